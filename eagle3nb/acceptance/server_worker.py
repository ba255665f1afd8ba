"""The process that is SGLang's server: python -m eagle3nb.acceptance.server_worker --model-path … (its own arguments).

It runs SGLang's launcher unchanged, and ends when its input ends: that is when whoever started it closes it or is gone,
however that happened. SGLang's processes go first; what they left in shared memory goes with them, since SGLang ends
them by a kill.
"""

import os
import runpy
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil

# What 0.5.23 maps in /dev/shm: 16 KB a server, 25 MB where it is tensor-parallel. A semaphore of 32 bytes stays behind.
SHARED = ("sglang_loads_", "sgl_shm_")


def main() -> None:
    threading.Thread(target=end_with, args=(sys.stdin,), daemon=True).start()
    runpy.run_module("sglang.launch_server", run_name="__main__")


def end_with(stream) -> None:
    """Wait for the end of `stream`; then end this process and all that it started."""
    stream.read()
    shared = set()
    children = psutil.Process().children(recursive=True)
    for process in [psutil.Process(), *children]:
        with suppress(psutil.Error):
            shared |= {Path(region.path) for region in process.memory_maps() if is_shared(region.path)}
    for child in children:
        with suppress(psutil.Error):
            child.kill()
    for file in shared:
        file.unlink(missing_ok=True)
    os._exit(0)


def is_shared(path: str) -> bool:
    return Path(path).parent == Path("/dev/shm") and Path(path).name.startswith(SHARED)


if __name__ == "__main__":
    main()
