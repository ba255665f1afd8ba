"""One real SGLang engine on the CPU for all tests here: `make test-sglang`. Where SGLang is missing there are none."""

import importlib.util

import pytest
import torch

found = importlib.util.find_spec("sglang")  # without the package it is this folder, which lies on the path
collect_ignore_glob = [] if found and found.origin else ["test_*.py"]


TIMES = pytest.StashKey()


@pytest.fixture(scope="session")
def times(pytestconfig) -> list[str]:
    """Lines for the end of the report: what was measured on the way."""
    return pytestconfig.stash.setdefault(TIMES, [])


def pytest_terminal_summary(terminalreporter, config):
    for line in config.stash.get(TIMES, []):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def calm_target(tmp_path_factory):
    """A random Llama of 10 layers whose float32 states lie within 5e-5 of float64's: tiny_target's, made with larger
    weights so that its text varies, are off by 9e-4 themselves."""
    import tiny

    return tiny.make_target(tmp_path_factory.mktemp("calm") / "target", layers=10, initializer_range=0.08)


@pytest.fixture(scope="session")
def reference(calm_target):
    from eagle3nb.states.hf import TransformersTarget

    torch.set_num_threads(1)
    return TransformersTarget(calm_target, torch.float32, "cpu")


@pytest.fixture(scope="session")
def engine(calm_target, times):
    """Batches of at most 256 tokens, so that a few rows make several, and a long one is beyond them."""
    from eagle3nb.states import open_target

    made = open_target("sglang", calm_target, engine_args=["max_prefill_tokens=256"])
    times.append(f"SGLang {made.version}: {made.load_s:.0f} s to the first states")
    yield made
    made.close()
