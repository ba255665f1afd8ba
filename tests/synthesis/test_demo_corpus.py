"""The committed corpus and the evaluation prompts: what the audit, the merge and the evaluation may rely on."""

import gzip
import json
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import xxhash

from eagle3nb.corpus.masks import (
    encode,
    find_markers,
    mask_from_markers,
    mask_from_prefixes,
    render,
    teacher_positions,
)
from eagle3nb.synthesis.prompts import expand, load_recipes, write_held_out
from eagle3nb.synthesis.talks import looping

DATA = Path(__file__).resolve().parents[2] / "data"
RECIPES = {recipe.name: recipe for recipe in load_recipes(DATA / "prompts")}
END, VOCABULARY = 2, 49152  # SmolLM2: <|im_end|>; ids are 0 … 49151
SEED = 1


@cache
def rows_of(name):
    with gzip.open(DATA / "demo" / name / "part-000.jsonl.gz", "rt", encoding="utf-8") as handle:
        return [json.loads(line) for line in handle]


@cache
def tokenizer():
    from eagle3nb.states.target import load_tokenizer, target_dir
    return load_tokenizer(target_dir("embedded"))


@cache
def corpus_prompts():
    """Every text that a corpus row says before an answer, A1 included."""
    return [message["content"] for recipe in RECIPES.values() for prompt in expand(recipe, SEED)
            for turn in (prompt.opening, *prompt.later) for message in turn if message["role"] != "system"]


@cache
def held_out():
    return [json.loads(line) for line in (DATA / "heldout.jsonl").read_text(encoding="utf-8").splitlines()]


def answers_in(row) -> int:
    return int(np.count_nonzero(np.diff([0, *row["loss_mask"]]) == 1))


def tokens(name):
    return sum(len(row["input_ids"]) for row in rows_of(name))


def test_ten_kinds_of_a_size_that_ten_minutes_allow():
    folders = sorted(path.name for path in (DATA / "demo").iterdir() if path.is_dir())
    assert folders == sorted(RECIPES)
    assert [name.split("_")[0] for name in folders] == ["A1", "A2", *(f"B{i}" for i in range(1, 9))]
    assert sum(path.stat().st_size for path in (DATA / "demo").rglob("*") if path.is_file()) <= 4_000_000
    sizes = {name: tokens(name) for name in folders}
    long = sizes.pop("A1_longform")
    assert 60_000 <= sum(sizes.values()) <= 100_000
    assert long > 2 * max(sizes.values()), "A1 is to be out of proportion"
    lengths = [len(row["input_ids"]) for row in rows_of("A1_longform")]
    assert np.mean(lengths) > 2 * max(tokens(name) / len(rows_of(name)) for name in sizes)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_row_is_a_sound_record(name):
    rows, markers = rows_of(name), find_markers(tokenizer())
    assert len({row["id"] for row in rows}) == len(rows) >= 20
    for row in rows:
        ids, mask = np.array(row["input_ids"]), np.array(row["loss_mask"])
        assert len(ids) == len(mask) and ids.min() >= 0 and ids.max() < VOCABULARY, row["id"]
        assert set(mask.tolist()) == {0, 1} and len(teacher_positions(mask)), row["id"]
        assert np.array_equal(mask, mask_from_markers(ids, markers)), row["id"]
        assert (row["finish"] == "stop") == (ids[mask == 1][-1] == END) == ("messages" in row), row["id"]
        if "messages" in row:
            whole, derived = mask_from_prefixes(row["messages"], tokenizer())
            assert np.array_equal(whole, ids) and np.array_equal(derived, mask), row["id"]


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_rows_answer_the_prompts_of_the_recipe(name):
    """The prompt tokens of each row are those of the prompt with its id, and no answer loops."""
    prompts = {prompt.id: prompt for prompt in expand(RECIPES[name], SEED)}
    for row in rows_of(name):
        begin = encode(tokenizer(), render(tokenizer(), list(prompts[row["id"]].opening), generation=True))
        assert row["input_ids"][:len(begin)] == begin, row["id"]
        assert row["loss_mask"][:len(begin) + 1] == [0] * len(begin) + [1], row["id"]
        starts = np.flatnonzero(np.diff([0, *row["loss_mask"], 0]))
        for first, last in zip(starts[::2], starts[1::2], strict=True):
            assert not looping([token for token in row["input_ids"][first:last] if token != END]), row["id"]


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_the_report_beside_it_is_right(name):
    report = json.loads((DATA / "demo" / f"{name}.json").read_text())
    rows = rows_of(name)
    packed = (DATA / "demo" / name / "part-000.jsonl.gz").read_bytes()
    assert report["xxh3"] == xxhash.xxh3_128_hexdigest(packed)
    assert (report["records"], report["tokens"]) == (len(rows), tokens(name))
    assert report["supervised"] == sum(sum(row["loss_mask"]) for row in rows)
    assert report["cut_at_limit"] == sum(row["finish"] == "length" for row in rows)
    assert report["answers"]["stop"] + report["answers"].get("length", 0) == \
        sum(map(answers_in, rows))


def test_some_conversations_have_several_turns():
    turns = Counter(answers_in(row) for name in RECIPES for row in rows_of(name))
    assert turns[2] >= 40 and turns[1] >= 200


def test_held_out_prompts_are_those_of_the_recipes(tmp_path):
    write_held_out(DATA / "prompts", tmp_path / "held.jsonl", SEED)
    assert (tmp_path / "held.jsonl").read_bytes() == (DATA / "heldout.jsonl").read_bytes()


def test_five_held_out_prompts_of_each_kind():
    kinds = Counter(row["source"] for row in held_out())
    assert set(kinds) == set(RECIPES) - {"A1_longform"}
    assert min(kinds.values()) >= 5 and kinds.total() >= 45
    texts = [row["messages"][-1]["content"] for row in held_out()]
    assert len(set(texts)) == len(texts)


def test_no_held_out_prompt_occurs_in_the_corpus():
    prompts = {plain(text) for text in corpus_prompts()}
    answers = " ".join(plain(tokenizer().decode(row["input_ids"])) for name in RECIPES for row in rows_of(name))
    for row in held_out():
        text = plain(row["messages"][-1]["content"])
        assert text not in prompts and text not in answers, row["id"]


def test_held_out_prompts_are_not_near_copies():
    """At most half of a held-out prompt's runs of four words stand in any one corpus prompt."""
    corpus = [set(grams(text)) for text in corpus_prompts()]
    for row in held_out():
        own = grams(row["messages"][-1]["content"])
        shared = max(sum(gram in other for gram in own) for other in corpus)
        assert shared <= 0.5 * len(own), (row["id"], row["messages"][-1]["content"])


def plain(text):
    return " ".join("".join(c if c.isalnum() else " " for c in text.lower()).split())


def grams(text, n=4):
    words = plain(text).split()
    return [tuple(words[i:i + n]) for i in range(len(words) - n + 1)]


def test_the_overlap_is_seen_where_there_is_one():
    assert grams("How do I boil an egg?")[0] == ("how", "do", "i", "boil")
    assert set(grams("How do I boil an egg?")) & set(grams("Tell me: how do I boil rice?"))
