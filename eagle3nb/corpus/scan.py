"""Every row of every dataset, in parallel and in order: `scan` gives each batch to a function in a process of its own.

    with pool_of(processes, shared) as pool:
        for found in scan(sources, work, pool, vocab_size=V, what="merge: reading"):
            found.value        # what work(batch, shared) returned; it should be small, it travels between processes
            found.line(7)      # the line number in the file of the batch's line 7

Processes are spawned, not forked: a notebook's kernel has threads. They end with the process that started them, however
that ends. Little data is read in this process, by the same code.
"""

import gc
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import wait as wait_for
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait as wait_for_end
from pathlib import Path

from eagle3nb.corpus.batch import Batch, batches
from eagle3nb.corpus.lines import Chunk, chunks
from eagle3nb.corpus.records import Fault, Record, Source
from eagle3nb.errors import UserError
from eagle3nb.progress import progress

SMALL = 32 << 20  # bytes that one process reads before others would be up
PROCESSES = 4  # at most, unless asked for more: 90 MB each, and a disk is seldom faster than four parsers


@dataclass(frozen=True)
class Found:
    """What came of one batch. `before`: lines of its file that precede the chunk."""

    source: int
    file: int
    before: int
    value: object

    def line(self, number: int) -> int:
        """1-based line in the file of the batch's line `number`."""
        return self.before + number + 1


def file_name(source: Source, file: int) -> str:
    """The file as a record may show it: <dataset>/<path>."""
    name = f"{source.name}/{source.files[file].relative_to(source.path).as_posix()}"
    return name.encode("utf-8", "replace").decode()  # a name that is no text must not keep a record from being written


def named_files(sources: list[Source]) -> list[tuple[int, str, Path]]:
    """(source, name as shown, path) of every file, in order."""
    return [(s, file_name(source, f), path) for s, source in enumerate(sources) for f, path in enumerate(source.files)]


def processes_for(size: int, asked: int = 0) -> int:
    """Processes for so many bytes: those asked for, else one for little data and up to four for much."""
    if asked < 0:
        raise UserError(f"processes is {asked}; give 1 or more, or 0 for as many as serve")
    return asked or (1 if size < SMALL else min(PROCESSES, len(os.sched_getaffinity(0))))


class Pool:
    """Runs functions in order: `pool.map(function, tasks)` yields results as the tasks stand. One process: right here.

    `function(task, shared, add)` calls `add(n)` as it takes n bytes off the disk; `told` is called with their sum.
    `shared` is sent to each process once; it has `rules`.
    """

    def __init__(self, processes: int, shared):
        self.shared, self.counted, self.pool = shared, _Here(), None
        if processes > 1:
            spawn = get_context("spawn")
            self.counted = spawn.Value("q", 0)
            sent = replace(shared, rules=shared.rules.packed())
            self.pool = ProcessPoolExecutor(processes, spawn, _begin, (self.counted, sent))
            for _ in range(processes):
                self.pool.submit(_nothing)  # they start while we look around

    def map(self, function: Callable, tasks, told: Callable[[int], None]) -> Iterator:
        self.counted.value = shown = 0
        if self.pool is None:
            for task in tasks:
                yield function(task, self.shared, self.counted.add)
                shown = self._tell(told, shown)
            return
        waiting = deque()
        try:
            waiting.extend(self.pool.submit(_counting, function, task) for task in tasks)
            while waiting:
                while not waiting[0].done():
                    wait_for([waiting[0]], timeout=0.5)
                    shown = self._tell(told, shown)
                yield waiting.popleft().result()
            self._tell(told, shown)
        except BrokenProcessPool:
            raise UserError("a reading process was killed, most likely for memory; set processes to 1, or find what "
                            "else fills the memory") from None
        finally:
            for future in waiting:
                future.cancel()

    def _tell(self, told, shown: int) -> int:
        now = self.counted.value
        if now > shown:
            told(now - shown)
        return now

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)


class _Here:
    """Counts in this process what a shared value counts across processes."""

    value = 0

    def add(self, count: int) -> None:
        self.value += count


@contextmanager
def pool_of(processes: int, shared) -> Iterator[Pool]:
    pool = Pool(processes, shared)
    try:
        yield pool
    finally:
        pool.close()


def scan(sources: list[Source], work: Callable[[Batch, object], object], pool: Pool, *, vocab_size: int,
         limit: int = 0, what: str = "reading") -> Iterator[Found]:
    """`work(batch, shared)` of every batch, in order."""
    files = [(s, f, path) for s, source in enumerate(sources) for f, path in enumerate(source.files)]
    tasks = list(chunks(files, limit))
    before, last = 0, None
    with progress(sum(chunk.stop - chunk.start for chunk in tasks), what, "B") as bar:
        results = pool.map(partial(_work, work, vocab_size), tasks, bar.advance)
        for chunk, (values, breaks) in zip(tasks, results, strict=True):
            if (chunk.source, chunk.file) != last:
                before, last = 0, (chunk.source, chunk.file)
            for value in values:
                yield Found(chunk.source, chunk.file, before, value)
            before += breaks


def read_records(source: Source, *, vocab_size: int, tokenizer=None, limit: int = 0) -> Iterator[Record | Fault]:
    """Each line of the source as a Record or a Fault, in file order; at most `limit` lines where it is not 0.

    To look at rows; what runs over all of them takes batches. Blank lines are no rows.
    """
    for chunk in chunks([(0, f, path) for f, path in enumerate(source.files)], limit, size=1 << 62):  # a file each
        for batch in batches(chunk, vocab_size=vocab_size, tokenizer=tokenizer and (lambda: tokenizer)):
            yield from _items(source, batch)


def _items(source: Source, batch: Batch) -> Iterator[Record | Fault]:
    name, rows = file_name(source, batch.file), []
    rows += [(int(batch.lines[r]), batch.record(r, source.name, name)) for r in range(len(batch))]
    rows += [(line, Fault(source.name, name, line + 1, rule, detail)) for line, rule, detail in batch.faults]
    return (item for _, item in sorted(rows, key=lambda row: row[0]))


# ------------------------------------------------------------------------------------------------ in the processes

_counter = _shared = None


def _begin(counter, shared) -> None:
    """A process's first act: know what all know, and end when the parent does."""
    global _counter, _shared
    _counter, _shared = counter, shared
    gc.freeze()  # what is there now stays: no need to look through it again and again
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    wait_for_end([parent_process().sentinel])
    os._exit(1)


def _nothing() -> None:
    """A task that starts a process."""


def _counting(function, task):
    return function(task, _shared, _add)


def _add(count: int) -> None:
    with _counter.get_lock():
        _counter.value += count


def _work(work, vocab_size: int, chunk: Chunk, shared, add) -> tuple[list, int]:
    """(work's value of each batch, line breaks in the chunk)."""
    rules, values, breaks = shared.rules, [], 0
    tokenizer = None if rules.tokenizer is None else rules.words
    for batch in batches(chunk, vocab_size=vocab_size, tokenizer=tokenizer):
        values.append(work(batch, shared))
        breaks += batch.breaks
        add(batch.read)
    return values, breaks
