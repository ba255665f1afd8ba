"""What becomes of one record, decided in one place: the audit forecasts with it and the merge obeys it.

A record's own mask wins; the derivations of masks.py check it or stand in for a missing one. Then the row is cut to
`max_seq_len`, and it is skipped where no position is left at which a drafter could learn.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from eagle3nb.corpus.masks import Markers, mask_from_markers, mask_from_prefixes, teacher_positions
from eagle3nb.corpus.records import Record
from eagle3nb.errors import UserError

# Rendering a conversation costs milliseconds, reading its ids microseconds: own masks are checked by rendering on a
# sample, every row of a source's first 500 and every 16th after them. Rows without a mask are rendered always.
RENDERED_FIRST, RENDERED_STEP = 500, 16


@dataclass(frozen=True)
class Rules:
    """How rows are decided; the same for audit and merge. masks: "own", or "template" to derive every mask anew."""

    max_seq_len: int
    masks: str = "own"
    markers: Markers | None = None
    tokenizer: object = None

    def __post_init__(self):
        if self.masks not in ("own", "template"):
            raise UserError(f"masks is {self.masks!r}; choose 'own' or 'template'")
        if self.max_seq_len < 3:
            raise UserError(f"max_seq_len is {self.max_seq_len}; a drafter needs at least 3 tokens of context")
        if self.masks == "template" and self.markers is None:
            raise UserError("masks='template' needs the target's tokenizer; give a target directory that holds one")


@dataclass(frozen=True)
class Decision:
    """`mask` is None only where `reason` is set: why the row is skipped ("" if it is kept)."""

    ids: np.ndarray  # int32[T'], cut
    mask: np.ndarray | None  # uint8[T'], cut
    whole: np.ndarray | None  # the mask before the cut, uint8[T]
    reason: str
    provenance: str  # "own" | "derived" | "none"
    checks: tuple[str, ...]  # markers_agree, markers_disagree, prefixes_agree, prefixes_disagree, prefixes_left_out
    detail: str = ""  # of the first disagreement

    @property
    def truncated(self) -> int:
        """Tokens cut off."""
        return (len(self.whole) if self.whole is not None else len(self.ids)) - len(self.ids)

    @property
    def supervised(self) -> int:
        return int(self.mask.sum())


def decide(record: Record, number: int, rules: Rules) -> Decision:
    """What becomes of the `number`-th record (from 1) of its source."""
    derived = mask_from_markers(record.ids, rules.markers) if rules.markers else None
    own = record.mask
    rendered = own is None or number <= RENDERED_FIRST or number % RENDERED_STEP == 0
    prefixes, left_out = _prefixes(record, rules) if rendered else (None, False)
    mask, provenance = (derived, "derived") if own is None or rules.masks == "template" else (own, "own")
    reference = own if own is not None else derived
    checks, detail = [], ""
    if own is not None and derived is not None:
        checks.append(f"markers_{_compare(own, derived)}")
        detail = _difference(own, derived, "the template's markers")
    if prefixes is not None:
        checks.append(f"prefixes_{_compare(reference, prefixes)}")
        detail = detail or _difference(reference, prefixes, "prefix rendering")
    elif left_out:
        checks.append("prefixes_left_out")
    reason = ""
    if mask is None:
        reason, provenance = "no loss_mask and no template to derive one", "none"
    elif own is None and prefixes is not None and not np.array_equal(mask, prefixes):
        reason = "no loss_mask and the derivations disagree"
    elif not len(teacher_positions(mask)):
        reason = "no supervised tokens"
    elif not len(teacher_positions(mask[:rules.max_seq_len])):
        reason = "no supervised tokens within max_seq_len"
    cut = None if mask is None else mask[:rules.max_seq_len]
    return Decision(record.ids[:rules.max_seq_len], cut, mask, reason, provenance, tuple(checks), detail)


def _prefixes(record: Record, rules: Rules) -> tuple[np.ndarray | None, bool]:
    """(mask by prefix rendering or None, True if messages were there but the derivation does not apply)."""
    if not record.messages or rules.tokenizer is None or rules.markers is None:
        return None, False
    stable = rules.markers.stable
    derived = mask_from_prefixes(record.messages, rules.tokenizer, record.tools) if stable else None
    if derived is None or not np.array_equal(derived[0], record.ids):
        return None, True
    return derived[1], False


def _compare(a: np.ndarray, b: np.ndarray) -> str:
    return "agree" if np.array_equal(a, b) else "disagree"


def _difference(mask: np.ndarray, other: np.ndarray, what: str) -> str:
    """The first position where two masks differ, in words; "" where they don't."""
    at = np.flatnonzero(mask != other)
    if not len(at):
        return ""
    return f"{len(at)} of {len(mask)} positions differ, first {at[0]}: mask {mask[at[0]]}, by {what} {other[at[0]]}"


@dataclass
class Tally:
    """The account of one source: lines read = records kept + skipped."""

    name: str
    records: int = 0
    tokens: int = 0
    supervised: int = 0
    teacher_positions: int = 0
    truncated_records: int = 0
    truncated_tokens: int = 0
    skipped: Counter = field(default_factory=Counter)  # by reason or fault rule
    masks: Counter = field(default_factory=Counter)  # by provenance and by outcome of each check

    def skip(self, reason: str) -> None:
        self.skipped[reason] += 1

    def add(self, decision: Decision) -> None:
        self.masks.update((decision.provenance, *decision.checks))
        if decision.reason:
            return self.skip(decision.reason)
        self.records += 1
        self.tokens += len(decision.ids)
        self.supervised += decision.supervised
        self.teacher_positions += len(teacher_positions(decision.mask))
        self.truncated_records += decision.truncated > 0
        self.truncated_tokens += decision.truncated

    def to_json(self) -> dict:
        return {**vars(self), "skipped": dict(sorted(self.skipped.items())), "masks": dict(sorted(self.masks.items())),
                "lines": self.records + self.skipped.total()}


def accounting_lines(sources: list[dict]) -> list[str]:
    """One line a source and the total, from `Tally.to_json()`s: printed by the merge, forecast by the audit."""
    lines = []
    for source in sources:
        size, unit = _scaled(source["tokens"])
        lines.append(f"  {source['name']:<25} {source['records']:>6} records, {size:>7.1f}{unit} tokens "
                     f"({sum(source['skipped'].values())} skipped)")
    size, unit = _scaled(sum(source["tokens"] for source in sources))
    return [*lines, f"Merge complete. {sum(s['records'] for s in sources):,} records, {size:.1f}{unit} tokens."]


def _scaled(tokens: int) -> tuple[float, str]:
    return (tokens / 1e6, "M") if tokens >= 50_000 else (tokens / 1e3, "K")
