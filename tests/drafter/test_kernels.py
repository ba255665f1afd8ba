"""Runs interpreted_kernels.py, and the kernels' benchmark at its smallest, in processes whose Triton interprets."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs pip install triton==3.9.0")


def interpreted(*arguments) -> str:
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=850,
                          env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def test_kernels_in_the_interpreter():
    told = interpreted("-m", "pytest", "-p", "no:cacheprovider", "-v", HERE / "interpreted_kernels.py")
    assert int(re.search(r"(\d+) passed", told).group(1)) >= 21 and "skipped" not in told


def test_benchmark_at_its_smallest(tmp_path):
    """Shapes, references and the table; the figures of an interpreter mean nothing."""
    benchmark = HERE.parent / "benchmarks" / "attention_and_loss.py"
    told = interpreted(benchmark, "--tiny", "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert {row["what"] for row in found["rows"]} == {"attention forward", "attention backward", "cross-entropy"}
    assert all(row["error"] < 1e-5 for row in found["rows"] if row["by"] == "kernel")
    assert "fraction" in told
