"""The committed notebooks and profiles keep the rules that records and runner rely on."""

import json
import re
from pathlib import Path

import pytest

from eagle3nb.record.declared import STAGES, declared, notebook_of, source_of, stem
from eagle3nb.record.params import declarations, load
from eagle3nb.record.provenance import BASE, LAYERS

ROOT = Path(__file__).resolve().parents[2]
COMMON = {"run": "str", "work_dir": "str", "data_root": "str", "target": "str", "engine": "str", "max_seq_len": "int",
          "exclude": "list[str]", "seed": "int", "limit": "int"}
present = [stage for stage in STAGES if (ROOT / "notebooks" / f"{stem(stage)}.ipynb").exists()]
profiles = sorted(p.name for p in (ROOT / "params").iterdir() if p.is_dir()) if (ROOT / "params").is_dir() else []


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("stage", present)
def test_a_notebook_is_bare_short_and_opens_and_closes_its_stage(stage):
    book = json.loads(notebook_of(stage).read_text())
    code = [c for c in book["cells"] if c["cell_type"] == "code"]
    assert book["metadata"]["kernelspec"]["name"] == "python3" and "papermill" not in book["metadata"]
    assert all(not c["outputs"] and c["execution_count"] is None for c in code)
    ids = [c["id"] for c in book["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in code:
        if "parameters" not in cell["metadata"].get("tags", []):
            assert len(source_of(cell).strip().splitlines()) <= 10, source_of(cell)
    assert f'record.start("{stage}", globals())' in source_of(code[1])
    assert "stage.finish(" in source_of(code[-1]) and book["cells"][0]["cell_type"] == "markdown"


@pytest.mark.parametrize("stage", present)
def test_parameters_are_typed_commented_and_named_alike(stage):
    found = declared(notebook_of(stage))
    assert {name: found[name].kind for name in COMMON if name in found} == COMMON
    assert [name for name, p in found.items() if not p.meaning] == []


@pytest.mark.parametrize("stage", present)
def test_a_notebook_computes_with_the_layers_its_code_hash_covers(stage):
    cells = json.loads(notebook_of(stage).read_text())["cells"]
    text = "\n".join(source_of(c) for c in cells if c["cell_type"] == "code")
    used = set(re.findall(r"(?:from|import) eagle3nb\.(\w+)", text)) - {"record"}
    assert used <= {*LAYERS[stage], *(name.removesuffix(".py") for name in BASE)}


@pytest.mark.parametrize("profile", profiles)
def test_profiles_fit_the_notebooks(profile):
    assert set(load(profile, tuple(declarations()))) == set(declarations())
