"""A disk that is full at any point of a merge, and files that change under it: one clear line, and the old corpus."""

import json
import os
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3nb.corpus import merge as merging
from eagle3nb.corpus.merge import merge
from eagle3nb.corpus.records import find_sources
from eagle3nb.corpus.verify import verify
from eagle3nb.errors import UserError

FILES = ["index.parquet", "merge.json", "merged.jsonl", "rejected.jsonl"]
OPTIONS = {"max_seq_len": 40, "vocab_size": 50, "markers": None}
FILLING = '''
import json, os, subprocess, sys
from eagle3nb.corpus import merge as merging
from eagle3nb.corpus.records import find_sources
from eagle3nb.errors import UserError

def run():
    sources, disk, processes, step, checks = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], check=True)
    out = disk + "/work/corpus"
    options = {"max_seq_len": 40, "vocab_size": 50, "markers": None, "processes": processes}
    merging.merge(find_sources(sources), out, seed=1, **options)
    old = {name: open(f"{out}/{name}", "rb").read() for name in os.listdir(out)}
    room = os.statvfs(disk)
    room = room.f_bavail * room.f_frsize
    for free in range(0, room + step, step):
        with open(disk + "/filler", "wb") as filler:
            filler.write(bytes(max(room - free, 0)))
        for known in (True, False)[1 - checks:]:  # is it seen beforehand that the rows have no room?
            merging.disk_free = (lambda _: 1 << 40) if not known else (lambda _: free)
            point = "done"
            try:
                merging.merge(find_sources(sources), out, seed=2, **options)
            except UserError as error:
                point = str(error)
            now = {name: open(f"{out}/{name}", "rb").read() for name in os.listdir(out)}
            left = sorted(os.listdir(disk + "/work"))
            print(json.dumps([free, known, point, now == old, left]), file=sys.stderr, flush=True)
            if point == "done" and not known:
                return
        os.unlink(disk + "/filler")

if __name__ == "__main__":
    run()
'''


def some_rows(seed: int, count: int) -> list[dict]:
    rng = random.Random(seed)
    rows = [{"input_ids": [rng.randrange(50) for _ in range(rng.randint(5, 60))], "id": i} for i in range(count)]
    return [row | {"loss_mask": [1] * len(row["input_ids"])} for row in rows] + [b"{"] * (count // 4)


def state(out: Path) -> dict:
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.mark.parametrize(("processes", "step", "checks"), [(1, 24 << 10, 1), (2, 450_000, 0)])
def test_wherever_the_disk_is_full_there_is_one_line_and_the_old_corpus(tmp_path, write, processes, step, checks):
    mount = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", tmp_path]
    if not shutil.which("unshare") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here; test_a_file_too_large stands for it")
    write(tmp_path / "in/A/1.jsonl", some_rows(1, 800))
    write(tmp_path / "in/A/2.jsonl.gz", some_rows(2, 1500))
    (tmp_path / "disk").mkdir()
    (tmp_path / "filling.py").write_text(FILLING)
    command = ["unshare", "-rm", sys.executable, tmp_path / "filling.py", tmp_path / "in", tmp_path / "disk"]
    done = subprocess.run([*command, str(processes), str(step), str(checks)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("[")]
    assert steps[-1][2] == "done" and len(steps) >= 3
    for _, known, told, same, left in steps:
        assert left == ["corpus"] and "\n" not in told
        assert same or told == "done"
        assert told == "done" or "No space left on device; free space or choose another work_dir" in told or (
            known and "are free; make room or choose another work_dir" in told)
    told = {told for *_, told, _, _ in steps}
    assert any("make room" in line for line in told) == checks and any("cannot merge into" in line for line in told)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_file_too_large_for_the_system_is_one_line(tmp_path, write, processes):
    """The limit on a process's files stands for a disk that is full: in the first pass, then in the second."""
    write(tmp_path / "plain/A/1.jsonl", some_rows(1, 300))
    write(tmp_path / "packed/A/1.jsonl.gz", some_rows(1, 300))
    merge(find_sources(tmp_path / "plain"), tmp_path / "work/corpus", seed=1, **OPTIONS)
    before, limits = state(tmp_path / "work/corpus"), resource.getrlimit(resource.RLIMIT_FSIZE)
    for name in ("packed", "plain"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        try:
            with pytest.raises(UserError, match="cannot merge into .*corpus: File too large; free space"):
                merge(find_sources(tmp_path / name), tmp_path / "work/corpus", seed=2, processes=processes, **OPTIONS)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert state(tmp_path / "work/corpus") == before and os.listdir(tmp_path / "work") == ["corpus"]


def test_an_error_that_the_disk_tells_while_it_flushes_is_not_lost(tmp_path, write, monkeypatch):
    """The system tells such an error once; the fsync that follows would succeed."""
    write(tmp_path / "in/A/1.jsonl", some_rows(1, 50))
    refused = merging.threading.Event()

    def refuse(_):
        refused.set()
        raise OSError(5, "Input/output error")

    class Slow(merging.Pool):
        def map(self, function, tasks, told):
            for result in super().map(function, tasks, told):
                if function is merging.write_block:
                    assert refused.wait(300)  # the flusher comes to its turn
                yield result

    monkeypatch.setattr(os, "fdatasync", refuse)
    monkeypatch.setattr("eagle3nb.corpus.scan.Pool", Slow)
    with pytest.raises(UserError, match="cannot merge into .*: Input/output error"):
        merge(find_sources(tmp_path / "in"), tmp_path / "corpus", seed=1, **OPTIONS)
    assert sorted(os.listdir(tmp_path)) == ["in"]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(("change", "words"), [
    (lambda path: path.write_bytes(path.read_bytes().replace(b"[1, 1, 1", b"[1, 0, 1")), "changed while it was merged"),
    (lambda path: path.write_bytes(path.read_bytes()[:5000]), "changed while it was merged"),
    (lambda path: path.write_bytes(b"\n" + path.read_bytes()), "changed while it was merged"),
    (lambda path: path.unlink(), "cannot be read any more: No such file or directory")])
def test_a_file_that_changes_between_the_passes(tmp_path, write, monkeypatch, processes, change, words):
    write(tmp_path / "in/A/1.jsonl", some_rows(1, 300))
    write(tmp_path / "in/B/2.jsonl.gz", some_rows(2, 50))
    merge(find_sources(tmp_path / "in"), tmp_path / "work/corpus", seed=1, **OPTIONS)
    before, select = state(tmp_path / "work/corpus"), merging.select

    def changed(*arguments):
        change(tmp_path / "in/A/1.jsonl")
        return select(*arguments)

    monkeypatch.setattr(merging, "select", changed)
    with pytest.raises(UserError) as error:
        merge(find_sources(tmp_path / "in"), tmp_path / "work/corpus", seed=2, processes=processes, **OPTIONS)
    assert str(error.value) == f"…/A/1.jsonl {words}; run the merge again"
    assert state(tmp_path / "work/corpus") == before and os.listdir(tmp_path / "work") == ["corpus"]


def test_lines_that_come_after_the_first_pass_wait_for_the_next_merge(tmp_path, write, monkeypatch):
    write(tmp_path / "in/A/1.jsonl", some_rows(1, 100))
    select = merging.select

    def appended(*arguments):
        with open(tmp_path / "in/A/1.jsonl", "ab") as file:
            file.write(b'{"input_ids": [1, 2], "loss_mask": [1, 1]}\n')
        return select(*arguments)

    monkeypatch.setattr(merging, "select", appended)
    report = merge(find_sources(tmp_path / "in"), tmp_path / "corpus", seed=1, **OPTIONS)
    assert report["sources"][0]["lines"] == 125 and verify(tmp_path / "corpus")["records"] == report["records"] <= 100


@pytest.mark.parametrize("name", ["1.jsonl", "1.jsonl.gz", "1.jsonl.zst"])
def test_a_file_that_cannot_be_read_is_told_as_a_line_of_it(tmp_path, write, monkeypatch, name):
    write(tmp_path / "in/A" / name, some_rows(1, 10))
    write(tmp_path / "in/A/2.jsonl", some_rows(2, 20))
    opened = open

    def refuse(path, *arguments, **options):
        if Path(path).name == name:
            raise PermissionError(13, "Permission denied")
        return opened(path, *arguments, **options)

    monkeypatch.setattr("builtins.open", refuse)
    report = merge(find_sources(tmp_path / "in"), tmp_path / "corpus", seed=1, **OPTIONS)
    monkeypatch.undo()
    rejected = [json.loads(line) for line in (tmp_path / "corpus/rejected.jsonl").read_bytes().splitlines()]
    assert rejected[0] == {"source": "A", "file": f"A/{name}", "line": 1, "reason": "json_invalid",
                           "detail": "file cannot be read on: Permission denied"}
    assert report["skipped"]["json_invalid"] == 1 + 5


def test_no_rows_at_all_is_one_line(tmp_path, write):
    (tmp_path / "in/A").mkdir(parents=True)
    for data in (None, b"", b"\n \n", b"{\n"):
        if data is not None:
            (tmp_path / "in/A/1.jsonl").write_bytes(data)
        with pytest.raises(UserError, match="the merge keeps no record of 1 datasets .[01] skipped.; run the audit"):
            merge(find_sources(tmp_path / "in"), tmp_path / "corpus", seed=1, **OPTIONS)
        assert sorted(os.listdir(tmp_path)) == ["in"]
