"""One pass over every row of every dataset, the excluded ones too: what there is, and what the merge will make of it.

Rules on ids and masks see every row; `sample` looks at some rows' text besides. Memory: half a kilobyte a row and the
examples, whatever the rows' length.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import xxhash

from eagle3nb.corpus.batch import Batch
from eagle3nb.corpus.decision import NO_MASK, Decisions, Rules, Tally, counts, decide, taught
from eagle3nb.corpus.hits import EXAMPLES, Hits
from eagle3nb.corpus.loops import loops
from eagle3nb.corpus.overlap import Needles, overlaps
from eagle3nb.corpus.records import Source, find_sources, is_excluded
from eagle3nb.corpus.rows import Part, Rows, part_of
from eagle3nb.corpus.scan import Found, file_name, named_files, pool_of, processes_for, scan
from eagle3nb.corpus.sketch import sketches
from eagle3nb.corpus.template import Template, mask_hits, template_hits, template_of
from eagle3nb.errors import UserError

COLUMNS = ("file", "offset", "line", "lengths", "supervised", "hashes")
OPEN_END = "open end"  # not a rule by itself
SHORT = 8  # tokens: hardly a question and an answer
FULL = 0.9  # of the window: a prompt that takes so much leaves an answer no room
DETAIL = 300  # characters that a record holds on one example
HELD_OUT = 0.05  # of the contents, by hash: their tokens are counted apart, to judge a draft vocabulary by


@dataclass(frozen=True)
class Looking:
    """What every process knows."""

    rules: Rules
    template: Template | None
    needles: Needles | None
    lengths: tuple[int, ...]  # where a cut is tried


@dataclass
class Look:
    """What one batch gives. Lines count from 0 within its chunk."""

    part: Part  # what the merge would keep
    lines: np.ndarray  # int64[R]
    offsets: np.ndarray  # int64[R]
    lengths: np.ndarray  # int32[R] tokens, uncut
    supervised: np.ndarray  # int32[R] supervised tokens, uncut
    hashes: np.ndarray  # uint64[R] xxh3-64 of the ids, uncut
    teachers: int  # positions that need the target's distribution, uncut
    kept: np.ndarray  # int64[L] supervised tokens that each cut leaves
    hits: Hits  # rows by rule; examples by line
    tokens: tuple  # (ids, counts) of supervised tokens of the rows that the merge keeps
    held_out: tuple  # the same of the held-out contents alone


@dataclass
class SourceSurvey:
    """What one dataset holds. Counts are of usable rows before the merge cuts or skips any, unless said otherwise."""

    name: str
    excluded: bool
    files: list[str]  # as shown
    bytes: int  # on disk, as they lie
    tally: Tally  # what the merge will make of it
    vocab_size: int
    kept: dict[int, int]  # at each length: supervised tokens left
    teachers: int = 0
    hits: Hits = field(default_factory=Hits)  # rows by rule
    sampled: Counter = field(default_factory=Counter)  # those of them that were seen in the sample's text alone
    examples: dict = field(default_factory=lambda: defaultdict(list))  # rule → [{file, line, at, detail}]
    parts: dict = field(default_factory=lambda: defaultdict(list))  # COLUMNS of each batch, until `close`
    looked_at: int = 0  # rows whose text was looked at

    def __post_init__(self):
        self.token_counts = np.zeros(self.vocab_size, np.int64)
        self.held_out_counts = np.zeros(self.vocab_size, np.int64)

    def add(self, found: Found) -> None:
        look: Look = found.value
        self.teachers += look.teachers
        for length, kept in zip(self.kept, look.kept.tolist(), strict=True):
            self.kept[length] += kept
        for counted, (ids, times) in ((self.token_counts, look.tokens), (self.held_out_counts, look.held_out)):
            counted[ids] += times
        self.hits.counts.update(look.hits.counts)
        for rule, examples in look.hits.examples.items():
            for line, at, detail in examples:
                self.example(rule, self.files[found.file], found.line(line), at, detail)
        for name, values in zip(COLUMNS, (np.full(len(look.lines), found.file, np.int32), look.offsets,
                                          look.lines + found.before + 1, look.lengths, look.supervised, look.hashes),
                                strict=True):
            self.parts[name].append(values)

    def example(self, rule: str, file: str, line: int, at: int | None, detail: str) -> None:
        if len(self.examples[rule]) < EXAMPLES:
            self.examples[rule].append({"file": file, "line": line, "at": at, "detail": _printable(detail)})

    def note_sampled(self, rule: str, file: str, line: int, detail: str) -> None:
        """A fault that a row of the sample has in its text."""
        self.hits.counts[rule] += 1
        self.sampled[rule] += 1
        self.example(rule, file, line, None, detail)

    def close(self) -> None:
        """After the last batch: lengths, supervised, hashes, file, line, offset get an entry a usable row, in order."""
        self.file, self.offset, self.line, self.lengths, self.supervised, self.hashes = (
            np.concatenate(self.parts[name]) if self.parts[name] else np.zeros(0, np.int64) for name in COLUMNS)
        self.parts.clear()

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

    def place(self, row: int) -> dict:
        """{file, line} of a usable row."""
        return {"file": self.files[self.file[row]], "line": int(self.line[row])}

    def lost(self, length: int) -> float:
        """Share of the supervised tokens that a cut at `length` loses."""
        return 1 - self.kept[length] / self.supervised_tokens if self.supervised_tokens else 0.0


def _printable(detail: str) -> str:
    """What is wrong, of bounded length; a row's own keys and words may be in it, with whatever they hold."""
    safe = "".join(c if c.isprintable() else repr(c)[1:-1] for c in detail[:DETAIL])
    return safe if len(safe) <= DETAIL and len(detail) <= DETAIL else safe[:DETAIL - 1] + "…"


@dataclass(frozen=True)
class Survey:
    """All sources by name, and what they were looked at with."""

    sources: list[SourceSurvey]
    rows: Rows  # what the merge would keep of the sources that are not excluded
    looking: Looking
    vocab_size: int
    exclude: tuple[str, ...]
    limit: int
    places: tuple[Source, ...]  # where they lie

    @property
    def rules(self) -> Rules:
        return self.looking.rules

    @property
    def lengths(self) -> tuple[int, ...]:
        """Where a cut was tried; max_seq_len is among them."""
        return self.looking.lengths

    @property
    def kept(self) -> list[SourceSurvey]:
        """The sources that the merge will take."""
        return [source for source in self.sources if not source.excluded]


def survey(data_root, *, rules: Rules, vocab_size: int, needles: Needles | None = None, exclude=(), lengths=(),
           limit: int = 0, processes: int = 0) -> Survey:
    """Read everything once. `rules` with markers bring the rules on templates, `needles` those on overlap.

    Raises UserError only where there is nothing to read; what is wrong inside is noted.
    """
    if wrong := [length for length in lengths if length < 3]:
        raise UserError(f"lengths holds {wrong[0]}; give numbers of tokens, 3 or more")
    shared = Looking(rules, _template(rules), needles, tuple(sorted({*lengths, rules.max_seq_len})))
    find_sources(data_root, exclude)
    sources = find_sources(data_root)
    names = [source.name for source in sources]
    seen = [SourceSurvey(source.name, is_excluded(source.name, exclude, names),
                         [file_name(source, f) for f in range(len(source.files))], source.bytes, Tally(source.name),
                         vocab_size, dict.fromkeys(shared.lengths, 0)) for source in sources]
    rows = Rows(named_files(sources))
    with pool_of(processes_for(sum(source.bytes for source in seen), processes), shared) as pool:
        for found in scan(sources, look, pool, vocab_size=vocab_size, limit=limit, what="audit: reading"):
            of, part = seen[found.source], found.value.part
            of.add(found)
            of.tally.take(part.faults, part.skipped[1], part.checks)
            if not of.excluded:
                rows.add(found.source, found.file, found.before, part)
    for source in seen:
        source.close()
    rows.close()
    return Survey(seen, rows, shared, vocab_size, tuple(exclude), limit, tuple(sources))


def _template(rules: Rules) -> Template | None:
    """Without a tokenizer that could tell more, only what the markers say."""
    if rules.markers is None:
        return None
    if rules.tokenizer is None:
        return Template((), (), None, (0,) * len(rules.markers.opens), (), (), ())
    return template_of(rules.tokenizer, rules.markers)


# ------------------------------------------------------------------------------------------------ in the processes


def look(batch: Batch, shared: Looking) -> Look:
    """One batch, by every rule on ids and masks."""
    made, hits = decide(batch, shared.rules), Hits()
    part = part_of(batch, made)
    ids, mask, starts = made.kept_rows(batch)
    part.sketches = sketches(ids, mask, starts)
    lengths = batch.lengths
    supervised = counts(made.mask.view(bool), batch.starts[:-1], batch.starts[1:])
    hashes = [xxhash.xxh3_64_intdigest(batch.ids[batch.row(r)]) for r in range(len(batch))]
    kept = [counts(made.mask.view(bool), batch.starts[:-1], batch.starts[:-1] + np.minimum(lengths, length)).sum()
            for length in shared.lengths]
    teachers = counts(taught(made.mask), batch.starts[:-1], batch.starts[1:] - 1).sum()
    _rules(batch, made, shared, supervised, hits)
    found = Look(part, batch.lines, batch.offsets, lengths.astype(np.int32), supervised.astype(np.int32),
                 np.array(hashes, np.uint64), int(teachers),
                 np.array(kept, np.int64), hits, *_token_counts(ids, mask, starts, part))
    for examples in hits.examples.values():
        examples[:] = [(int(batch.lines[row]), at, detail) for row, at, detail in examples]
    for line, rule, detail in batch.faults:
        hits.counts[rule] += 1
        if len(hits.examples[rule]) < EXAMPLES:
            hits.examples[rule].append((line, None, detail))
    return found


def _rules(batch: Batch, made: Decisions, shared: Looking, supervised: np.ndarray, hits: Hits) -> None:
    ids, starts, window = batch.ids, batch.starts, shared.rules.max_seq_len
    if not len(batch):
        return
    marks(batch, made, shared, hits)
    without = np.flatnonzero(made.reason == NO_MASK)
    hits.add("schema", without, None, lambda row, at: "no loss_mask and no template to derive one")
    lengths = batch.lengths
    hits.add("too_short", np.flatnonzero(lengths < SHORT), None, lambda row, at: f"{lengths[row]} tokens")
    first = np.array([int(np.argmax(made.mask[batch.row(r)])) for r in range(len(batch))])
    full = np.flatnonzero((supervised > 0) & (first >= FULL * window) & (made.reason != NO_MASK))
    hits.add("prompt_fills_window", full, np.minimum(first[full], lengths[full] - 1),
             lambda row, at: f"the first answer begins at token {first[row]:,} of {window:,}")
    rows, at, share = loops(ids, made.mask, starts)
    shares = dict(zip(rows.tolist(), share.tolist(), strict=True))
    hits.add("degenerate_text", rows, at,
             lambda row, at: f"{shares[row]:.0%} of the answer's 8-grams stood there before")
    if shared.needles:
        rows, at, which, share = overlaps(ids, starts, shared.needles)
        told = dict(zip(rows.tolist(), zip(which.tolist(), share.tolist(), strict=True), strict=True))
        hits.add("benchmark_overlap", rows, at,
                 lambda row, at: f"{shared.needles.benchmarks[told[row][0]]} {shared.needles.names[told[row][0]]}: "
                             f"{told[row][1]:.0%} of the prompt")


def marks(batch: Batch, made: Decisions, shared: Looking, hits: Hits) -> None:
    """The rules on masks and templates; OPEN_END counts rows that end inside an answer, for a rule on whole sources."""
    ids, starts, lasts = batch.ids, batch.starts, batch.starts[1:] - 1
    if shared.template is not None and made.derived is not None:
        template_hits(ids, batch.mask, batch.own, made.derived, starts, shared.rules.markers, shared.template, hits)
        inside = (made.derived[lasts] == 1) & (ids[lasts] != shared.rules.markers.end_of_turn)
        rows = np.flatnonzero(inside)
        hits.add(OPEN_END, rows, batch.lengths[rows] - 1, lambda row, at: "the row ends without an end-of-turn token")
        return
    mask = made.mask.copy()
    mask[starts[:-1][made.reason == NO_MASK]] = 1  # a row that no mask can be had for is the schema's, not all zero
    mask_hits(mask, starts, hits)


def _token_counts(ids: np.ndarray, mask: np.ndarray, starts: np.ndarray, part: Part) -> Iterator[tuple]:
    """((ids, counts) of all supervised tokens, the same of the held-out rows')."""
    bound = int(HELD_OUT * (1 << 64))
    held = part.ids_hash.view(">u8").reshape(-1, 2)[:, 0].astype(np.uint64) < bound if len(part.ids_hash) else []
    of_held = np.repeat(held, np.diff(starts)) if len(part.ids_hash) else np.zeros(0, bool)
    for chosen in (mask == 1, (mask == 1) & of_held):
        times = np.bincount(ids[chosen])
        found = np.flatnonzero(times)
        yield found, times[found]
