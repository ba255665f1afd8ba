"""The runner: papermill for each stage in a child process, with the verdict, the records and the clean-up its own.

    eagle3nb run demo --stages audit,merge -p limit 20

A stage that finished is kept if its artefacts still match their hashes and its parameters, inputs, notebook and the
package's code are the same. Exit codes: 0, 1 a stage failed, 2 wrong use (nothing was started).
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid

from eagle3nb.files import project_root, read_json, shown, write_json
from eagle3nb.lock import only_one
from eagle3nb.record import console, index, report
from eagle3nb.record.declared import USUAL, notebook_hash, notebook_of, stem
from eagle3nb.record.family import MARK, end_family
from eagle3nb.record.params import Settings, load
from eagle3nb.record.provenance import parameters_hash, scrubber, shareable
from eagle3nb.record.runs import state_folder
from eagle3nb.record.stage import Paths, paths_of
from eagle3nb.record.unchanged import why_run


class Stopped(BaseException):
    """A signal or the time limit: the message says which."""


def run(profile: str, *, name: str = "", stages=USUAL, overrides=(), force: bool = False, minutes: float = 0) -> int:
    """Runs the stages of a profile; returns the exit code. `minutes`: limit of the whole command, 0 for none.

    UserError before anything is started: unknown profile, parameter or stage, a value of the wrong type, a run that is
    being run already.
    """
    settings = load(profile, stages, overrides, name)
    full = settings[stages[0]].full
    paths = paths_of(full.get("run", "demo"), full.get("work_dir", ""))
    deadline = time.monotonic() + 60 * minutes if minutes else float("inf")
    command = shlex.join(["eagle3nb", "run", profile, *(["--run", name] if name else []),
                          *(["--stages", ",".join(stages)] if stages != USUAL else []),
                          *(word for n, v in overrides for word in ("-p", n, v))])
    with locked(paths), locked_work(paths):
        try:
            with signals():
                for stage in stages:
                    reason = "forced" if force else why_run(stage, settings[stage].full, paths)
                    if not reason:
                        console.kept(stage, read_json(paths.run / f"{stem(stage)}.json"))
                        continue
                    twin = Execution(stage, settings[stage], paths, command, deadline).run(reason)
                    if twin["status"] != "ok":
                        console.failed(stage, twin, paths.run)
                        return 1
                    console.done(stage, twin)
        except Stopped as stopped:  # between two stages
            console.warn(str(stopped))
            return 1
        print(f"\nOpen {shown(index.write_index(paths.run))}", flush=True)
    return 0


def locked(paths: Paths):
    """Holds the run: a second runner on the same run is refused. The system frees it however this process ends."""
    busy = f"run {paths.run.name} is under way already; wait, or choose another --run"
    return only_one(state_folder(paths.run) / "lock", wait=False, busy=busy)


def locked_work(paths: Paths):
    """Holds a work_dir that lies elsewhere: another run with the same one would write into the same drafter."""
    if paths.work == paths.run / "work":
        return contextlib.nullcontext()
    busy = f"{shown(paths.work)} is being written by another run; wait, or give this one its own work_dir"
    return only_one(paths.work / ".runner.lock", wait=False, busy=busy)


@contextlib.contextmanager
def signals():
    """Ctrl-C, SIGTERM and a closed terminal become Stopped, so that all that was started is ended."""
    words = {signal.SIGINT: "interrupted (Ctrl-C)", signal.SIGTERM: "ended by SIGTERM",
             signal.SIGHUP: "the terminal was closed"}
    words = {n: word for n, word in words.items() if signal.getsignal(n) != signal.SIG_IGN}  # as nohup asks

    def stop(number, _frame):
        for quiet in words:  # once is enough: a second Ctrl-C must not cut the clean-up short
            signal.signal(quiet, signal.SIG_IGN)
        raise Stopped(words[number])

    before = {number: signal.signal(number, stop) for number in words}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Execution:
    """One execution of one stage, from the child's start to the records."""

    def __init__(self, stage: str, settings: Settings, paths: Paths, command: str, deadline: float):
        self.stage, self.settings, self.paths, self.deadline = stage, settings, paths, deadline
        self.scrub = scrubber(settings.full)
        self.command, self.mark = self.scrub(command), uuid.uuid4().hex
        self.state = state_folder(paths.run)
        self.partial = paths.run / f"{stem(stage)}.ipynb.partial"
        self.twin_path = paths.run / f"{stem(stage)}.json"
        self.outcome, self.progress = self.state / "outcome.json", self.state / "progress.json"
        self.log, self.started = self.state / f"{stem(stage)}.log", time.monotonic()

    def run(self, reason: str) -> dict:
        """Executes, settles the verdict, writes the records; returns the twin. Nothing started here is left running."""
        for path in (self.partial, self.outcome, self.progress):
            path.unlink(missing_ok=True)
        twin = self.unfinished("did not finish")
        write_json(self.twin_path, twin)
        report.retire_records(self.paths.run, twin, self.command)
        write_json(self.state / "status.json", {"stage": self.stage, "pid": os.getpid(), "started": time.time(),
                                                "work": str(self.paths.work)})
        index.write_index(self.paths.run)
        console.starts(self.stage, reason)
        error = self.execute()
        twin = self.verdict(error)
        book = report.finish_notebook(self.partial, self.stage, twin, self.command, self.scrub)
        report.write_records(self.paths.run, book, twin)
        self.partial.unlink(missing_ok=True)
        index.write_index(self.paths.run)
        return twin

    def execute(self) -> str:
        """Runs the child to its end, the time limit or a signal; returns what went wrong, "" if nothing did."""
        spec = {"notebook": str(notebook_of(self.stage)), "record": str(self.partial), "root": str(project_root()),
                "parameters": self.settings.given, "outcome": str(self.outcome)}
        surroundings = os.environ | {MARK: self.mark, "EAGLE3NB_PROGRESS": str(self.progress),
                                     "EAGLE3NB_COMMAND": self.command}
        child = None
        try:
            with open(self.log, "wb") as log:
                child = subprocess.Popen([sys.executable, "-m", "eagle3nb.record.execute", json.dumps(spec)],
                                         stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=project_root(),
                                         env=surroundings, start_new_session=True)
            self.follow(child)
        except Stopped as stopped:
            return str(stopped)
        finally:
            self.end(child)
            console.line_ends()
        if not self.outcome.exists():
            return f"papermill's process ended with code {child.returncode}; see {shown(self.log)}"
        return read_json(self.outcome)["error"]

    def follow(self, child: subprocess.Popen) -> None:
        while child.poll() is None:
            if time.monotonic() > self.deadline:
                raise Stopped("the time limit (--timeout) is over")
            console.progress(self.stage, self.progress, time.monotonic() - self.started)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=0.5)

    def end(self, child: subprocess.Popen | None) -> None:
        """Ends whatever is left: the kernel, what the notebook started, their children, and the child itself."""
        left = end_family(self.mark)
        if child is not None:
            child.stdin.close()
            child.wait()
        if left:
            console.warn(f"{len(left)} processes of stage {self.stage} could not be ended: {[p.pid for p in left]}")

    def verdict(self, error: str) -> dict:
        """The twin as it stands on disk, made failed where the notebook did not come to its end."""
        twin = read_json(self.twin_path)
        if not error and twin["status"] != "ok":
            error = twin.get("error", "")
            error = "the notebook ended without stage.finish" if error in ("", "did not finish") else error
        if error:
            twin.update(status="failed", error=self.scrub(error))
        else:
            twin.pop("error", None)
        twin["cost"] = twin["cost"] | {"total_s": round(time.monotonic() - self.started, 3)}
        write_json(self.twin_path, twin)
        return twin

    def unfinished(self, error: str) -> dict:
        """The twin that stands until the notebook writes its own."""
        given = self.settings.full
        return {"stage": self.stage, "status": "failed", "error": error, "parameters": shareable(given),
                "provenance": {"notebook": shown(notebook_of(self.stage)),
                               "notebook_xxh3": notebook_hash(notebook_of(self.stage)),
                               "parameters_xxh3": parameters_hash(given), "command": self.command},
                "inputs": [], "outputs": [], "result": {}, "cost": {}}
