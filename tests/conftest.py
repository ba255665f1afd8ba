"""One thread a test (the machine's cores are shared), no network, and the tiny target and corpus."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))  # `import tiny`, under --import-mode=importlib

import pytest


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory) -> Path:
    """A random Llama of 8 layers, h 64, V 256, untied, with a ChatML tokenizer: a model directory."""
    import tiny

    return tiny.make_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory) -> Path:
    """24 rows of random conversations (up to 128 tokens), merged: a corpus directory."""
    import tiny

    return tiny.make_corpus(tmp_path_factory.mktemp("tiny"))
