"""SGLang's command lines in README and docs against SGLang's own parser: in its environment, by `make test-sglang`."""

import argparse
import importlib.util
import shlex

import pages
import pytest

found = importlib.util.find_spec("sglang")  # without the package it is the folder tests/sglang, which lies on the path


def command_lines() -> list[list[str]]:
    """The words behind `python -m sglang.launch_server`, of every block that has it."""
    found = [line for page in pages.names() for block in pages.blocks(page) if block.language in ("sh", "bash")
             for line in block.text.replace("\\\n", " ").splitlines() if "sglang.launch_server" in line]
    return [shlex.split(line.partition("sglang.launch_server")[2]) for line in found]


@pytest.mark.skipif(not (found and found.origin), reason="SGLang is not in this environment: make test-sglang")
def test_sglang_takes_these_flags():
    args = importlib.import_module("sglang.srt.server_args")
    parser = argparse.ArgumentParser(exit_on_error=False)
    args.ServerArgs.add_cli_args(parser)
    lines = command_lines()
    assert len(lines) >= 3
    for words in lines:
        assert parser.parse_args(words).model_path
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parser.parse_args(["--model-path", "M", "--speculative-steps-number", "3"])
