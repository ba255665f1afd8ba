"""The training process seen from a notebook: a real store on disk, a real subprocess, and what is left of it."""

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from ports import free_port
from transformers import LlamaConfig, LlamaForCausalLM
from waiting import PATIENCE, gone, until

from eagle3nb.drafter.curves import read_metrics
from eagle3nb.drafter.elastic import ended
from eagle3nb.drafter.initialise import target_weights
from eagle3nb.drafter.launch import failure, launch, stop
from eagle3nb.drafter.model import DraftModel
from eagle3nb.drafter.settings import Machines, Settings
from eagle3nb.drafter.train import train
from eagle3nb.errors import UserError
from eagle3nb.files import write_json
from eagle3nb.states.store import Store, open_writer
from eagle3nb.states.target import facts_of


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


def kernel(root, name, **changes) -> subprocess.Popen:
    """A notebook's kernel that launches: settings and machines from `changes`; its last line says how it ended."""
    machines = {key: changes.pop(key) for key in list(changes) if key in Machines.__dataclass_fields__}
    settings = asdict(settings_for(root, name, **changes))
    code = textwrap.dedent(f"""
        from eagle3nb.drafter.launch import launch
        from eagle3nb.drafter.settings import Machines, Settings
        from eagle3nb.errors import UserError
        try:
            lines = launch(Settings(**{settings!r}), range(97), machines=Machines(**{machines!r}))
            print("lines", len(lines))
        except UserError as error:
            print("error", error)
    """)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ)


def test_it_ends_with_the_process_that_started_it(folders):
    """A notebook's kernel that is killed: its training is gone soon after, and what it left can be resumed."""
    parent = kernel(folders, "orphan", epochs=3000)
    try:
        until((folders / "orphan" / "metrics.jsonl").is_file)
        children = psutil.Process(parent.pid).children()
        assert len(children) == 1
    finally:
        parent.kill()
        parent.wait()
    assert gone(children[0].pid) and (folders / "orphan" / "settings.json").is_file()


def test_torchrun_starts_again_and_ends_with_the_kernel(folders):
    """Two processes: one is killed, and both start again from a checkpoint; then the kernel is killed, and all end."""
    metrics, log = folders / "several" / "metrics.jsonl", folders / "several" / "train.log"

    def reached():
        return max((line["step"] for line in read_metrics(metrics)), default=0)

    parent = kernel(folders, "several", processes=2, max_restarts=1, epochs=3000, accumulate=3, checkpoint_every=2,
                    evaluate_every=20)                        # which does not end by itself
    try:
        until(lambda: reached() > 4)
        (agent,) = psutil.Process(parent.pid).children()
        first = agent.children()
        assert len(first) == 2
        first[1].kill()
        until(lambda: "resumed at step" in log.read_text())
        second, at = agent.children(), reached()
        until(lambda: reached() > at)
    finally:
        parent.kill()
        parent.wait()
    assert all(gone(process.pid) for process in (agent, *first, *second))


def test_an_interrupt_saves_what_several_have_done(folders, monkeypatch):
    """And one process alone goes on with it."""
    monkeypatch.setattr("eagle3nb.drafter.launch.stop", partial(stop, patience=PATIENCE))

    def interrupt(lines):
        if lines[-1]["step"] > 3:
            raise KeyboardInterrupt

    long = {"epochs": 3000, "accumulate": 3, "evaluate_every": 2}  # which does not end by itself
    with pytest.raises(KeyboardInterrupt):
        launch(settings_for(folders, "interrupted", **long), range(97), interrupt, Machines(processes=2))
    folder = folders / "interrupted"
    step = read_metrics(folder / "metrics.jsonl")[-1]["step"]
    assert (folder / "checkpoints" / f"step-{step:06d}" / "state.json").is_file()
    assert "interrupted; the next start goes on from its checkpoint" in (folder / "train.log").read_text()
    write_json(folder / "vocabulary.json", {"ids": list(range(97))})
    calls = iter(range(10))
    with pytest.raises(KeyboardInterrupt):
        train(settings_for(folders, "interrupted", **long), Store.open(folders / "states"),
              facts_of(folders / "target"), None, stop=lambda: next(calls) == 2)
    assert read_metrics(folder / "metrics.jsonl")[-1]["step"] == step + 3


def test_several_processes_do_not_stream(folders, monkeypatch, capsys):
    monkeypatch.setattr("eagle3nb.drafter.launch.streams", lambda folder: True)
    with pytest.raises(UserError, match="states that stream are read by one training process; set processes to 1"):
        launch(settings_for(folders, "streamed"), range(97), machines=Machines(processes=2))
    assert not (folders / "streamed").exists()


def test_the_line_of_a_failure(tmp_path):
    """The last `error:` of this start, whoever wrote it; else what is known of the end."""
    told = ["error: row 7 is damaged (process 1 of 2)", "Traceback", "process 0 ended with exit code 1"]
    assert failure(1, told, tmp_path / "train.log") == "row 7 is damaged (process 1 of 2)"
    assert failure(1, [ended({1: -9, 0: 1})], tmp_path).startswith("training process 1 was killed by SIGKILL, usually")
    assert "exit code 3 (no output)" in failure(3, [], tmp_path)
    assert failure(-9, told, tmp_path).startswith("training was killed by SIGKILL, usually for lack of memory")
    assert failure(0, [], tmp_path).startswith("training was interrupted; the next start")


def test_two_machines_are_one_training(folders):
    """One process each, the second with a disk of its own, on which it needs nothing and leaves nothing."""
    where = f"127.0.0.1:{free_port()}"
    settings = [settings_for(folders, name, accumulate=3) for name in ("alone", "here", "elsewhere")]
    with ThreadPoolExecutor(2) as machines:
        both = [machines.submit(launch, settings[1 + rank], range(97), machines=Machines(
            nodes=2, node_rank=rank, rendezvous=where)) for rank in range(2)]
    assert both[1].result() == [] and both[0].result()[-1]["kind"] == "end" and both[0].result()[0]["processes"] == 2
    assert {path.name for path in (folders / "elsewhere").iterdir()} == {
        "settings.json", "train-1.log", "vocabulary.json"}
    write_json(folders / "alone" / "vocabulary.json", {"ids": list(range(97))})
    train(settings[0], Store.open(folders / "states"), facts_of(folders / "target"),
          lambda: target_weights(folders / "target"))
    losses = [[line["loss"] for line in of if line["kind"] == "train"]
              for of in (both[0].result(), read_metrics(folders / "alone" / "metrics.jsonl"))]
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parametrize(("machines", "message"), [
    ({"processes": -1}, "0 or more"), ({"nodes": 2}, "host:port"), ({"nodes": 2, "rendezvous": "box"}, "host:port"),
    ({"node_rank": 1}, "0 … nodes − 1"), ({"processes": "2"}, "must be int"),
])
def test_machines_are_strict(machines, message):
    assert Machines.of({"processes": 2, "epochs": 3}) == Machines(processes=2)
    with pytest.raises(UserError, match=message):
        Machines.of(machines)


def test_who_is_to_blame():
    """A process that is killed takes others with it; what torchrun itself kills comes last."""
    assert ended({0: 1, 1: -9, 2: -15}) == ("error: training process 1 was killed by SIGKILL, usually for lack of "
                                            "memory: lower pack_tokens; run again to resume")
    assert ended({2: 1, 1: 3}) == "process 1 ended with exit code 3"
    assert ended({0: 1, 3: -11}).startswith("error: training process 3 was killed by SIGSEGV; run")
