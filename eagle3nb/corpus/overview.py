"""Tables and figures of a survey, and what the merge will make of it by default."""

from dataclasses import replace

import numpy as np

from eagle3nb.corpus import accounts
from eagle3nb.corpus.decision import accounting_lines
from eagle3nb.corpus.records import Source
from eagle3nb.corpus.selection import Mix, select
from eagle3nb.corpus.survey import SourceSurvey, Survey
from eagle3nb.files import read_json


def forecast(found: Survey) -> dict:
    """What the merge will count: its settings, each source's account, the accounting lines, and the totals."""
    tallies = [replace(source.tally, skipped=source.tally.skipped.copy()) for source in found.sources]
    accounts.fill(tallies, found.rows, select(found.rows, Mix(), [source.name for source in found.sources], 0))
    sources = [tally.to_json() for tally, source in zip(tallies, found.sources, strict=True) if not source.excluded]
    totals = {name: sum(source[name] for source in sources)
              for name in ("records", "tokens", "supervised", "teacher_positions")}
    settings = {"max_seq_len": found.rules.max_seq_len, "masks": found.rules.masks, "limit": found.limit,
                "exclude": list(found.exclude), "include": [],
                "truncation": found.rules.truncation, "decontaminate": []} | vars(Mix())
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
    others = [off_policy(place) for place in found.places]
    return [row | {"off-policy": other} for row, other in zip(rows, others, strict=True)] if any(others) else rows


def off_policy(place: Source) -> str:
    """The other model that answered a dataset's prompts, where synthesis said so in its report beside it; else ""."""
    models = set()
    for pattern in (f"{place.name}.json", f"{place.name}.*.json"):
        for path in place.path.parent.glob(pattern):
            report = read_json(path)
            if isinstance(report, dict) and report.get("on_policy") is False:
                models.add(str(report.get("model") or "another model"))
    return ", ".join(sorted(models))


def token_counts(found: Survey) -> tuple[dict, dict]:
    """(of all rows, of the held-out rows): int64[V] supervised tokens that the merge keeps, by source."""
    return ({source.name: source.token_counts for source in found.kept},
            {source.name: source.held_out_counts for source in found.kept})


def p99(found: Survey) -> int:
    """Tokens of a row, as merged, that one row in a hundred exceeds."""
    lengths = found.rows.columns["tokens"] if len(found.rows) else np.zeros(1)
    return int(np.percentile(lengths, 99, method="higher"))


def looked_at(found: Survey, looked: dict[str, int]) -> str:
    """A sentence on the sample."""
    rows, of = sum(looked.values()), sum(source.records for source in found.sources)
    return f"The text of {rows:,} of {of:,} rows was looked at: " + ", ".join(
        f"{name} {count:,}" for name, count in looked.items()) + "."


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
        "source": source.name, "excluded": source.excluded, "files": len(source.files), "bytes": source.bytes,
        "records": source.records, "tokens": source.tokens, "supervised": source.supervised_tokens,
        "teacher_positions": source.teachers, "mean_length": source.mean_length,
        "percentiles": dict(zip(("p50", "p90", "p95", "p99"), percentiles, strict=True)),
        "longest": int(lengths.max(initial=0)),
        "histogram": {"edges": edges, "rows": np.histogram(lengths, edges)[0].tolist()},
        "truncation": [{"max_seq_len": length, "rows": int((lengths > length).sum()),
                        "tokens": int(np.minimum(lengths, length).sum()), "supervised": kept}
                       for length, kept in source.kept.items()]}
