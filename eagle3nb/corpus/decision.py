"""What becomes of the rows of a batch, decided in one place: the audit forecasts with it and the merge obeys it.

A record's own mask wins; the derivations of masks.py check it or stand in for a missing one. Then the row is cut to
`max_seq_len`, and it is skipped where no position is left at which a drafter could learn.
"""

import pickle
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from eagle3nb.corpus.batch import Batch
from eagle3nb.corpus.masks import Markers, mask_from_prefixes, masks_from_markers
from eagle3nb.errors import UserError

TRUNCATIONS = ("right", "turn", "drop")
KEPT, NO_MASK, DISAGREE, UNSUPERVISED, CUT_AWAY, TOO_LONG, NO_TURN = range(7)
REASONS = ("", "no loss_mask and no template to derive one", "no loss_mask and the derivations disagree",
           "no supervised tokens", "no supervised tokens within max_seq_len", "longer than max_seq_len",
           "no complete turn within max_seq_len")


@dataclass(frozen=True)
class Rules:
    """How rows are decided; the same for audit and merge.

    masks       "own", or "template" to derive every mask anew
    tokenizer   of the target, for rows of text and for the second derivation of a missing mask
    truncation  of a row longer than max_seq_len: cut at the "right", after the last "turn" that fits, or "drop" the row
    """

    max_seq_len: int
    masks: str = "own"
    markers: Markers | None = None
    tokenizer: object = None
    truncation: str = "right"

    def __post_init__(self):
        if self.masks not in ("own", "template"):
            raise UserError(f"masks is {self.masks!r}; choose 'own' or 'template'")
        if self.truncation not in TRUNCATIONS:
            raise UserError(f"truncation is {self.truncation!r}; choose one of {', '.join(TRUNCATIONS)}")
        if self.max_seq_len < 3:
            raise UserError(f"max_seq_len is {self.max_seq_len}; a drafter needs at least 3 tokens of context")
        if self.masks == "template" and self.markers is None:
            raise UserError("masks='template' needs the target's tokenizer; give a target directory that holds one")

    def packed(self) -> "Rules":
        """With the tokenizer as bytes, which another process unpacks when it meets the first row that needs it."""
        try:
            return replace(self, tokenizer=None if self.tokenizer is None else pickle.dumps(self.tokenizer))
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise UserError(f"the tokenizer cannot be sent to other processes ({error}); set processes to 1") from None

    def words(self):
        """The tokenizer."""
        return _unpacked(self.tokenizer) if isinstance(self.tokenizer, bytes) else self.tokenizer


@cache
def _unpacked(packed: bytes):
    return pickle.loads(packed)  # packed by the parent process a moment ago, not read from anywhere


@dataclass(frozen=True)
class Decisions:
    """One entry a row of the batch. The masks are whole, the counts are of what is left after the cut."""

    mask: np.ndarray  # uint8[N] own or derived; 0 where there is none
    derived: np.ndarray | None  # uint8[N] from the template's markers; None without a template
    reason: np.ndarray  # uint8[R] KEPT or why not, as in REASONS
    length: np.ndarray  # int64[R] tokens after the cut
    truncated: np.ndarray  # int64[R] tokens cut off
    supervised: np.ndarray  # int64[R] supervised tokens within the cut
    teachers: np.ndarray  # int64[R] positions p with l[p]·l[p+1] = 1 within the cut
    changed: np.ndarray  # bool[R] must the row be written anew?
    checks: Counter  # rows by provenance of the mask, and by the outcome of each check

    def kept_rows(self, batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(ids, mask, starts) of the rows that are kept, as they are merged, end to end."""
        length = np.where(self.reason == KEPT, self.length, 0)
        stops = np.repeat(batch.starts[:-1] + length, batch.lengths)
        inside = np.arange(len(batch.ids)) < stops
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.length[self.reason == KEPT])])
        return batch.ids[inside], self.mask[inside], starts


def decide(batch: Batch, rules: Rules) -> Decisions:
    """What becomes of every row of the batch."""
    starts, lengths, own = batch.starts, batch.lengths, batch.own
    derived = None if rules.markers is None else masks_from_markers(batch.ids, starts, rules.markers)
    reason, checks = np.zeros(len(batch), np.uint8), Counter()
    take = ~own if rules.masks == "own" else np.ones(len(batch), bool)  # whose mask is the derived one
    mask = batch.mask
    if derived is None:
        reason[take] = NO_MASK
        checks["none"] = int(take.sum())
    else:
        if take.any():
            mask = np.where(np.repeat(take, lengths), derived, batch.mask)
        checks["derived"] = int(take.sum())
        differ = counts(batch.mask != derived, starts[:-1], starts[1:]) > 0
        checks["markers_agree"], checks["markers_disagree"] = int((own & ~differ).sum()), int((own & differ).sum())
        _second(batch, mask, rules, reason, checks)
    checks["own"] = int((~take).sum())

    pairs = taught(mask)
    length = _cut(mask, batch, rules, reason)
    begin, end = starts[:-1], starts[:-1] + length
    supervised, teachers = counts(mask.view(bool), begin, end), counts(pairs, begin, end - 1)
    whole = counts(pairs, begin, starts[1:] - 1) if (length < lengths).any() else teachers
    for place, why in ((whole == 0, UNSUPERVISED), (teachers == 0, CUT_AWAY)):
        reason[place & (reason == KEPT)] = why
    truncated = lengths - length
    changed = ~batch.plain | take | (truncated > 0)
    if rules.masks == "template" and derived is not None:
        changed = ~batch.plain | ~own | differ | (truncated > 0)
    return Decisions(mask, derived, reason, length, truncated, supervised, teachers, changed, +checks)


def _second(batch: Batch, mask: np.ndarray, rules: Rules, reason: np.ndarray, checks: Counter) -> None:
    """Rows without a mask of their own: prefix rendering, where it applies, must agree with the markers."""
    if rules.tokenizer is None:
        return
    for r in np.flatnonzero(~batch.own):
        messages, tools = batch.messages(r)
        if not messages:
            continue
        found = mask_from_prefixes(messages, rules.words(), tools) if rules.markers.stable else None
        if found is None or not np.array_equal(found[0], batch.ids[batch.row(r)]):
            checks["prefixes_left_out"] += 1
        elif np.array_equal(found[1], mask[batch.row(r)]):
            checks["prefixes_agree"] += 1
        else:
            checks["prefixes_disagree"] += 1
            reason[r] = DISAGREE


def _cut(mask: np.ndarray, batch: Batch, rules: Rules, reason: np.ndarray) -> np.ndarray:
    """int64[R]: tokens of each row that are left by the truncation."""
    lengths, most = batch.lengths, rules.max_seq_len
    long = lengths > most
    if rules.truncation == "right" or not long.any():
        return np.minimum(lengths, most)
    if rules.truncation == "drop":
        reason[long & (reason == KEPT)] = TOO_LONG
        return np.minimum(lengths, most)
    ends = np.flatnonzero((mask[:-1] == 1) & (mask[1:] == 0)) + 1  # a turn of the assistant ends before here
    rows = np.searchsorted(batch.starts, ends - 1, side="right") - 1
    inside = ends - batch.starts[rows]
    fits = inside <= most
    last = np.zeros(len(batch), np.int64)
    np.maximum.at(last, rows[fits], inside[fits])
    reason[long & (last == 0) & (reason == KEPT)] = NO_TURN
    return np.where(long, np.where(last > 0, last, most), lengths)


def taught(mask: np.ndarray) -> np.ndarray:
    """bool[N]: the positions p with l[p]·l[p+1] = 1 of rows end to end, across rows too: leave out each row's last."""
    pairs = np.zeros(len(mask), bool)
    pairs[:-1] = (mask[:-1] & mask[1:]).view(bool)
    return pairs


def counts(flags: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """int64[R]: how many of bool[N] `flags` are set in each [begin, end). A row at a time: ten times a running sum."""
    return np.array([np.count_nonzero(flags[begin:end]) for begin, end in
                     zip(begins.tolist(), ends.tolist(), strict=True)], np.int64)


@dataclass
class Tally:
    """The account of one source: lines read = records − copies + skipped."""

    name: str
    records: int = 0  # in merged.jsonl, copies included; so are the counts below
    copies: int = 0
    tokens: int = 0
    supervised: int = 0
    teacher_positions: int = 0
    truncated_records: int = 0
    truncated_tokens: int = 0
    skipped: Counter = field(default_factory=Counter)  # by reason or fault rule
    masks: Counter = field(default_factory=Counter)  # by provenance and by outcome of each check
    faults: int = 0  # lines that are no rows, among the skipped

    def take(self, faults, reasons: np.ndarray, checks: Counter) -> None:
        """What the first pass over a batch skips: faults (line, rule, detail), and codes of REASONS."""
        self.faults += len(faults)
        self.skipped.update(rule for _, rule, _ in faults)
        self.skipped.update(REASONS[reason] for reason in reasons.tolist())
        self.masks.update(checks)

    def to_json(self) -> dict:
        return {**vars(self), "skipped": dict(sorted(self.skipped.items())), "masks": dict(sorted(self.masks.items())),
                "lines": self.records - self.copies + self.skipped.total()}


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
