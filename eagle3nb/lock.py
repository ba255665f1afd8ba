"""One process at a time: a lock file, freed by the system when its holder ends, however it ends."""

import fcntl
from contextlib import contextmanager
from pathlib import Path

from eagle3nb.errors import UserError
from eagle3nb.files import shown


@contextmanager
def only_one(path: Path, wait: bool = True, busy: str = ""):
    """Hold the lock file `path`. A second process waits; with `wait=False` it gets UserError(busy) at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = open(path, "w")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise UserError(f"cannot write {shown(path)}: {error.strerror}; make its folder writable") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise UserError(busy) from None
        yield
    finally:
        handle.close()
