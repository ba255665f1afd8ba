"""Training on states that stream: the losses of the whole store, within the disk's bound, through any kill."""

import json
import subprocess
import sys
import threading
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import tiny
from safetensors import safe_open
from streams import HOW, Forked, assert_alike, make_world, of, watched
from waiting import PATIENCE, until

from eagle3nb.drafter import launch as launching
from eagle3nb.drafter import streaming
from eagle3nb.drafter import train as training
from eagle3nb.drafter.curves import read_metrics
from eagle3nb.drafter.streaming import opened_states
from eagle3nb.errors import UserError
from eagle3nb.states import streamed
from eagle3nb.states.extract import extract

KEEP, LARGEST = 26_000_000, 1_600_000  # bytes: the bound of `world`'s streams, and a shard of them at most


def children() -> list[psutil.Process]:
    """What runs for this process; multiprocessing's resource tracker, which other tests leave, is nobody's feeder."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it ended between the two looks
            found += [child] if "resource_tracker" not in " ".join(child.cmdline()) else []
    return found


def suspend(process: psutil.Process) -> None:
    """Until every thread of it stands still."""
    process.suspend()
    threads = Path(f"/proc/{process.pid}/task")
    until(lambda: all(stat.read_text().rsplit(")", 1)[1].split()[0] == "T" for stat in threads.glob("*/stat")))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A tiny target and 38,000 tokens, of which the first 20,000 are kept for the columns' scales."""
    return make_world(tmp_path_factory.mktemp("streaming"), 360)


@pytest.fixture
def small_world(tmp_path, monkeypatch):
    """6,000 tokens, 800 of them kept for the scales, and a feeder that is forked: it has imported everything."""
    monkeypatch.setattr(training, "SCALED", 800)
    monkeypatch.setattr(streaming, "SCALED", 800)
    monkeypatch.setattr(streamed, "start_feeder", Forked)
    return make_world(tmp_path, 60)


@pytest.fixture(scope="module")
def undisturbed(world):
    """Metrics of a streamed run that nothing stops, with what the watcher saw. Training waits at first until the feeder
    has run ahead as far as it may, and is never faster than the watcher."""
    world.begin("undisturbed")
    with watched(world.root / "undisturbed") as sizes:
        calls = count(1)

        def dawdle():
            looks = max(300, next(calls))
            until(lambda: max(sizes, default=0) > KEEP - 2 * LARGEST and len(sizes) > looks, pause=0.001)
            return False

        lines = world.trained("a", "undisturbed", stop=dawdle)
    return SimpleNamespace(lines=lines, sizes=sizes)


def test_the_loss_is_that_of_the_whole_store(world, undisturbed):
    extract(world.corpus, world.target, world.root / "whole", batch_tokens=1024, **HOW)
    whole = world.trained("b", "whole")
    losses = [np.array([line["loss"] for line in of(lines, "train")]) for lines in (undisturbed.lines, whole)]
    assert len(losses[0]) > 60 and of(whole, "train")[-1]["epoch"] == 1
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert_alike(undisturbed.lines, whole, 2e-3)  # norms and a hit more or less, by rounding
    assert whole[0]["identity"] != undisturbed.lines[0]["identity"]  # neither goes on with the other's checkpoint


@pytest.mark.parametrize("shard_tokens", [1, 700])
def test_with_one_row_a_batch_it_is_the_same_bit_for_bit(small_world, shard_tokens):
    """Whatever the shards: here one of a row each, which ends many in a pack, and some that packs end in."""
    how = {"dtype": "bf16", "batch_tokens": 1, "shard_tokens": shard_tokens}
    extract(small_world.corpus, small_world.target, small_world.root / "single", **how)
    small_world.begin("singly", keep_bytes=2_500_000, **how)
    with watched(small_world.root / "singly") as sizes:
        single, singly = (small_world.trained(f"of {name}", name, initialise="random", checkpoint_every=0, epochs=3)
                          for name in ("single", "singly"))
    assert len(of(single, "train")) > 15 and max(sizes) <= 2_500_000
    assert_alike(singly, single, 0.0)


def test_the_disk_holds_no_more_than_the_bound(world, undisturbed):
    folder = world.root / "undisturbed"
    kept = sum(file.stat().st_size for file in (folder / "kept").glob("*.safetensors"))
    assert KEEP - 2 * LARGEST < max(undisturbed.sizes) <= KEEP  # and it ran ahead
    assert len(undisturbed.sizes) > 300 and undisturbed.sizes[-1] == kept + (folder / "head.safetensors").stat().st_size
    assert not (folder / "ahead").exists() and not children()
    steps, end = of(undisturbed.lines, "train"), undisturbed.lines[-1]
    assert undisturbed.lines[0]["waited_s"] > 0.5  # the feeder's start
    assert 0 <= end["waiting_share"] < 1 and end["waited_s"] >= sum(line["waited_s"] for line in steps) - 0.1


def test_either_side_killed_at_any_moment(tmp_path):
    script = Path(__file__).with_name("streaming_killed.py")
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_the_feeder_as_it_is_started_for_real(world, undisturbed):
    """Processes of their own: the feeder killed is one line, and a run to the end makes nothing that is kept twice."""
    def kill(lines):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            for process in children() if lines[-1]["step"] >= 3 and not cut else ():
                for child in process.children():
                    cut.append(child.pid)
                    child.kill()

    for attempt in range(5):  # this process may stand still while training goes on to its end
        folder, name, cut = world.root / f"killed-{attempt}", f"c-{attempt}", []
        world.begin(folder.name)
        settings = world.settings(name, folder.name)
        try:
            launching.launch(settings, range(128), kill)
        except UserError as error:
            assert str(error).startswith("the process that makes the states was killed by SIGKILL, usually for lack")
            break
    else:
        pytest.fail("the feeder had always made all before it was killed")
    assert len(cut) == 1
    made = {file.name: file.stat().st_mtime_ns for file in (folder / "kept").glob("*.safetensors")}
    newest = max(int(path.name[5:]) for path in (world.root / name / "checkpoints").iterdir())
    assert newest == read_metrics(world.root / name / "metrics.jsonl")[-1]["step"]  # nothing that was trained is lost
    lines = launching.launch(settings, range(128))
    assert made == {file.name: file.stat().st_mtime_ns for file in (folder / "kept").glob("*.safetensors")}
    assert len(made) > 10 and not (folder / "ahead").exists()
    assert_alike(lines, undisturbed.lines, 1e-6)


def test_it_can_be_interrupted_while_it_waits(small_world, monkeypatch):
    monkeypatch.setattr(streamed, "PATIENCE", 0.2)  # a feeder that is stopped ignores SIGTERM
    small_world.begin("waits", keep_bytes=2_000_000, shard_tokens=300)  # one or two shards: the feeder is never far
    metrics, looks, wait = small_world.root / "d" / "metrics.jsonl", [], streamed.Stream.wait
    stands, asked = threading.Event(), threading.Event()

    def anew(*args):
        looks.clear()
        return wait(*args)

    def begun():
        return len(read_metrics(metrics)) > 4

    def stop():  # called after every step, and at every look for a shard that is waited for
        looks.append(1)
        if not stands.is_set() and begun():
            stands.wait(PATIENCE)
        return asked.is_set()

    def interrupt():
        try:
            until(begun)
            (feeder,) = children()
            suspend(feeder)
            claim = small_world.root / "waits" / "ahead" / "manifest.json.claim"
            while claim.exists():  # training would wait for that
                feeder.resume()
                time.sleep(0.01)
                suspend(feeder)
            stands.set()
            until(lambda: len(looks) > 50)
        finally:
            stands.set()
            asked.set()

    monkeypatch.setattr(streamed.Stream, "wait", anew)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        small_world.trained("d", "waits", stop=stop, checkpoint_every=0, epochs=6)
    thread.join()
    assert len(looks) > 50, "training was not waiting when it was interrupted"
    step = read_metrics(metrics)[-1]["step"]
    (checkpoint,) = (small_world.root / "d" / "checkpoints").iterdir()
    state = json.loads((checkpoint / "state.json").read_text())
    assert state["step"] == step and state["waited"] > 0.5 and not children()


def test_what_the_feeder_cannot_make_is_trainings_one_line(small_world):
    small_world.begin("wrong")
    tiny.make_target(small_world.root / "other", seed=5)
    with pytest.raises(UserError, match="the states could not be made: .*holds states of another target weights"):
        small_world.trained("e", "wrong", target=str(small_world.root / "other"))
    assert not children()


def test_the_start_by_regression_reads_what_is_kept(small_world):
    """It wants 20,000 teacher positions, so it reads on to the corpus's end: nothing streams, all is kept."""
    small_world.begin("fitted", keep_bytes=40_000_000)
    lines = small_world.trained("f", "fitted", initialise="fitted", epochs=1)
    assert lines[-1]["kind"] == "end" and lines[-1]["waiting_share"] < 0.5
    kept = json.loads((small_world.root / "fitted" / "kept" / "manifest.json").read_text())
    assert kept["rows"] == len(small_world.corpus)


def test_a_bound_too_small_is_told_before_anything_is_made(small_world):
    with pytest.raises(UserError, match=r"keep_bytes is 0.001 GB, but the head \(0.000 GB\) and one shard \(0.00"):
        small_world.begin("small", keep_bytes=1_000_000)
    made = small_world.begin("small", keep_bytes=2_200_000)
    assert made["shards_ahead"] == (2_200_000 - made["head_bytes"]) // made["shard_bytes"] == 1
    with pytest.raises(UserError, match=r"rows that are kept \(0.00\d GB\) and one shard .* or validation_share"):
        small_world.trained("g", "small")
    assert not (small_world.root / "small" / "kept").exists() and not children()


def test_one_training_at_a_time(small_world):
    small_world.begin("busy")
    settings = small_world.settings("h", "busy")
    with opened_states(settings), pytest.raises(UserError, match="another training reads the states"):
        with opened_states(settings):
            pass


def test_a_stores_checksums_are_read_as_the_run_says(small_world):
    """A byte that flipped on the disk, in the last row: named where it is looked at, trained on where it is not."""
    extract(small_world.corpus, small_world.target, small_world.root / "store", batch_tokens=1024, **HOW)
    last = sorted((small_world.root / "store").glob("shard-*.safetensors"))[-1]
    for number, verify in enumerate(("first", "each", "all", "never")):
        with opened_states(small_world.settings(f"read-{number}", "store", verify_states=verify)) as store:
            assert store.verifies == ("first" if verify == "all" else verify)
    data = bytearray(last.read_bytes())
    with safe_open(last, "pt") as tensors:
        width = tensors.get_slice("aux").get_shape()[1]
    header = int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8:8 + header])["aux"]["data_offsets"]
    data[8 + header + end - 4 * width] ^= 1  # of the last token's float32 features: the lowest bit of the first
    last.write_bytes(data)
    for verify in ("first", "each"):
        with pytest.raises(UserError, match=f"{last.name}.*row"):
            small_world.trained(f"checked-{verify}", "store", verify_states=verify, epochs=1)
    assert small_world.trained("unchecked", "store", verify_states="never", epochs=1)[-1]["kind"] == "end"
