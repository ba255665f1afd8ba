"""Reclaiming: what must not go does not, what may go goes whole, and nothing beside it is touched."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import until

from eagle3nb.errors import UserError
from eagle3nb.files import project_root
from eagle3nb.states import deletion, reclaim, store
from eagle3nb.states.reclaim import checked, start, table


@pytest.fixture
def vol(tmp_path):
    """A volume with data, a run's work folder and an old store; tmp_path itself without links."""
    vol = Path(os.path.realpath(tmp_path)) / "vol"
    for name in ("data/A_x/rows.jsonl", "work/corpus/merged.jsonl", "work/states/shard-0000000-0000001.safetensors"):
        fill(vol / name, 100)
    return vol


def fill(path: Path, size: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    return path


def make_store(folder: Path, shards=3, size=1000) -> Path:
    entries = []
    for i in range(shards):
        name = store.shard_name(i, i)
        fill(folder / name, size)
        entries.append({"file": name, "first": i, "last": i})
    manifest = {"schema": store.SCHEMA, "fingerprint": {"corpus": "x"}, "head": None, "shards": entries}
    (folder / store.MANIFEST).write_text(json.dumps(manifest))
    return folder


def look(vol, *entries):
    return checked([str(e) for e in entries], protect=[vol / "data", vol / "work/corpus", vol / "work/states"])


def run(listed, vol, timeout=300):
    report = start(listed, vol / "work/reclaimed.json").finish(timeout)
    assert json.loads((vol / "work/reclaimed.json").read_text()) == [r for r in report if r["state"] != "absent"]
    return report


def sizes(folder: Path) -> list[int]:
    """Naive: every regular file below, by os.walk."""
    return [os.lstat(os.path.join(d, f)).st_size for d, _, fs in os.walk(folder) for f in fs
            if not os.path.islink(os.path.join(d, f))]


def tree(folder: Path) -> list:
    return sorted((str(p), p.read_bytes() if p.is_file() else None) for p in folder.rglob("*"))


def test_naming_is_the_stores():
    """reclaim must not load torch in the merge's process, so it has these again."""
    assert (reclaim.SCHEMA, reclaim.OWN, reclaim.MANIFEST) == (store.SCHEMA, store.OWN, store.MANIFEST)
    command = "import sys, eagle3nb.states.reclaim; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_store_goes_by_its_path_and_nothing_beside_it(vol):
    old = make_store(vol / "old")
    fill(old / f"{store.shard_name(3, 3)}.1234.partial", 10)
    fill(old / ".lock", 0)
    beside = fill(vol / "old2/keep", 5)
    listed = look(vol, old)
    assert [(r.kind, r.bytes, r.files) for r in listed] == [("store", sum(sizes(old)), 6)]
    assert table(listed)[0]["GB"] == sum(sizes(old)) / 1e9 and old.exists()
    before = tree(vol / "data"), tree(vol / "work/corpus")
    [line] = run(listed, vol)
    assert reclaim.sentence([line]) == "0.00 of 0.00 GB freed: …/vol/old freed"
    assert line["state"] == "freed" and line["freed"] == line["bytes"] == listed[0].bytes and line["error"] == ""
    assert not os.path.isabs(line["path"]) and str(vol) not in json.dumps(line)
    assert sorted(p.name for p in vol.iterdir()) == ["data", "old2", "work"] and beside.exists()
    assert before == (tree(vol / "data"), tree(vol / "work/corpus"))


@pytest.mark.parametrize("deeper", [False, True])
def test_a_foreign_directory_needs_its_size(vol, deeper):
    old = vol / "old"
    for i in range(5):
        fill(old / ("a/b" if deeper else ".") / f"f{i}", 20_000 + i)
    total = sum(sizes(old))
    for wrong in (old, f"{old} = {round(total * 1.012)}", f"{old} = {round(total * 0.988)}", f"{old} = 0",
                  f"{old}=1 GB"):
        with pytest.raises(UserError, match="state its size|not the stated"):
            look(vol, wrong)
    for right in (total, f"{total} B", f"{round(total * 1.009)}", f"{total / 1e3} kB", f"{total / 1024:.3f} KiB",
                  f"{total / 1e9:.9f} gb", f"{total / 1e12:.12f} TB"):
        [item] = look(vol, f"{old} = {right}")
        assert (item.kind, item.bytes) == ("foreign", total)
    assert run([item], vol)[0]["freed"] == total and not old.exists()


@pytest.mark.parametrize("size", ["lots", "924", "5 ib", "-3 GB", "1,000 MB", "", "nan"])
def test_sizes_that_cannot_be_read_or_are_wrong(vol, size):
    fill(vol / "old/f", 10)
    with pytest.raises(UserError):
        look(vol, f"{vol / 'old'} = {size}")
    with pytest.raises(UserError):
        look(vol, f"{vol / 'old'}={size}")


def test_an_equals_sign_in_a_name(vol):
    old = make_store(vol / "step=1000")
    assert look(vol, old)[0].path == old
    assert look(vol, f"{old} = {sum(sizes(old))}")[0].path == old


@pytest.mark.parametrize("manifest", [
    "", "[]", "{", '{"schema": 1}', '{"schema": 3, "shards": [], "fingerprint": {}}', "[" * 100_000,
    '{"schema": true, "shards": [], "fingerprint": {}}', '{"files": []}', "link"])
def test_another_manifest_is_not_ours(vol, manifest):
    old = make_store(vol / "old")
    (old / "manifest.json").unlink()
    if manifest == "link":
        (old / "manifest.json").symlink_to(make_store(vol / "other") / "manifest.json")
    else:
        (old / "manifest.json").write_text(manifest)
    with pytest.raises(UserError, match="no manifest of this project"):
        look(vol, old)
    assert look(vol, f"{old} = {sum(sizes(old))}")[0].kind == "foreign"


def test_a_store_with_anything_else_in_it_is_refused_by_name(vol):
    old = make_store(vol / "old")
    fill(old / "thesis.tex", 1)
    for stated in ("", f" = {sum(sizes(old))}"):
        with pytest.raises(UserError, match=r"thesis\.tex"):
            look(vol, f"{old}{stated}")
    (old / "thesis.tex").unlink()
    (old / "shard-0000009-0000009.safetensors").mkdir()
    with pytest.raises(UserError, match="shard-0000009"):
        look(vol, old)


def test_nothing_that_matters_is_an_entry(vol, monkeypatch):
    home = fill(vol / "home/user/notes", 9).parent
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(fill(vol / "desk/here/note", 9).parent)
    root = project_root()
    for entry in ("/", home, home.parent, vol, vol / "data", vol / "data/A_x", vol / "work", vol / "work/corpus",
                  vol / "work/states", vol / "desk", vol / "desk/here", "~", "..", root, root / "notebooks",
                  root / "params/demo", root / "eagle3nb", root / ".git", root / "outputs", root.parent, ".",
                  vol / "data/../data", f"{vol}/work/", vol / "none/../data"):
        with pytest.raises(UserError, match="is or holds|lies in"):
            checked([f"{entry} = {1 << 40}"], protect=[vol / "data", vol / "work/corpus", vol / "work/states"])
    for entry in ("", "  ", "= 5 GB"):
        with pytest.raises(UserError, match="empty|no path"):
            look(vol, entry)
    old = make_store(home / "old")
    assert look(vol, old)[0].kind == "store"  # inside the home is where old states are


def test_protected_through_a_link_or_not_there_yet(vol, tmp_path):
    """data_root may be a link, and the corpus may be still to come: neither opens a way."""
    (vol / "link").symlink_to(vol / "data")
    with pytest.raises(UserError, match="is or holds"):
        checked([f"{vol / 'data'} = 100"], protect=[vol / "link"])
    with pytest.raises(UserError, match="lies in"):
        checked([f"{vol / 'data/A_x'} = 100"], protect=[vol / "link"])
    fill(vol / "new/f", 10)
    with pytest.raises(UserError, match="is or holds"):
        checked([f"{vol / 'new'} = 10"], protect=[vol / "new/work/corpus"])
    with pytest.raises(UserError, match="is or holds"):
        checked([str(vol / "later")], protect=[vol / "later/corpus"])


def test_links_are_never_followed_to_an_entry(vol):
    old = make_store(vol / "far/old")
    (vol / "link").symlink_to(old)
    (vol / "way").symlink_to(vol / "far")
    (vol / "dangling").symlink_to(vol / "nowhere")
    for entry, message in ((vol / "link", "is a link"), (vol / "way/old", "reached through a link"),
                           (vol / "dangling", "is a link"), (vol / "way/gone", "reached through a link")):
        with pytest.raises(UserError, match=message):
            look(vol, entry)
    with pytest.raises(UserError, match="no directory"):
        look(vol, f"{fill(vol / 'file', 3)} = 3")


def test_entries_in_one_another_or_twice(vol):
    old = make_store(vol / "runs/old")
    for pair in ((old, f"{vol / 'runs'} = 1"), (f"{vol / 'runs'} = {sum(sizes(vol / 'runs'))}", old), (old, old),
                 (old, f"{old}/")):
        with pytest.raises(UserError, match="one another|named twice|not the stated|one another"):
            look(vol, *pair)
    assert old.exists()


def test_one_bad_entry_and_nothing_goes(vol):
    old = make_store(vol / "old")
    with pytest.raises(UserError):
        look(vol, old, vol / "data")
    assert len(sizes(old)) == 4


def test_what_is_gone_has_nothing_to_free_but_a_folder_that_never_was_is_a_mistake(vol):
    listed = look(vol, vol / "old")
    assert [item.kind for item in listed] == ["absent"] and "nothing" in table(listed)[0]["what it is"]
    assert [line["state"] for line in run(listed, vol)] == ["absent"]
    with pytest.raises(UserError, match="does not exist"):
        look(vol, vol / "olds/run1/states")


def test_a_store_that_is_being_written(vol):
    old = make_store(vol / "old")
    with open(old / ".lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="being written"):
            look(vol, old)
    assert look(vol, old)


def test_mounts(vol, monkeypatch):
    old = make_store(vol / "old")
    fill(vol / "other/sub/f", 5)
    for mounted, entry in ((old, old), (vol / "other/sub", f"{vol / 'other'} = 5")):
        monkeypatch.setattr(reclaim, "mounts", lambda mounted=mounted: [Path("/"), mounted])
        with pytest.raises(UserError, match="mount"):
            look(vol, entry)
    monkeypatch.undo()
    assert Path("/proc") in reclaim.mounts() or not Path("/proc/self/mountinfo").exists()


def test_links_and_strange_files_inside_go_as_what_they_are(vol):
    precious = fill(vol / "precious/one", 50).parent
    old = make_store(vol / "old")
    (old / store.shard_name(7, 7)).symlink_to(precious / "one")
    (old / store.shard_name(8, 8)).symlink_to(precious)
    foreign = fill(vol / "foreign/deep/er/f", 10_000).parents[2]
    (foreign / "deep/link").symlink_to(precious)
    (foreign / "deep/er/up").symlink_to(vol)
    os.mkfifo(foreign / "deep/pipe")
    os.link(precious / "one", foreign / "hard")
    (foreign / "empty").mkdir()
    listed = look(vol, old, f"{foreign} = {10_050}")
    assert listed[0].bytes == sum(sizes(old))
    report = run(listed, vol)
    assert [line["state"] for line in report] == ["freed", "freed"] and not old.exists() and not foreign.exists()
    assert report[1]["freed"] == 10_000  # the hard link's bytes still have a name
    assert (precious / "one").read_bytes() == b"x" * 50


@pytest.mark.parametrize("swap", ["link", "directory", "file in it", "parent"])
def test_what_is_swapped_in_after_the_check_stays(vol, swap):
    old = make_store(vol / "runs/old")
    victim = make_store(vol / "victims/old")
    listed = look(vol, old)
    os.rename(old, vol / "moved")
    if swap == "link":
        old.symlink_to(victim)
    elif swap == "directory":
        os.rename(victim, old)
    elif swap == "parent":
        old.parent.rmdir()
        old.parent.symlink_to(vol / "victims")
    else:
        os.rename(vol / "moved", old)
        fill(old / "thesis.tex", 1)
    before = tree(vol / "victims"), tree(old)
    [line] = run(listed, vol)
    assert line["state"] == "failed" and line["error"] and line["freed"] == 0
    assert reclaim.sentence([line]).endswith(f"failed ({line['error']})")
    assert (tree(vol / "victims"), tree(old)) == before
    assert not list(vol.rglob("*.reclaiming"))


def test_a_swap_between_the_rename_and_the_deletion(vol, monkeypatch):
    """The directory is opened once and emptied through that descriptor: a link put in its place leads nowhere."""
    old, victim = make_store(vol / "old"), make_store(vol / "victim")
    [item] = look(vol, old)
    emptied = deletion.empty

    def swapping(fd, *rest):
        [aside] = vol.glob("*.reclaiming")
        os.rename(aside, vol / "elsewhere")
        aside.symlink_to(victim)
        emptied(fd, *rest)

    monkeypatch.setattr(deletion, "empty", swapping)
    before = tree(victim)
    with pytest.raises(OSError):
        deletion.remove(item.job(), lambda size: None, lambda: False)
    assert tree(victim) == before


def many(folder: Path, files=10_000) -> Path:
    folder.mkdir(parents=True)
    for i in range(files):
        (folder / f"f{i}").write_bytes(b"12345")
    return folder


HELD = """
import os, sys, threading, time
unlink, count, listen = os.unlink, 0, threading.Thread.run

def held(path, *, dir_fd=None):
    global count
    if dir_fd is not None:
        end = time.monotonic() + 300
        while count == NUMBER and not os.path.exists(GATE) and time.monotonic() < end:
            time.sleep(0.001)
        count += 1
    unlink(path, dir_fd=dir_fd)

def late(thread):
    while LATE and not os.path.exists(GATE):
        time.sleep(0.001)
    time.sleep(LATE)
    listen(thread)

if "eagle3nb.states.deletion" in sys.orig_argv:
    os.unlink, threading.Thread.run = held, late
"""


@pytest.fixture
def gate(tmp_path, monkeypatch):
    """gate(n): the file without which a deletion does not go on behind its nth file, however long we stand still.
    late: how many seconds after that it listens to the one that started it; 0: from the beginning."""
    def made(number: int, late: float = 0) -> Path:
        place = tmp_path / "gate"
        (tmp_path / "site").mkdir()
        code = HELD.replace("NUMBER", str(number)).replace("GATE", repr(str(place))).replace("LATE", str(late))
        (tmp_path / "site/sitecustomize.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
        return place

    return made


def test_kill_9_in_the_middle_and_a_rerun(vol, gate):
    old, opened = many(vol / "old"), gate(9_000)
    entry = f"{old} = {10_000 * 5}"
    handle = start(look(vol, entry), vol / "work/reclaimed.json")
    [aside] = until(lambda: list(vol.glob("old.*.reclaiming")), pause=0.001)
    until(lambda: len(os.listdir(aside)) < 10_000, pause=0.001)
    handle.process.kill()
    handle.process.wait()
    opened.touch()
    left = len(os.listdir(aside))
    assert 0 < left < 10_000 and not old.exists()
    [line] = handle.report()
    assert line["state"] == "failed" and "run the stage again" in line["error"]

    fill(vol / "old.77.reclaiming/mine", 4)  # called so, but not of our making
    fresh = many(old, 10)                    # and the entry exists once more: of another size than stated
    with pytest.raises(UserError, match="not the stated"):
        look(vol, entry)
    listed = look(vol, f"{old} = 50")
    assert [(r.kind, r.files, r.bytes) for r in listed] == [("left over", left, 5 * left), ("foreign", 10, 50)]
    assert [line["freed"] for line in run(listed, vol)] == [5 * left, 50]
    assert sorted(p.name for p in vol.iterdir()) == ["data", "old.77.reclaiming", "work"] and not fresh.exists()


NOTEBOOK = """
import sys
import time
from pathlib import Path
from eagle3nb.states.reclaim import checked, start
vol = Path(sys.argv[1])
handle = start(checked([f"{vol / 'old'} = 50000"], protect=[]), vol / "log.json")
print("started", flush=True)
while sys.argv[2] == "finish once begun" and (vol / "old").exists():
    time.sleep(0.001)
if sys.argv[2].startswith("finish"):
    handle.finish(0)
    sys.exit()
sys.stdin.read()
"""


@pytest.mark.parametrize("how, late", [("killed", 0), ("finish", 0), ("finish once begun", 1.0)])
def test_when_the_notebook_ends(vol, how, late, gate):
    """Killed, the deletion stops with it and the log says so; after finish(0) it goes on to its end, and says that,
    even if it hears of it only when the notebook is gone."""
    old, opened = many(vol / "old"), gate(9_000 if how == "killed" else 100, late)
    notebook = subprocess.Popen([sys.executable, "-c", NOTEBOOK, str(vol), how], stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE)
    assert notebook.stdout.readline() == b"started\n"
    if how == "killed":
        until(lambda: not old.exists(), pause=0.001)
        notebook.send_signal(signal.SIGKILL)
    notebook.wait()
    opened.touch()
    [line] = until(lambda: [x for x in json.loads((vol / "log.json").read_text()) if x["state"] != "running"])
    left = list(vol.glob("old.*.reclaiming"))
    if how.startswith("finish"):
        assert line["state"] == "freed" and line["freed"] == 50000 and not left
    else:
        assert "stopped with the notebook" in line["error"] and len(os.listdir(left[0])) * 5 + line["freed"] == 50000
        assert [r.kind for r in checked([f"{old} = 50000"], protect=[])] == ["left over"]
    notebook.stdin.close()
    notebook.stdout.close()


def test_the_caller_never_waits(vol, gate):
    """Neither start nor report, while the deletion stands before its first file."""
    listed, opened = look(vol, f"{many(vol / 'old')} = 50000"), gate(0)
    handle = start(listed, vol / "work/reclaimed.json")
    assert handle.report()[0]["state"] == "running" and handle.process.poll() is None
    opened.touch()
    assert handle.finish(300)[0]["state"] == "freed"


def test_a_folder_that_cannot_be_emptied(vol, monkeypatch):
    old = make_store(vol / "old")
    monkeypatch.setattr(reclaim.os, "access", lambda path, mode, **more: path != ".")  # the tests may run as root
    with pytest.raises(UserError, match="not writable"):
        look(vol, old)
