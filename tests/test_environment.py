"""environment.yml, pyproject.toml and the notebooks' committed state stay consistent."""

import ast
import json
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def requirements(lines):
    return {Requirement(line).name: Requirement(line) for line in lines}


def test_environment_is_the_gpu_extra_spelt_out():
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pip = next(entry["pip"] for entry in conda if isinstance(entry, dict))
    assert "-e ." in pip
    listed = requirements(line for line in pip if not line.startswith("-e"))
    core, gpu = requirements(PROJECT["dependencies"]), requirements(PROJECT["optional-dependencies"]["gpu"])
    for name in ("jupyterlab", "papermill", "pandas", "matplotlib"):
        assert str(listed.pop(name).specifier) == str(core[name].specifier), name
    assert {name: str(r.specifier) for name, r in listed.items()} == {name: str(r.specifier) for name, r in gpu.items()}


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_every_extra_pins_inside_the_package_s_range(extra):
    core = requirements(PROJECT["dependencies"])
    for name, requirement in requirements(PROJECT["optional-dependencies"][extra]).items():
        pins = [s.version for s in requirement.specifier if s.operator == "=="]
        if name in core and pins:
            assert core[name].specifier.contains(pins[0]), f"{name}=={pins[0]} is outside {core[name].specifier}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_committed_clean(path):
    notebook = json.loads(path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    tagged = [cell for cell in code if "parameters" in cell["metadata"].get("tags", [])]
    assert len(tagged) == 1
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in code:
        lines = "".join(cell["source"]).splitlines()
        assert cell in tagged or len(lines) <= 10, f"{path.name}, cell {cell['id']}: {len(lines)} lines"
    for node in ast.parse("".join(tagged[0]["source"])).body:
        assert isinstance(node, ast.AnnAssign), "a parameter has a type"
        ast.literal_eval(node.value)


def test_the_common_parameters_stand_in_every_notebook_alike():
    from papermill import inspect_notebook

    common = yaml.safe_load((ROOT / "params/demo/common.yml").read_text())
    declared = [inspect_notebook(str(path)) for path in NOTEBOOKS]
    assert len(declared) == 6
    for name in common:
        texts = {(notebook[name]["inferred_type_name"], notebook[name]["default"]) for notebook in declared}
        assert len(texts) == 1, f"{name} differs between the notebooks: {texts}"


def test_files_stay_readable_in_one_sitting():
    long = {p.relative_to(ROOT).as_posix(): n for p in (ROOT / "eagle3nb").rglob("*.py")
            if (n := len(p.read_text().splitlines())) > 400}
    assert not long
