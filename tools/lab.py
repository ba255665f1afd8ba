"""JupyterLab as this project's workplace: `python tools/lab.py [options of jupyter lab]`, or `make lab`.

The launcher has a section with the notebooks and the records, the table of contents stands open at the right, and a
write-protected record cannot be overwritten, by root neither. All of it lies in tools/lab and holds for this start
alone: nothing is installed, and the user's own settings stay what they are.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "tools" / "lab"


def surroundings() -> dict[str, str]:
    """The server's environment: tools/lab ahead of the user's own configuration, this environment's kernel first."""
    def first(name: str) -> str:
        return os.pathsep.join(filter(None, [str(HERE), os.environ.get(name, "")]))

    return os.environ | {"JUPYTER_CONFIG_PATH": first("JUPYTER_CONFIG_PATH"), "JUPYTER_PATH": first("JUPYTER_PATH"),
                         "JUPYTER_PREFER_ENV_PATH": "1"}


def command(options: list[str], root: Path = ROOT) -> list[str]:
    """`jupyter lab` on the project, at the notebooks. Containers of rented machines have no other user than root."""
    as_root = ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    return [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={root}",
            f"--FileContentsManager.preferred_dir={root / 'notebooks'}", *as_root, *options]


def main() -> None:
    print("JupyterLab opens on notebooks/; its address is the line with `token=` below. From another machine:\n"
          "  ssh -N -L 8888:localhost:8888 USER@MACHINE", flush=True)
    os.execve(sys.executable, command(sys.argv[1:]), surroundings())


if __name__ == "__main__":
    main()
