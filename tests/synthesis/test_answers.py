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

from eagle3nb.errors import UserError
from eagle3nb.synthesis import answers
from eagle3nb.synthesis.answerer import Answerer, TargetHere
from eagle3nb.synthesis.answers import make, make_all, standing
from eagle3nb.synthesis.endpoint import Answer, Ask
from eagle3nb.synthesis.journal import opened
from eagle3nb.synthesis.prompts import Prompt, load_recipe
from eagle3nb.synthesis.sources import Dataset
from eagle3nb.synthesis.talks import Row, agree, begin, language_of, looping

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

    @property
    def answerer(self):
        return Answerer(TargetHere("", target=self), "", True, True, 10**6)

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
    return dataset_of(tmp_path, RECIPE)


def dataset_of(folder, text):
    (folder / "X1_test.yml").write_text(text)
    recipe = load_recipe(folder / "X1_test.yml")
    return Dataset("X1_test", "a recipe", None, recipe.max_new_tokens, recipe.temperature, recipe.top_p, recipe=recipe)


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """Locks go to a project of the test's own."""
    for folder in ("notebooks", "params"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)


def synthesise(dataset, script, tokenizer, out_dir, seed=1, weights="w"):
    """The report of one part."""
    return make(dataset, script.answerer, language_of(tokenizer, (END,)), out_dir, seed,
                {"config": "c", "weights": weights}).report


def rows_of(folder):
    return [json.loads(line) for line in gzip.open(folder / "X1_test" / "part-000.jsonl.gz", "rt")]


def test_a_record_is_the_prompt_and_the_targets_own_ids(tmp_path, recipe, tokenizer):
    report = synthesise(recipe, Script(tokenizer, {}), tokenizer, tmp_path)
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
    report = synthesise(recipe, script, tokenizer, tmp_path)
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
    synthesise(recipe, Script(tokenizer, said), tokenizer, tmp_path / "whole")
    first, second = Script(tokenizer, said, stop_after), Script(tokenizer, said)
    with pytest.raises(KeyboardInterrupt):
        synthesise(recipe, first, tokenizer, tmp_path / "torn")
    assert not (tmp_path / "torn/X1_test/part-000.jsonl.gz").exists()
    synthesise(recipe, second, tokenizer, tmp_path / "torn")
    assert sorted(first.asked + second.asked) == sorted([(t, 0) for t in ("Aa?", "Bb?", "Cc?", "Dd?", "And then?")]
                                                        + [("Aa?", 1)])
    whole, torn = ((tmp_path / name / "X1_test/part-000.jsonl.gz").read_bytes() for name in ("whole", "torn"))
    assert whole == torn
    assert [path.name for path in (tmp_path / "torn/X1_test").iterdir()] == ["part-000.jsonl.gz"]


def test_the_journal_forgets_a_torn_line_and_another_runs_answers(tmp_path):
    path = tmp_path / "journal"

    def known(mark, *notes, tear=0):
        with opened(path, mark) as journal:
            before = {key: list(answer.ids) for key, answer in journal.known.items()}
            for key, ids in notes:
                journal.note(Ask(key), Answer(key, "stop", ids=tuple(ids)))
        path.write_bytes(path.read_bytes()[:-tear or None])
        return before

    a, b = ("a", 0, 0), ("b", 0, 0)
    assert known("one", (a, [1, 2]), (b, [3]), tear=4) == {}
    assert known("one", (b, [4])) == {a: [1, 2]}
    assert known("one") == {a: [1, 2], b: [4]}
    assert known("two") == {}


def test_a_finished_dataset_stands_until_something_changes(tmp_path, recipe, tokenizer):
    assert standing(tmp_path, "X1_test", "mark") is None
    report = synthesise(recipe, Script(tokenizer, {}), tokenizer, tmp_path)
    assert standing(tmp_path, "X1_test", report["fingerprint"]) == report
    assert standing(tmp_path, "X1_test", "other") is None
    again = Script(tokenizer, {})
    assert synthesise(recipe, again, tokenizer, tmp_path) == report and not again.asked
    (tmp_path / "X1_test/part-000.jsonl.gz").write_bytes(b"torn")
    assert standing(tmp_path, "X1_test", report["fingerprint"]) is None
    assert synthesise(recipe, again, tokenizer, tmp_path) == report and len(again.asked) == 5


def test_a_rehearsal_makes_few_records_and_replaces_no_whole_dataset(tmp_path, recipe, tokenizer):
    few = synthesise(replace(recipe, limit=2), Script(tokenizer, {}), tokenizer, tmp_path)
    assert few["records"] == few["limit"] == len(rows_of(tmp_path)) == 2
    whole = synthesise(recipe, Script(tokenizer, {}), tokenizer, tmp_path)
    assert whole["records"] == 4 and "limit" not in whole
    script = Script(tokenizer, {})
    assert synthesise(replace(recipe, limit=2), script, tokenizer, tmp_path) == whole and not script.asked


def test_parts_are_files_of_the_seeds_one_after_another(tmp_path, tokenizer, monkeypatch, capsys):
    """Ids stand once, the first part is what a command without parts makes, and more parts leave those that stand."""
    dataset = dataset_of(tmp_path, RECIPE.replace("count: 4", "count: 6")
                         + 'templates: ["What of {x}?"]\nslots: {x: [a, b, c, d, e, f]}\n')
    script = Script(tokenizer, {})
    monkeypatch.setattr(answers, "target_identity", lambda folder: {"config": "c", "weights": "w"})

    def made(out, parts):
        script.asked.clear()
        make_all([dataset], parts, script.answerer, language_of(tokenizer, (END,)), tmp_path / out, 1, tmp_path)
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
    synthesise(recipe, Script(tokenizer, {}), tokenizer, tmp_path)
    before = rows_of(tmp_path)
    silent = Script(tokenizer, {(t, a): [END] for t in ("Aa?", "Bb?", "Cc?", "Dd?") for a in range(3)})
    with pytest.raises(UserError, match="no answer was usable"):
        synthesise(recipe, silent, tokenizer, tmp_path, weights="other")
    assert rows_of(tmp_path) == before


def test_fingerprints_follow_the_rows_not_the_evaluation(recipe, tokenizer):
    def mark(seed=1, answerer=None, weights="w", temperature=0.5, **changed):
        dataset = replace(recipe, recipe=replace(recipe.recipe, **changed), temperature=temperature)
        talks = [begin(prompt, tokenizer) for prompt in dataset.prompts(seed)]
        identity = {"config": "c", "weights": weights, "tokenizer": "t"}
        return answers.fingerprint(dataset, talks, seed, identity, answerer or Script(tokenizer, {}).answerer)

    base = mark()
    assert mark(held_out={"count": 1}, about="x") == base
    others = [mark(temperature=0.6), mark(system="Hm."), mark(2), mark(weights="v"), mark(count=3),
              mark(answerer=Answerer(None, "m", True, True)), mark(answerer=Answerer(None, "n", True, True)),
              mark(answerer=Answerer(None, "m", False, True)), mark(answerer=Answerer(None, "m", True, False))]
    assert len({base, *others}) == 10


def test_agreement_fails_for_another_mask_or_text(tokenizer):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n"))["input_ids"]
    mask = [0] * (len(ids) - 5) + [1] * 5
    language = language_of(tokenizer, (END,))

    def agreed(ids, mask, said="Well", own=frozenset({1})):
        row = Row(ids, mask, [messages[0], {"role": "assistant", "content": said}], own, "stop")
        return agree(row, Prompt("a", "b", ()), language)

    assert agreed(ids, mask) == agreed(ids[:-1], mask[:-1]) == "both"  # the second is cut at its limit
    assert agreed(ids, [0, *mask[:-1]]) == agreed(ids, mask, "Wells") == agreed(ids, mask, own=frozenset()) == ""


def test_loops_are_told_from_texts_that_repeat_a_little():
    text = list(range(100))
    assert not looping(text)
    assert not looping(text + text[:30])                     # a quotation
    assert not looping(text[:40] + [7] * 20)                 # a short ruler
    assert looping(text[:40] + [7] * 24)                     # a block of one, 24 long
    assert looping(text + text[80:] * 3)                     # ends in a circle
    assert looping(list(range(20)) * 2 + [50, 51] + list(range(20)) * 2 + [60])  # circles, with a break at the end
    assert not looping([])
