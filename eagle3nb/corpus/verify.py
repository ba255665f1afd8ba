"""The merged corpus read back: is the file what its index and its report say?"""

from pathlib import Path

from eagle3nb.corpus.decision import Rules
from eagle3nb.corpus.merged import REPORT, ROWS, Corpus
from eagle3nb.corpus.passes import Reading, read_back
from eagle3nb.corpus.records import Source
from eagle3nb.corpus.rows import corpus_hash
from eagle3nb.corpus.scan import pool_of, processes_for, scan
from eagle3nb.errors import UserError


def verify(out_dir: str | Path, processes: int = 0) -> dict:
    """Read merged.jsonl back: every row against the index (order, ids, mask, counts), all of it against merge.json.

    Returns {records, tokens, supervised, corpus_hash}. Raises UserError at the first disagreement.
    """
    corpus = Corpus.open(out_dir)
    path, told = Path(out_dir) / ROWS, {name: corpus.index[name].tolist() for name in
                                        ("tokens", "supervised", "bytes", "xxh3", "mask_xxh3")}
    source, seen, hashes = Source("corpus", path.parent, (path,)), 0, {"xxh3": [], "mask_xxh3": []}
    with pool_of(processes_for(path.stat().st_size, processes), Reading(Rules(1 << 40))) as pool:
        for found in scan([source], read_back, pool, vocab_size=corpus.vocab_size, what="merge: verifying"):
            for row, rest in enumerate(zip(*found.value.values(), strict=True), seen):
                if row >= len(corpus) or rest != tuple(told[name][row] for name in found.value):
                    raise UserError(f"{_place(corpus, row)}; run the merge again")
            seen += len(found.value["tokens"])
            for name in hashes:
                hashes[name] += found.value[name]
    if seen != len(corpus):
        raise UserError(f"{ROWS} holds {seen} of {len(corpus)} rows; run the merge again")
    whole = corpus_hash(*(bytes.fromhex("".join(values)) for values in hashes.values()))
    result = {"records": seen, "tokens": sum(told["tokens"]), "supervised": sum(told["supervised"]),
              "corpus_hash": whole}
    for name, value in result.items():
        if corpus.report[name] != value:
            raise UserError(f"{ROWS} read back gives {name} {value}, {REPORT} says {corpus.report[name]}; merge again")
    return result


def _place(corpus: Corpus, row: int) -> str:
    if row >= len(corpus):
        return f"{ROWS} holds rows that the index does not"
    told = corpus.index.iloc[row]
    return f"{ROWS} row {row} is not {told['file']} line {told['line']}, as its index says"
