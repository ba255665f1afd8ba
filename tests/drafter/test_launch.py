"""The training process seen from a notebook: a real store on disk, a real subprocess, and what is left of it."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3nb.drafter.launch import launch
from eagle3nb.drafter.model import DraftModel
from eagle3nb.drafter.settings import Settings
from eagle3nb.errors import UserError
from eagle3nb.states.store import Store, open_writer


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny target's directory, and a store of the synthetic chain over the target's own embedding and head."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("synthetic", Path(__file__).with_name("conftest.py"))
    synthetic = module_from_spec(spec)
    spec.loader.exec_module(synthetic)
    root = tmp_path_factory.mktemp("training")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        hidden_size=32, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2, intermediate_size=40,
        vocab_size=97, max_position_embeddings=256, tie_word_embeddings=False)).save_pretrained(root / "target")
    store = synthetic.make_store(rows=40, seed=2)
    rows = store.rows
    ids = [torch.from_numpy(row.ids) for row in rows]
    writer = open_writer(root / "states", {"corpus": "synthetic"}, {
        "hidden": 32, "vocab": 97, "rows": 40, "tokens": int(store.lengths.sum())})
    writer.write_head({"embedding": store.embedding(), "lm_head": store._lm_head, "final_norm": torch.ones(32)})

    def offsets(sizes):
        return torch.tensor([0, *sizes]).cumsum(0)

    writer.write(0, 39, {
        "input_ids": torch.cat(ids), "loss_mask": torch.cat([torch.from_numpy(row.mask) for row in rows]),
        "aux": torch.cat([row.aux for row in rows]).bfloat16(),
        "last": torch.cat([row.last for row in rows]).bfloat16(),
        "row_offsets": offsets(map(len, ids)), "rows": torch.arange(40),
        "last_offsets": offsets(len(row.last_positions) for row in rows),
        **{name: torch.cat([torch.from_numpy(getattr(row, name)) for row in rows])
           for name in ("last_positions", "teacher_argmax", "teacher_lse")}})
    return root


def settings_for(root, name, **changes) -> Settings:
    values = {"epochs": 3, "pack_tokens": 96, "learning_rate": 3e-3, "validation_share": 0.15, **changes}
    return Settings(states=str(root / "states"), drafter=str(root / name), target=str(root / "target"), **values)


def test_trains_in_a_process_and_tells_as_it_goes(folders):
    seen = []
    lines = launch(settings_for(folders, "drafter"), range(97), lambda lines: seen.append(len(lines)))
    assert lines[0]["kind"] == "start" and lines[-1]["kind"] == "end" and seen[-1] == len(lines)
    assert lines[-1]["tokens"] == lines[0]["total_tokens"]
    curve = [line for line in lines if line["kind"] == "validation"]
    assert curve[-1]["loss"] < curve[0]["loss"] and len(curve) == 4
    DraftModel.load(folders / "drafter", Store.open(folders / "states").embedding())


def test_its_own_error_is_the_notebooks_error(folders):
    with pytest.raises(UserError, match="leaves none to train on"):
        launch(settings_for(folders, "bad", validation_share=0.9999), range(97))


def test_it_ends_with_the_process_that_started_it(folders):
    """A notebook's kernel that is killed: its training is gone soon after, and what it left can be resumed."""
    kernel = textwrap.dedent(f"""
        from eagle3nb.drafter.launch import launch
        from eagle3nb.drafter.settings import Settings
        launch(Settings(states={str(folders / "states")!r}, drafter={str(folders / "orphan")!r},
                        target={str(folders / "target")!r}, epochs=300, pack_tokens=96), range(97))
    """)
    parent = subprocess.Popen([sys.executable, "-c", kernel], stdout=subprocess.DEVNULL, env=os.environ)
    try:
        deadline = time.monotonic() + 60
        while not (folders / "orphan" / "metrics.jsonl").is_file() and time.monotonic() < deadline:
            time.sleep(0.1)
        children = psutil.Process(parent.pid).children()
        assert len(children) == 1
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert not alive and (folders / "orphan" / "settings.json").is_file()
