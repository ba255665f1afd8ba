"""One pass over every row of every dataset, the excluded ones too: what there is, and what the merge will make of it.

Memory: 32 bytes a row and the examples, whatever the rows' length.
"""

from array import array
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np
import xxhash

from eagle3nb.corpus.decision import Decision, Rules, Tally, accounting_lines, decide
from eagle3nb.corpus.masks import teacher_positions
from eagle3nb.corpus.records import Fault, Record, Source, find_sources, is_excluded, read_records
from eagle3nb.errors import UserError
from eagle3nb.progress import progress

EXAMPLES = 5  # kept of each rule and source


@dataclass
class SourceSurvey:
    """What one dataset holds. Counts are of usable rows before the merge cuts or skips any, unless said otherwise."""

    name: str
    excluded: bool
    files: int
    bytes: int  # on disk, as they lie
    tally: Tally  # what the merge will make of it
    lengths: array = field(default_factory=lambda: array("i"))  # int32[R] tokens a row
    supervised: array = field(default_factory=lambda: array("i"))  # int32[R] supervised tokens a row
    teachers: int = 0  # positions that need the target's distribution, uncut
    kept: dict[int, int] = field(default_factory=dict)  # at each length: supervised tokens left
    counts: Counter = field(default_factory=Counter)  # rows by rule, faults and masks
    examples: dict = field(default_factory=lambda: defaultdict(list))  # rule → [{file, line, detail}]
    hashes: array = field(default_factory=lambda: array("Q"))  # xxh3-64 of each row's ids
    places: array = field(default_factory=lambda: array("q"))  # file number << 40 | line
    names: list[str] = field(default_factory=list)  # file names by number

    @property
    def records(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        return int(np.sum(self.lengths, dtype=np.int64))

    @property
    def supervised_tokens(self) -> int:
        return int(np.sum(self.supervised, dtype=np.int64))

    @property
    def mean_length(self) -> float:
        return self.tokens / max(self.records, 1)

    def place(self, row: int) -> tuple[str, int]:
        """(file, line) of a usable row."""
        return self.names[self.places[row] >> 40], self.places[row] & ((1 << 40) - 1)

    def note(self, rule: str, file: str, line: int, detail: str) -> None:
        """One more row under `rule`; the first few are kept as examples."""
        self.counts[rule] += 1
        if len(self.examples[rule]) < EXAMPLES:
            self.examples[rule].append({"file": file, "line": line, "detail": detail})

    def lost(self, length: int) -> float:
        """Share of the supervised tokens that a cut at `length` loses."""
        return 1 - self.kept[length] / self.supervised_tokens if self.supervised_tokens else 0.0


@dataclass(frozen=True)
class Survey:
    """All sources by name, and the rules they were looked at with."""

    sources: list[SourceSurvey]
    rules: Rules
    lengths: tuple[int, ...]  # where a cut was tried; max_seq_len is among them
    exclude: tuple[str, ...] = ()
    limit: int = 0

    @property
    def kept(self) -> list[SourceSurvey]:
        """The sources that the merge will take."""
        return [source for source in self.sources if not source.excluded]


def survey(data_root, *, exclude=(), rules: Rules, vocab_size: int, lengths=(), limit: int = 0) -> Survey:
    """Read everything once. Raises UserError only where there is nothing to read; what is wrong inside is noted."""
    find_sources(data_root, exclude)
    sources = find_sources(data_root)
    if wrong := [length for length in lengths if length < 3]:
        raise UserError(f"lengths holds {wrong[0]}; give numbers of tokens, 3 or more")
    lengths = tuple(sorted({*lengths, rules.max_seq_len}))
    size = sum(path.stat().st_size for source in sources for path in source.files)
    with progress(size, "audit: reading", "B") as bar:
        found = [_survey(source, is_excluded(source.name, exclude), rules, vocab_size, lengths, limit, bar)
                 for source in sources]
    return Survey(found, rules, lengths, tuple(exclude), limit)


def _survey(source: Source, excluded: bool, rules: Rules, vocab_size: int, lengths, limit: int, bar) -> SourceSurvey:
    size = sum(path.stat().st_size for path in source.files)
    tally, kept = Tally(source.name), dict.fromkeys(lengths, 0)
    seen = SourceSurvey(source.name, excluded, len(source.files), size, tally, kept=kept)
    for item in read_records(source, vocab_size=vocab_size, tokenizer=rules.tokenizer, limit=limit, bar=bar):
        if isinstance(item, Fault):
            seen.tally.skip(item.rule)
            seen.note(item.rule, item.file, item.line, item.detail)
            continue
        made = decide(item, seen.records + 1, rules)
        seen.tally.add(made)
        _measure(seen, item, made)
        _check_mask(seen, item, made)
    return seen


def _measure(seen: SourceSurvey, record: Record, made: Decision) -> None:
    """Lengths, what each cut would keep, and the row's hash."""
    mask = np.zeros(len(record.ids), np.uint8) if made.whole is None else made.whole
    reached = np.cumsum(mask, dtype=np.int64)  # supervised tokens up to and with each position
    seen.lengths.append(len(mask))
    seen.supervised.append(int(reached[-1]))
    seen.teachers += len(teacher_positions(mask))
    for length in seen.kept:
        seen.kept[length] += int(reached[min(length, len(mask)) - 1])
    if not seen.names or seen.names[-1] != record.file:
        seen.names.append(record.file)
    seen.places.append((len(seen.names) - 1) << 40 | record.line)
    seen.hashes.append(xxhash.xxh3_64_intdigest(record.ids.tobytes()))


def _check_mask(seen: SourceSurvey, record: Record, made: Decision) -> None:
    """Rules on the row's mask."""
    at = record.file, record.line
    if made.whole is None:
        return seen.note("schema", *at, made.reason)
    if not made.whole.any():
        seen.note("mask_all_zero", *at, f"none of {len(made.whole)} tokens is supervised")
    elif made.whole.all():
        seen.note("mask_all_one", *at, f"all {len(made.whole)} tokens are supervised, the prompt too")
    if made.detail:
        seen.note("mask_disagrees", *at, made.detail)


def forecast(found: Survey) -> dict:
    """What the merge will count: its settings, each source's account, the accounting lines, and the totals."""
    sources = [source.tally.to_json() for source in found.kept]
    totals = {name: sum(source[name] for source in sources)
              for name in ("records", "tokens", "supervised", "teacher_positions")}
    settings = {"max_seq_len": found.rules.max_seq_len, "masks": found.rules.masks, "limit": found.limit,
                "exclude": list(found.exclude)}
    return {"settings": settings, **totals, "lines": accounting_lines(sources), "sources": sources}


def overview(found: Survey) -> list[dict]:
    """A row a source, for a table: sizes, lengths, share of the tokens among the sources that are kept."""
    total = sum(source.tokens for source in found.kept)
    rows = []
    for source in found.sources:
        lengths = np.asarray(source.lengths) if source.records else np.zeros(1, np.int32)
        rows.append({
            "source": source.name, "used": "excluded" if source.excluded else "", "records": source.records,
            "tokens": source.tokens,
            "share %": None if source.excluded else round(100 * source.tokens / max(total, 1), 1),
            "supervised": source.supervised_tokens, "mean length": round(source.mean_length, 1),
            "median": int(np.median(lengths)), "p95": int(np.percentile(lengths, 95)), "longest": int(lengths.max()),
            "skipped": sum(source.tally.skipped.values())})
    return rows


def heaviest(found: Survey) -> str:
    """The source with the most tokens, in words."""
    most = max(found.sources, key=lambda source: source.tokens)
    total, used = sum(source.tokens for source in found.sources), " (excluded)" if most.excluded else ""
    return f"{most.name}{used} holds {most.tokens / max(total, 1):.0%} of all tokens"


def losses(found: Survey) -> list[dict]:
    """A row a source, for a table: percent of the supervised tokens lost at each cut."""
    return [{"source": source.name} | {f"{length:,}": round(100 * source.lost(length), 2) for length in found.lengths}
            for source in found.sources]


def to_json(source: SourceSurvey) -> dict:
    """One entry of `sources` in findings.json."""
    lengths = np.asarray(source.lengths, np.int64)
    edges = [0, *(1 << power for power in range(4, 19))]
    percentiles = np.percentile(lengths, (50, 90, 95, 99)).tolist() if len(lengths) else [0.0] * 4
    return {
        "source": source.name, "excluded": source.excluded, "files": source.files, "bytes": source.bytes,
        "records": source.records, "tokens": source.tokens, "supervised": source.supervised_tokens,
        "teacher_positions": source.teachers, "mean_length": source.mean_length,
        "percentiles": dict(zip(("p50", "p90", "p95", "p99"), percentiles, strict=True)),
        "longest": int(lengths.max(initial=0)),
        "histogram": {"edges": edges, "rows": np.histogram(lengths, edges)[0].tolist()},
        "truncation": [{"max_seq_len": length, "rows": int((lengths > length).sum()),
                        "tokens": int(np.minimum(lengths, length).sum()), "supervised": kept}
                       for length, kept in source.kept.items()],
        "forecast": source.tally.to_json()}
