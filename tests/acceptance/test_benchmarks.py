"""Prompts are read strictly, answers are cut where they end and kept by content, loops are told from text."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from eagle3nb.acceptance import benchmarks
from eagle3nb.acceptance.benchmarks import Prompt, answers, load_prompts, looping, overview, render, spread
from eagle3nb.errors import UserError

GOOD = {"id": "a", "source": "chat", "messages": [{"role": "user", "content": "Hello?"}]}


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_prompts_are_read_in_order(tmp_path):
    path = write(tmp_path / "held.jsonl", GOOD, "", {**GOOD, "id": "b", "source": "code"})
    read = [(p.id, p.source, p.messages[0]["content"]) for p in load_prompts(path)]
    assert read == [("a", "chat", "Hello?"), ("b", "code", "Hello?")]


def test_a_limit_is_for_each_source(tmp_path):
    rows = [{**GOOD, "id": f"{source}{i}", "source": source} for i in range(3) for source in ("chat", "code")]
    path = write(tmp_path / "held.jsonl", *rows, {**GOOD, "id": "only", "source": "maths"})
    assert [p.id for p in load_prompts(path, 2)] == ["chat0", "code0", "chat1", "code1", "only"]
    assert len(load_prompts(path)) == 7


def test_spread():
    assert spread(list(range(10)), 4) == [0, 2, 5, 7] and spread([1, 2], 5) == [1, 2] and spread([1, 2], 0) == []


@pytest.mark.parametrize("line, said", [
    ('{"id": "x", "source":', "not valid JSON"),
    ("[1, 2]", "exactly the keys"),
    ({**GOOD, "id": "x", "extra": 1}, "exactly the keys"),
    ({"id": "x", "source": "chat"}, "exactly the keys"),
    ({**GOOD, "id": 3}, "id and source"),
    ({**GOOD, "id": "x", "source": ""}, "id and source"),
    ({**GOOD, "id": "x", "source": "all"}, "names the total"),
    ({**GOOD, "id": "x", "messages": []}, "messages wants"),
    ({**GOOD, "id": "x", "messages": [{"role": "user"}]}, "role and a content"),
    ({**GOOD, "id": "x", "messages": [*GOOD["messages"], {"role": "assistant", "content": "Hi"}]}, "nothing is left"),
    (GOOD, "line 1 already")])
def test_a_fault_is_one_line_with_its_place(tmp_path, line, said):
    path = write(tmp_path / "held.jsonl", GOOD, line)
    with pytest.raises(UserError, match="line 2") as caught:
        load_prompts(path)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_no_file_and_no_prompt(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        load_prompts(tmp_path / "nowhere.jsonl")
    with pytest.raises(UserError, match="holds no prompt"):
        load_prompts(write(tmp_path / "empty.jsonl", ""))


def test_rendering_opens_the_assistants_turn():
    seen = {}

    class Tokenizer:
        def apply_chat_template(self, messages, **options):
            seen.update(options, messages=messages)
            return [5, 6, 7]

    (prompt,) = render([Prompt("a", "chat", ({"role": "user", "content": "Hi"},))], Tokenizer())
    assert prompt.ids == (5, 6, 7) and seen["add_generation_prompt"] is True and prompt.id == "a"
    assert seen["messages"] == [{"role": "user", "content": "Hi"}]


def test_loops():
    rng = np.random.default_rng(0)
    text = rng.permutation(1000)[:40].tolist()
    assert looping(text + [7] * 24)                              # one token over and over
    assert looping(text + [1, 2, 3, 4, 5] * 5)                   # a phrase
    assert looping(text + text)                                  # a long block, twice
    assert looping(text + text + text[:11])                      # cut in the middle of its third copy
    assert looping([*range(3), *([9] * 23), 9])


def test_not_loops():
    rng = np.random.default_rng(0)
    text = rng.permutation(1000)[:40].tolist()
    assert not looping([])
    assert not looping(text)
    assert not looping(text + [7] * 23)                          # a ruler of dashes
    assert not looping([7] * 60 + text)                          # got out of it
    assert not looping(text + [1, 2, 3, 4, 5] * 4)               # 20 tokens
    assert not looping(text + text[:39])                         # the second copy is not whole
    numbered = [token for i in range(20) for token in (i + 500, 1, 2, 3)]
    assert not looping(numbered)                                 # a list whose numbers go on


class Target:
    """Answers prompt [p] by p, p+1, p+2, …; counts what it was asked."""

    def __init__(self, folder, eos=(30,)):
        self.dir, self.facts, self.asked = folder, SimpleNamespace(eos=eos, max_positions=100), []

    def generate(self, prompts, *, max_new_tokens, temperature, stop_ids, beyond, batch, done):
        self.asked += prompts
        assert temperature == 0.0
        texts = [list(range(p[-1] + 1, p[-1] + 1 + max_new_tokens)) for p in prompts]
        ends = [next((i + 1 for i, t in enumerate(text) if t in stop_ids), max_new_tokens) for text in texts]
        for i in reversed(range(len(prompts))):  # rows finish in any order
            done(i, list(range(prompts[i][-1] + 1, prompts[i][-1] + 1 + ends[i] + beyond)))


@pytest.fixture
def target(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmarks, "target_identity", lambda folder: {"weights": str(folder)})
    return Target("one")


PROMPTS = [Prompt("a", "chat", ids=(1, 2, 27)), Prompt("b", "code", ids=(5,))]


def test_answers_end_at_their_stop_token_or_limit(target, tmp_path):
    first, second = answers(target, PROMPTS, max_new_tokens=6, beyond=2, cache_dir=tmp_path)
    assert (first.ids, first.beyond, first.stopped) == ((28, 29, 30), (31, 32), True)
    assert (second.ids, second.beyond, second.stopped) == ((6, 7, 8, 9, 10, 11), (12, 13), False)
    assert (first.start, first.end) == (3, 6) and first.sequence.tolist() == [1, 2, 27, 28, 29, 30, 31, 32]
    assert first.sequence.dtype == np.int32
    total = overview([first, second]).set_index("source").loc["all"].to_dict()
    assert total == {"prompts": 2, "prompt tokens": 4, "answer tokens": 9, "stopped": 1, "looping": 0}


def test_examples_show_one_answer_a_source(target, tmp_path):
    messages = ({"role": "user", "content": "Why? " * 100},)
    asked = [Prompt(p.id, p.source, messages, p.ids) for p in [*PROMPTS, PROMPTS[0]]]
    taken = answers(target, asked, max_new_tokens=6, beyond=2, cache_dir=tmp_path)
    rows = benchmarks.examples(asked, taken, SimpleNamespace(decode=lambda ids: " ".join(map(str, ids))), width=9)
    assert rows == [{"source": "chat", "prompt": "Why? Why?", "answer": "28 29 30"},
                    {"source": "code", "prompt": "Why? Why?", "answer": "6 7 8 9 1"}]


def test_answers_are_decoded_once(target, tmp_path):
    first = answers(target, PROMPTS, max_new_tokens=6, beyond=2, cache_dir=tmp_path)
    again = answers(target, PROMPTS[::-1], max_new_tokens=6, beyond=2, cache_dir=tmp_path)
    assert again == first[::-1] and len(target.asked) == 2
    assert not list(tmp_path.glob("*.partial"))


def test_another_setting_prompt_or_target_is_another_answer(target, tmp_path):
    def ask(**changes):
        before = len(target.asked)
        settings = {"max_new_tokens": 6, "beyond": 2, "cache_dir": tmp_path}
        answers(target, changes.pop("prompts", PROMPTS), **{**settings, **changes})
        return len(target.asked) - before
    assert ask() == 2
    assert ask(max_new_tokens=7) == 2
    assert ask(beyond=3) == 2
    assert ask(stop_ids=[31]) == 2
    assert ask(prompts=[*PROMPTS, Prompt("c", "chat", ids=(9,))]) == 1
    target.dir = "another"
    assert ask() == 2


def test_a_damaged_cache_is_decoded_again(target, tmp_path):
    first = answers(target, PROMPTS, max_new_tokens=6, beyond=2, cache_dir=tmp_path)
    for file in tmp_path.glob("*.json"):
        file.write_text(file.read_text()[:20])
    assert answers(target, PROMPTS, max_new_tokens=6, beyond=2, cache_dir=tmp_path) == first
    assert len(target.asked) == 4


def test_a_prompt_too_long_for_the_target(target, tmp_path):
    with pytest.raises(UserError, match="prompt a: 3 tokens and 98 to answer pass the target's 100 positions"):
        answers(target, PROMPTS, max_new_tokens=96, beyond=2, cache_dir=tmp_path)
    assert not target.asked
