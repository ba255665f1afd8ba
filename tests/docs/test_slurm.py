"""The one-node script when its time is up, with everything real but Slurm and the run itself."""

import os
import signal
import subprocess

import pages
import world as worlds
from waiting import until

RUN = "trap 'echo ended >> ended; exit 1' TERM\n: > started\nwhile :; do read -rt 1 <> <(:) || :; done"


def script(name: str) -> str:
    return next(b.text for b in pages.blocks("docs/how-to/slurm.md") if f"# {name}: " in b.text)


def started(made, run: str) -> tuple[subprocess.Popen, dict]:
    """The script under bash, once the run in it (`run` is what that does) has begun, and bash waits for it, behind its
    trap: so says its trace."""
    worlds.ACTIONS["eagle3nb"] = run
    try:
        made.stand_in(made.project / ".venv/bin/eagle3nb")
    finally:
        del worlds.ACTIONS["eagle3nb"]
    made.write_file("job.sbatch", script("one-node.sbatch"))
    surroundings = {"PATH": str(made.folder / "bin"), "HOME": str(made.folder / "home"), "SLURM_JOB_ID": "7",
                    "SLURM_SUBMIT_DIR": str(made.project)}
    with open(made.folder / "trace", "w+") as trace:
        process = subprocess.Popen([made.bash, "-x", "job.sbatch"], cwd=made.project, env=surroundings, stderr=trace)
    until(lambda: process.poll() is not None or (made.project / "started").exists()
          and "\n+ wait " in (made.folder / "trace").read_text())
    return process, surroundings


def test_out_of_time_it_ends_the_run_and_asks_to_be_requeued(base, tmp_path):
    made = worlds.World(base, tmp_path / "w")
    process, _ = started(made, RUN)
    os.kill(process.pid, signal.SIGUSR1)
    assert process.wait(600) == 0
    assert (made.project / "ended").read_text() == "ended\n"
    assert made.log.read_text().split("\x1e")[-2].split("\x1f")[4:6] == ["requeue", "7"]


def test_a_run_that_fails_by_itself_ends_the_job(base, tmp_path):
    made = worlds.World(base, tmp_path / "w")
    process, _ = started(made, ": > started; exit 1")
    assert process.wait(600) == 1 and "requeue" not in made.log.read_text()
