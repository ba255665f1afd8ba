"""A tokenised corpus like the reference run's, for benchmarks: nine datasets whose rows merge to 87.8 M tokens.

    python tests/benchmarks/corpus.py FOLDER [--records 37312] [--seed 0]

What it promises, at any number of records (counts are exact, rounded to whole rows):
  20 %    of the rows are longer than 8192 tokens (up to 16,384), so a merge at 8192 cuts them
  5 %     have no loss_mask, so a merge derives it from the markers
  2,353   tokens a row are left after the merge: 87.8 M for 37,312 rows
  0.1 %   more rows have no supervised token (one at least), so a merge skips them
Rows are conversations of several turns between `MARKERS`, written as json.dumps writes them. Token ids follow the
Zipf-Mandelbrot law, an id being its rank, as in a byte-pair vocabulary: 94 % of them have 3 to 6 digits.

About 10 s a GB on one core; memory is that of a few rows, whatever the number. The same seed gives the same bytes.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
import xxhash

from eagle3nb.corpus.masks import Markers

RECORDS, TOKENS, MAX_SEQ_LEN = 37_312, 87_800_000, 8192
SOURCES = {"A2_agentic": 0.22, "B1_code": 0.18, "B2_math": 0.14, "B3_chat": 0.12, "B4_science": 0.10, "B5_tools": 0.08,
           "B6_writing": 0.07, "B7_translation": 0.05, "B8_safety": 0.04}
LONG, MASKLESS, UNSUPERVISED = 0.20, 0.05, 0.001
VOCAB, TEXT = 163_840, 163_000  # ids below TEXT are text
USER, ASSISTANT, MIDDLE, THINK, END = range(163_584, 163_589)
MARKERS = Markers(opens=((ASSISTANT, MIDDLE, THINK), (ASSISTANT, MIDDLE)), end_of_turn=END,
                  special_ids=(USER, ASSISTANT, MIDDLE, THINK, END))
SHORTEST_ROW, SHORTEST_TURN, LONGEST_QUESTION = 64, 8, 4096  # tokens; the question ends before the cut
SHIFT = 200.0  # Mandelbrot's: flattens the head, so that the commonest token is 0.07 % of the text, not 8 %
ROWS_A_FILE, ROWS_A_BATCH = 4096, 32
DECIMAL = np.array([f"{i}, ".encode() for i in range(VOCAB)], "S8")  # padded with zero bytes
BIT = np.array([b"0, ", b"1, "], "S3")


@dataclass(frozen=True)
class Made:
    """What was written, and what a merge at MAX_SEQ_LEN must find in it."""

    bytes: int
    records: int  # rows that the merge keeps
    skipped: int
    tokens: int  # of the kept rows, cut
    cut: int  # rows longer than MAX_SEQ_LEN
    maskless: int  # rows without loss_mask


def make_corpus(root: str | Path, records: int = RECORDS, seed: int = 0) -> Made:
    """Write `<root>/<source>/part-000.jsonl` and so on; `records` of 60 or more leave no source empty."""
    rng = np.random.default_rng(seed)
    lengths, maskless, supervised = _plan(records, rng)
    ends = np.round(np.cumsum(list(SOURCES.values())) * len(lengths)).astype(int)
    size = first = 0
    for name, end in zip(SOURCES, ends, strict=True):
        (Path(root) / name).mkdir(parents=True)
        for part, start in enumerate(range(first, end, ROWS_A_FILE)):
            with open(Path(root) / name / f"part-{part:03}.jsonl", "wb") as out:
                for at in range(start, min(start + ROWS_A_FILE, end), ROWS_A_BATCH):
                    rows = slice(at, min(at + ROWS_A_BATCH, start + ROWS_A_FILE, end))
                    size += out.write(b"".join(_lines(name, lengths, maskless, supervised, rows, rng)))
        first = end
    return Made(size, records, int((~supervised).sum()), int(np.minimum(lengths, MAX_SEQ_LEN)[supervised].sum()),
                int((lengths[supervised] > MAX_SEQ_LEN).sum()), int(maskless.sum()))


def _plan(records: int, rng) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(lengths int64[R], maskless bool[R], supervised bool[R]) of all rows, in random order."""
    long, dumb = round(LONG * records), max(1, round(UNSUPERVISED * records))
    budget = round(TOKENS * records / RECORDS) - long * MAX_SEQ_LEN - (records - long) * SHORTEST_ROW
    weights = np.minimum(rng.lognormal(0, 0.8, records - long), 9)  # none can pass MAX_SEQ_LEN
    short = np.floor(budget * weights / weights.sum()).astype(np.int64)
    short[:budget - short.sum()] += 1
    lengths = np.concatenate([short + SHORTEST_ROW, rng.integers(MAX_SEQ_LEN + 1, 2 * MAX_SEQ_LEN + 1, long),
                              rng.integers(SHORTEST_ROW, 1024, dumb)])
    maskless, supervised = np.zeros(len(lengths), bool), np.arange(len(lengths)) < records
    maskless[rng.choice(records, round(MASKLESS * records), replace=False)] = True
    order = rng.permutation(len(lengths))
    return lengths[order], maskless[order], supervised[order]


def _lines(source: str, lengths, maskless, supervised, rows: slice, rng):
    """The rows' lines. Ids and masks are drawn and spelt for all of them at once."""
    starts = np.concatenate([[0], np.cumsum(lengths[rows])])
    uniform = rng.random(starts[-1], dtype=np.float32)
    ids = np.minimum(SHIFT * np.expm1(uniform * np.float32(np.log1p(TEXT / SHIFT))), TEXT - 1).astype(np.int32)
    mask = np.zeros(len(ids), np.uint8)
    for i, row in enumerate(range(rows.start, rows.stop)):
        here = slice(starts[i], starts[i + 1])
        _converse(ids[here], mask[here], rng)
        mask[here] &= supervised[row]
        text = DECIMAL[ids[here]].tobytes().translate(None, b"\0")[:-2]
        own = b"" if maskless[row] else b', "loss_mask": [%b]' % BIT[mask[here]].tobytes()[:-2]
        yield b'{"id": "%b-%06d", "input_ids": [%b]%b}\n' % (source.encode(), row, text, own)


def _converse(ids: np.ndarray, mask: np.ndarray, rng) -> None:
    """Put the markers of user and assistant turns into a row's ids (in place), and ones into its mask (zeros)."""
    turns = 2 * min(1 + int(rng.poisson(2)), len(ids) // SHORTEST_ROW)
    cuts = np.sort(rng.integers(0, len(ids) - turns * SHORTEST_TURN + 1, turns - 1))
    cuts[0] = min(cuts[0], LONGEST_QUESTION)
    bounds = np.concatenate([[0], cuts, [len(ids) - turns * SHORTEST_TURN]]) + SHORTEST_TURN * np.arange(turns + 1)
    users, answers = bounds[:-1:2], bounds[1:-1:2]
    ids[users], ids[answers] = USER, ASSISTANT
    ids[bounds[:-1] + 1] = MIDDLE
    ids[bounds[1:] - 1] = END
    thinks = rng.random(len(answers)) < 0.5
    ids[answers[thinks] + 2] = THINK
    for start, end in zip(answers + 2 + thinks, bounds[2::2], strict=True):
        mask[start:end] = 1


def fingerprint(path: Path) -> tuple[int, int, int]:
    """(rows, tokens, sum of the rows' xxh3-128): the same for the same (ids, mask) rows in whatever order."""
    rows = tokens = total = 0
    with open(path, "rb") as lines:
        for line in lines:
            row = orjson.loads(line)
            pair = row["input_ids"], row["loss_mask"]
            total = (total + xxhash.xxh3_128_intdigest(orjson.dumps(pair))) % (1 << 128)
            rows, tokens = rows + 1, tokens + len(pair[0])
    return rows, tokens, total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--records", type=int, default=RECORDS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(make_corpus(options.folder, options.records, options.seed))


if __name__ == "__main__":
    main()
