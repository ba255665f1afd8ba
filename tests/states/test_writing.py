"""The store's writer: alone, beside other processes, killed at every step, on a full disk."""

import errno
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import safetensors.torch
import shards
import torch

from eagle3nb.errors import UserError
from eagle3nb.lock import only_one
from eagle3nb.states import manifest as manifests
from eagle3nb.states import reclaim, writing
from eagle3nb.states.quantise import encode
from eagle3nb.states.shard import as_stored, write_tensors
from eagle3nb.states.store import Store, open_writer

ROWS, RANGES = 8, [(0, 2), (3, 3), (4, 7)]


def opened(folder, dtype="bf16", rows=ROWS):
    return open_writer(folder, {"corpus": "x", "dtype": dtype}, shards.sizes(rows))


def fill(folder, dtype="bf16") -> Store:
    writer = opened(folder, dtype)
    writer.write_head(shards.head())
    for first, last in RANGES:
        with writer.claim(first, last) as mine:
            if mine:
                writer.write(first, last, shards.shard(first, last, ROWS))
    return Store.open(folder)


@pytest.mark.parametrize("scenario", ["kill_everywhere", "together", "living", "renamed", "readers"])
def test_processes_that_die_or_meet(scenario, tmp_path, monkeypatch):
    tests = Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", str(tests), prepend=os.pathsep)
    done = subprocess.run([sys.executable, tests / "states" / "processes.py", scenario, tmp_path], text=True,
                          capture_output=True, timeout=840, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp8_e4m3"])
def test_the_file_is_what_the_library_writes(dtype, tmp_path):
    tensors = as_stored(shards.shard(0, ROWS - 1, ROWS), 0, ROWS - 1, dtype)
    size, xxh3 = write_tensors(tmp_path / "ours", tensors)
    safetensors.torch.save_file(tensors, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert size == (tmp_path / "ours").stat().st_size
    assert manifests.same(tmp_path, {"file": "theirs", "bytes": size, "xxh3": xxh3})


def test_states_come_in_the_targets_dtype_and_stand_in_the_stores(tmp_path):
    given = shards.shard(0, 2, ROWS)
    for dtype in ("bf16", "fp32", "fp8_e4m3", None):
        writer = opened(tmp_path / str(dtype), dtype)
        entry = writer.write(0, 2, given)
        stored = safetensors.torch.load_file(tmp_path / str(dtype) / entry["file"])
        for name, layers in (("aux", 3), ("last", 1)):
            if dtype == "fp8_e4m3":
                values, scale = encode(given[name], layers)
                assert torch.equal(stored[name].view(torch.uint8), values.view(torch.uint8))
                assert torch.equal(stored[f"{name}_scale"], scale)
            else:
                assert torch.equal(stored[name], given[name].to(manifests.DTYPES.get(dtype, torch.float32)))
        assert ("aux_scale" in stored) == (dtype == "fp8_e4m3")


def test_a_claim_is_one_writers_until_it_ends(tmp_path):
    one, other = opened(tmp_path), opened(tmp_path)
    with one.claim(0, 2) as mine, other.claim(0, 2) as not_theirs, other.claim(3, 3) as theirs:
        assert mine and not not_theirs and theirs
        with pytest.raises(UserError, match="another process is writing .*shard-0000000-0000002"):
            other.write(0, 2, shards.shard(0, 2, ROWS))
        with one.claim(0, 2) as again:
            assert not again  # nor twice in one writer
    with other.claim(0, 2) as mine:
        assert mine
        other.write(0, 2, shards.shard(0, 2, ROWS))
    assert one.done == other.done == {(0, 2)}
    with one.claim(0, 2) as mine:
        assert not mine  # it stands
    with pytest.raises(ZeroDivisionError), one.claim(3, 3):
        raise ZeroDivisionError
    with one.claim(3, 3) as mine:
        assert mine
    assert not list(tmp_path.glob("*.claim"))


def test_the_first_writer_checks_what_stands_and_those_who_join_do_not(tmp_path, monkeypatch):
    fill(tmp_path)
    made, read = writing.same, []
    monkeypatch.setattr(writing, "same", lambda folder, entry, *more: read.append(entry["file"])
                        or made(folder, entry, *more))

    def files():
        found = list(read)
        read.clear()
        return len(found)

    with opened(tmp_path):
        assert files() == 4
        with opened(tmp_path), opened(tmp_path):
            assert files() == 0
    with only_one(tmp_path / ".lock"), opened(tmp_path):  # a caller that keeps others out
        assert files() == 4
    last = opened(tmp_path)
    assert files() == 4
    del last  # as good as closed
    with opened(tmp_path):
        assert files() == 4


def test_a_store_that_is_written_is_not_reclaimed(tmp_path):
    fill(tmp_path / "states")
    with opened(tmp_path / "states"), pytest.raises(UserError, match="is being written by an extraction"):
        reclaim.checked([str(tmp_path / "states")], protect=[])
    assert [item.kind for item in reclaim.checked([str(tmp_path / "states")], protect=[])] == ["store"]


def test_one_claim_in_many_threads(tmp_path):
    """The lock's file is removed before it is unlocked: whoever opened it before has no claim."""
    writer, inside, most, taken = opened(tmp_path), [0], [0], [0]

    def work():
        for _ in range(60):
            with writing.claimed(tmp_path / "x", wait=True):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                taken[0] += 1
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 1 and taken[0] == 300 and not list(tmp_path.glob("*.claim"))
    assert writer.done == set()


def test_threads_of_one_writer_lose_no_shard(tmp_path):
    """The next forward may overlap the write."""
    writer = opened(tmp_path, rows=30)
    writer.write_head(shards.head())
    threads = [threading.Thread(target=lambda r=r: writer.write(r, r, shards.shard(r, r, 30))) for r in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.done == {(r, r) for r in range(30)} and len(Store.open(tmp_path)) == 30


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def none(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(writing.fcntl, "flock", none)
    with pytest.raises(UserError, match="cannot be locked .No locks available.: mount its file system with locks"):
        opened(tmp_path)


@pytest.mark.parametrize("change", [
    {"aux": torch.zeros(1, 24)}, {"rows": torch.tensor([0, 1, 3])}, {"teacher_lse": torch.zeros(99)},
    {"row_offsets": torch.tensor([0, 1, 2, 99])}, {"last_offsets": torch.tensor([1, 1, 1, 1])}])
def test_tensors_that_do_not_fit_are_not_written(tmp_path, change):
    writer = opened(tmp_path)
    with pytest.raises(ValueError, match="rows 0 to 2"):
        writer.write(0, 2, shards.shard(0, 2, ROWS) | change)
    assert writer.done == set() and not list(tmp_path.glob("shard*"))


def test_ranges_that_overlap_are_not_entered(tmp_path):
    writer = opened(tmp_path)
    writer.write(0, 2, shards.shard(0, 2, ROWS))
    with pytest.raises(ValueError, match="rows 2 to 3 .*rows 0 to 2"):
        writer.write(2, 3, shards.shard(2, 3, ROWS))
    writer.write(0, 2, shards.shard(0, 2, ROWS))  # the same again is no second one
    assert writer.done == {(0, 2)} and not list(tmp_path.glob("*0002-0000003*"))


# ---------------------------------------------------------------------------------------------------- full disk


@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3"])
def test_a_disk_that_is_full_at_any_write(tmp_path, dtype, monkeypatch):
    """ENOSPC from the nth flush, whichever file it is of: one line, what was finished stands, the next run ends it."""
    expected, sync = fill(tmp_path / "whole", dtype).content_hash(), os.fsync
    for n in range(1, 99):
        calls = []

        def full(handle, n=n, calls=calls):
            if Path(os.readlink(f"/proc/self/fd/{handle}")).is_dir():
                return sync(handle)
            calls.append(handle)
            if len(calls) == n:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return sync(handle)

        here = tmp_path / str(n)
        monkeypatch.setattr(os, "fsync", full)
        try:
            store = fill(here, dtype)
        except UserError as error:
            assert "No space left on device; free space" in str(error) and "\n" not in str(error)
            monkeypatch.setattr(os, "fsync", sync)
            assert not [file for file in here.iterdir() if file.name.endswith((".partial", ".claim"))]
            if (here / "manifest.json").exists():
                assert all(manifests.same(here, entry) for entry in manifests.files_of(manifests.read_manifest(here)))
            assert fill(here, dtype).content_hash() == expected
        else:
            break
    assert n == 10 and store.content_hash() == expected  # the manifest, and each of four files with its entry


def test_a_limit_of_the_system_is_a_full_disk(tmp_path):
    """A real refusal to write: the kernel's, in the middle of a file."""
    store = fill(tmp_path / "whole")
    largest = max(entry["bytes"] for entry in store.shards)
    opened(tmp_path / "full").write_head(shards.head())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 100, hard))
    try:
        with pytest.raises(UserError, match="cannot write .*shard-.*File too large; free space"):
            fill(tmp_path / "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "full").glob("*.partial"))
    assert fill(tmp_path / "full").content_hash() == store.content_hash()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "states").write_text("a file in its place")
    with pytest.raises(UserError, match="cannot write"):
        opened(tmp_path / "states")
