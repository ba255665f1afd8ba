"""Bad input, from end to end: one clear line, nothing half written, and what stood before is kept."""

import resource

import numpy as np
import pytest
import tiny
import torch

from eagle3nb.corpus.masks import find_markers
from eagle3nb.corpus.merge import merge
from eagle3nb.corpus.merged import Corpus
from eagle3nb.corpus.records import find_sources
from eagle3nb.errors import UserError
from eagle3nb.states.extract import extract
from eagle3nb.states.hf import TransformersTarget
from eagle3nb.states.probe import probe
from eagle3nb.states.store import Store

SETTINGS = {"dtype": "fp32", "batch_tokens": 1, "shard_tokens": 400}  # a row a batch: the same content bit for bit


def refused(corpus, target, folder, **settings) -> str:
    with pytest.raises(UserError) as error:
        extract(corpus, target, folder, **SETTINGS | settings)
    assert "\n" not in str(error.value) and "; " in str(error.value)
    assert not [file.name for file in folder.glob("*") if "partial" in file.name or "claim" in file.name]
    return str(error.value)


def shards(folder):
    return {file.name: file.read_bytes() for file in folder.glob("shard-*")}


def test_a_row_longer_than_the_context(corpus, tmp_path):
    target = TransformersTarget(tiny.make_target(tmp_path / "t", max_position_embeddings=100), torch.float32, "cpu")
    longest = int(corpus.lengths.argmax())
    assert f"row {longest} of the corpus has 128 tokens, the target takes 100; lower max_seq_len" in refused(
        corpus, target, tmp_path / "states")
    assert not shards(tmp_path / "states")


class Spoilt:
    """Sets what one layer gives to one token of one row to `value`, inside the model's own forward."""

    def __init__(self, target, layer, ids, token, value, monkeypatch):
        self.ids, self.token, self.value, self.rows, self.on = ids.tolist(), token, value, [], True
        capture = target.capture

        def noting(rows):
            self.rows = [list(map(int, row)) for row in rows]
            return capture(rows)

        monkeypatch.setattr(target, "capture", noting)
        target.body.layers[layer - 1].register_forward_hook(self.change, prepend=True)  # before it is captured

    def change(self, module, inputs, output):
        if self.on and self.ids in self.rows:
            output = output.clone()
            output[self.rows.index(self.ids), self.token] = self.value
        return output


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("layer, named, token", [(2, "layer 2", 6), (4, "layer 4", 6), (5, "layer 5", 6),
                                                 (8, "the last layer", 6), (3, "layer 4", 0), (6, "the last layer", 0)])
def test_a_layer_that_gives_no_number(corpus, tiny_target, tmp_path, monkeypatch, layer, named, token, value):
    """Named is the first captured layer at or behind it, and its first token: attention spreads a NaN to all of them.

    Shards before it are kept, and the rest is made once the target is sound: the store of one that always was.
    """
    target = TransformersTarget(tiny_target, torch.float32, "cpu")
    extract(corpus, target, tmp_path / "sound", **SETTINGS)
    spoilt = Spoilt(target, layer, corpus.row(17)[0], 6, value, monkeypatch)
    message = refused(corpus, target, tmp_path / "states")
    assert f"row 17, token {token}: {named} is not finite; " in message
    kept = shards(tmp_path / "states")
    assert kept and len(kept) < len(shards(tmp_path / "sound"))
    spoilt.on = False
    made = extract(corpus, target, tmp_path / "states", **SETTINGS)
    assert made["shards_kept"] == len(kept) and shards(tmp_path / "states").items() >= kept.items()
    assert Store.open(tmp_path / "states").content_hash() == Store.open(tmp_path / "sound").content_hash()


def test_a_dtype_that_overflows(corpus, tiny_target, tmp_path):
    """Float16 ends at 65,504; the massive activations of a trained model are no further away than this."""
    target = TransformersTarget(tiny_target, torch.float16, "cpu")
    target.body.layers[2].mlp.down_proj.weight *= 3e3
    assert "layer 4 is not finite" in refused(corpus, target, tmp_path / "states")
    assert not shards(tmp_path / "states")
    with pytest.raises(UserError, match=r"row 0, token \d+: layer 4 holds -?(inf|nan); check the target's weights and "
                                        r"dtype \(fp16 overflows\)"):
        probe(target, corpus)


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """A corpus whose merge was given the tokenizer, as the notebook does."""
    folder = tiny.make_corpus(tmp_path_factory.mktemp("marked")).parent
    tokenizer = tiny.make_tokenizer()
    merge(find_sources(folder / "data"), folder / "again", max_seq_len=128, seed=0, vocab_size=256,
          markers=find_markers(tokenizer), tokenizer=tokenizer)
    return Corpus.open(folder / "again")


def test_a_tokenizer_that_is_not_the_corpuss(marked, tiny_target, tmp_path):
    target = TransformersTarget(tiny_target, torch.float32, "cpu")
    assert marked.tokenizer and probe(target, marked, rows=2, new_tokens=4, policy_tokens=0)["rows"] == 2
    folder = tiny.make_target(tmp_path / "other")
    tokenizer = tiny.make_tokenizer()
    tokenizer.add_tokens(["<|tool|>"])
    tokenizer.save_pretrained(folder)
    other = TransformersTarget(folder, torch.float32, "cpu")
    with pytest.raises(UserError, match="merged with another tokenizer than that of .*other: its ids spell other text; "
                                        "merge again with this target"):
        probe(other, marked)
    assert "merged with another tokenizer" in refused(marked, other, tmp_path / "states")
    assert not (tmp_path / "states").exists()


@pytest.mark.parametrize("vocab", [200, 320])
def test_a_vocabulary_that_is_not_the_corpuss(corpus, tmp_path, vocab):
    """A smaller one cannot hold the ids; a larger one is another model's, and its ids mean other tokens."""
    target = TransformersTarget(tiny.make_target(tmp_path / "t", vocab=vocab), torch.float32, "cpu")
    with pytest.raises(UserError, match=f"merged for a vocabulary of 256, the target's is {vocab}"):
        probe(target, corpus)
    assert f"vocabulary of 256, the target's is {vocab}; merge again" in refused(corpus, target, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_a_disk_that_fills(corpus, target, tmp_path):
    """The kernel refuses to write on in the largest shard: the others stand, and the next run makes what is left."""
    extract(corpus, target, tmp_path / "whole", **SETTINGS)
    whole = Store.open(tmp_path / "whole")
    sizes = sorted(entry["bytes"] for entry in whole.shards)
    assert sizes[-1] > sizes[-2]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[-1] - 1, hard))
    try:
        message = refused(corpus, target, tmp_path / "states")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    largest = max(whole.shards, key=lambda entry: entry["bytes"])
    assert f"{largest['file']}: File too large; free space and run the stage again" in message
    kept = shards(tmp_path / "states")
    assert largest["file"] not in kept
    made = extract(corpus, target, tmp_path / "states", **SETTINGS)
    assert made["shards_kept"] == len(kept) > 0 and made["shards_made"] == len(whole.shards) - len(kept)
    assert Store.open(tmp_path / "states").content_hash() == whole.content_hash()


def test_prompts_that_leave_no_room_to_answer(corpus, tmp_path):
    target = TransformersTarget(tiny.make_target(tmp_path / "t", max_position_embeddings=20), torch.float32, "cpu")
    with pytest.raises(UserError, match="no row of the corpus begins with a prompt that fits the target; run the"):
        probe(target, corpus)
    assert np.min(corpus.lengths) > 20
