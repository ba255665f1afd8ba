"""Profiles against notebooks: types by the annotation, names by the nearest right one."""

import json
import re

import pytest
import yaml
from papermill.iorw import NoDatesSafeLoader

from eagle3nb.errors import UserError
from eagle3nb.record.declared import Parameter, check, coerce, declared, notebook_hash
from eagle3nb.record.params import Loader, chosen_stages, load

COMMON = 'run: str = "demo"  # the run\nseed: int = 1\n'
CELLS = {
    "1_audit": COMMON + 'allow: list[str] = []  # rule ids\n',
    "2_merge": COMMON + 'masks: str = "own"  # whose masks\nlearning_rate: float = 3.0e-4\nhalve: bool = False\n',
}


def notebook(parameters: str, tags=("parameters",)) -> dict:
    cell = {"cell_type": "code", "id": "p", "metadata": {"tags": list(tags)}, "source": parameters.splitlines(True),
            "outputs": [], "execution_count": None}
    return {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "params" / "tiny").mkdir(parents=True)
    for name, source in CELLS.items():
        (tmp_path / "notebooks" / f"{name}.ipynb").write_text(json.dumps(notebook(source)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(project, **files):
    for name, text in files.items():
        (project / "params" / "tiny" / f"{name}.yml").write_text(text)


def test_declared_reads_names_types_defaults_and_comments(project):
    found = declared(project / "notebooks" / "2_merge.ipynb")
    assert found["learning_rate"] == Parameter("learning_rate", "float", 3.0e-4, "")
    assert found["masks"] == Parameter("masks", "str", "own", "whose masks")


@pytest.mark.parametrize("source, said", [("a: int = 2\nb: int = a * 2", "must be a literal"),
                                          ('a: int = "2"', "must be int")])
def test_a_default_that_overrides_would_miss_is_refused(tmp_path, source, said):
    (tmp_path / "n.ipynb").write_text(json.dumps(notebook(source)))
    with pytest.raises(UserError, match=said):
        declared(tmp_path / "n.ipynb")


def test_the_notebook_hash_sees_sources_and_not_outputs(tmp_path):
    book, path = notebook("a: int = 1"), tmp_path / "n.ipynb"
    hashes = []
    printed = {"outputs": [{"output_type": "stream", "name": "stdout", "text": "x"}]}
    for change in ({}, printed, {"source": "a: int = 2"}):
        book["cells"][0].update(change)
        path.write_text(json.dumps(book))
        hashes.append(notebook_hash(path))
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("kind, given, wanted", [
    ("float", "1e-4", 1e-4), ("float", 3, 3.0), ("int", "007", 7), ("int", "1e4", 10000), ("int", 1e4, 10000),
    ("bool", "false", False), ("list[str]", "A1, B2", ["A1", "B2"]), ("list[int]", "[1, 2]", [1, 2]),
    ("list[str]", "", []),
    ("str", "010", "010"), ("int | None", "none", None), ("list[float]", [1, 2.5], [1.0, 2.5]), ("str", "", "")])
def test_values_become_what_the_annotation_says(kind, given, wanted):
    value = coerce(Parameter("x", kind, wanted, ""), given)
    assert value == wanted and type(value) is type(wanted)


@pytest.mark.parametrize("kind, given", [
    ("int", 1.5), ("int", True), ("float", True), ("bool", 1), ("str", 7), ("list[str]", [1]), ("float", "much"),
    ("float", "nan"), ("int", "inf"), ("float", float("inf")), ("list[int]", "1,x"), ("int", None), ("bool", "2")])
def test_values_that_do_not_fit_are_refused(kind, given):
    with pytest.raises(UserError, match=r"parameter x must be"):
        coerce(Parameter("x", kind, None, ""), given)


def test_a_number_that_yaml_took_for_text_is_named_with_its_right_spelling():
    for text, right in (("1e-4", "1.0e-4"), ("1.25e4", "1.25e+4")):
        with pytest.raises(UserError, match=re.escape(f"write {right}")):
            check(Parameter("x", "float", 0.0, ""), text)
        assert yaml.safe_load(text) == text and yaml.safe_load(right) == float(text)


def test_layers_win_in_their_order(project):
    write(project, common="seed: 5\n", merge="learning_rate: 1e-4\nseed: 6\n")
    found = load("tiny", ("audit", "merge"), [("seed", "7")])
    assert found["audit"].full == {"run": "tiny", "seed": 7, "allow": []}
    assert found["merge"].given == {"run": "tiny", "seed": 7, "learning_rate": 1e-4}
    write(project, common="run: mine\nseed: 5\n")
    assert load("tiny", ("merge",))["merge"].full["run"] == "mine"
    assert load("tiny", ("merge",), run="other")["merge"].full == {
        "run": "other", "seed": 6, "masks": "own", "learning_rate": 1e-4, "halve": False}


@pytest.mark.parametrize("files, said", [
    ({"merge": "learning_rat: 1"},
     r"params/tiny/merge.yml: notebooks/2_merge.ipynb .*'learning_rat'; did you mean learning_rate"),
    ({"audit": "masks: own"}, r"audit.yml: .*'masks'; merge has it"),
    ({"common": "sed: 1"}, r"common.yml: no notebook has .*'sed'; did you mean seed"),
    ({"common": "masks: own"}, r"common.yml: 'masks' is unknown to audit"),
    ({"merge": "seed: soon"}, r"merge.yml: parameter seed must be int, not str 'soon'"),
    ({"merge": "seed: 1\nseed: 2"}, r"merge.yml is not valid YAML: .*key seed stands there twice"),
    ({"merge": "- seed"}, r"merge.yml must hold lines"),
    ({"merge": "a: [1"}, r"merge.yml is not valid YAML"),
    ({"mrege": "seed: 1"}, r"mrege.yml belongs to no stage; did you mean merge")])
def test_a_wrong_profile_is_refused_with_file_and_remedy(project, files, said):
    write(project, **files)
    with pytest.raises(UserError, match=said):
        load("tiny", ("audit", "merge"))


def test_wrong_names_on_the_command_line(project):
    write(project)
    for call, said in ((lambda: load("tinny"), "did you mean tiny"),
                       (lambda: chosen_stages("audit,merg"), "did you mean merge"),
                       (lambda: load("tiny", ("audit",), [("sed", "1")]), "did you mean seed"),
                       (lambda: load("tiny", ("audit",), [("masks", "own")]), "merge has it, which is not run"),
                       (lambda: load("tiny", ("training",)), "4_training.ipynb does not exist")):
        with pytest.raises(UserError, match=said):
            call()
    assert chosen_stages("merge, audit") == ("audit", "merge")
    assert chosen_stages("merge,synthesis") == ("synthesis", "merge")
    assert chosen_stages("") == ("audit", "merge", "extraction", "training", "evaluation")  # what may cost money


def test_yaml_is_read_as_papermill_reads_it():
    text = "a: 2026-01-01\nb: 1e-4\nc: 1.0e-4\nd: 010\ne: on\nf: [x, 1]\ng: 12:30:45\nh: {i: ~}\n"
    assert yaml.load(text, Loader=Loader) == yaml.load(text, Loader=NoDatesSafeLoader)


@pytest.mark.parametrize("value", ["-1", -1])
def test_a_negative_limit_is_refused_since_it_would_mean_all_rows(value):
    from eagle3nb.record.declared import coerce, declared, notebook_of

    with pytest.raises(UserError, match="limit must be 0"):
        coerce(declared(notebook_of("merge"))["limit"], value)
