"""The stream without training: its folders put in order, its bound, what a reader gets and leaves behind."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle3nb.errors import UserError
from eagle3nb.files import read_json
from eagle3nb.states import feeder, stream, streamed
from eagle3nb.states import store as stores
from eagle3nb.states.extract import extract
from eagle3nb.states.store import Store
from eagle3nb.states.streamed import Starved, Stream

HOW = {"dtype": "fp32", "batch_tokens": 1, "shard_tokens": 250}
KEPT = np.array([3, 17, 4])
KEEP = 2_000_000


@pytest.fixture
def world(corpus, target, tmp_path, monkeypatch):
    """world.open(): the stream of a begun folder, with no feeder started; world.feed(): what the feeder would do."""
    monkeypatch.setattr(streamed, "start_feeder", lambda folder: None)

    class World:
        folder = tmp_path / "states"
        order = np.concatenate([np.setdiff1d(np.random.default_rng(e).permutation(len(corpus)), KEPT,
                                             assume_unique=True) for e in range(3)])

        def begin(self, **changes):
            return stream.begin(corpus, target, self.folder, **{**HOW, "keep_bytes": KEEP} | changes)

        def open(self, at=0, order=order):
            opened = Stream.open(self.folder, corpus.folder, target.dir)
            try:
                opened.start(KEPT, order, at)
            except UserError:
                opened.close()
                raise
            return opened

        def feed(self):
            feeder.feed(self.folder, read_json(self.folder / stream.FEED), target)

        def ahead(self):
            return {(e["first"], e["last"]) for e in stores.read_manifest(self.folder / "ahead")["shards"]}

    return World()


def read(opened, p):
    return opened.row(int(opened.parts["ahead"].order[p])).aux


def todo(world, part="ahead"):
    return [tuple(r) for r in read_json(world.folder / stream.FEED)["todo"][part]]


def test_rows_come_as_from_the_whole_store(world, corpus, target, tmp_path):
    """Kept ones at any time, the others in the announced order; each shard goes with its last row, unmapped."""
    extract(corpus, target, tmp_path / "whole", **HOW)
    whole = Store.open(tmp_path / "whole")
    world.begin(keep_bytes=50_000_000)
    with world.open() as opened:
        world.feed()
        part, gone = opened.parts["ahead"], 0
        assert len(part.ranges) > 20 and world.ahead() == set(part.ranges)
        for p, i in enumerate(world.order):
            ours, theirs = opened.row(int(i)), whole.row(int(i))
            assert ours.row == i and np.array_equal(ours.ids, theirs.ids) and np.array_equal(ours.mask, theirs.mask)
            for name in ("last_positions", "teacher_argmax", "teacher_lse"):
                assert np.array_equal(getattr(ours, name), getattr(theirs, name))
            assert torch.equal(ours.aux, theirs.aux) and torch.equal(ours.last, theirs.last)
            kept = opened.row(int(KEPT[p % 3]))
            assert torch.equal(kept.aux, whole.row(kept.row).aux)
            gone += p == part.ranges[gone][1]
            assert world.ahead() == set(part.ranges[gone:])
            assert len(list(part.folder.glob("*.safetensors"))) == len(part.ranges) - gone
            mapped = f"{part.folder.resolve()}/shard-" in Path("/proc/self/maps").read_text()  # not another test's
            assert mapped != (gone > 0 and p == part.ranges[gone - 1][1])  # deleted but mapped, it would keep its disk
        with pytest.raises(RuntimeError, match="out of the announced order"):
            read(opened, 0)
    assert not (world.folder / "ahead").exists() and len(list((world.folder / "kept").glob("*.safetensors"))) >= 1


def test_rows_out_of_order_are_refused(world):
    world.begin()
    opened = world.open()
    with pytest.raises(RuntimeError, match=f"row {world.order[1]} is read out of the announced order, at position 0"):
        read(opened, 1)
    opened.close()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8_e4m3"])
def test_a_shard_takes_what_was_reckoned(world, dtype):
    world.begin(dtype=dtype, keep_bytes=50_000_000)
    opened = world.open()
    world.feed()
    for name in ("kept", "ahead"):
        part = opened.parts[name]
        for (first, last), most in zip(part.ranges, part.bytes, strict=True):
            size = (part.folder / stores.shard_name(first, last)).stat().st_size
            assert most - stream.HEADER < size <= most
    opened.close()


def test_a_start_goes_on_with_what_stands(world, corpus):
    """Shards behind the position, beyond the bound, damaged, partial: gone. Those within stay, not made again."""
    world.begin(keep_bytes=50_000_000)
    opened = world.open()
    world.feed()  # as if a bound had been so large
    part, kept = opened.parts["ahead"], sum(opened.parts["kept"].bytes)
    opened.close()
    ranges, folder = part.ranges, world.folder / "ahead"
    stood = {r: (folder / stores.shard_name(*r)).stat().st_mtime_ns for r in ranges}
    damaged = folder / stores.shard_name(*ranges[7])
    damaged.write_bytes(damaged.read_bytes()[:-9] + b"123456789")
    (folder / stores.shard_name(*ranges[8])).unlink()
    (folder / f"{stores.shard_name(*ranges[8])}.1.partial").write_bytes(b"half")
    head = opened.manifest["head"]["bytes"]
    world.begin(keep_bytes=head + kept + sum(part.bytes[5:12]))
    opened = world.open(at=ranges[5][1])
    assert world.ahead() == {*ranges[5:7], *ranges[9:12]}
    assert {file.name for file in folder.glob("shard-*")} == {stores.shard_name(*r) for r in world.ahead()}
    assert todo(world) == [*ranges[7:9], *ranges[12:]] and not todo(world, "kept")
    assert all((folder / stores.shard_name(*r)).stat().st_mtime_ns == stood[r] for r in world.ahead())
    for p in range(ranges[5][1], ranges[6][1] + 1):  # what stands needs no feeder
        read(opened, p)
    with pytest.raises(Starved, match="the process that makes the states ended with exit code 0"):
        read(opened, ranges[7][0])
    opened.close()


def test_a_damaged_head_is_told_and_made_again(world):
    world.begin()
    head = world.folder / "head.safetensors"
    whole = head.read_bytes()
    head.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UserError, match="head.safetensors is not what was written; run stage 3 again"):
        world.open()
    world.begin()
    assert head.read_bytes() == whole
    world.open().close()


def test_another_order_is_another_stream(world):
    world.begin(keep_bytes=50_000_000)
    opened = world.open()
    world.feed()
    opened.close()
    opened = world.open(order=world.order[::-1])
    assert not world.ahead() and todo(world) == opened.parts["ahead"].ranges and not todo(world, "kept")
    opened.close()


def test_a_row_that_cannot_be_is_named_as_the_corpus_names_it(world, corpus, target, monkeypatch):
    capture, bad = target.capture, int(world.order[5])

    def broken(rows):
        states = [(aux.clone(), last) for aux, last in capture(rows)]
        for ids, (aux, _) in zip(rows, states, strict=True):
            if np.array_equal(ids, corpus.row(bad)[0]):
                aux[4, 3] = float("nan")
        return states

    monkeypatch.setattr(target, "capture", broken)
    world.begin()
    opened = world.open()
    with pytest.raises(UserError, match=f"^row {bad}, token 4: layer 2"):
        world.feed()
    opened.close()


def test_stage_3_and_the_whole_store(world, corpus, target):
    """One folder: begun as a stream, made whole, and never half of either."""
    assert not stream.streams(world.folder)
    made = world.begin()
    assert stream.streams(world.folder) and made["whole_bytes"] > 5 * made["shard_bytes"]
    with pytest.raises(UserError, match=f"holds 0 of {len(corpus)} rows"):
        Store.open(world.folder)
    extract(corpus, target, world.folder, **HOW)
    assert not stream.streams(world.folder) and Store.open(world.folder).verify()
    with pytest.raises(UserError, match="shards of a whole store; set keep_bytes to 0 to go on with it"):
        world.begin()
    with pytest.raises(UserError, match="holds states of another dtype"):
        world.begin(dtype="bf16")
    shutil.rmtree(world.folder)
    with pytest.raises(UserError, match="'int4' cannot be written"):
        world.begin(dtype="int4")


def test_stage_3_counts_what_the_merge_has_held_out(world, corpus, monkeypatch):
    monkeypatch.setitem(corpus.report, "validation", {"first_row": len(corpus) - 5})
    made = world.begin()
    kept = 5 * 64 * 4 * 3 * corpus.lengths[-5:].mean()
    assert kept < made["held_out_bytes"] < 1.4 * kept + stream.HEADER
    least = made["head_bytes"] + made["held_out_bytes"] + made["shard_bytes"]
    with pytest.raises(UserError, match=r", 5 rows that are kept \(0.00\d GB\) and one shard"):
        world.begin(keep_bytes=least - 1)
    assert world.begin(keep_bytes=least)["shards_ahead"] == 1


def test_a_disk_without_room_is_told(world, monkeypatch):
    world.begin()
    monkeypatch.setattr(streamed, "disk_free", lambda _: 1000)
    with pytest.raises(UserError, match="GB more at once, 0.00 GB are free"):
        world.open()
