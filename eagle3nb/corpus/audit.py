"""Audit: findings over a survey. Each has a rule, a severity, a count, examples by file and line, and the remedy.

    red     the run would fail or be worthless: the stage fails, unless the parameters allow the rule
    amber   look at it before the machines are rented
    info    good to know
"""

import difflib
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

import numpy as np

from eagle3nb.corpus.hits import EXAMPLES
from eagle3nb.corpus.overview import forecast, to_json
from eagle3nb.corpus.sketch import near_duplicates
from eagle3nb.corpus.survey import OPEN_END, SourceSurvey, Survey
from eagle3nb.errors import UserError
from eagle3nb.files import write_json

# Rules on single rows: id → (theme, what its rows are, what to do, share of a source's rows from which it is red).
ROWS = {
    "json_invalid": ("form", "lines that are no JSON", "write them again; a file cut short lost its end in a copy", 0),
    "schema": ("form", "rows that are no records",
               "give input_ids with loss_mask, prompt_ids with response_ids, or text", 0),
    "length_mismatch": ("form", "rows whose loss_mask is of another length", "make ids and mask in one pass", 0),
    "mask_values": ("form", "rows whose loss_mask is not of 0 and 1",
                    "write 1 for generated tokens, 0 for the others", 0),
    "empty_row": ("form", "rows without tokens", "leave them out", 0),
    "token_out_of_range": ("form", "rows with ids beyond the vocabulary",
                           "tokenise with this target's own tokenizer", 0),
    "mask_all_zero": ("masks", "rows that supervise nothing",
                      "check the loss_mask of their generator, or set masks to 'template'", 0.9),
    "mask_all_one": ("masks", "rows that supervise every token, the prompt included",
                     "set masks to 'template', unless these rows have no prompt", 0.9),
    "mask_disagrees": ("masks", "rows whose mask differs from what the chat template says",
                       "look at the examples; their own mask is kept, masks: 'template' overrides it", None),
    "eot_unsupervised": ("masks", "rows whose answers' end-of-turn token is not supervised",
                         "let the mask end behind the end-of-turn token, or set masks to 'template'", None),
    "supervised_prompt": ("masks", "rows that supervise tokens outside the answers",
                          "the drafter would learn what no target ever says: set masks to 'template'", 0.9),
    "template_mismatch": ("template", "rows that are not what the target's chat template writes",
                          "render them with this target's template, or name the right target", 0.5),
    "special_token_as_text": ("template", "rows with a special token spelled out as text, or typed by a user",
                              "tokenise rendered text with special tokens recognised, and users' text without", None),
    "roles_malformed": ("template", "rows whose turns cannot follow one another", "repair or leave out these rows",
                        None),
    "think_unbalanced": ("template", "rows whose thoughts open and close out of step",
                         "keep the opening tag that the template writes for the model, and its close", None),
    "tool_json_invalid": ("template", "rows whose tool calls hold no valid JSON", "leave out these rows", None),
    "prompt_fills_window": ("length", "rows whose prompt takes nine tenths of the window or all of it",
                            "raise max_seq_len, or leave out these rows", None),
    "too_short": ("length", "rows of fewer than 8 tokens", "leave them out, or join them to conversations", None),
    "benchmark_overlap": ("content", "rows that hold a prompt of an evaluation set",
                          "name the sets in the merge's `decontaminate`, or the evaluation is not held out", None),
    "degenerate_text": ("content", "rows whose answers go round in circles",
                        "leave them out: a drafter that learns loops looks good in training alone", None),
}
THEMES = ("form", "masks", "template", "length", "content", "draft", "machine")
OTHER = {"empty_source": "form", "truncation_loss": "length", "disproportionate": "length",
         "duplicate_rows": "content", "near_duplicates": "content", "vocab_coverage": "draft", "draft_config": "draft",
         "disk_short": "machine", "stale_states": "machine", "memory_short": "machine",
         "kernel_shared_memory": "machine"}
THEME = {rule: values[0] for rule, values in ROWS.items()} | OTHER
RULES = tuple(sorted(THEME, key=lambda rule: THEMES.index(THEME[rule])))
ORDER = ("red", "amber", "info")
FEW = 0.001  # of a source's rows under a rule on single rows: fewer are no reason to stop and look
STRIPPED, OPEN_ROWS = 0.95, 10  # share of a source's rows that end inside an answer, and how many at least
MUCH_LOST = 0.05  # of the supervised tokens by truncation: more is amber
OUT_OF_PROPORTION = 3.0  # times the other sources' median mean length, or times a fair share of the tokens


@dataclass(frozen=True)
class Finding:
    """`source` is a dataset's name, or "" for the run as a whole; `examples` are at most five {file, line, at, detail}:
    `at` is the token in the row where the fault is, or None."""

    rule: str
    severity: str  # "red" | "amber" | "info"
    source: str
    count: int
    message: str
    remedy: str
    examples: list[dict] = field(default_factory=list)

    @property
    def theme(self) -> str:
        return THEME[self.rule]


def findings(found: Survey) -> list[Finding]:
    """What the datasets themselves show. An excluded source is looked at too, but its findings are info."""
    listed = []
    for source in found.sources:
        of_source = [*_empty(source), *_rows(source), *_open_ends(source), *_proportion(source, found),
                     *_truncation(source, found.rules.max_seq_len)]
        listed += [_excluded(finding) for finding in of_source] if source.excluded else of_source
    return [*listed, *_duplicates(found), *_near(found)]


def ranked(listed: list[Finding]) -> list[Finding]:
    """The gravest first, then by theme."""
    return sorted(listed, key=lambda finding: (ORDER.index(finding.severity), RULES.index(finding.rule)))


def _excluded(finding: Finding) -> Finding:
    return replace(finding, severity="info", message=f"{finding.message}; excluded by the parameters",
                   remedy=f"nothing, while it is excluded (else: {finding.remedy})")


def _empty(source: SourceSurvey) -> list[Finding]:
    """Red: a source that holds no line."""
    if source.records or source.tally.faults:
        return []
    return [Finding("empty_source", "red", source.name, 1, f"{len(source.files)} files and no record in them",
                    "fill the directory with *.jsonl, *.jsonl.gz or *.jsonl.zst, or remove or exclude it")]


def _rows(source: SourceSurvey) -> list[Finding]:
    """Rules on single rows: red from a share of the source on, info below one row in a thousand.

    What the sample shows stands for the whole source: its share is that of the rows looked at.
    """
    listed, lines = [], source.records + source.tally.faults
    for rule, (_, what, remedy, red_from) in ROWS.items():
        count, sampled = source.hits.counts[rule], source.sampled[rule]
        if not count:
            continue
        share = (count - sampled) / max(lines, 1) + sampled / max(source.looked_at, 1)
        severity = "red" if red_from is not None and share >= red_from else "amber" if share >= FEW else "info"
        seen = f" ({sampled:,} of them among the {source.looked_at:,} whose text was looked at)" if sampled else ""
        listed.append(Finding(rule, severity, source.name, count, f"{count:,} of {lines:,} {what}{seen}", remedy,
                              source.examples[rule]))
    return listed


def _open_ends(source: SourceSurvey) -> list[Finding]:
    """Amber: nearly all rows end inside an answer. Some are cut at their generator's limit; all were stripped."""
    count = source.hits.counts[OPEN_END]
    if count < OPEN_ROWS or count < STRIPPED * source.records:
        return []
    return [Finding(
        "eot_unsupervised", "amber", source.name, count,
        f"{count:,} of {source.records:,} rows end inside an answer, without its end-of-turn token",
        "keep the end-of-turn token when rows are made, with mask 1, or the drafter never learns to end a turn",
        source.examples[OPEN_END])]


def _truncation(source: SourceSurvey, max_seq_len: int) -> list[Finding]:
    """Amber where the cut costs much of what is to be learnt."""
    lengths, lost = source.lengths, source.lost(max_seq_len)
    cut = np.flatnonzero(lengths > max_seq_len)
    if not len(cut):
        return []
    longest = cut[np.argsort(-lengths[cut], kind="stable")][:EXAMPLES]
    examples = [source.place(row) | {"at": max_seq_len, "detail": f"{lengths[row]:,} tokens"} for row in longest]
    return [Finding(
        "truncation_loss", "amber" if lost > MUCH_LOST else "info", source.name, len(cut),
        f"{len(cut):,} of {source.records:,} rows are cut at {max_seq_len:,} tokens: {lost:.1%} of what is supervised",
        "raise max_seq_len (memory grows with it) or exclude the source", examples)]


def _proportion(source: SourceSurvey, found: Survey) -> list[Finding]:
    """Amber where a source, among those that are kept, is far longer or heavier than the others."""
    others = [other for other in found.kept if other is not source and other.records]
    if not others or not source.records:
        return []
    usual = median(other.mean_length for other in others)
    share = source.tokens / (source.tokens + sum(other.tokens for other in others))
    rows = source.records / (source.records + sum(other.records for other in others))
    fair = 1 / (len(others) + 1)
    if source.mean_length <= OUT_OF_PROPORTION * usual and share <= OUT_OF_PROPORTION * fair:
        return []
    return [Finding(
        "disproportionate", "amber", source.name, source.records,
        f"mean length {source.mean_length:,.0f} tokens against a median of {usual:,.0f} for the others; "
        f"{share:.0%} of the tokens in {rows:.0%} of the rows",
        f"exclude it (exclude: [{source.name.split('_', 1)[0]}]) or thin it (caps, weights), lest it dominate disk, "
        "time and training")]


def _duplicates(found: Survey) -> list[Finding]:
    """Amber: rows whose ids equal an earlier row's, inside a source or across; excluded sources left out."""
    kept = [source for source in found.kept if source.records]
    if not kept:
        return []
    hashes = np.concatenate([source.hashes for source in kept])
    of = np.repeat(np.arange(len(kept)), [source.records for source in kept])
    row = np.concatenate([np.arange(source.records) for source in kept])
    _, first, which = np.unique(hashes, return_index=True, return_inverse=True)
    earlier = first[which]
    repeats = np.flatnonzero(earlier != np.arange(len(hashes)))

    def place(i: int) -> dict:
        return kept[of[i]].place(row[i])

    return _repeated("duplicate_rows", repeats, earlier, of, [source.name for source in kept], place,
                     [source.records for source in kept], "repeat an earlier row", "the same tokens as",
                     "the merge leaves one of each (dedup: exact), unless their weight is meant (dedup: none)")


def _near(found: Survey) -> list[Finding]:
    """Amber: rows that the merge would keep, nearly equal to another; exact duplicates are the other rule's."""
    rows = found.rows
    if not len(rows):
        return []
    _, distinct = np.unique(rows.ids_hash, return_index=True)
    distinct = np.sort(distinct)
    labels = near_duplicates(rows.sketches[distinct], distinct.astype(np.uint64))
    like = np.arange(len(rows))
    like[distinct] = distinct[labels]
    repeats = np.flatnonzero(like != np.arange(len(rows)))
    columns = {name: values.tolist() for name, values in rows.columns.items() if name in ("file", "line")}

    def place(i: int) -> dict:
        return {"file": rows.files[columns["file"][i]][1], "line": columns["line"][i]}

    names = [source.name for source in found.sources]
    return _repeated("near_duplicates", repeats, like, rows.columns["source"], names, place,
                     np.bincount(rows.columns["source"], minlength=len(names)).tolist(), "are nearly another row",
                     "nearly the same as", "set the merge's dedup to near, unless their weight is meant")


def _repeated(rule, repeats, earlier, of, names, place, records, what, like, remedy) -> list[Finding]:
    """A finding a source over rows `repeats`, each like row earlier[repeat]."""
    listed = []
    for number, name in enumerate(names):
        mine = repeats[of[repeats] == number]
        if not len(mine):
            continue
        examples = []
        for i in mine[:EXAMPLES].tolist():
            other = place(int(earlier[i]))
            examples.append(place(i) | {"at": None, "detail": f"{like} {other['file']} line {other['line']}"})
        listed.append(Finding(rule, "amber" if len(mine) >= FEW * records[number] else "info", name, len(mine),
                              f"{len(mine):,} of {records[number]:,} rows {what}", remedy, examples))
    return listed


def check_allow(allow) -> None:
    """Raises UserError for a rule id that does not exist, with the nearest one that does."""
    for rule in allow:
        if rule not in RULES:
            near = difflib.get_close_matches(rule, RULES, n=1, cutoff=0)[0]
            raise UserError(f"allow: there is no rule {rule!r}; did you mean {near!r}?")


def gate(listed: list[Finding], allow=()) -> str:
    """A sentence on what was found. Raises UserError where a red finding is not allowed."""
    check_allow(allow)
    listed = ranked(listed)
    stopping = [finding for finding in listed if finding.severity == "red" and finding.rule not in allow]
    if stopping:
        first, more = stopping[0], len(stopping) - 1
        at = f" ({example(first)})" if first.examples else ""
        rules = ", ".join(dict.fromkeys(finding.rule for finding in stopping))
        raise UserError(f"the audit stops the run: {first.source or 'machine'}: {first.message}{at}"
                        + (f" and {more} more red finding{'s' * (more > 1)}" if more else "")
                        + f"; {first.remedy}, or allow {rules}")
    return summary(listed)


def summary(listed: list[Finding]) -> str:
    counts = [sum(finding.severity == severity for finding in listed) for severity in ORDER]
    return f"{counts[0]} red, {counts[1]} amber and {counts[2]} info findings" if listed else "no findings"


def rows(listed: list[Finding]) -> list[dict]:
    """The findings as rows of a table."""
    return [{"severity": f.severity, "rule": f.rule, "source": f.source or "the run", "count": f.count,
             "what": f.message, "example": example(f), "remedy": f.remedy} for f in listed]


def example(finding: Finding) -> str:
    """The first example in words, "" where there is none."""
    return "{file} line {line}: {detail}".format(**finding.examples[0]) if finding.examples else ""


def write_findings(folder: str | Path, listed: list[Finding], found: Survey | None) -> Path:
    """findings.json: {"findings": […], "sources": […], "forecast": […]}. Returns its path."""
    path = Path(folder) / "findings.json"
    foretold = forecast(found) if found else {"lines": [], "sources": []}
    merged = {source["name"]: source for source in foretold["sources"]}
    told = [asdict(finding) for finding in listed]
    for finding in told:
        finding["examples"] = [{key: e[key] for key in ("file", "line", "detail")} for e in finding["examples"]]
    write_json(path, {"findings": told,
                      "sources": [to_json(source) | {"forecast": merged.get(source.name)} for source in found.sources]
                      if found else [], "forecast": foretold["lines"]})
    return path
