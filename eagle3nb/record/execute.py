"""The child process in which papermill runs one notebook: `python -m eagle3nb.record.execute SPEC`, SPEC in JSON.

It writes how that ended to spec["outcome"]: {"kind": "ok" | "cell" | "died" | "papermill", "error": one line}.
papermill itself records a killed kernel as a success, so nothing it writes is trusted for the verdict. Its standard
input is a pipe from the runner: when that closes, the runner is dead, and all that was started here ends too.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import papermill
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import DeadKernelError
from papermill.exceptions import PapermillExecutionError

from eagle3nb.files import write_json
from eagle3nb.record.family import MARK, end_family

ended: list[int] = []  # the kernel's exit code, once it has died by itself


class OwnKernel(AsyncKernelManager):
    """A kernel of this very environment, whatever kernels the user has installed as "python3"."""

    @property
    def kernel_spec(self):
        return KernelSpec(**get_kernel_dict())

    async def _async_is_alive(self):
        if self.has_kernel and (code := await self.provisioner.poll()) is not None:
            ended.append(code)
        return await super()._async_is_alive()

    is_alive = _async_is_alive


def end_with_runner() -> None:
    """Waits for the runner's end of the pipe to close; then ends the kernel and all else."""
    os.read(sys.stdin.fileno(), 1)  # not sys.stdin.read: its lock would be held when the interpreter ends
    end_family(os.environ[MARK])
    os._exit(1)


def out_of_memory_kills() -> int:
    """How often the system has killed a process of this container for want of memory (0 where it does not tell)."""
    try:
        lines = Path("/sys/fs/cgroup/memory.events").read_text().split("\n")
        return int(dict(line.split() for line in lines if line)["oom_kill"])
    except (OSError, KeyError, ValueError):
        return 0


def cause_of_death(kills_before: int) -> str:
    code = ended[-1] if ended else 0
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    if out_of_memory_kills() > kills_before:
        return f"the kernel was killed ({how}): memory ran out"
    if code == -signal.SIGKILL:
        return f"the kernel was killed ({how}), most often because memory ran out"
    return f"the kernel died ({how})"


def execute(spec: dict) -> dict:
    kills = out_of_memory_kills()
    try:
        papermill.execute_notebook(
            spec["notebook"], spec["record"], spec["parameters"], kernel_name="python3", progress_bar=False,
            cwd=spec["root"], start_timeout=180, iopub_timeout=120, coalesce_streams=True,
            kernel_manager_class=OwnKernel)
    except PapermillExecutionError as error:
        name = "" if error.ename == "UserError" else f"{error.ename}: "
        return {"kind": "cell", "error": name + " ".join(str(error.evalue).split())}
    except Exception as error:  # whatever papermill or nbclient raise: the stage has failed, and this says why
        if ended or isinstance(error, DeadKernelError):
            return {"kind": "died", "error": cause_of_death(kills)}
        return {"kind": "papermill", "error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
    return {"kind": "ok", "error": ""}


def main() -> None:
    spec = json.loads(sys.argv[1])
    threading.Thread(target=end_with_runner, daemon=True).start()
    write_json(spec["outcome"], execute(spec))


if __name__ == "__main__":
    main()
