"""A folder that takes another's place: what stays, what goes, and what a killed process leaves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3nb import files
from eagle3nb.files import fresh_folder, replace_folder

NAMES = {"a", "b"}


def tree(folder: Path) -> dict:
    """{path: bytes, link target or None for an empty folder} below a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = str(path.readlink())
        elif path.is_file():
            found[name] = path.read_bytes()
        elif not any(path.iterdir()):
            found[name] = None
    return found


def put(folder: Path, **contents) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in contents.items():
        (folder / name).write_bytes(data)


def make(path: Path, **contents) -> None:
    with fresh_folder(path) as folder:
        assert folder.parent == Path(os.path.realpath(path)).parent and not any(folder.iterdir())
        put(folder, **contents)
        replace_folder(folder, path, NAMES)


@pytest.fixture(params=["exchange", "two renames", "no links"])
def way(request, monkeypatch):
    """How the file system can do it."""
    if request.param != "exchange":
        monkeypatch.setattr(files, "exchange", lambda a, b: False)
    if request.param == "no links":
        def refuse(*_, **__):
            raise PermissionError(1, "Operation not permitted")
        monkeypatch.setattr(os, "link", refuse)


def test_this_file_system_exchanges_folders(tmp_path):
    put(tmp_path / "x", a=b"1")
    put(tmp_path / "y", b=b"2")
    assert files.exchange(tmp_path / "x", tmp_path / "y")
    assert tree(tmp_path) == {"x/b": b"2", "y/a": b"1"}
    assert not files.exchange(tmp_path / "x", tmp_path / "nowhere")


def test_the_new_files_come_the_old_ones_go_and_others_stay(tmp_path, way):
    make(tmp_path / "out", a=b"1", b=b"1")
    put(tmp_path / "out", notes=b"mine", **{".hidden": b"h"})
    put(tmp_path / "out/deep/er", c=b"3", a=b"not ours")
    (tmp_path / "out/empty").mkdir()
    (tmp_path / "out/link").symlink_to("/nowhere")
    (tmp_path / "out/deep/folder").symlink_to("er")
    make(tmp_path / "out", a=b"2")
    assert tree(tmp_path) == {
        "out/a": b"2", "out/notes": b"mine", "out/.hidden": b"h", "out/deep/er/c": b"3", "out/deep/er/a": b"not ours",
        "out/empty": None, "out/link": "/nowhere", "out/deep/folder": "er"}


def test_after_an_error_all_is_as_before(tmp_path):
    make(tmp_path / "out", a=b"1")
    with pytest.raises(ZeroDivisionError), fresh_folder(tmp_path / "out") as folder:
        put(folder, a=b"2")
        1 / 0  # noqa: B018
    assert tree(tmp_path) == {"out/a": b"1"}


def test_a_link_to_a_folder_elsewhere_is_followed(tmp_path, way):
    (tmp_path / "large/disk").mkdir(parents=True)
    (tmp_path / "work").mkdir()
    (tmp_path / "work/out").symlink_to(tmp_path / "large/disk/out")
    for data in (b"1", b"2"):
        make(tmp_path / "work/out", a=data)
        assert tree(tmp_path) == {"large/disk/out/a": data, "work/out": str(tmp_path / "large/disk/out")}


def test_what_ended_processes_left_goes_and_nothing_else(tmp_path):
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    dead = int(dead.stdout)
    kept = {f"out.{dead}.partial.x": b"", f"outer.{dead}.partial/a": b"", "out.x1.partial/a": b"", "out.partial/a": b"",
            f"out.{dead}.other/a": b"", f"out.{dead}/a": b"", "out.1.2.partial/a": b"", "7.partial/a": b""}
    for name, data in kept.items():
        put((tmp_path / name).parent, **{Path(name).name: data})
    (tmp_path / f"out.{dead + 1}.partial").write_bytes(b"a file")
    put(tmp_path / "elsewhere", a=b"e")
    (tmp_path / f"out.{dead + 2}.partial").symlink_to("elsewhere")
    for pid in (dead, os.getpid(), os.getppid()):  # a number may belong to another process by now
        put(tmp_path / f"out.{pid}.partial/spool", x=b"left")
    put(tmp_path / f"out.{dead}.replaced", a=b"old")
    make(tmp_path / "out", a=b"1")
    assert tree(tmp_path) == kept | {
        "out/a": b"1", "elsewhere/a": b"e", f"out.{dead + 1}.partial": b"a file",
        f"out.{dead + 2}.partial": "elsewhere"}


def test_a_folder_in_use_is_left_alone(tmp_path):
    code = ("import sys, time\nfrom eagle3nb.files import fresh_folder\n"
            "with fresh_folder(sys.argv[1]) as folder:\n"
            "    (folder / 'a').write_text('other')\n    print('there', flush=True)\n    sys.stdin.read()")
    with subprocess.Popen([sys.executable, "-c", code, tmp_path / "out"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "there\n"
        make(tmp_path / "out", a=b"1")
        assert tree(tmp_path) == {"out/a": b"1", f"out.{other.pid}.partial/a": b"other"}
        other.kill()
        other.wait()
        make(tmp_path / "out", a=b"2")
    assert tree(tmp_path) == {"out/a": b"2"}


def test_an_old_folder_that_was_set_aside_is_put_back(tmp_path):
    put(tmp_path / "out.99999999.replaced", a=b"1", notes=b"mine")
    put(tmp_path / "out.99999999.partial", a=b"2", notes=b"mine")
    with fresh_folder(tmp_path / "out"):
        assert (tmp_path / "out/a").read_bytes() == b"1"
    assert tree(tmp_path) == {"out/a": b"1", "out/notes": b"mine"}


def test_where_the_new_folder_cannot_take_its_place_the_old_one_returns(tmp_path, monkeypatch):
    make(tmp_path / "out", a=b"1")
    rename = os.rename

    def refuse(source, target):
        if str(source).endswith(".partial"):
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(files, "exchange", lambda a, b: False)
    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(OSError, match="No space"):
        make(tmp_path / "out", a=b"2")
    assert tree(tmp_path) == {"out/a": b"1"}


def test_without_locks_the_process_number_decides(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    for pid in (99999999, os.getpid(), os.getppid()):
        put(tmp_path / f"out.{pid}.partial", a=b"left")
    make(tmp_path / "out", a=b"1")
    assert tree(tmp_path) == {"out/a": b"1", f"out.{os.getppid()}.partial/a": b"left"}
