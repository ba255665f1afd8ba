"""Prompts: the same file and seed give the same prompts, a corpus can grow, and nothing unknown is let through."""

import json
from collections import Counter

import pytest

from eagle3nb.errors import UserError
from eagle3nb.synthesis.prompts import expand, expand_held_out, load_recipe, load_recipes, write_held_out

GOOD = """
about: two kinds of question
system: Be brief.
count: 9
max_new_tokens: 16
temperature: 0.5
top_p: 0.9
turns: [0.5, 0.5]
prompts: ["What is time?", ["How are you?", "And now?"]]
templates: ["What is {thing}?", "Compare {thing} and {other}."]
slots: {thing: [tea, milk, rain], other: [snow, wind]}
follow_ups: ["More about {thing}?", {tool: '{{"{other}": 1}}'}]
held_out: {count: 2, prompts: ["Who are you?"], templates: ["Where is {place}?"], slots: {place: [Rome, Oslo]}}
"""


def recipe(tmp_path, text=GOOD, name="X1_test"):
    path = tmp_path / f"{name}.yml"
    path.write_text(text, encoding="utf-8")
    return load_recipe(path)


def texts(prompts):
    return [prompt.opening[-1]["content"] for prompt in prompts]


def test_same_seed_same_prompts_and_other_seed_others(tmp_path):
    one = recipe(tmp_path)
    assert expand(one, 1) == expand(recipe(tmp_path), 1)
    assert expand(one, 1) != expand(one, 2)
    assert len(set(texts(expand(one, 1)))) == 9


def test_a_larger_count_only_adds(tmp_path):
    small = expand(recipe(tmp_path, GOOD.replace("count: 9", "count: 5")), 3)
    assert expand(recipe(tmp_path), 3)[:5] == small


def test_hand_written_first_then_every_template_in_turn(tmp_path):
    prompts = expand(recipe(tmp_path), 1)
    assert texts(prompts)[:2] == ["What is time?", "How are you?"]
    assert [m["content"] for turn in prompts[1].later for m in turn] == ["And now?"]
    assert prompts[0].opening[0] == {"role": "system", "content": "Be brief."}
    starts = Counter(text.split()[0] for text in texts(prompts)[2:])
    assert starts == {"What": 3, "Compare": 4}  # three things; the other template fills the count


def test_follow_ups_speak_of_the_same_slots(tmp_path):
    later = [(p.opening[-1]["content"], message) for p in expand(recipe(tmp_path), 1)[2:]
             for turn in p.later for message in turn]
    assert later
    for opening, message in later:
        said = message["content"].removeprefix("More about ").removesuffix("?").strip('{}": 1')
        assert said in opening
        assert message["role"] == ("tool" if message["content"].startswith("{") else "user")


def test_shares_of_turns_are_met(tmp_path):
    words = json.dumps([f"w{i}" for i in range(200)])
    many = GOOD.replace("count: 9", "count: 400").replace("[tea, milk, rain]", words)
    turns = Counter(len(prompt.later) for prompt in expand(recipe(tmp_path, many), 1)[2:])
    assert set(turns) == {0, 1}
    assert abs(turns[1] / 398 - 0.5) < 0.1  # four standard deviations of a fair coin


@pytest.mark.parametrize("old, new, word", [
    ("about:", "abuot:", "abuot"),
    ("temperature: 0.5", "temperature: hot", "temperature"),
    ("count: 9", "count: 0", "count"),
    ("count: 9", "count: true", "count"),
    ("count: 9", "", "count is missing"),
    ("count: 9", "count: 40", "distinct"),
    ("top_p: 0.9", "top_p: 1.5", "top_p"),
    ("turns: [0.5, 0.5]", "turns: [0.5, 0.4]", "sum to 1"),
    ("turns: [0.5, 0.5]", "turns: [0.2, 0.2, 0.2, 0.4]", "follow_ups"),
    ("What is {thing}?", "What is {thong}?", "thong"),
    ("What is {thing}?", "What is {thing?", "fault"),
    ("[snow, wind]", "[snow, snow]", "distinct values"),
    ("held_out: {count: 2,", "held_out: {cuont: 2,", "cuont"),
    ("[\"What is time?\",", "[3,", "wants texts"),
    ("about: two", "about: [two", "YAML"),
])
def test_faults_are_one_line_that_names_them(tmp_path, old, new, word):
    assert old in GOOD
    with pytest.raises(UserError, match=word) as caught:
        expand(recipe(tmp_path, GOOD.replace(old, new)), 1)
    assert "\n" not in str(caught.value)
    assert "X1_test" in str(caught.value)


def test_a_folder_without_recipes_or_with_another_name_is_refused(tmp_path):
    with pytest.raises(UserError, match="no .yml"):
        load_recipes(tmp_path)
    recipe(tmp_path)
    with pytest.raises(UserError, match="X1_test"):
        load_recipes(tmp_path, ["X2"])


def test_held_out_prompts_are_written(tmp_path):
    held = expand_held_out(recipe(tmp_path), 1)
    assert texts(held)[0] == "Who are you?"
    assert sorted(texts(held)[1:]) == ["Where is Oslo?", "Where is Rome?"]
    assert write_held_out(tmp_path, tmp_path / "held.jsonl", 1) == 3
    rows = [json.loads(line) for line in (tmp_path / "held.jsonl").read_text().splitlines()]
    assert [row["messages"][-1]["content"] for row in rows] == texts(held)
    assert {row["source"] for row in rows} == {"X1_test"}
