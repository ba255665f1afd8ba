"""The store: what is written is read back, whatever is damaged is named, nothing is half there."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from eagle3nb.corpus.masks import teacher_positions
from eagle3nb.errors import UserError
from eagle3nb.states import extract as extraction
from eagle3nb.states import manifest as manifests
from eagle3nb.states import store as stores
from eagle3nb.states import writing
from eagle3nb.states.extract import extract
from eagle3nb.states.store import Store

SETTINGS = {"dtype": "bf16", "batch_tokens": 512, "shard_tokens": 600}


@pytest.fixture(scope="module")
def made(corpus, target, tmp_path_factory):
    """A finished store's folder, not to be touched."""
    folder = tmp_path_factory.mktemp("made") / "states"
    extract(corpus, target, folder, **SETTINGS)
    return folder


@pytest.fixture
def copy(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "states"))


def test_rows_read_back_as_they_were_captured(made, corpus, target):
    store = Store.open(made)
    assert len(store) == len(corpus) == 24 and store.hidden == 64 and store.vocab == 256
    assert store.lengths.tolist() == corpus.index["tokens"].tolist() and store.lengths.dtype == np.int64
    for i in range(len(store)):
        row, (ids, mask) = store.row(i), corpus.row(i)
        assert row.row == i and np.array_equal(row.ids, ids) and np.array_equal(row.mask, mask)
        assert row.ids.dtype == np.int32 and row.mask.dtype == np.uint8 and row.last_positions.dtype == np.int32
        expected = [p for p in range(len(ids) - 1) if mask[p] and mask[p + 1]]
        assert row.last_positions.tolist() == expected == teacher_positions(mask).tolist()
        aux, last = target.capture([ids])[0]  # alone: another batch, so not bit for bit
        assert row.aux.dtype == torch.bfloat16 and row.aux.shape == aux.shape
        assert (row.aux.float() - aux).norm() < 4e-3 * aux.norm()  # bf16 keeps 8 bits
        assert (row.last.float() - last[expected]).norm() <= 4e-3 * last[expected].norm()
        logits = target.logits(last[expected]).double()
        assert np.array_equal(row.teacher_argmax, logits.argmax(-1).numpy())
        assert np.allclose(row.teacher_lse, logits.exp().sum(-1).log().numpy(), atol=1e-5)
    with pytest.raises(IndexError):
        store.row(24)


def test_fp32_keeps_the_states_exactly(corpus, target, tmp_path):
    extract(corpus, target, tmp_path, dtype="fp32", batch_tokens=1, shard_tokens=10**9)  # one row a batch, one shard
    store = Store.open(tmp_path)
    for i in (0, 11, 23):
        aux, last = target.capture([corpus.row(i)[0]])[0]
        row = store.row(i)
        assert torch.equal(row.aux, aux) and torch.equal(row.last, last[torch.as_tensor(row.last_positions).long()])


def test_the_files_are_as_the_design_lays_them_out(made, corpus):
    store = Store.open(made)
    assert [(s["first"], s["last"]) for s in store.shards] == stores.shard_ranges(store.lengths, 600)
    entry = store.shards[1]
    assert entry["file"] == f"shard-{entry['first']:07d}-{entry['last']:07d}.safetensors"
    t = load_file(made / entry["file"])
    N, S, R = entry["tokens"], entry["teacher"], entry["rows"]
    shapes = {"input_ids": ("int32", N), "loss_mask": ("uint8", N), "aux": ("bfloat16", N, 192),
              "last": ("bfloat16", S, 64), "last_positions": ("int32", S), "teacher_argmax": ("int32", S),
              "teacher_lse": ("float32", S),
              "row_offsets": ("int64", R + 1), "last_offsets": ("int64", R + 1), "rows": ("int64", R),
              "row_xxh3": ("int64", R, 3)}
    assert {k: (str(v.dtype).removeprefix("torch."), *v.shape) for k, v in t.items()} == shapes
    assert t["rows"].tolist() == list(range(entry["first"], entry["last"] + 1))
    assert sum(s["bytes"] for s in stores.files_of(store.manifest)) == store.verify()
    assert store.fingerprint["corpus"] == corpus.hash and store.fingerprint["layers"] == [2, 4, 5]
    store.check_corpus(corpus)


def test_embedding_head_and_norm_lie_beside(made, tiny_target):
    plain, store = load_file(tiny_target / "model.safetensors"), Store.open(made)
    assert torch.equal(store.embedding(), plain["model.embed_tokens.weight"])
    assert torch.equal(store.lm_head(), plain["lm_head.weight"])
    assert torch.equal(store.lm_head_rows(np.array([7, 200])), plain["lm_head.weight"][[7, 200]])
    assert torch.equal(store.final_norm(), plain["model.norm.weight"])


def test_shards_are_contiguous_and_bounded():
    lengths = [5, 5, 5, 30, 1, 9, 10]
    assert stores.shard_ranges(lengths, 10) == [(0, 1), (2, 2), (3, 3), (4, 5), (6, 6)]
    assert stores.shard_ranges([], 10) == []
    covered = [r for first, last in stores.shard_ranges(lengths, 17) for r in range(first, last + 1)]
    assert covered == list(range(len(lengths)))


def test_any_flipped_byte_is_found(copy):
    store = Store.open(copy)
    rng = np.random.default_rng(0)
    for entry in [*store.shards[:2], store.manifest["head"]]:
        path = copy / entry["file"]
        whole = path.read_bytes()
        for at in (9, len(whole) - 1, *rng.integers(0, len(whole), 4)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1:])
            with pytest.raises(UserError, match=entry["file"]):
                Store.open(copy).verify()
        path.write_bytes(whole)
    assert store.verify() > 0


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-1])])
def test_a_shard_that_is_gone_or_cut_is_named_and_alone_made_again(copy, corpus, target, damage, monkeypatch):
    before, victim = Store.open(copy).content_hash(), Store.open(copy).shards[2]
    damage(copy / victim["file"])
    with pytest.raises(UserError, match=f"rows {victim['first']} to {victim['last']}"):
        Store.open(copy)
    found = extract(corpus, target, copy, **SETTINGS)
    assert found["extracted_tokens"] == victim["tokens"]
    assert Store.open(copy).content_hash() == before


def test_ids_that_differ_from_the_corpus_are_named(copy, corpus):
    store = Store.open(copy, verify="never")
    store.tensors(0)["input_ids"][3] += 1  # the map is private: the file stands
    with pytest.raises(UserError, match="row 0 .*other tokens"):
        store.check_corpus(corpus)
    Store.open(copy).check_corpus(corpus)


def test_a_store_that_is_not_finished_or_not_there_is_not_opened(copy, tmp_path):
    manifest = stores.read_manifest(copy)
    manifests.write_manifest(copy, {**manifest, "shards": manifest["shards"][:2]})
    with pytest.raises(UserError, match="of 24 rows"):
        Store.open(copy)
    manifests.write_manifest(copy, {**manifest, "schema": 99})
    with pytest.raises(UserError, match="schema 99"):
        Store.open(copy)
    (copy / "manifest.json").write_text(json.dumps({**manifest, "schema": 1}))  # those had no checksum
    with pytest.raises(UserError, match="schema 1, this version reads 2"):
        Store.open(copy)
    with pytest.raises(UserError, match="run the extraction, which writes it"):
        Store.open(tmp_path / "nothing")


def test_a_store_of_something_else_is_refused_by_name_and_kept(copy, corpus, target, tmp_path):
    import tiny

    from eagle3nb.corpus.merged import Corpus
    from eagle3nb.states.hf import TransformersTarget

    before = sorted((p.name, p.stat().st_size) for p in copy.iterdir())
    with pytest.raises(UserError, match=r"another dtype \(bf16 there, fp32 wanted\)"):
        extract(corpus, target, copy, **{**SETTINGS, "dtype": "fp32"})
    with pytest.raises(UserError, match="another shard_tokens"):
        extract(corpus, target, copy, **{**SETTINGS, "shard_tokens": 700})
    other = TransformersTarget(tiny.make_target(tmp_path / "other", seed=9), torch.float32, "cpu")
    with pytest.raises(UserError, match="another target weights"):
        extract(corpus, other, copy, **SETTINGS)
    with pytest.raises(UserError, match="another corpus"):
        extract(Corpus.open(tiny.make_corpus(tmp_path, seed=5)), target, copy, **SETTINGS)
    assert sorted((p.name, p.stat().st_size) for p in copy.iterdir()) == before


def test_leftovers_of_ours_go_and_strangers_stay(copy, corpus, target):
    ours = ["shard-0000900-0000999.safetensors", "shard-0000000-0000003.safetensors.77.partial",
            "manifest.json.5.partial"]
    strangers = ["notes.txt", "shard-of-mine.safetensors", "model.safetensors"]
    for name in ours + strangers:
        (copy / name).write_text("x")
    extract(corpus, target, copy, **SETTINGS)
    assert not any((copy / name).exists() for name in ours) and all((copy / name).exists() for name in strangers)


def test_a_disk_that_fills_up_keeps_what_is_finished(made, tmp_path, corpus, target, monkeypatch):
    save, calls = writing.write_tensors, []

    def full(path, tensors):
        calls.append(path)
        if len(calls) == 4:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(path, tensors)

    monkeypatch.setattr(writing, "write_tensors", full)
    with pytest.raises(UserError, match="No space left on device; free space"):
        extract(corpus, target, tmp_path, **SETTINGS)
    assert not list(tmp_path.glob("*.partial")) and len(list(tmp_path.glob("shard-*"))) == 2
    found = extract(corpus, target, tmp_path, **SETTINGS)
    assert found["shards_kept"] == 2 and Store.open(tmp_path).content_hash() == Store.open(made).content_hash()


def test_another_dtype_is_refused_in_one_line(corpus, target, tmp_path):
    with pytest.raises(UserError, match="'int4' cannot be written; choose one of bf16, fp32, fp8_e4m3"):
        extract(corpus, target, tmp_path / "s", **{**SETTINGS, "dtype": "int4"})
    assert not (tmp_path / "s").exists()


def test_a_second_extraction_into_the_same_folder_is_refused(copy, corpus, target):
    with extraction.only_one(copy / ".lock"), pytest.raises(UserError, match="another extraction is writing"):
        extract(corpus, target, copy, **SETTINGS)


KILLED = """
import os, sys, torch
torch.set_num_threads(1)
from eagle3nb.corpus.merged import Corpus
from eagle3nb.states.extract import extract
from eagle3nb.states.hf import TransformersTarget
target, corpus, folder = sys.argv[1:]
target = TransformersTarget(target, torch.float32, "cpu")
print("ready", flush=True)
for line in sys.stdin:                          # a child a kill: forked, since importing takes seconds
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # its bar
        extract(Corpus.open(corpus), target, folder, dtype="bf16", batch_tokens=512, shard_tokens=250)
        os._exit(0)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


def test_killed_at_random_moments_the_store_ends_the_same(corpus, target, tiny_target, tiny_corpus, tmp_path):
    began = time.perf_counter()
    extract(corpus, target, tmp_path / "whole", **{**SETTINGS, "shard_tokens": 250})
    whole, took = Store.open(tmp_path / "whole"), time.perf_counter() - began
    assert len(whole.shards) > 10
    with subprocess.Popen([sys.executable, "-c", KILLED, tiny_target, tiny_corpus, tmp_path / "killed"], text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        rng, killed, counts = np.random.default_rng(1), 0, []
        assert parent.stdout.readline() == "ready\n"
        for attempt in range(40):
            parent.stdin.write("go\n")
            parent.stdin.flush()
            child = int(parent.stdout.readline())
            if attempt < 8:
                time.sleep(rng.uniform(0, took / 3))
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            status = int(parent.stdout.readline())
            killed += status == signal.SIGKILL
            manifest = tmp_path / "killed" / "manifest.json"
            counts.append(len(json.loads(manifest.read_text())["shards"]) if manifest.exists() else 0)
            if status == 0:
                break
        parent.stdin.close()
    assert killed >= 3 and counts == sorted(counts) and counts[-1] == len(whole.shards)
    store = Store.open(tmp_path / "killed")
    assert store.content_hash() == whole.content_hash() and store.verify()
    assert not [p for p in (tmp_path / "killed").iterdir() if p.name.endswith(".partial")]
    assert [s["xxh3"] for s in store.shards] == [s["xxh3"] for s in whole.shards]  # the files too, byte for byte
