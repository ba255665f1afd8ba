"""The pages of README and docs, and a project in which their commands are run."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tools")]  # `import pages, world`, `import reference`


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    """A world that pages start from (world.py); every page gets a copy."""
    import world

    return world.build(tmp_path_factory.mktemp("world").resolve())


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """A small store of hidden states, for `verify`."""
    import shards

    from eagle3nb.states.writing import open_writer

    folder = tmp_path_factory.mktemp("store") / "states"
    with open_writer(folder, {"rows": 6, "dtype": "fp32"}, shards.sizes(6)) as writer:
        writer.write_head(shards.head())
        writer.write(0, 5, shards.shard(0, 5, 6))
    return folder
