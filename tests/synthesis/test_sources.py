"""Prompts from files, sets and other models' datasets: what is asked, where answers go, and what is refused."""

import gzip
import json
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from synthesis.speaking import END, TOOLS, call, naive, tokenizer_of

from eagle3nb.corpus.masks import find_markers
from eagle3nb.errors import UserError
from eagle3nb.synthesis import sources
from eagle3nb.synthesis.endpoint import Answer
from eagle3nb.synthesis.sources import anew, asked_anew, check_policy, datasets, prompt_of
from eagle3nb.synthesis.talks import begin, language_of, records, take

SAMPLING = {"max_new_tokens": 9, "temperature": 0.5, "top_p": 0.9}
FULL = SAMPLING | {"limit": 0}


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    for folder in ("notebooks", "params"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def say(role, content, **more):
    return {"role": role, "content": content} | more


def write(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def made(*prompts, **more):
    return datasets(list(prompts), data_root="data", **SAMPLING, **more)


def test_a_file_makes_a_dataset_of_its_name(project):
    write(project / "p/B9_mine.jsonl.gz", {"prompt": "One?"}, b"", {"id": 7, "messages": [say("user", "Two?")]},
          {"question": "Three?", "task_id": "t"}, {"turns": ["Four?", "Five?"], "tools": [{"type": "function"}]})
    found, = made("p/B9_mine.jsonl.gz")
    assert (found.name, found.origin, found.max_new_tokens, found.temperature, found.top_p) == (
        "B9_mine", "p/B9_mine.jsonl.gz", 9, 0.5, 0.9)
    assert [p.id for p in found.prompts(1)] == ["B9_mine-000001", "7", "t", "B9_mine-000005"]
    assert [p.opening[0]["content"] for p in found.prompts(1)] == ["One?", "Two?", "Three?", "Four?"]
    last = found.prompts(2)[-1]
    assert last.later == (({"role": "user", "content": "Five?"},),) and last.tools == ({"type": "function"},)


@pytest.mark.parametrize("row, said", [
    (b"{", "not valid JSON"), ([1], "wants an object"), ({"id": "x"}, "wants messages, a list, or prompt"),
    ({"prompt": " "}, "wants messages"), ({"messages": []}, "wants messages"),
    ({"messages": [say("robot", "Hi")]}, "message 0 wants a role, one of system"),
    ({"messages": [say("user", None)]}, "message 0 wants a content of text"),
    ({"messages": [say("user", "Hi"), say("assistant", "Ho")]}, "wants to begin with, and to be left to answer after"),
    ({"messages": [say("system", "Hi")]}, "to be left to answer after"),
    ({"messages": [{"role": "assistant"}, say("user", "Hi")]}, "wants to begin with"),
    ({"prompt": "Hi", "tools": ["look"]}, "tools wants a list of objects"),
    ({"id": "a", "prompt": "again"}, "the id 'a' stands on line 1 already")])
def test_a_line_that_is_no_prompt_is_named(project, row, said):
    write(project / "mine.jsonl", {"id": "a", "prompt": "Hi?"}, row)
    with pytest.raises(UserError, match=f"mine.jsonl line 2: .*{said}"):
        made("mine.jsonl")


@pytest.mark.parametrize("shape, blocks", [
    ("u", ["u"]), ("su", ["su"]), ("uu", ["u", "u"]), ("utu", ["u", "t", "u"]), ("uttu", ["u", "tt", "u"]),
    ("uaut", ["uau", "t"]), ("ut_tu", ["u", "t", "t", "u"]), ("u_tt", ["u", "tt"]), ("uuau_", ["u", "uau"]),
    ("uactu", ["uact", "u"]), ("u__u", ["u", "u"])])
def test_an_answer_goes_wherever_a_word_is_not_followed_by_one(shape, blocks):
    """u user, s system, t tool, a a given answer, c a given call, _ a place for an answer."""
    kinds = {"u": say("user", "u"), "s": say("system", "s"), "t": say("tool", "t"), "a": say("assistant", "a"),
             "c": say("assistant", "", tool_calls=[call("look", 1)]), "_": {"role": "assistant"}}
    names = {json.dumps(message): name for name, message in kinds.items()}
    prompt = prompt_of("i", "X", [kinds[name] for name in shape])
    assert ["".join(names[json.dumps(m)] for m in block) for block in (prompt.opening, *prompt.later)] == blocks


def test_sets_that_packages_carry_keep_their_turns(monkeypatch):
    held = SimpleNamespace(id="81", messages=({"role": "user", "content": "Write."},), later=("Shorter.",))
    monkeypatch.setattr(sources, "prompt_sets", lambda names: ({"mtbench": [held]}, {}))
    found, = made("mtbench")
    assert found.name == "mtbench" and found.asked[0].later == (({"role": "user", "content": "Shorter."},),)
    monkeypatch.setattr(sources, "prompt_sets", lambda names: ({}, {"mtbench": "pip install it"}))
    with pytest.raises(UserError, match="mtbench is not installed: pip install it"):
        made("mtbench")


RECIPE = "about: x\ncount: 3\nmax_new_tokens: 4\ntemperature: 0.1\ntop_p: 0.8\ntemplates: ['What of {x}?']\nslots: " \
         "{x: [a, b, c, d, e, f]}\n"


def test_which_datasets_are_made(project):
    for name in ("A1_long", "B1_short"):
        (project / "recipes").mkdir(exist_ok=True)
        (project / f"recipes/{name}.yml").write_text(RECIPE)
    write(project / "C1_mine.jsonl", {"prompt": "One?"}, {"prompt": "Two?"})

    def names(**more):
        return [dataset.name for dataset in made("recipes", "C1_mine.jsonl", **more)]

    assert names() == ["A1_long", "B1_short", "C1_mine"]
    assert names(exclude=["A1", "of_another_stage"]) == ["B1_short", "C1_mine"]
    assert names(only=["A1_long"], exclude=["A1"]) == ["A1_long"], "what is named is wanted"
    one, _, mine = made("recipes", "C1_mine.jsonl")
    assert (one.max_new_tokens, one.temperature, one.top_p) == (4, 0.1, 0.8)
    assert one.prompts(1) != one.prompts(2) and mine.prompts(1) == mine.prompts(2)
    assert [len(d.prompts(1)) for d in made("recipes", "C1_mine.jsonl", limit=1)] == [1, 1, 1]
    for call_, said in ((lambda: names(only=["B2"]), "nothing in prompts makes 'B2'; there are A1_long"),
                        (lambda: names(exclude=["A1", "B1", "C1"]), "there is nothing to make"),
                        (lambda: made("recipes", "recipes"), "A1_long would be made by two entries"),
                        (lambda: made("nowhere"), "'nowhere' is no folder of recipes, no file, and none of the sets"),
                        (lambda: datasets([], data_root=".", max_new_tokens=0, temperature=0, top_p=1), "they want 1")):
        with pytest.raises(UserError, match=said):
            call_()


# ---------------------------------------------------------------------------------------------------- anew


def row_of(pieces, messages, tokenizer, **more):
    ids, mask = naive(pieces)
    return {"id": "r", "input_ids": ids, "loss_mask": mask, "messages": messages} | more


def test_anew_keeps_turns_tools_and_what_the_masks_do_not_supervise(project):
    """Random talks, some of whose answers are context: what is asked, answered as before, gives the same row again."""
    tokenizer = tokenizer_of(TOOLS)
    markers, language, tool = find_markers(tokenizer), language_of(tokenizer, (END,)), {"type": "function"}
    for seed in range(20):
        draw = random.Random(seed)
        messages, pieces = [], [(f"<|im_start|>tools\n{json.dumps(tool)}\n<|im_end|>\n", 0)]
        own = [draw.random() < 0.6 for _ in range(draw.randint(1, 4))]
        own[draw.randrange(len(own))] = True
        for n, taught in enumerate(own):
            messages += [say("user", f"question {n}"), say("assistant", f"answer {n}")]
            pieces += [(f"<|im_start|>user\nquestion {n}<|im_end|>\n<|im_start|>assistant\n", 0),
                       (f"answer {n}<|im_end|>", int(taught)), ("\n", 0)]
        row = row_of(pieces, messages, tokenizer, tools=[tool])
        prompt, why = asked_anew(json.dumps(row).encode(), "X", 0, markers)
        assert not why and 1 + len(prompt.later) == sum(own), seed
        talk, answers = begin(prompt, tokenizer), iter([n for n, taught in enumerate(own) if taught])
        while not talk.over:
            said = say("assistant", f"answer {next(answers)}")
            take(talk, Answer(talk.key, "stop", message=said), language, Counter())
        again, = records(talk, tokenizer)
        end = 1 + int(np.flatnonzero(row["loss_mask"])[-1])
        assert again["input_ids"][:end] == row["input_ids"][:end], seed
        assert again["loss_mask"][:end] == row["loss_mask"][:end] and again["tools"] == [tool], seed


def test_rows_that_cannot_be_asked_anew_are_left_out_and_counted(project):
    tokenizer = tokenizer_of(TOOLS)
    markers = find_markers(tokenizer)
    talk = [say("user", "Hi?"), say("assistant", "Ho")]
    pieces = [("<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n", 0), ("Ho<|im_end|>", 1)]
    good = row_of(pieces, talk, tokenizer)
    cut = row_of([*pieces[:1], ("Ho", 1)], None, tokenizer, prompt=talk[:1], finish="length")
    del cut["messages"]
    write(project / "data/B1_other/part-000.jsonl.gz", good, good, cut, {"input_ids": [5, 6], "loss_mask": [0, 1]},
          b"{", good | {"messages": talk * 2}, good | {"messages": talk[1:]},
          good | {"loss_mask": [0] * len(good["input_ids"])},
          {"id": "t", "prompt": "So?", "response": "So."})
    found = anew("B1_other", "data", markers, FULL)
    assert (found.name, found.anew) == ("B1_other_on_policy", True)
    assert [p.id for p in found.asked] == ["r", "r~2", "r~3", "t"]
    assert [p.opening for p in found.asked[:3]] == [tuple(talk[:1])] * 3
    assert found.left_out == {"no messages": 1, "no record": 1, "answers not told apart": 1, "no prompt": 1,
                              "nothing supervised": 1}
    with pytest.raises(UserError, match="B1_other_on_policy is for the target's own answers"):
        check_policy([found], on_policy=False)
    check_policy([found], on_policy=True)
    (project / "data/B1_more").mkdir()
    with pytest.raises(UserError, match="'B1' matches 2 datasets"):
        anew("B1", "data", markers, FULL)
