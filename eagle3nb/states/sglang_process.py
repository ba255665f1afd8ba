"""SGLang's Engine in a process of its own, and the folder in which its states change hands.

Of its own, since an engine whose scheduler fails ends its whole process (here: the notebook's kernel), since importing
it replaces asyncio's event loop, which a kernel is running, and since it may then live in another environment: its
Python is this one's, or the one that EAGLE3NB_SGLANG_PYTHON names.

States lie on tmpfs where that has room, for as long as it takes to read them. A folder is locked by the process that
reads it; one whose reader has ended, however it ended, is removed by the next engine that starts.
"""

import fcntl
import importlib.util
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path

from eagle3nb.errors import UserError
from eagle3nb.files import disk_free, resolve, shown
from eagle3nb.interrupt import next_of
from eagle3nb.lock import only_one
from eagle3nb.states.sglang_plugin import FOLDER
from eagle3nb.states.sglang_worker import GRACE

TMPFS = Path("/dev/shm")
ROOM = 8 << 30  # bytes that must be free on it; a container often has 64 MB there
LOGS = 10  # that are kept
LONGEST = 300  # characters of an error that is passed on
# An error's last line, or a process that was killed; what is told in brackets is a warning about something optional.
FAILURE = re.compile(r"(?<![\w.(])(?:\w+\.)*\w*(?:Error|Exception|Killed): \S.*|Subprocess \S+ .*crashed.*")


class EngineProcess:
    """An Engine that answers requests, one at a time. `.folder` for its states, `.longest` row, `.version`."""

    def __init__(self, arguments: dict, environment: dict, scratch: str | Path | None = None):
        self.folder, handle = states_folder(scratch)
        self.log = new_log(self.folder.name)
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [python(), "-m", "eagle3nb.states.sglang_worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, start_new_session=True,  # Ctrl-C is for the notebook, and an end is for the whole group
                env={**os.environ, **sockets(self.folder), **environment, FOLDER: str(self.folder),
                     "SGLANG_PLUGINS": ",".join(filter(None, [os.environ.get("SGLANG_PLUGINS"), "eagle3nb"]))})
        self.replies, self.turn, self.asked = queue.SimpleQueue(), threading.Lock(), 0
        threading.Thread(target=listen, args=(self.process.stdout, self.replies), daemon=True).start()
        # At this process's end, too; not at a fork's.
        self.end = weakref.finalize(self, finish, os.getpid(), self.process, self.folder, handle, self.log)
        try:
            self.send(arguments)
            ready = self.reply(0)
        except BaseException:
            self.end()
            raise
        self.version, self.longest = ready["version"], ready["longest"]

    def ask(self, rows, *, states: bool, **sampling) -> list[dict]:
        """Each row's {"ids", "states"}, in order. UserError where the engine refuses one, or has ended."""
        with self.turn:
            self.asked += 1
            self.send({"id": self.asked, "rows": rows, "sampling": sampling, "states": states})
            answers = self.reply(self.asked)["rows"]
        for i, answer in enumerate(answers):
            if answer["refused"]:
                self.drop(self.asked)
                raise UserError(f"SGLang refuses a row of {len(rows[i])} tokens: {answer['refused'].splitlines()[0]}")
        return answers

    def send(self, request: dict) -> None:
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise UserError(self.why()) from None

    def reply(self, number: int) -> dict:
        """The answer to request `number`; older ones, whose asker was interrupted, are dropped with their states."""
        while True:
            line = next_of(self.replies)
            if line is None:
                self.replies.put(None)
                raise UserError(self.why())
            answer = json.loads(line)
            if answer["id"] != number:
                self.drop(answer["id"])
            elif "error" in answer:
                raise UserError(self.why(answer["error"]) if number == 0 else f"SGLang: {answer['error']}")
            else:
                return answer

    def drop(self, number: int) -> None:
        for file in self.folder.glob(f"{number}-*.safetensors"):
            file.unlink(missing_ok=True)

    def why(self, found: str = "") -> str:
        return why(self.log, found)

    def close(self) -> None:
        self.end()


def new_log(name: str) -> Path:
    """Where an engine's log goes; kept where it failed, the last LOGS of them."""
    log = resolve(".cache") / "sglang" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    for old in sorted(log.parent.glob("*.log"), key=written_at)[: 1 - LOGS]:
        old.unlink(missing_ok=True)
    return log


def written_at(file: Path) -> float:
    """When it was written to; 0 where its owner has removed it meanwhile."""
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def why(log: Path, found: str = "", since: int = 0) -> str:
    """One line on an engine that failed: the first error in its log behind its first `since` bytes, else `found`, and
    where the rest stands."""
    lines = log.read_bytes()[since:].decode(errors="replace").splitlines() if log.is_file() else []
    told = [match[0] for line in lines if (match := FAILURE.search(line))] or [found, *lines[-1:], "no word of why"]
    return f"SGLang ended: {next(filter(None, told))[:LONGEST]}; its log is {shown(log)}"


def python() -> str:
    """The interpreter that has SGLang. UserError where none does; SGLang itself is not imported here."""
    other = os.environ.get("EAGLE3NB_SGLANG_PYTHON")
    if other:
        if not os.access(resolve(other), os.X_OK):
            raise UserError(f"EAGLE3NB_SGLANG_PYTHON names {other}, which cannot be run; name an environment's python")
        return str(resolve(other))
    found = importlib.util.find_spec("sglang")
    if found is None or found.origin is None:  # none, or a folder of that name
        raise UserError("engine sglang needs SGLang, which this environment has not; use environment.yml on a GPU box, "
                        "or `make sglang-cpu` and EAGLE3NB_SGLANG_PYTHON=.venv-sglang/bin/python on a CPU")
    return sys.executable


def states_folder(scratch: str | Path | None = None) -> tuple[Path, int]:
    """A new empty folder of this process's, and the handle that keeps it locked; what ended ones left is removed.

    In `scratch`, or in what EAGLE3NB_SCRATCH names, or on tmpfs if it has ROOM, or where temporary files lie.
    """
    named = scratch or os.environ.get("EAGLE3NB_SCRATCH")
    roomy = TMPFS.is_dir() and os.access(TMPFS, os.W_OK) and disk_free(TMPFS) >= ROOM
    root = (resolve(named) if named else TMPFS if roomy else Path(tempfile.gettempdir())) / f"eagle3nb-{os.getuid()}"
    with only_one(root / "lock"):
        for left in root.iterdir():
            if left.is_dir() and (handle := locked(left)) is not None:
                os.close(handle)
                shutil.rmtree(left, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix="states-", dir=root))
        return folder, locked(folder)


def sockets(folder: Path) -> dict:
    """SGLang leaves its sockets where temporary files lie: there they go with the folder, if their paths may be so
    long (107 bytes)."""
    inside = folder / "tmp"
    if len(os.fsencode(inside)) > 80:
        return {}
    inside.mkdir()
    return {"TMPDIR": str(inside)}


def locked(folder: Path) -> int | None:
    """A handle that holds the folder's lock; None where another process does, or has removed it meanwhile."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def listen(stream, replies: queue.SimpleQueue) -> None:
    """Lines as they come; None after the last. A thread of its own, so that an interrupt cannot tear one."""
    with stream:
        for line in stream:
            replies.put(line)
    replies.put(None)


def finish(owner: int, process: subprocess.Popen, folder: Path, handle: int, log: Path) -> None:
    """End the engine with all its processes, then its folder, and its log if it ended well."""
    if os.getpid() != owner:
        return
    with suppress(BrokenPipeError):
        process.stdin.close()
    until = time.monotonic() + GRACE
    with suppress(ChildProcessError, ProcessLookupError):
        # Not reaped before its group is gone: until then no other group can have its number.
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    if process.wait() == 0:
        log.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    os.close(handle)
