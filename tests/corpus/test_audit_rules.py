"""Every rule of the audit on the real path: one fault in one source of a clean corpus, and nothing else is found."""

import json

import planted
import plants
import pytest
from planted import PLANTED, Maker


@pytest.fixture
def makers(chatml, kimi):
    return {"chatml": Maker("chatml", chatml, 5), "kimi": Maker("kimi", kimi, 5)}


def wanted_of(make, plant):
    """(rows, {rule: (severity, where in each row)})."""
    rows, expected = plant(make)
    return rows, {rule: (severity, at if isinstance(at, list) else [at] * len(rows))
                  for rule, (severity, at) in expected.items()}


def check(listed, expected, lines, suffix=""):
    """The findings are those expected of B_two, at these lines, and no others."""
    assert {(f.rule, f.severity, f.source, f.count) for f in listed} == {
        (rule, severity, PLANTED, len(lines)) for rule, (severity, _) in expected.items()}
    for found in listed:
        assert [(e["file"], e["line"]) for e in sorted(found.examples, key=lambda e: e["line"])] == [
            (f"{PLANTED}/rows.jsonl{suffix}", line) for line in lines[:5]], found.rule
        for example in found.examples:
            at = expected[found.rule][1][lines.index(example["line"])]
            assert example["at"] in at if isinstance(at, range) else example["at"] == at, found.rule
            assert example["detail"]
        assert found.message.startswith(f"{len(lines)} of {24 + len(lines)} ") or found.rule == "truncation_loss"
        assert found.remedy


@pytest.mark.parametrize("kind", ["chatml", "kimi"])
@pytest.mark.parametrize("plant", plants.PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found_where_it_is_and_nothing_else_is(tmp_path, makers, plant, kind):
    make = makers[kind]
    rows, expected = wanted_of(make, plant)
    lines = planted.build(tmp_path, make, rows)
    check(planted.audit(tmp_path, make)[1], expected, lines)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["chatml", "kimi"])
def test_a_clean_corpus_has_no_finding(tmp_path, makers, kind, seed):
    make = Maker(kind, makers[kind].tokenizer, seed)
    planted.build(tmp_path, make, [])
    assert planted.audit(tmp_path, make)[1] == []


@pytest.mark.parametrize(("plant", "red"), [
    (plants.all_zero, "mask_all_zero"), (plants.all_one, "mask_all_one"), (plants.inverted, "supervised_prompt"),
    (plants.llama_headers, "template_mismatch"), (plants.another_tokenizers_ids, "template_mismatch"),
    (plants.messages_of_another_row, "template_mismatch"), (plants.end_of_turn_left_out, ""),
    (plants.last_turn_alone_supervised, ""), (plants.special_token_typed_by_a_user, "")])
def test_what_a_whole_source_has_wrong_stops_the_run_where_it_must(tmp_path, makers, plant, red):
    make = makers["kimi"]
    planted.build(tmp_path, make, [])
    rows, expected = [], {}
    while len(rows) < 20:
        more, expected = plant(make)
        rows += more
    planted.write(tmp_path / PLANTED / "rows.jsonl", rows)
    assert {(f.rule, f.severity, f.source, f.count) for f in planted.audit(tmp_path, make, max_seq_len=4000)[1]} == {
        (rule, "red" if rule == red else "amber", PLANTED, len(rows)) for rule in expected}


def test_what_a_sample_shows_is_judged_by_its_share_of_the_sample(tmp_path, makers):
    make = makers["chatml"]
    rows = make.clean(24)
    for name in planted.SOURCES[:2]:
        planted.write(tmp_path / name / "rows.jsonl", rows if name != PLANTED else [
            {**make.row(), "messages": make.talk()} for _ in range(200)])
    listed = planted.audit(tmp_path, make, size=20)[1]
    [found] = [f for f in listed if f.rule == "template_mismatch"]
    assert (found.severity, found.source, found.count) == ("red", PLANTED, 20)
    assert "20 of them among the 20 whose text was looked at" in found.message


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_rows_with_blanks_around_are_looked_at_too(tmp_path, makers, suffix):
    make = makers["chatml"]
    rows = [{**make.row(), "messages": make.talk()} for _ in range(3)]
    spaced = [before + json.dumps(row).encode() + b" \r" for before, row in zip(
        (b" ", b"\t" * 300, b""), rows, strict=True)]
    planted.write(tmp_path / PLANTED / f"rows.jsonl{suffix}", [spaced[0], b" ", *spaced[1:]])
    [found] = planted.audit(tmp_path, make)[1]
    assert (found.rule, found.count, [e["line"] for e in found.examples]) == ("template_mismatch", 3, [1, 3, 4])


def test_what_a_row_says_of_itself_is_cut_and_seen(tmp_path, makers):
    make = makers["chatml"]
    keys = {"\x1b[2J" + "k" * 500: 1, "\u202e": 2}
    row = make.row(make.talk(turns=1))
    role = {**row, "messages": [*row["messages"][:-1], {"role": "r" * 5000, "content": "x"}]}
    planted.write(tmp_path / PLANTED / "rows.jsonl", [keys, role])
    listed = planted.audit(tmp_path, make)[1]
    assert {f.rule for f in listed} >= {"schema", "roles_malformed"}
    for found in listed:
        for example in found.examples:
            assert len(example["detail"]) <= 300 and example["detail"].isprintable()
