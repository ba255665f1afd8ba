"""The model card from records as stages write them: every figure is one of theirs, what they lack is left out, and no
place of this machine gets in."""

import copy
import re
import socket

import pytest
import torch
import yaml

from eagle3nb.acceptance import card
from eagle3nb.drafter.export import export
from eagle3nb.drafter.model import DraftConfig, DraftModel
from eagle3nb.errors import UserError
from eagle3nb.files import project_root, read_json, xxh3_file
from eagle3nb.states.target import TargetFacts

FACTS = TargetFacts("LlamaForCausalLM", 32, 10, 4, 2, 8, 40, 97, 1e-5, 256, (2,), False,
                    {"theta": 10000.0, "scaling": None})
IDENTITY = {"config": "c" * 32, "weights": "d" * 32, "tokenizer": "e" * 32}
PROVENANCE = {"commit": "0123456789abcdef", "dirty": True, "versions": {"eagle3nb": "0.1.0", "torch": "2.13.0+cpu"},
              "system": "Linux x86_64", "command": "eagle3nb run params/demo --run demo",
              "folders": {"inputs": ["/secret/place/data"], "outputs": []}}


def row(steps, source, tau, low, high, prompts=5):
    return {"steps": steps, "source": source, "tau": tau, "low": low, "high": high, "delivered_per_verify": tau,
            "prompts": prompts, "tokens": 900, "verifies": 500, "accepted": 321, "delivered": 800}


def records() -> dict:
    sources = [{"name": "A2_chat", "records": 36, "tokens": 9121, "supervised": 7572, "lines": 36},
               {"name": "B1_code", "records": 44, "tokens": 9090, "supervised": 7096, "lines": 44}]
    return {
        "merge": {"parameters": {"data_root": "/secret/data"}, "provenance": PROVENANCE, "result": {"merge": {
            "sources": sources, "records": 80, "tokens": 18211, "supervised": 14668, "max_seq_len": 1024,
            "exclude": ["A1"], "truncated_records": 3, "corpus_hash": "f" * 32}}},
        "training": {"parameters": {"target": "/secret/model", "work_dir": "/secret/work", "ttt_steps": 3, "epochs": 4,
                                    "learning_rate": 3e-4, "freeze_head": False, "initialise": "fitted"},
                     "provenance": PROVENANCE, "result": {
            "parameters_trained": 7448832, "coverage": 0.97145, "identity": "40e6c5b3b753a6a1",
            "last": {"tokens": 314016, "step": 834}, "best": {"step": 800, "accuracy": [0.4401, 0.4021, 0.3711]}}},
        "evaluation": {"parameters": {"steps": 2, "max_new_tokens": 64, "prompts": "/secret/heldout.jsonl"}, "result": {
            "acceptance": [row(1, "all", 1.4221, 1.3859, 1.4571, 55), row(2, "all", 1.5812, 1.5201, 1.6402, 55),
                           row(2, "A2_chat", 1.5179, 1.3368, 1.7162), row(2, "B1_code", 1.6351, float("nan"), None, 1),
                           row(1, "A2_chat", 1.1111, 1.0, 1.2)],
            "answers": [{"source": "A2_chat", "looping": 2}, {"source": "all", "looping": 7}],
            "decode": {"prompts": 32, "same_text": 32, "same_counts": 31, "speed": [{"tokens_per_s": 3.27}]},
            "export_parity": 4.8e-7}},
    }


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    model = DraftModel(DraftConfig.from_target(FACTS, 28), torch.randn(97, 32), torch.arange(28))
    export(model, tmp_path / "export", target_layers=10, eos=(2,))
    return tmp_path / "export"


def written(folder, **changes) -> str:
    return card.write(folder, **{**records(), "target": FACTS, "identity": IDENTITY, **changes}).read_text()


def front_matter(text: str) -> dict:
    return yaml.safe_load(text.split("---\n")[1])


def test_the_figures_are_the_records(folder):
    text = written(folder, base_model="someone/Model-8B")
    for line in ("| 1 | 1.42 | 1.39 to 1.46 | 500 | 321 |", "| 2 | 1.58 | 1.52 to 1.64 | 500 | 321 |",
                 "| A2_chat | 1.52 | 1.34 to 1.72 | 5 | 500 |", "| B1_code | 1.64 | – | 1 | 500 |",
                 "| A2_chat | 36 | 9,121 | 7,572 |", "| all | 80 | 18,211 | 14,668 |", "| learning rate | 0.0003 |",
                 "| head frozen | no |", "| the merged corpus | " + "f" * 32, "| the target's weights | " + "d" * 32,
                 "# EAGLE-3 drafter for Model-8B"):
        assert line in text, line
    for words in ("answers of at most 64 tokens, 55 prompts", "same text 32 times, the same counts 31 times",
                  "longer than 1,024 tokens were cut (3 of them). Left out: A1.", "7,448,832 parameters trained; "
                  "314,016 tokens seen in 834", "at step 800: accuracy by step 0.440 / 0.402 / 0.371",
                  "28 of 97 tokens", "97.1 % of the generated tokens", "the target's context is 256",
                  "hidden states 2, 5, 7", "within 4.8e-07", "7 of the answers measured end in a loop",
                  "eagle3nb 0.1.0, torch 2.13.0+cpu, commit 0123456789ab with changes."):
        assert words in text, words
    assert "1.11" not in text and "3.27" not in text  # another number of steps; PyTorch's own speed
    for name in card.FILES:
        assert f"| {name} | {(folder / name).stat().st_size:,} | {xxh3_file(folder / name)} |" in text
    assert front_matter(text) == {
        "library_name": "sglang", "pipeline_tag": "text-generation", "base_model": "someone/Model-8B",
        "tags": ["eagle3", "speculative-decoding", "draft-model", "sglang", "vllm"]}
    assert {path.name for path in folder.iterdir()} == {*card.FILES, "README.md"}


def test_commands_draft_as_many_tokens_as_the_headline(folder):
    text = written(folder)
    assert "--speculative-num-steps 2 \\\n  --speculative-eagle-topk 1 --speculative-num-draft-tokens 3" in text
    assert '\'{"method": "eagle3", "model": "DRAFTER", "num_speculative_tokens": 2}\'' in text
    assert "SGLang makes float16 unless --dtype" in text and "base_model" not in front_matter(text)


def test_what_the_records_lack_is_left_out(folder):
    empty = {"training": {"parameters": {}, "result": {}}, "merge": {"result": {}},
             "evaluation": {"parameters": {}, "result": {}}}
    text = written(folder, **empty)
    assert re.findall(r"^## (.*)$", text, re.M) == ["Serve it", "Limits", "Identity"]
    assert not re.search(r"None|nan|\{\}|\[\]", text) and "Made with" not in text
    full = records()
    del full["evaluation"]["result"]["decode"], full["training"]["result"]["best"]
    text = written(folder, **full)
    assert "real draft-and-verify" not in text and "834 optimiser steps." in text


def test_served_figures_and_the_check_in_sglang(folder):
    served = {"SGLang on one GPU, 8 at once": [{"run": "alone", "tokens_per_s": 29.604, "speedup": None},
                                               {"run": "3 drafted", "tokens_per_s": 1061.2, "speedup": 2.1349}],
              "nothing": []}
    report = {"engine": "SGLang", "checked": True, "version": "0.5.23", "max_relative": 2.8e-6,
              "by_step": [0, 0, 2.8e-6], "argmax_equal": 72, "compared": 72}
    text = written(folder, served=served, parity=report)
    assert "## Served\n\nSGLang on one GPU, 8 at once\n\n| run | tokens_per_s | speedup |" in text
    assert "| alone | 29.60 | – |\n| 3 drafted | 1,061 | 2.13 |" in text
    assert "SGLang 0.5.23's own class: within 2.8e-06 of the largest over 3 steps, argmax equal at 72 of 72." in text
    missing = {"engine": "SGLang", "checked": False, "reason": "not checked in SGLang: /opt/python"}
    assert "Not loaded in SGLang where this was made" in written(folder, parity=missing)


def test_no_place_of_this_machine_enters(folder, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-box-7")
    text = written(folder)
    assert "secret" not in text and "gpu-box-7" not in text and str(folder) not in text
    for place in ("/secret/data/B1", "see ~/data", "/tmp", "gpu-box-7", r"C:\Users\x", str(folder.parent)):
        bad = copy.deepcopy(records())
        bad["merge"]["result"]["merge"]["sources"][1]["name"] = place
        (folder / "README.md").unlink(missing_ok=True)
        with pytest.raises(UserError, match="a place of this machine"):
            written(folder, **bad)
        assert not (folder / "README.md").exists()
    fine = records()
    fine["merge"]["result"]["merge"]["sources"][1]["name"] = "either/or, 3/4, and/or /generate, https://example.org/a/b"
    assert "/generate" in written(folder, **fine)


@pytest.mark.parametrize("name", ["/models/kimi", "kimi", "a/b/c", "a/b\nlicense: x"])
def test_a_base_model_is_a_hubs_name(folder, name):
    with pytest.raises(UserError, match="owner/name"):
        written(folder, base_model=name)


def test_a_card_of_real_records(folder):
    """The committed specimen's: every total of its evaluation, every source of its corpus."""
    run = project_root() / "outputs" / "specimen-demo"
    given = {stage: read_json(run / f"{number}_{stage}.json") for number, stage in
             ((2, "merge"), (3, "extraction"), (4, "training"), (5, "evaluation"))}
    text = written(folder, **given)
    totals = [row for row in given["evaluation"]["result"]["acceptance"] if row["source"] == "all"]
    assert totals and all(f"| {row['steps']} | {row['tau']:.2f} | {row['low']:.2f} to {row['high']:.2f} |" in text
                          for row in totals)
    assert all(f"| {source['name']} | {source['records']:,} |" in text
               for source in given["merge"]["result"]["merge"]["sources"])
    assert re.findall(r"^## (.*)$", text, re.M) == ["Acceptance length", "Serve it", "Data", "Training", "Limits",
                                                    "Checked", "Identity"]
    assert "None" not in text and "nan" not in text


def test_the_embedded_target_has_a_name(folder):
    given = records()["training"]
    given["parameters"]["target"] = "embedded"
    assert front_matter(written(folder, training=given))["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
