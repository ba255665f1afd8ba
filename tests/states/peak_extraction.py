"""Peak memory of a real extraction in a process of its own: python peak_extraction.py TARGET '{"rows": …}'

Prints JSON: bytes above what stood before the target was loaded (Python, torch, Transformers).
"""

import json
import os
import sys
import tempfile

import numpy as np
import pandas as pd
import torch

from eagle3nb.corpus.masks import teacher_positions
from eagle3nb.states import open_target
from eagle3nb.states.extract import extract
from eagle3nb.states.target import facts_of, target_identity


class RandomCorpus:
    """What the extraction uses of a corpus: rows of one length, the last 60 % supervised."""

    hash, tokenizer = "random", None

    def __init__(self, rows: int, length: int, vocab: int):
        self.ids = np.random.default_rng(0).integers(0, vocab, (rows, length)).astype(np.int32)
        self.mask = (np.arange(length) >= 0.4 * length).astype(np.uint8)
        self.vocab_size = vocab
        self.index = pd.DataFrame({"tokens": [length] * rows,
                                   "teacher_positions": [len(teacher_positions(self.mask))] * rows})

    def __len__(self):
        return len(self.ids)

    def row(self, i):
        return self.ids[i], self.mask


def status(key: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def main(folder: str, o: dict) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    import transformers.models.llama.modeling_llama  # noqa: F401 (its code is no part of what is measured)

    target_identity(folder)
    corpus = RandomCorpus(o["rows"], o["length"], facts_of(folder).vocab)
    base = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as handle:
        handle.write("5")  # the high-water mark starts anew
    with tempfile.TemporaryDirectory() as store:
        extract(corpus, open_target("transformers", folder), store, dtype="bf16", batch_tokens=o["batch_tokens"],
                shard_tokens=o["shard_tokens"])
    print(json.dumps({"peak": status("VmHWM") - base, "base": base}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
