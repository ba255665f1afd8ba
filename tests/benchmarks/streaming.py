"""Training on states that stream against training on the whole store, in one run (the demo's corpus, 15 minutes or so):

    python tests/benchmarks/streaming.py [--corpus DIR] [--target DIR] [--epochs 2] [--keep-mb 250] [--json FILE]

Both train with the demo's settings, all epochs, in processes of their own. Printed: the largest relative difference of
a step's loss and of held-out losses, acceptance at the end, seconds, the share of waiting, and the most bytes of shards
and head that a look every 10 ms found on the disk.
"""

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path

import yaml

from eagle3nb.corpus import vocabulary
from eagle3nb.corpus.masks import find_markers
from eagle3nb.corpus.merged import Corpus
from eagle3nb.drafter.launch import launch
from eagle3nb.drafter.settings import Settings
from eagle3nb.files import project_root, resolve
from eagle3nb.states import open_target, stream
from eagle3nb.states.extract import extract
from eagle3nb.states.target import load_tokenizer, target_dir


class Watch(threading.Thread):
    """.most: bytes of the states' files below a folder, at any look."""

    def __init__(self, folder: Path):
        super().__init__(daemon=True)
        self.folder, self.most, self.ended = folder, 0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.01):
            total = 0
            for file in self.folder.rglob("*.safetensors*"):
                try:
                    total += file.stat().st_size
                except FileNotFoundError:
                    continue
            self.most = max(self.most, total)


def run(name: str, root: Path, corpus: Corpus, target: Path, make, parameters: dict, ids) -> dict:
    """make(states folder) writes the store or begins the stream; then a training. Figures, and the metrics' lines."""
    states, drafter, began = root / name / "states", root / name / "drafter", time.monotonic()
    watch = Watch(states)
    watch.start()
    make(states)
    made = time.monotonic()
    first = corpus.report["validation"]["first_row"]
    settings = Settings.of(parameters, first if first < len(corpus) else 0, states=states, drafter=drafter,
                           target=target, corpus=corpus.folder)
    lines = launch(settings, ids)
    watch.ended.set()
    return {"name": name, "stage 3 (s)": made - began, "training (s)": time.monotonic() - made,
            "acceptance": lines[-1]["best"]["acceptance"], "disk (MB)": watch.most / 1e6,
            "waited before (s)": lines[0].get("waited_s", 0.0), "waiting share": lines[-1].get("waiting_share", 0.0),
            "lines": lines}


def differences(ours: list[dict], theirs: list[dict]) -> dict:
    """The largest relative difference of a loss, by kind of line."""
    found = {}
    for kind in ("train", "validation"):
        pairs = zip(*([line for line in lines if line["kind"] == kind] for lines in (ours, theirs)), strict=True)
        found[kind] = max(abs(a["loss"] - b["loss"]) / max(abs(b["loss"]), 1e-9) for a, b in pairs)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--corpus", default="outputs/demo/work/corpus", help="merged; make demo writes this one")
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--keep-mb", type=float, default=250, help="keep_bytes, in 10⁶ bytes")
    parser.add_argument("--draft-vocab", type=int, default=4096)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--shard-tokens", type=int, default=4096)
    parser.add_argument("--json")
    options = parser.parse_args()
    corpus, target = Corpus.open(resolve(options.corpus)), target_dir(options.target)
    parameters = {}
    for file in ("common", "training"):
        parameters |= yaml.safe_load((project_root() / "params" / "demo" / f"{file}.yml").read_text())
    parameters |= {"epochs": options.epochs, "minutes": 0.0}
    counts = vocabulary.supervised_counts(corpus, range(corpus.report["validation"]["first_row"]))
    forced = find_markers(load_tokenizer(target)).special_ids
    ids = vocabulary.choose(counts, options.draft_vocab, forced).ids
    model = open_target("transformers", target)
    how = {"dtype": options.dtype, "batch_tokens": 1024, "shard_tokens": options.shard_tokens}
    keep = round(options.keep_mb * 1e6)
    with tempfile.TemporaryDirectory() as folder:
        made = [run(name, Path(folder), corpus, target, make, parameters, ids) for name, make in (
            ("whole", lambda states: extract(corpus, model, states, **how)),
            ("streamed", lambda states: stream.begin(corpus, model, states, **how, keep_bytes=keep)))]
    whole, streamed = (one.pop("lines") for one in made)
    found = {"tokens": corpus.tokens, "epochs": options.epochs, "keep_bytes": keep, "runs": made,
             "loss, relative": differences(streamed, whole)}
    print(json.dumps(found, indent=1))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
