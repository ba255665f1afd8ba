"""A closer look at some rows of each source: rules that need a conversation's text or its rendering.

Rendering costs milliseconds a row, reading its ids microseconds. The sample is the rows whose content has the lowest
keyed hashes, so the same seed looks at the same rows wherever they lie.
"""

from dataclasses import replace
from functools import partial

import numpy as np

from eagle3nb.corpus.batch import Batch, batches
from eagle3nb.corpus.conversation import conversation_faults
from eagle3nb.corpus.decision import decide
from eagle3nb.corpus.hits import Hits
from eagle3nb.corpus.lines import Chunk
from eagle3nb.corpus.scan import pool_of, processes_for
from eagle3nb.corpus.survey import Looking, SourceSurvey, Survey, marks
from eagle3nb.progress import progress

ROW_BYTES = 16 << 10  # of reading that take as long as rendering a row: where more processes pay
MIXER = np.uint64(0x9E3779B97F4A7C15)


def chosen(source: SourceSurvey, size: int, seed: int) -> np.ndarray:
    """int64[S]: row numbers of the source that are looked at, ascending; all of them where `size` is 0."""
    if not size or size >= source.records:
        return np.arange(source.records)
    with np.errstate(over="ignore"):
        key = (source.hashes ^ np.uint64(seed % (1 << 64))) * MIXER
        key ^= key >> np.uint64(29)
        key *= MIXER
    return np.sort(np.argpartition(key, size)[:size])


def look_closer(found: Survey, *, size: int, seed: int, processes: int = 0) -> dict[str, int]:
    """Notes the faults of the sampled rows in `found`; returns how many rows of each source were looked at.

    A row that the survey has put under a rule already, by its ids, is not counted twice.
    """
    tasks, looked = [], {}
    for number, source in enumerate(found.sources):
        rows = chosen(source, size, seed)
        looked[source.name] = source.looked_at = len(rows)
        for file in np.unique(source.file[rows]):
            mine = rows[source.file[rows] == file]
            path = found.places[number].files[int(file)]
            tasks.append((number, int(file), path, source.line[mine] - 1, source.offset[mine]))
    total = sum(len(task[3]) for task in tasks)
    with pool_of(processes_for(total * ROW_BYTES, processes), found.looking) as pool:
        with progress(total, "audit: looking at text", "rows") as bar:
            results = pool.map(partial(look_at, found.vocab_size), tasks, bar.advance)
            for (number, file, *_), faults in zip(tasks, results, strict=True):
                source = found.sources[number]
                for line, rule, detail in faults:
                    source.note_sampled(rule, source.files[file], line + 1, detail)
    return looked


def look_at(vocab_size: int, task: tuple, shared: Looking, add) -> list[tuple[int, str, str]]:
    """[(line from 0, rule, detail)] of the wanted lines of one file."""
    number, file, path, lines, offsets = task
    rules, found = replace(shared.rules, tokenizer=shared.rules.words()), []
    unrendered = replace(rules, tokenizer=None)  # what the survey saw in the ids; the rendering is done once, below
    tokenizer = None if rules.tokenizer is None else rules.words
    for batch, before in _wanted(path, number, file, lines, offsets, vocab_size, tokenizer):
        for r in np.flatnonzero(np.isin(batch.lines + before, lines)):
            row, seen = batch.one(r), Hits()
            marks(row, decide(row, unrendered), shared, seen)
            line = int(batch.lines[r]) + before
            found += [(line, rule, detail)
                      for rule, detail in conversation_faults(batch.record(r), rules, shared.template)
                      if rule not in seen.counts]
            add(1)
    return found


def _wanted(path, number: int, file: int, lines: np.ndarray, offsets: np.ndarray, vocab_size: int, tokenizer):
    """(batch, number to add to its lines): a line each of a plain file, all of a compressed one."""
    options = {"vocab_size": vocab_size, "tokenizer": tokenizer}
    if path.suffix != ".jsonl":
        for batch in batches(Chunk(number, file, path, 0, path.stat().st_size), **options):
            yield batch, 0
        return
    for line, offset in zip(lines.tolist(), offsets.tolist(), strict=True):
        batch: Batch
        for batch in batches(Chunk(number, file, path, _line_begin(path, offset), offset + 1), **options):
            yield batch, line


def _line_begin(path, offset: int) -> int:
    """Where the line begins whose first character that is no blank stands at `offset`."""
    back = 64
    with open(path, "rb") as handle:
        while True:
            handle.seek(max(0, offset - back))
            before = handle.read(min(back, offset))
            if b"\n" in before or len(before) == offset:
                return offset - len(before) + before.rfind(b"\n") + 1
            back *= 16
