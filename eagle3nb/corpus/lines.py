"""Dataset files cut into chunks that a process can read alone, and the lines of a chunk.

A plain file is cut anywhere: a chunk owns the lines that begin in it. A compressed file is one chunk. Line numbers
count within the chunk; whoever reads the chunks in order adds what came before.
"""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import zstandard

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
CHUNK = 4 << 20  # bytes: large enough to hide the overhead of a batch, small enough for ten copies in memory
DAMAGED = (OSError, EOFError, zlib.error, zstandard.ZstdError)


@dataclass(frozen=True)
class Chunk:
    """Bytes [start, stop) of a file; all of it where compressed. `lines`: at most so many that are not blank, 0 all."""

    source: int  # place among the sources
    file: int  # place among the source's files
    path: Path
    start: int
    stop: int
    lines: int = 0


@dataclass(frozen=True)
class Lines:
    """Lines that follow one another; `breaks` is the number of line breaks in them."""

    raws: list[bytes]  # without white space around; blank ones are left out
    numbers: list[int]  # from 0, within the chunk
    offsets: list[int]  # byte where the line begins in the file; -1 where that is compressed
    breaks: int
    read: int  # bytes taken off the disk for them
    after: int  # number of the line that follows them
    damage: str = ""  # why the file cannot be read on there


def chunks(files: list[tuple[int, int, Path]], limit: int = 0, size: int = CHUNK) -> Iterator[Chunk]:
    """Chunks of (source, file, path) triples, in order; the first `limit` lines of each source where it is not 0."""
    left = {}
    for source, file, path in files:
        whole = path.stat().st_size
        if limit:
            rest = left.get(source, limit)
            stop, found, damaged = _head(path, rest) if rest else (0, 0, False)
            left[source] = rest - found
            if found or damaged:
                yield Chunk(source, file, path, 0, stop, rest if damaged else found)
        elif path.suffix != ".jsonl":
            yield Chunk(source, file, path, 0, whole)
        else:
            for start in range(0, whole, size):
                yield Chunk(source, file, path, start, min(start + size, whole))


def _head(path: Path, count: int) -> tuple[int, int, bool]:
    """(byte after the first `count` lines that are not blank, how many there are, is the file damaged before them)."""
    found, stop, whole = 0, 0, path.stat().st_size
    for lines in read(Chunk(0, 0, path, 0, whole, count), 1 << 18):
        found += len(lines.raws)
        if lines.raws:
            stop = lines.offsets[-1] + len(lines.raws[-1])
        if lines.damage and found < count:
            return whole, found, True
    return (stop if path.suffix == ".jsonl" else whole), found, False


def read(chunk: Chunk, size: int = CHUNK) -> Iterator[Lines]:
    """The chunk's lines, about `size` bytes at a time. Damage in a file is told in the last of them, never raised."""
    left = chunk.lines
    for lines in (_plain if chunk.path.suffix == ".jsonl" else _unpacked)(chunk, size):
        if chunk.lines and len(lines.raws) >= left:
            yield replace(lines, raws=lines.raws[:left], numbers=lines.numbers[:left], offsets=lines.offsets[:left],
                          damage="")
            return
        left -= len(lines.raws)
        yield lines


def _plain(chunk: Chunk, size: int) -> Iterator[Lines]:
    begin, line = chunk.start, 0
    try:
        with open(chunk.path, "rb", buffering=1 << 16) as handle:
            if begin:
                handle.seek(begin - 1)  # the line that reaches into this chunk, perhaps through it, is the one before's
                begin += len(handle.readline(chunk.stop - begin + 1)) - 1
            while begin < chunk.stop:
                data = handle.read(min(size, chunk.stop - begin))
                tail = b"" if data.endswith(b"\n") else handle.readline()  # the rest of the last line
                if not data:
                    return
                lines = _split(data, tail, begin, line, len(data) + len(tail))
                begin, line = begin + lines.read, lines.after
                yield lines
    except OSError as error:
        yield Lines([], [], [], 0, 0, line, str(error.strerror or error))


def _split(data: bytes, tail: bytes, begin: int, line: int, read: int, damage: str = "") -> Lines:
    """Lines of data + tail. `begin`: where they start in the file, -1 if unknown; `line`: the first one's number within
    the chunk.
    """
    raws, numbers, offsets, place, parts = [], [], [], begin, data.split(b"\n")
    if tail:
        parts[-1:] = (parts[-1] + tail).split(b"\n")
    for number, text in enumerate(parts, line):
        raw = text.strip()
        if raw:
            raws.append(raw)
            numbers.append(number)
            offsets.append(place + (0 if len(raw) == len(text) else text.index(raw)) if begin >= 0 else -1)
        place += len(text) + 1
    return Lines(raws, numbers, offsets, len(parts) - 1, read, line + len(parts) - 1, damage)


def _unpacked(chunk: Chunk, size: int) -> Iterator[Lines]:
    """Lines of a compressed file; what could be unpacked before the damage is given first."""
    rest, line, told = b"", 0, 0
    try:
        handle = open(chunk.path, "rb", buffering=1 << 20)  # noqa: SIM115 (closed below)
    except OSError as error:
        yield Lines([], [], [], 0, 0, line, str(error.strerror or error))
        return
    with handle:
        parts, damage = _gzip(handle) if chunk.path.suffix == ".gz" else _zstd(handle), ""
        while True:
            held, ended = [rest], False
            try:
                while sum(map(len, held)) < size or b"\n" not in held[-1]:
                    held.append(next(parts))
            except StopIteration:
                ended = True
            except DAMAGED as error:
                ended, damage = True, str(error)
            data = b"".join(held)
            cut = data.rfind(b"\n") + 1
            # A last line without its line break is a row where the file is whole, and the stump of one where it is cut.
            rest, data = (data[cut:], data[:cut]) if not ended or damage else (b"", data)
            at = handle.tell()
            lines = _split(data, b"", -1, line, at - told, damage)
            line, told = lines.after, at
            yield lines
            if ended:
                return


def _gzip(handle) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=handle) as packed:
        while part := packed.read1(1 << 18):
            yield part


def _zstd(handle) -> Iterator[bytes]:
    """Any number of frames, one after the other. zstandard's own reader takes a frame cut short for the end."""
    frame = zstandard.ZstdDecompressor().decompressobj()
    while packed := handle.read(1 << 18):
        while packed:
            if frame.eof:
                frame = zstandard.ZstdDecompressor().decompressobj()
            if part := frame.decompress(packed):
                yield part
            packed = frame.unused_data
    if not frame.eof:
        raise EOFError("the last zstd frame is cut short")
