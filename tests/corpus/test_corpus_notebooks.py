"""The audit and merge notebooks, cell by cell in this process, on a tiny target; the form that every notebook keeps."""

import json
import random
import shutil
from pathlib import Path

import pytest

from eagle3nb.corpus.masks import encode, render
from eagle3nb.errors import UserError
from eagle3nb.files import read_json

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 8, "num_attention_heads": 4,
          "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 512, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
          "max_position_embeddings": 2048, "eos_token_id": 2, "tie_word_embeddings": True}


def rows(tokenizer, seed, count, words=8):
    rng = random.Random(seed)
    for n in range(count):
        question, answer = (" ".join(rng.choices(["owls", "sing", "the", "93", "jars"], k=k)) for k in (5, words))
        turns = zip(("user", "assistant"), (f"{question} {n}", f"{answer} {seed}"), strict=True)
        messages = [{"role": role, "content": text} for role, text in turns]
        ids = encode(tokenizer, render(tokenizer, messages))
        start = len(encode(tokenizer, render(tokenizer, messages[:1], generation=True)))
        mask = [int(start <= t < len(ids) - 1) for t in range(len(ids))]
        yield {"id": f"{seed}-{n}", "messages": messages, "input_ids": ids, "loss_mask": mask}


@pytest.fixture
def unseen(monkeypatch):
    """Figures are made but not drawn: the larger part of a notebook's seconds."""
    monkeypatch.setattr("eagle3nb.record.figures.png", lambda _: ("", 1))


@pytest.fixture
def project(tmp_path, write, chatml, monkeypatch):
    """A project's root of its own, with a tiny target and three datasets, one of them too long."""
    shutil.copytree(NOTEBOOKS, tmp_path / "notebooks", ignore=lambda _, names: [n for n in names if n[0] == "."])
    (tmp_path / "params").mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / "target/config.json").write_text(json.dumps(CONFIG))
    chatml.save_pretrained(tmp_path / "target")
    for seed, (name, words) in enumerate([("A1_long", 200), ("A2_chat", 8), ("B1_code", 12)]):
        write(tmp_path / f"data/{name}/part.jsonl.gz", rows(chatml, seed, 30, words))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(name, **overrides):
    """Every code cell in order, parameters replaced after their cell; what the cells left behind."""
    names = {}
    for cell in read_json(f"notebooks/{name}.ipynb")["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
            if "parameters" in cell["metadata"].get("tags", []):
                names |= {"run": "t", "target": "target", "data_root": "data", "max_seq_len": 128,
                          "benchmarks": [], **overrides}
    return names


def test_audit_then_merge(project, capsys):
    run("1_audit", lengths=[32], draft_vocab_size=128)
    audit = read_json("outputs/t/1_audit.json")
    found = read_json("outputs/t/work/audit/findings.json")
    assert audit["status"] == "ok" and {f["severity"] for f in found["findings"]} == {"info"}
    assert {(f["rule"], f["source"]) for f in found["findings"]} == {
        ("disproportionate", "A1_long"), ("truncation_loss", "A1_long"), ("vocab_coverage", "")}
    assert [source["source"] for source in found["sources"]] == ["A1_long", "A2_chat", "B1_code"]
    names = run("2_merge")
    merge = read_json("outputs/t/2_merge.json")
    assert merge["status"] == "ok" and merge["result"]["forecast"] == "Every line is as the audit foretold."
    assert merge["result"]["console"] == found["forecast"] and len(names["corpus"]) == 60
    assert found["forecast"][-1] in capsys.readouterr().out
    plan = read_json("outputs/t/work/audit/plan.json")
    assert plan["forecast"]["tokens"] == names["corpus"].tokens and plan["layers"] == [2, 4, 5]
    h, size = 32, 128  # fc, q k v, o, the MLP, four norms, the head
    trainable = 3 * h * h + 2 * h * (32 + 16 + 16) + 32 * h + 3 * h * 64 + 4 * h + size * h
    assert plan["draft"] == {"draft_vocab_size": size, "trainable": trainable, "frozen": 512 * h, "head": size * h,
                             "head_rows": 3 * plan["forecast"]["teacher_positions"],
                             "training_bytes": plan["memory"]["training"]["total"]}
    assert plan["draft"]["training_bytes"] > 16 * trainable + 2 * 512 * h


@pytest.mark.parametrize(("line", "words"), [
    (b'{"input_ids": [1, 2', "B1_code/more.jsonl line 1.*json_invalid"),
    ({"input_ids": [1, 512], "loss_mask": [0, 1]}, r"input_ids\[1\] = 512.*512 tokens.*token_out_of_range"),
    ({"input_ids": [1, 2, 3], "loss_mask": [1, 1]}, "2 values for 3 tokens.*length_mismatch")])
def test_bad_rows_stop_the_audit_after_it_has_written_what_it_found(project, unseen, write, line, words):
    write(project / "data/B1_code/more.jsonl", [line])
    with pytest.raises(UserError, match=words):
        run("1_audit", draft_vocab_size=128)
    assert read_json("outputs/t/1_audit.json")["status"] == "failed"
    [red] = [f for f in read_json("outputs/t/work/audit/findings.json")["findings"] if f["severity"] == "red"]
    assert run("1_audit", draft_vocab_size=128, allow=[red["rule"]])["verdict"].startswith("1 red")
    run("2_merge")
    assert read_json("outputs/t/work/corpus/merge.json")["skipped"] == {red["rule"]: 1}


@pytest.mark.parametrize(("change", "words"), [
    ({"data_root": "nowhere"}, "nowhere does not exist"),
    ({"exclude": ["A3"]}, "'A3' matches no dataset in .*there are A"),
    ({"allow": ["schem"]}, "did you mean 'schema'"), ({"states_dtype": "fp16"}, "fp16"),
    ({"masks": "none"}, "choose 'own'"), ({"target": "data"}, "config.json")])
def test_parameters_that_cannot_be_meant_are_one_line(project, unseen, change, words):
    with pytest.raises(UserError, match=words) as error:
        run("1_audit", draft_vocab_size=128, **change)
    assert "\n" not in str(error.value)


def test_an_empty_dataset_and_a_small_disk_stop_the_run(project, unseen, monkeypatch):
    (project / "data/C_empty").mkdir()
    with pytest.raises(UserError, match="C_empty: 0 files.*empty_source"):
        run("1_audit", draft_vocab_size=128)
    (project / "data/C_empty").rmdir()
    monkeypatch.setattr("eagle3nb.states.plan.disk_free", lambda _: 1000)
    with pytest.raises(UserError, match="disk_short"):
        run("1_audit", draft_vocab_size=128)


def test_a_plan_from_the_config_alone(project):
    for path in project.glob("target/[!c]*"):
        path.unlink()  # no tokenizer
    run("1_audit", data_root="to/come", planned_records=10, planned_tokens=1000, draft_vocab_size=128)
    plan = read_json("outputs/t/work/audit/plan.json")
    assert plan["planned"] and plan["disk"]["needed"] > 1000 * 4 * 32 * 2
    with pytest.raises(UserError, match="does not exist"):
        run("2_merge", data_root="to/come")


def test_the_merge_says_when_the_data_changed_since_the_audit(project, unseen, write, chatml):
    run("1_audit", draft_vocab_size=128)
    write(project / "data/B1_code/new.jsonl", rows(chatml, 9, 2))
    with pytest.raises(UserError, match="run the audit again"):
        run("2_merge")


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("[0-9]_*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_keeps_the_form(path):
    book = json.loads(path.read_text())
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    parameters = [cell for cell in code if "parameters" in cell["metadata"].get("tags", [])]
    assert len(parameters) == 1 and book["metadata"]["kernelspec"]["name"] == "python3"
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
    assert all(len("".join(cell["source"]).splitlines()) <= 10 for cell in code if cell not in parameters)
    assert "record.start(" in "".join(code[1]["source"]) and "stage.finish(" in "".join(code[-1]["source"])
