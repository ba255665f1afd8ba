"""Notebook 0, cell by cell in this process, against a server of the tests: out of budget, on to the end, answered anew;
then the audit reads what was made."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from synthesis.faulty_server import FaultyServer
from synthesis.speaking import END, PLAIN, naive, tokenizer_of

from eagle3nb.errors import UserError
from eagle3nb.files import read_json

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 8, "num_attention_heads": 4,
          "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 262, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
          "max_position_embeddings": 2048, "eos_token_id": END, "tie_word_embeddings": True}
SECRET = "sk-secret-0123456789"
PROMPTS = [{"id": f"p{n}", "messages": [{"role": "user", "content": f"Tell me about {what}."} for what in told]}
           for n, told in enumerate([["owls"], ["jars", "blue jars"], ["tea"], ["rain", "snow"]])]


@pytest.fixture
def project(tmp_path, monkeypatch):
    shutil.copytree(NOTEBOOKS, tmp_path / "notebooks", ignore=lambda _, names: [n for n in names if n[0] == "."])
    for folder in ("params", "target"):
        (tmp_path / folder).mkdir()
    (tmp_path / "target/config.json").write_text(json.dumps(CONFIG))
    tokenizer_of(PLAIN).save_pretrained(tmp_path / "target")
    (tmp_path / "C1_mine.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TEST_KEY", SECRET)
    monkeypatch.setattr("eagle3nb.record.figures.png", lambda _: ("", 1), raising=False)
    return tmp_path


def run(name: str, **overrides) -> dict:
    """Every code cell in order, parameters replaced after their cell; what the cells left behind."""
    names = {}
    for cell in read_json(f"notebooks/{name}.ipynb")["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
            if "parameters" in cell["metadata"].get("tags", []):
                names |= {"run": "t", "target": "target", "data_root": "data", "exclude": [], **overrides}
    return names


def rows(dataset: str) -> list[dict]:
    return [json.loads(line) for line in gzip.open(f"data/{dataset}/part-000.jsonl.gz")]


def test_out_of_budget_then_to_the_end_then_anew_then_audited(project, capsys):
    asked = {"prompts": ["C1_mine.jsonl"], "max_new_tokens": 80, "key_variable": "TEST_KEY", "concurrency": 2}

    def said(body):
        return f"Much is known about it: {body['messages'][-1]['content']}"

    def ids(body):
        return naive([(f"I read {len(body['input_ids'])} bytes of this.<|im_end|>", 1)])[0]

    anew = asked | {"prompts": [], "api": "sglang", "regenerate": ["C1_mine"]}
    with FaultyServer(say=said, ids=ids) as up:
        run("0_synthesis", endpoint=up.url + "/v1", budget_requests=3, **asked)
        twin = read_json("outputs/t/0_synthesis.json")
        assert twin["status"] == "ok" and twin["result"]["incomplete"] and len(up.seen) == 3
        assert twin["result"]["verdict"].startswith("amber: incomplete (") and "off-policy" in twin["result"]["verdict"]
        run("0_synthesis", endpoint=up.url + "/v1", prices={"prompt": 1.0, "completion": 2.0}, **asked)
        twin = read_json("outputs/t/0_synthesis.json")
        assert not twin["result"]["incomplete"] and len(up.seen) == 6 and twin["result"]["records"] == 4
        given = {"given": 6, "succeeded": 6, "failed": 0, "skipped": 0}
        assert twin["result"]["accounts"] == [{"dataset": "C1_mine"} | given]
        assert [entry["path"] for entry in twin["inputs"]] == ["target/config.json", "C1_mine.jsonl"]
        assert [entry["path"] for entry in twin["outputs"]] == ["data/C1_mine/part-000.jsonl.gz", "data/C1_mine.json"]
        assert all(seen.key == SECRET for seen in up.seen)
        with pytest.raises(UserError, match="C1_mine_on_policy is for the target's own answers"):
            run("0_synthesis", endpoint=up.url, **anew)
        run("0_synthesis", endpoint=up.url, **anew, on_policy=True)
    other, own = rows("C1_mine"), rows("C1_mine_on_policy")
    assert [row["on_policy"] for row in other + own] == [False] * 4 + [True] * 4
    for before, after in zip(other, own, strict=True):
        assert before["id"] == after["id"] and before["messages"][::2] == after["messages"][::2]
        assert [m["role"] for m in before["messages"]] == [m["role"] for m in after["messages"]]
    run("1_audit", benchmarks=[], lengths=[64], draft_vocab_size=128, allow=["vocab_coverage"])
    assert read_json("outputs/t/1_audit.json")["status"] == "ok"
    told = capsys.readouterr().out
    for path in [p for p in Path().rglob("*") if p.is_file()]:
        assert SECRET not in path.read_bytes().decode("utf-8", "replace"), path
    assert SECRET not in told
