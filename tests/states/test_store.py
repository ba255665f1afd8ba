"""The store: what is written is read back, whatever is damaged is named, nothing is half there."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import shards
import torch
from safetensors.torch import load_file, save_file

from eagle3nb.cli import main
from eagle3nb.corpus.masks import teacher_positions
from eagle3nb.errors import UserError
from eagle3nb.states import manifest as manifests
from eagle3nb.states import store as stores
from eagle3nb.states import writing
from eagle3nb.states.extract import extract
from eagle3nb.states.quantise import decode, encode
from eagle3nb.states.store import Store
from eagle3nb.states.target import BYTES

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


# ---------------------------------------------------------------------------------------------------- any byte


DTYPES = ("bf16", "fp8_e4m3")


def small(folder, dtype) -> Path:
    """A finished store of eight short rows in three shards: a few kilobytes."""
    writer = stores.open_writer(folder, {"corpus": "x", "dtype": dtype}, shards.sizes(8))
    writer.write_head(shards.head())
    for first, last in ((0, 2), (3, 3), (4, 7)):
        writer.write(first, last, shards.shard(first, last, 8))
    return folder


def flips(folder, name, count, seed=0):
    """Write every file with one byte changed in turn: all of its first 8 + header bytes if `count` allows, then random
    ones; yields the place."""
    path, rng = folder / name, np.random.default_rng(seed)
    whole = path.read_bytes()
    begin = len(whole) if name == "manifest.json" else 8 + int.from_bytes(whole[:8], "little")
    places = [*rng.permutation(begin)[:count], *rng.integers(0, len(whole), count)]
    for at in map(int, places):
        changed = whole[at] ^ int(rng.integers(1, 256))
        path.write_bytes(whole[:at] + bytes([changed]) + whole[at + 1:])
        yield at
    path.write_bytes(whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_flipped_byte_is_found(dtype, tmp_path):
    """By verify, which names the file; by the reader too, where it is a byte of what is read."""
    folder = small(tmp_path, dtype)
    for file in sorted(file.name for file in folder.iterdir() if file.stat().st_size):
        rows = re.findall(r"\d+", file)
        named = f"{file} .rows {int(rows[0])} to {int(rows[1])}. " if rows else file
        for _ in flips(folder, file, 120):
            with pytest.raises(UserError, match=named):
                Store.open(folder, verify="never").verify()
    assert Store.open(folder).verify() == sum(file.stat().st_size for file in folder.iterdir()) - (
        folder / "manifest.json").stat().st_size


@pytest.mark.parametrize("verify", ["first", "each"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_flipped_byte_is_read_as_something_else(dtype, verify, tmp_path):
    """Whatever byte of a shard has changed, in the header or in a row: an error that names it, or what was written."""
    folder = small(tmp_path, dtype)
    expected = [read(Store.open(folder).row(i)) for i in range(8)]
    file, refused, total = "shard-0000004-0000007.safetensors", 0, 0
    for _ in flips(folder, file, 200):
        total += 1
        try:
            store = Store.open(folder, verify)
            for i in range(8):
                assert read(store.row(i)) == expected[i]
        except UserError as error:
            assert file in str(error) and "\n" not in str(error)
            refused += 1
    assert refused > 0.97 * total  # what is left: a row's checksum of nothing, which nobody asks


@pytest.mark.parametrize("name, dtype", [
    ("teacher_lse", "I32"), ("teacher_argmax", "F32"), ("loss_mask", "I8"), ("aux", "F16"), ("aux", "I16"),
    ("last", "F16"), ("rows", "F64")])
def test_the_same_bytes_as_another_dtype_are_not_the_same(name, dtype, tmp_path):
    folder = small(tmp_path, "bf16")
    path, row = folder / "shard-0000004-0000007.safetensors", 6
    raw = path.read_bytes()
    size = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:size])
    header[name]["dtype"] = dtype
    path.write_bytes(raw[:8] + json.dumps(header, separators=(",", ":")).encode().ljust(size - 8) + raw[size:])
    with pytest.raises(UserError, match="row 6 in .*0000004-0000007.*is not what was written"):
        (Store.open(folder).row(row).aux, Store.open(folder).row(row).last)


@pytest.mark.parametrize("name", ["row_offsets", "last_offsets"])
@pytest.mark.parametrize("at, change", [(0, 1), (4, 1), (4, -1), (2, 50), (2, -50)])
def test_lengths_that_do_not_fit_are_found_on_opening(name, at, change, tmp_path):
    """Training is planned from the lengths before a row is looked at."""
    folder = small(tmp_path, "bf16")
    path = folder / "shard-0000004-0000007.safetensors"
    tensors = load_file(path)
    tensors[name][at] += change
    save_file(tensors, path)
    with pytest.raises(UserError, match="0000004-0000007.* is not what was written"):
        Store.open(folder, verify="never")


def read(row) -> list:
    """Everything of a row, to be compared."""
    return [row.row, *((x.dtype, tuple(x.shape), torch.as_tensor(x).float().tolist()) for x in (
        row.ids, row.mask, row.aux, row.last, row.last_positions, row.teacher_argmax, row.teacher_lse))]


def test_what_is_looked_at_is_checked_and_no_more(tmp_path):
    """The parts of a row have their own checksums: `split` and `on_policy` read no states."""
    folder = small(tmp_path, "bf16")
    file, lengths = "shard-0000004-0000007.safetensors", Store.open(folder).tensors(2)["last_offsets"].diff()
    row = 4 + int(lengths.argmax())
    assert lengths.max() > 0

    def change(name):
        tensors = load_file(folder / file)
        offsets = tensors["last_offsets" if name.startswith(("last", "teacher")) else "row_offsets"]
        start = int(offsets[row - 4])
        path, raw = folder / file, bytearray((folder / file).read_bytes())
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])[name]
        size = (header["data_offsets"][1] - header["data_offsets"][0]) // header["shape"][0]
        raw[8 + int.from_bytes(raw[:8], "little") + header["data_offsets"][0] + start * size] ^= 1
        path.write_bytes(raw)

    whole = (folder / file).read_bytes()
    for name, fails in (("aux", "aux"), ("last", "last"), ("loss_mask", "row"), ("teacher_lse", "row")):
        change(name)
        store = Store.open(folder)
        for i in {*range(8)} - {row}:
            assert store.row(i).aux.shape[1] == 24 and store.row(i).last.shape[1] == 8
        for part in ("row", "aux", "last"):
            if part == fails or fails == "row":
                with pytest.raises(UserError, match=f"row {row} in .*{file} .rows 4 to 7. is not what was written"):
                    getattr(store.row(row), part)
            else:
                getattr(store.row(row), part)
        Store.open(folder, verify="never").row(row).aux.sum()
        (folder / file).write_bytes(whole)


def test_how_often_a_row_is_checked(tmp_path, monkeypatch):
    from eagle3nb.states import shard as shard_files

    folder, made, asked = small(tmp_path, "fp8_e4m3"), shard_files.checksum, []
    monkeypatch.setattr(shard_files, "checksum", lambda t, r, column: asked.append((r, column)) or made(t, r, column))
    for verify, first, again in (("each", 3, 3), ("first", 3, 0), ("never", 0, 0)):
        store = Store.open(folder, verify)
        for expected in (first, again):
            asked.clear()
            row = store.row(6)
            assert (row.aux.shape, row.last.shape[1]) == ((len(row.ids), 24), 8) and row.aux is row.aux
            assert len(asked) == expected
    with pytest.raises(UserError, match="verify is 'always'; choose one of each, first, never"):
        Store.open(folder, "always")


@pytest.mark.parametrize("verify", ["each", "first", "never"])
def test_a_head_that_changed_is_not_used(tmp_path, verify):
    folder = small(tmp_path, "bf16")
    raw = bytearray((folder / "head.safetensors").read_bytes())
    raw[-3] ^= 8
    (folder / "head.safetensors").write_bytes(raw)
    store = Store.open(folder, verify)
    if verify == "never":
        assert store.embedding().shape == (50, 8)
    else:
        with pytest.raises(UserError, match="head.safetensors is not what was written"):
            store.embedding()


def test_fp8_is_read_back_to_its_precision(corpus, target, tmp_path):
    extract(corpus, target, tmp_path / "fp8", **{**SETTINGS, "dtype": "fp8_e4m3"})
    extract(corpus, target, tmp_path / "fp32", **{**SETTINGS, "dtype": "fp32"})
    store, exact = Store.open(tmp_path / "fp8"), Store.open(tmp_path / "fp32")
    assert store.verify() < 0.45 * exact.verify()  # the head is as large in both
    for i in range(len(store)):
        row, right = store.row(i), exact.row(i)
        assert row.aux.dtype == row.last.dtype == torch.bfloat16
        for name, layers in (("aux", 3), ("last", 1)):
            read, states = getattr(row, name), getattr(right, name)
            assert torch.equal(read, decode(*encode(states, layers), torch.bfloat16))
            error = (read.float() - states).view(-1, layers, 64).norm(dim=-1)
            assert (error < 0.035 * states.view(-1, layers, 64).norm(dim=-1)).all()
        assert np.array_equal(row.teacher_argmax, right.teacher_argmax)
        assert np.array_equal(row.teacher_lse, right.teacher_lse)


def test_what_a_store_can_hold_has_a_size_in_the_plan():
    assert set(manifests.DTYPES) == set(BYTES)
    assert all(torch.empty(0, dtype=dtype).element_size() == BYTES[name] for name, dtype in manifests.DTYPES.items())


# ---------------------------------------------------------------------------------------------------- eagle3nb verify


def test_verify_on_the_command_line(tmp_path, capsys):
    folder = small(tmp_path / "states", "fp8_e4m3")
    assert main(["verify", str(folder)]) == 0
    told = capsys.readouterr()
    assert "8 rows, 3 shards" in told.out and "every byte is what was written" in told.out and not told.err
    assert "100%" in told.out and "bytes/s" in told.out  # rate and time left
    path = folder / "shard-0000003-0000003.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert main(["verify", str(folder)]) == 1
    assert "states/shard-0000003-0000003.safetensors (rows 3 to 3) is not what was written" in capsys.readouterr().err
    path.unlink()
    assert main(["verify", str(folder)]) == 1
    assert "shard-0000003-0000003.safetensors (rows 3 to 3) is missing or cut short" in capsys.readouterr().err
    path.write_bytes(whole)
    manifest = manifests.read_manifest(folder)
    manifests.write_manifest(folder, manifest | {"shards": manifest["shards"][:2]})
    assert main(["verify", str(folder)]) == 1
    assert "4 of 8 rows; run the extraction to its end" in capsys.readouterr().err
    (folder / "manifest.json").write_text("{}")
    assert main(["verify", str(folder)]) == 1
    assert "manifest.json is not what was written" in capsys.readouterr().err
    assert main(["verify", str(tmp_path)]) == 2
    assert "holds no manifest.json; name the folder of a store" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------- what stands


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
        while killed < 3 and took > 1e-3:  # one that ended sooner than it took above: anew, with kills sooner still
            shutil.rmtree(tmp_path / "killed", ignore_errors=True)
            killed, counts = 0, []
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
            took /= 2
        parent.stdin.close()
    assert killed >= 3 and counts == sorted(counts) and counts[-1] == len(whole.shards)
    store = Store.open(tmp_path / "killed")
    assert store.content_hash() == whole.content_hash() and store.verify()
    assert not [p for p in (tmp_path / "killed").iterdir() if p.name.endswith(".partial")]
    assert [s["xxh3"] for s in store.shards] == [s["xxh3"] for s in whole.shards]  # the files too, byte for byte
