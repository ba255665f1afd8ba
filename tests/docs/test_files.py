"""docs/reference/files.md against the files that the code writes."""

import json
import re
from pathlib import Path

import pages
import pandas as pd
import pytest
from safetensors import safe_open

from eagle3nb.corpus.merged import INDEX, REJECTED, REPORT, ROWS
from eagle3nb.drafter import export
from eagle3nb.states.layout import HEAD, MANIFEST, SCHEMA

SIZES = {"hidden_size": 8, "draft_vocab_size": 5, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 4,
         "num_key_value_heads": 1, "vocab_size": 50, "fc_norm": True}


@pytest.fixture(scope="module")
def sections() -> dict[str, str]:
    text = pages.text_of("docs/reference/files.md")
    return {m[1]: m[2] for m in re.finditer(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.M | re.S)}


def first_column(section: str) -> set[str]:
    """The names in back quotes in the first cell of every row."""
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_the_corpus(sections, tiny_corpus):
    assert set(pd.read_parquet(tiny_corpus / INDEX).columns) == first_column(sections["Corpus"])
    for name in (ROWS, INDEX, REJECTED, REPORT):
        assert name in pages.text_of("docs/reference/files.md")


def test_a_shard_and_the_head(sections, store):
    names = set()
    for file in store.glob("shard-*.safetensors"):
        with safe_open(file, "pt") as handle:
            names |= set(handle.keys())
    assert names | {"aux_scale", "last_scale"} == first_column(sections["Hidden states"])
    with safe_open(store / HEAD, "pt") as handle:
        assert all(f"`{name}`" in sections["Hidden states"] for name in handle.keys())  # noqa: SIM118 (no mapping)
    manifest = json.loads((store / MANIFEST).read_text())
    assert f"`schema` {SCHEMA}" in sections["Hidden states"] and manifest["schema"] == SCHEMA
    for name in manifest.keys() - {"head", "shards", "xxh3"}:
        assert f"`{name}`" in sections["Hidden states"], name


def test_the_drafters_tensors(sections):
    written = set(export.expected_shapes(SIZES))
    told = first_column(sections["Drafter"].split("With `fc_norm`")[0])
    assert written - told == {f"fc_norm.{i}.weight" for i in range(3)} and told <= written
    shapes = {name: shape for name, shape in export.expected_shapes(SIZES).items() if name in told}
    letters = {"h": 8, "3h": 24, "2h": 16, "D": 5, "V": 50, "m": 16, "q": 8, "kv": 4}
    for line in sections["Drafter"].splitlines():
        if line.startswith("| `") and (shape := re.search(r"\| \[([^\]]+)\]", line)):
            for name in re.findall(r"`([\w.]+)`", line.split("|")[1]):
                assert shapes[name] == tuple(letters[s.strip()] for s in shape[1].split(",")), name


def test_a_stages_json(sections):
    for twin in (pages.ROOT / "outputs/specimen-demo").glob("[0-9]_*.json"):
        assert set(json.loads(twin.read_text(encoding="utf-8"))) <= first_column(sections["A stage's JSON"])


def test_kinds_of_metrics(sections):
    source = "".join(path.read_text(encoding="utf-8") for path in (pages.ROOT / "eagle3nb/drafter").glob("*.py"))
    kinds = set(re.findall(r'"kind": "(\w+)"', source)) | set(re.findall(r'kind="(\w+)"', source))
    table = sections["Drafter"].split("| kind |")[1].split("\n\n")[0]
    assert kinds == first_column(table)


def test_folders_of_a_run(sections):
    from eagle3nb.record.stage import paths_of

    tree = pages.blocks("docs/reference/files.md")[0].text
    for name, path in vars(paths_of("demo")).items():
        assert name in ("run", "work") or f"    {Path(path).name}/" in tree, name
