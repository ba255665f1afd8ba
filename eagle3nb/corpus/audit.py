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

from eagle3nb.corpus.survey import EXAMPLES, SourceSurvey, Survey, forecast, to_json
from eagle3nb.errors import UserError
from eagle3nb.files import write_json

# Rules on single rows: (what their rows are, what to do).
FAULTS = {
    "json_invalid": ("lines that are no JSON", "write them again; a file cut short lost its end in a copy"),
    "schema": ("rows that are no records", "give input_ids with loss_mask, prompt_ids with response_ids, or text"),
    "length_mismatch": ("rows whose loss_mask is of another length", "make ids and mask in one pass"),
    "mask_values": ("rows whose loss_mask is not of 0 and 1", "write 1 for generated tokens, 0 for the others"),
    "empty_row": ("rows without tokens", "leave them out"),
    "token_out_of_range": ("rows with ids beyond the vocabulary", "tokenise with this target's own tokenizer"),
}
RULES = (*FAULTS, "empty_source", "mask_all_zero", "mask_all_one", "mask_disagrees", "truncation_loss",
         "disproportionate", "duplicate_rows", "disk_short", "stale_states")
ORDER = ("red", "amber", "info")
MUCH_LOST = 0.05  # of the supervised tokens by truncation: more is amber
OUT_OF_PROPORTION = 3.0  # times the other sources' median mean length, or times a fair share of the tokens


@dataclass(frozen=True)
class Finding:
    """`source` is a dataset's name, or "" for the run as a whole; `examples` are at most five {file, line, detail}."""

    rule: str
    severity: str  # "red" | "amber" | "info"
    source: str
    count: int
    message: str
    remedy: str
    examples: list[dict] = field(default_factory=list)


def findings(found: Survey, plan: dict | None = None) -> list[Finding]:
    """All findings, the gravest first. `plan` is the disk plan of the states: free, needed and standing bytes.

    An excluded source is looked at, but nothing in it can stop the run: its findings are info.
    """
    listed = []
    for source in found.sources:
        of_source = [*_faults(source), *_masks(source), *_truncation(source, found.rules.max_seq_len),
                     *_proportion(source, found)]
        listed += [_excluded(finding) for finding in of_source] if source.excluded else of_source
    listed += _duplicates(found)
    if plan:
        listed += disk_findings(plan)
    return sorted(listed, key=lambda finding: (ORDER.index(finding.severity), RULES.index(finding.rule)))


def _excluded(finding: Finding) -> Finding:
    return replace(finding, severity="info", message=f"{finding.message}; excluded by the parameters",
                   remedy=f"nothing, while it is excluded (else: {finding.remedy})")


def _faults(source: SourceSurvey) -> list[Finding]:
    """Red: every rule that makes a line unusable, and a source that holds no line."""
    listed = [Finding(rule, "red", source.name, source.counts[rule], f"{source.counts[rule]:,} {what}", remedy,
                      source.examples[rule])
              for rule, (what, remedy) in FAULTS.items() if source.counts[rule]]
    if not source.records and not listed:
        listed.append(Finding("empty_source", "red", source.name, 1, f"{source.files} files and no record in them",
                              "fill the directory with *.jsonl, *.jsonl.gz or *.jsonl.zst, or remove or exclude it"))
    return listed


def _masks(source: SourceSurvey) -> list[Finding]:
    """A source with nothing supervised is red; single rows are amber."""
    rows, counts, listed = source.records, source.counts, []
    if zero := counts["mask_all_zero"]:
        listed.append(Finding(
            "mask_all_zero", "red" if not source.supervised_tokens else "amber", source.name, zero,
            f"{zero:,} of {rows:,} rows have no supervised token and will be skipped",
            "check the loss_mask of their generator, or set masks to 'template'", source.examples["mask_all_zero"]))
    if ones := counts["mask_all_one"]:
        listed.append(Finding(
            "mask_all_one", "amber", source.name, ones,
            f"{ones:,} of {rows:,} rows supervise every token, the prompt included",
            "set masks to 'template', unless these rows have no prompt", source.examples["mask_all_one"]))
    if wrong := counts["mask_disagrees"]:
        listed.append(Finding(
            "mask_disagrees", "amber", source.name, wrong,
            f"the mask of {wrong:,} of {rows:,} rows differs from what the chat template says",
            "look at the examples; their own mask is kept, masks: 'template' overrides it",
            source.examples["mask_disagrees"]))
    return listed


def _truncation(source: SourceSurvey, max_seq_len: int) -> list[Finding]:
    """Amber where the cut costs much of what is to be learnt."""
    lengths, lost = np.asarray(source.lengths), source.lost(max_seq_len)
    cut = np.flatnonzero(lengths > max_seq_len)
    if not len(cut):
        return []
    longest = cut[np.argsort(-lengths[cut], kind="stable")][:EXAMPLES]
    examples = [dict(zip(("file", "line"), source.place(row), strict=True)) | {"detail": f"{lengths[row]:,} tokens"}
                for row in longest]
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
        f"exclude it (exclude: [{source.name.split('_', 1)[0]}]) or thin it, lest it dominate disk, time and training")]


def _duplicates(found: Survey) -> list[Finding]:
    """Amber: rows whose ids equal an earlier row's, inside a source or across; excluded sources left out."""
    kept = [source for source in found.kept if source.records]
    if not kept:
        return []
    hashes = np.concatenate([np.frombuffer(source.hashes, np.uint64) for source in kept])
    starts = np.cumsum([0, *(source.records for source in kept)])
    values, first, which = np.unique(hashes, return_index=True, return_inverse=True)
    if len(values) == len(hashes):
        return []
    repeats, original = np.flatnonzero(first[which] != np.arange(len(hashes))), first[which]
    listed = []
    for i, source in enumerate(kept):
        mine = repeats[(repeats >= starts[i]) & (repeats < starts[i + 1])]
        if not len(mine):
            continue
        examples = []
        for row in mine[:EXAMPLES]:
            at = int(np.searchsorted(starts, original[row], side="right")) - 1
            file, line = source.place(int(row - starts[i]))
            earlier = kept[at].place(int(original[row] - starts[at]))
            detail = f"the same tokens as {earlier[0]} line {earlier[1]}"
            examples.append({"file": file, "line": line, "detail": detail})
        listed.append(Finding("duplicate_rows", "amber", source.name, len(mine),
                              f"{len(mine):,} of {source.records:,} rows repeat an earlier row",
                              "leave them out, unless their weight is meant", examples))
    return listed


def disk_findings(plan: dict, planned: bool = False) -> list[Finding]:
    """Findings on the states' disk: {needed, free, standing} in bytes, and short: does it not fit?

    `planned`: the data is still to come and the machine may be another, so a small disk here is amber.
    """
    listed = []
    if plan["short"]:
        listed.append(Finding(
            "disk_short", "amber" if planned else "red", "", 1,
            f"the states need {plan['needed'] / 1e9:,.1f} GB, {plan['free'] / 1e9:,.1f} GB are free",
            "free space, put work_dir on a larger volume, store a smaller dtype, or lower max_seq_len"))
    if plan["standing"]:
        listed.append(Finding(
            "stale_states", "info" if not plan["short"] else "amber", "", 1,
            f"{plan['standing'] / 1e9:,.2f} GB of states stand already in the states folder",
            "nothing if they are this run's (the extraction goes on with them); else delete them"))
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
    stopping = [finding for finding in listed if finding.severity == "red" and finding.rule not in allow]
    if stopping:
        first, more = stopping[0], len(stopping) - 1
        at = f" ({example(first)})" if first.examples else ""
        rules = ", ".join(dict.fromkeys(finding.rule for finding in stopping))
        raise UserError(f"the audit stops the run: {first.source or 'machine'}: {first.message}{at}"
                        + (f" and {more} more red finding{'s' * (more > 1)}" if more else "")
                        + f"; {first.remedy}, or allow {rules}")
    counts = [sum(finding.severity == severity for finding in listed) for severity in ORDER]
    return f"{counts[0]} red, {counts[1]} amber and {counts[2]} info findings" if listed else "no findings"


def rows(listed: list[Finding]) -> list[dict]:
    """The findings as rows of a table."""
    return [{"severity": f.severity, "rule": f.rule, "source": f.source or "machine", "count": f.count,
             "what": f.message, "example": example(f), "remedy": f.remedy} for f in listed]


def example(finding: Finding) -> str:
    """The first example in words, "" where there is none."""
    return "{file} line {line}: {detail}".format(**finding.examples[0]) if finding.examples else ""


def write_findings(folder: str | Path, listed: list[Finding], found: Survey | None) -> Path:
    """findings.json: {"findings": […], "sources": […], "forecast": […]}. Returns its path."""
    path = Path(folder) / "findings.json"
    write_json(path, {"findings": [asdict(finding) for finding in listed],
                      "sources": [to_json(source) for source in found.sources] if found else [],
                      "forecast": forecast(found)["lines"] if found else []})
    return path
