"""Answers become records whose ids are the target's own, whatever interrupts; faults are sampled again and counted.

The target here is a double: it answers from a script, so every id of a record can be told in advance.
"""

import gzip
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle3nb.corpus.masks import find_markers
from eagle3nb.errors import UserError
from eagle3nb.synthesis import answers
from eagle3nb.synthesis.answers import agree, journal, looping, standing, synthesise
from eagle3nb.synthesis.prompts import expand, load_recipe

TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
END = 0  # <|im_end|>
RECIPE = """
about: test
count: 4
max_new_tokens: 40
temperature: 0.5
top_p: 0.9
prompts: ["Aa?", ["Bb?", "And then?"], "Cc?", "Dd?"]
"""
CIRCLE = "round and " * 12


@pytest.fixture(scope="module")
def tokenizer():
    """Every byte a token, two special ones, and "He": so "He" has another spelling, "H" + "e"."""
    special = {"<|im_end|>": 0, "<|im_start|>": 1}
    letters = {letter: 2 + i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bpe = Tokenizer(models.BPE(vocab=letters | {"He": 300} | special, merges=[("H", "e")]))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", chat_template=TEMPLATE,
                                   additional_special_tokens=["<|im_start|>"])


class Script:
    """Answers by the last user turn and the attempt; `stop_after` answers it is interrupted, as by Ctrl-C."""

    def __init__(self, tokenizer, said: dict, stop_after: int = 10**9):
        self.tokenizer, self.said, self.stop_after = tokenizer, said, stop_after
        self.facts = SimpleNamespace(eos=(END,), vocab=301)
        self.asked = []

    def generate(self, prompts, *, seed, done, max_new_tokens, **settings):
        for i, (ids, one) in enumerate(zip(prompts, seed, strict=True)):
            if len(self.asked) == self.stop_after:
                raise KeyboardInterrupt
            turn = self.tokenizer.decode(ids).split("user\n")[-1].split("<|im_end|>")[0]
            attempt = (one - 1) // answers.SEED_STEP
            self.asked.append((turn, attempt))
            said = self.said.get((turn, attempt), f"So {turn}")
            ids = said if isinstance(said, list) else [*self.tokenizer(said)["input_ids"], END]
            done(i, ids[:max_new_tokens])


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "X1_test.yml").write_text(RECIPE)
    return load_recipe(tmp_path / "X1_test.yml")


def rows_of(folder):
    return [json.loads(line) for line in gzip.open(folder / "X1_test" / "part-000.jsonl.gz", "rt")]


def test_a_record_is_the_prompt_and_the_targets_own_ids(tmp_path, recipe, tokenizer):
    report = synthesise(recipe, Script(tokenizer, {}), tokenizer, tmp_path, 1, "mark")
    rows = rows_of(tmp_path)
    text = "<|im_start|>user\nAa?<|im_end|>\n<|im_start|>assistant\nSo Aa?<|im_end|>\n"
    assert rows[0]["input_ids"] == tokenizer(text)["input_ids"]
    assert tokenizer.decode([t for t, m in zip(rows[0]["input_ids"], rows[0]["loss_mask"], strict=True) if m]) == \
        "So Aa?<|im_end|>"
    assert [m["role"] for m in rows[1]["messages"]] == ["user", "assistant", "user", "assistant"]
    mask = "".join(map(str, rows[1]["loss_mask"]))
    assert [len(run) for run in mask.split("0") if run] == [7, 13]  # "So Bb?", "So And then?", an end of turn each
    assert report["records"] == 4 and report["answers"] == {"stop": 5}
    assert report["tokens"] == sum(len(row["input_ids"]) for row in rows)
    assert report["supervised"] == sum(sum(row["loss_mask"]) for row in rows)
    assert json.loads((tmp_path / "X1_test.json").read_text()) == report


def test_faults_are_sampled_again_counted_and_given_up(tmp_path, recipe, tokenizer):
    H, e = tokenizer.convert_tokens_to_ids(["H", "e"])
    script = Script(tokenizer, {
        ("Aa?", 0): CIRCLE, ("Aa?", 1): [H, e, END],            # looping, then an odd spelling of "He", then well
        ("And then?", 0): [END], ("And then?", 1): [5, 1, 5, END], ("And then?", 2): [END],  # no second turn
        ("Cc?", 0): list(range(40, 90)),                          # cut at the limit: kept, and said so
        ("Dd?", 0): [END], ("Dd?", 1): [END], ("Dd?", 2): [END]})  # no record at all
    report = synthesise(recipe, script, tokenizer, tmp_path, 1, "mark")
    rows = {row["id"][-1]: row for row in rows_of(tmp_path)}
    assert sorted(rows) == ["0", "1", "2"]
    assert tokenizer.decode(rows["0"]["input_ids"]).endswith("So Aa?<|im_end|>\n")
    assert tokenizer.decode(rows["1"]["input_ids"]).endswith("So Bb?<|im_end|>\n")
    assert [m["role"] for m in rows["1"]["messages"]] == ["user", "assistant"]
    assert rows["2"]["finish"] == "length" and "messages" not in rows["2"]
    assert rows["2"]["input_ids"][-40:] == list(range(40, 80)) and sum(rows["2"]["loss_mask"]) == 40
    assert report["answers"] == {"empty": 5, "given up": 2, "length": 1, "looping": 1, "retokenises": 1,
                                 "special token": 1, "stop": 2}
    assert report["cut_at_limit"] == 1


@pytest.mark.parametrize("stop_after", [0, 1, 3, 5])
def test_an_interrupted_run_resumes_and_asks_for_nothing_twice(tmp_path, recipe, tokenizer, stop_after):
    said = {("Aa?", 0): CIRCLE}
    synthesise(recipe, Script(tokenizer, said), tokenizer, tmp_path / "whole", 1, "mark")
    first, second = Script(tokenizer, said, stop_after), Script(tokenizer, said)
    with pytest.raises(KeyboardInterrupt):
        synthesise(recipe, first, tokenizer, tmp_path / "torn", 1, "mark")
    assert not (tmp_path / "torn/X1_test/part-000.jsonl.gz").exists()
    synthesise(recipe, second, tokenizer, tmp_path / "torn", 1, "mark")
    assert sorted(first.asked + second.asked) == sorted([(t, 0) for t in ("Aa?", "Bb?", "Cc?", "Dd?", "And then?")]
                                                        + [("Aa?", 1)])
    whole, torn = ((tmp_path / name / "X1_test/part-000.jsonl.gz").read_bytes() for name in ("whole", "torn"))
    assert whole == torn
    assert [path.name for path in (tmp_path / "torn/X1_test").iterdir()] == ["part-000.jsonl.gz"]


def test_the_journal_forgets_a_torn_line_and_another_runs_answers(tmp_path):
    path = tmp_path / "journal"
    with journal(path, "one") as (known, note):
        note(("a", 0, 0), [1, 2])
        note(("b", 0, 0), [3])
    path.write_bytes(path.read_bytes()[:-4])
    with journal(path, "one") as (known, note):
        assert known == {("a", 0, 0): [1, 2]}
        note(("b", 0, 0), [4])
    with journal(path, "one") as (known, _):
        assert known == {("a", 0, 0): [1, 2], ("b", 0, 0): [4]}
    with journal(path, "two") as (known, _):
        assert known == {}


def test_a_finished_dataset_stands_until_something_changes(tmp_path, recipe, tokenizer):
    assert standing(tmp_path, "X1_test", "mark") is None
    report = synthesise(recipe, Script(tokenizer, {}), tokenizer, tmp_path, 1, "mark")
    assert standing(tmp_path, "X1_test", "mark") == report
    assert standing(tmp_path, "X1_test", "other") is None
    (tmp_path / "X1_test/part-000.jsonl.gz").write_bytes(b"torn")
    assert standing(tmp_path, "X1_test", "mark") is None


def test_parts_are_files_of_the_seeds_one_after_another(tmp_path, tokenizer, monkeypatch, capsys):
    """Ids stand once, the first part is what a command without parts makes, and more parts leave those that stand."""
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "X1_test.yml").write_text(
        RECIPE.replace("count: 4", "count: 6") + 'templates: ["What of {x}?"]\nslots: {x: [a, b, c, d, e, f]}\n')
    script = Script(tokenizer, {})
    for name, value in {"target_dir": lambda name: tmp_path, "load_tokenizer": lambda folder: tokenizer,
                        "target_identity": lambda folder: {"config": "c", "weights": "w"}}.items():
        monkeypatch.setattr(f"eagle3nb.states.target.{name}", value)
    monkeypatch.setattr("eagle3nb.states.hf.TransformersTarget", lambda folder: script)

    def made(out, parts):
        script.asked.clear()
        answers.main(tmp_path / "prompts", tmp_path / out, [], 1, parts)
        return {path.name: path.read_bytes() for path in sorted((tmp_path / out / "X1_test").iterdir())}

    one, three = made("one", 1), made("three", 3)
    assert list(three) == ["part-000.jsonl.gz", "part-001.jsonl.gz", "part-002.jsonl.gz"]
    assert {"part-000.jsonl.gz": three["part-000.jsonl.gz"]} == one
    assert len({attempt for _, attempt in script.asked}) == 1 and len(script.asked) == 3 * 7
    rows = [json.loads(line) for part in three.values() for line in gzip.decompress(part).splitlines()]
    assert len({row["id"] for row in rows}) == 18 and rows[6]["id"] == "X1_test-0000.1"
    asked = [{tuple(row["input_ids"]) for row in rows[i:i + 6]} for i in (0, 6, 12)]
    assert len(set.union(*asked)) > 6, "another seed fills the templates otherwise"
    assert sorted(path.name for path in (tmp_path / "three").glob("*.json")) == [
        "X1_test.1.json", "X1_test.2.json", "X1_test.json"]
    assert made("one", 3) == three and len(script.asked) == 2 * 7
    assert made("one", 3) == three and not script.asked
    assert "X1_test.2" in capsys.readouterr().out
    with pytest.raises(UserError, match="parts is 0"):
        made("one", 0)


def test_no_usable_answer_is_an_error_that_keeps_what_stood(tmp_path, recipe, tokenizer):
    synthesise(recipe, Script(tokenizer, {}), tokenizer, tmp_path, 1, "mark")
    before = rows_of(tmp_path)
    silent = Script(tokenizer, {(t, a): [END] for t in ("Aa?", "Bb?", "Cc?", "Dd?") for a in range(3)})
    with pytest.raises(UserError, match="no answer was usable"):
        synthesise(recipe, silent, tokenizer, tmp_path, 1, "other")
    assert rows_of(tmp_path) == before


def test_fingerprints_follow_the_rows_not_the_evaluation(recipe, tokenizer):
    def mark(recipe, seed=1, **identity):
        talks = [answers.begin(prompt, tokenizer) for prompt in expand(recipe, seed)]
        return answers.fingerprint(recipe, talks, seed, {"config": "c", "weights": "w"} | identity)

    base = mark(recipe)
    assert mark(replace(recipe, held_out={"count": 1}, about="x"), tokenizer="t") == base
    others = [mark(replace(recipe, temperature=0.6)), mark(replace(recipe, system="Hm.")), mark(recipe, 2),
              mark(recipe, weights="v"), mark(replace(recipe, count=3))]
    assert len({base, *others}) == 6


def test_agreement_fails_for_another_mask_or_text(tokenizer):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n"))["input_ids"]
    mask = [0] * (len(ids) - 5) + [1] * 5
    markers = find_markers(tokenizer)
    assert agree(ids, mask, messages, tokenizer, markers)
    assert agree(ids[:-1], mask[:-1], messages, tokenizer, markers)  # cut at its limit
    assert not agree(ids, [0, *mask[:-1]], messages, tokenizer, markers)
    assert not agree(ids, mask, [messages[0], {"role": "assistant", "content": "Wells"}], tokenizer, markers)


def test_loops_are_told_from_texts_that_repeat_a_little():
    text = list(range(100))
    assert not looping(text)
    assert not looping(text + text[:30])                     # a quotation
    assert not looping(text[:40] + [7] * 20)                 # a short ruler
    assert looping(text[:40] + [7] * 24)                     # a block of one, 24 long
    assert looping(text + text[80:] * 3)                     # ends in a circle
    assert looping(list(range(20)) * 2 + [50, 51] + list(range(20)) * 2 + [60])  # circles, with a break at the end
    assert not looping([])
