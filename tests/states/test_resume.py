"""Extractions that are killed, share a folder, or wait: each ends with the store of an undisturbed one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Enough rows for some fifty shards of one or two."""
    import tiny

    return tiny.make_corpus(tmp_path_factory.mktemp("many"), rows=80, max_seq_len=128, seed=3)


@pytest.fixture(autouse=True)
def siblings(monkeypatch):
    """What a test starts finds the modules of tests/ too."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)


def run(scenarios, *arguments) -> None:
    script = Path(__file__).with_name("extracting.py")
    done = subprocess.run([sys.executable, script, *arguments, *scenarios], capture_output=True, text=True, timeout=840)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def test_killed_twenty_times_the_store_ends_the_same(tiny_target, rows, tmp_path):
    run(["killed"], tiny_target, rows, tmp_path)


def test_two_processes_share_a_store(tiny_target, rows, tmp_path):
    """From its first moment on; with one of them killed; with one that stands still, and goes on or dies."""
    run(["shared", "one_killed", "stopped"], tiny_target, rows, tmp_path)
