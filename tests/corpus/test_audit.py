import json
import random

import pytest

from eagle3nb.corpus.accounts import accounting_lines, against_forecast
from eagle3nb.corpus.audit import RULES, check_allow, findings, gate, ranked, rows, write_findings
from eagle3nb.corpus.decision import Rules
from eagle3nb.corpus.masks import encode, find_markers, render
from eagle3nb.corpus.merge import merge
from eagle3nb.corpus.overview import forecast, losses, overview
from eagle3nb.corpus.records import find_sources
from eagle3nb.corpus.runfindings import disk_findings
from eagle3nb.corpus.survey import survey
from eagle3nb.errors import UserError
from eagle3nb.files import write_json

V = 100
PLAN = {"needed": 10_000_000_000, "free": 20_000_000_000, "standing": 0, "short": False}


def clean(rng, n=20, length=10, supervised=6):
    """Distinct rows with a prompt and an answer."""
    return [{"input_ids": [rng.randrange(V) for _ in range(length)],
             "loss_mask": [0] * (length - supervised) + [1] * supervised} for _ in range(n)]


def audit(root, exclude=(), max_seq_len=50, **options):
    rules = options.pop("rules", Rules(max_seq_len))
    found = survey(root, exclude=exclude, rules=rules, vocab_size=options.pop("vocab_size", V), **options)
    return found, ranked(findings(found))


def named(listed):
    return {(finding.rule, finding.severity, finding.source, finding.count) for finding in listed}


@pytest.fixture
def corpus(tmp_path, write):
    rng = random.Random(0)
    for name in ("A_x", "B_y", "C_z"):
        write(tmp_path / name / "rows.jsonl", clean(rng))
    return tmp_path


def test_a_clean_corpus_has_no_findings(corpus):
    found, listed = audit(corpus)
    assert listed == [] and gate(listed) == "no findings"
    assert [row["tokens"] for row in overview(found)] == [200] * 3


@pytest.mark.parametrize(("row", "rule"), [
    (b"{", "json_invalid"), (b"[]", "schema"), ({"input_ids": [1], "loss_mask": [1, 1]}, "length_mismatch"),
    ({"input_ids": [1], "loss_mask": [3]}, "mask_values"), ({"input_ids": []}, "empty_row"),
    ({"input_ids": [V]}, "token_out_of_range")])
def test_every_unusable_line_is_red_with_its_place_and_stops_the_run(corpus, write, row, rule):
    write(corpus / "B_y/more.jsonl", [*clean(random.Random(1), 3), *[row] * 7])
    _, listed = audit(corpus)
    assert named(listed) == {(rule, "red", "B_y", 7)}
    [finding] = listed
    assert [(e["file"], e["line"]) for e in finding.examples] == [("B_y/more.jsonl", n) for n in range(4, 9)]
    assert all(e["detail"] for e in finding.examples) and finding.message and finding.remedy
    with pytest.raises(UserError, match=rf"B_y.*7 .*B_y/more.jsonl line 4.*{rule}"):
        gate(listed)
    assert gate(listed, [rule]) == "1 red, 0 amber and 0 info findings"
    _, of_excluded = audit(corpus, ["B"])
    assert named(of_excluded) == {(rule, "info", "B_y", 7)} and "excluded by the parameters" in of_excluded[0].message
    gate(of_excluded)


def test_rows_that_no_mask_can_be_had_for_are_red(corpus, write):
    write(corpus / "B_y/more.jsonl", [{"input_ids": [1, 2, 3]}])
    _, listed = audit(corpus)
    assert ("schema", "red", "B_y", 1) in named(listed) and "no loss_mask" in listed[0].examples[0]["detail"]


def test_the_error_of_the_gate_is_one_line_and_counts_the_rest(corpus, write):
    write(corpus / "B_y/more.jsonl", [b"{", {"input_ids": []}])
    with pytest.raises(UserError) as error:
        gate(audit(corpus)[1])
    assert "\n" not in str(error.value) and "1 more red finding;" in str(error.value)
    assert "json_invalid, empty_row" in str(error.value)


@pytest.mark.parametrize("rows_in", [None, []])
def test_a_dataset_without_records_is_red(corpus, write, rows_in):
    (corpus / "D_empty").mkdir()
    if rows_in is not None:
        write(corpus / "D_empty/rows.jsonl", rows_in)
    assert named(audit(corpus)[1]) == {("empty_source", "red", "D_empty", 1)}


def test_rows_that_supervise_nothing_or_everything(corpus, write):
    write(corpus / "A_x/more.jsonl", [{"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}])
    write(corpus / "B_y/more.jsonl", [{"input_ids": [1, 2, 4], "loss_mask": [1, 1, 1]}])
    write(corpus / "C_z/rows.jsonl", [{"input_ids": [1, 2, 5 + i], "loss_mask": [0, 0, 0]} for i in range(9)])
    assert {n for n in named(audit(corpus)[1]) if n[0].startswith("mask")} == {
        ("mask_all_zero", "amber", "A_x", 1), ("mask_all_one", "amber", "B_y", 1), ("mask_all_zero", "red", "C_z", 9)}


def test_a_mask_that_the_template_contradicts(tmp_path, write, chatml):
    messages = [{"role": "user", "content": "the question"}, {"role": "assistant", "content": "owls sing"}]
    ids = encode(chatml, render(chatml, messages))
    start = len(encode(chatml, render(chatml, messages[:1], generation=True)))
    right = [int(start <= t < len(ids) - 1) for t in range(len(ids))]
    shifted = [0, *right[:-1]]
    write(tmp_path / "A/rows.jsonl", [{"input_ids": ids, "loss_mask": right, "messages": messages},
                                      {"input_ids": [*ids, 7], "loss_mask": [*shifted, 0]}])
    rules = Rules(100, markers=find_markers(chatml), tokenizer=chatml)
    _, listed = audit(tmp_path, rules=rules, vocab_size=500)
    assert ("mask_disagrees", "amber", "A", 1) in named(listed)
    [disagrees] = [finding for finding in listed if finding.rule == "mask_disagrees"]
    assert disagrees.examples == [{"file": "A/rows.jsonl", "line": 2, "at": start, "detail": (
        f"2 of {len(ids) + 1} positions differ, first {start}: mask 0, by the template's markers 1")}]


def test_truncation_is_told_by_what_it_costs(corpus, write):
    rng = random.Random(2)
    long = clean(rng, n=1, length=30, supervised=20)
    write(corpus / "A_x/more.jsonl", long)
    found, listed = audit(corpus, max_seq_len=25, lengths=[5, 40])
    # A_x has 20 rows of 6 supervised tokens and one of 20, of which 5 lie beyond 25: 5/140
    assert named(listed) == {("truncation_loss", "info", "A_x", 1)} and "3.6%" in listed[0].message
    assert listed[0].examples == [{"file": "A_x/more.jsonl", "line": 1, "at": 25, "detail": "30 tokens"}]
    assert found.lengths == (5, 25, 40)
    # cut at 5: each short row keeps the first of its 6, the long one none
    assert losses(found)[0] == {"source": "A_x", "5": round(100 * 120 / 140, 2), "25": 3.57, "40": 0.0}
    assert named(audit(corpus, max_seq_len=20)[1]) == {("truncation_loss", "amber", "A_x", 1)}


def test_the_disproportionate_source_is_named_also_when_it_is_excluded(tmp_path, write):
    rng = random.Random(3)
    for n in range(9):
        write(tmp_path / f"B{n}_x/rows.jsonl", clean(rng, n=20 + n, length=10 + n))
    write(tmp_path / "A1_long/rows.jsonl", clean(rng, n=20, length=60))
    found, listed = audit(tmp_path, max_seq_len=100)
    assert named(listed) == {("disproportionate", "amber", "A1_long", 20)}
    total = sum((20 + n) * (10 + n) for n in range(9)) + 1200
    assert f"{1200 / total:.0%} of the tokens in {20 / (216 + 20):.0%} of the rows" in listed[0].message
    assert "exclude: [A1]" in listed[0].remedy
    _, listed = audit(tmp_path, ["A1"], max_seq_len=100)
    assert named(listed) == {("disproportionate", "info", "A1_long", 20)}
    assert [row["share %"] for row in overview(found)].count(None) == 0


def test_many_short_rows_can_be_out_of_proportion_too(tmp_path, write):
    rng = random.Random(4)
    for n in range(5):
        write(tmp_path / f"B{n}/rows.jsonl", clean(rng, n=10))
    write(tmp_path / "C/rows.jsonl", clean(rng, n=100))
    assert named(audit(tmp_path)[1]) == {("disproportionate", "amber", "C", 100)}


def test_repeated_rows_are_found_inside_and_across_sources_but_not_in_excluded_ones(corpus, write):
    row, other = clean(random.Random(5), 2)
    write(corpus / "A_x/more.jsonl", [row, {**row, "id": "again"}])
    write(corpus / "C_z/more.jsonl", [other, row, row])
    _, listed = audit(corpus)
    assert named(listed) == {("duplicate_rows", "amber", "A_x", 1), ("duplicate_rows", "amber", "C_z", 2)}
    assert listed[0].examples == [
        {"file": "A_x/more.jsonl", "line": 2, "at": None, "detail": "the same tokens as A_x/more.jsonl line 1"}]
    assert [e["line"] for e in listed[1].examples] == [2, 3]
    assert named(audit(corpus, ["A"])[1]) == {("duplicate_rows", "amber", "C_z", 1)}


def test_disk_findings():
    assert disk_findings(PLAN) == []
    short = {**PLAN, "free": 9_000_000_000, "short": True, "standing": 924_000_000_000}
    assert named(disk_findings(short)) == {("disk_short", "red", "", 1), ("stale_states", "amber", "", 1)}
    assert disk_findings(short, planned=True)[0].severity == "amber"
    assert "10.0 GB" in disk_findings(short)[0].message and "924.00 GB" in disk_findings(short)[1].message
    assert named(disk_findings({**PLAN, "standing": 5})) == {("stale_states", "info", "", 1)}


def test_a_rule_to_allow_must_exist():
    check_allow(RULES)
    with pytest.raises(UserError, match="did you mean 'token_out_of_range'"):
        gate([], ["token_out_of_rang"])


def test_the_forecast_is_the_merges_account(corpus, write, chatml):
    rng = random.Random(6)
    write(corpus / "B_y/more.jsonl", [b"{", *clean(rng, 5, length=80, supervised=60), *clean(rng, 5, 80, 3),
                                      {"input_ids": [1, 2], "loss_mask": [0, 0]}, {"messages": [
                                          {"role": "user", "content": "x"}, {"role": "assistant", "content": "owls"}]}])
    rules = Rules(50, markers=find_markers(chatml), tokenizer=chatml)
    for limit in (0, 22):
        found, _ = audit(corpus, ["C"], rules=rules, vocab_size=500, limit=limit)
        report = merge(find_sources(corpus, ["C"]), corpus.parent / "out", max_seq_len=50, seed=1, vocab_size=500,
                       markers=rules.markers, tokenizer=chatml, limit=limit)
        assert forecast(found)["lines"] == accounting_lines(report["sources"])
        for name in ("sources", "records", "tokens", "supervised", "teacher_positions"):
            assert forecast(found)[name] == report[name]
        write_json(corpus.parent / "plan.json", {"forecast": forecast(found)})
        assert against_forecast({**report, "exclude": ["C"]}, corpus.parent / "plan.json").startswith("Every line")
    assert "another exclude" in against_forecast({**report, "exclude": []}, corpus.parent / "plan.json")
    assert "no forecast" in against_forecast(report, corpus.parent / "none.json")
    report["sources"][0]["records"] += 1
    with pytest.raises(UserError, match="20 records.*21 records.*audit again"):
        against_forecast({**report, "exclude": ["C"]}, corpus.parent / "plan.json")


def test_what_is_written(corpus, write, tmp_path):
    write(corpus / "B_y/more.jsonl", [b"{"])
    found, listed = audit(corpus, ["C"], lengths=[8])
    written = json.loads(write_findings(tmp_path / "out", listed, found).read_text())
    assert [set(finding) for finding in written["findings"]] == [
        {"rule", "severity", "source", "count", "examples", "message", "remedy"}]
    b = written["sources"][1]
    assert (b["source"], b["records"], b["tokens"], b["supervised"], b["excluded"]) == ("B_y", 20, 200, 120, False)
    assert sum(b["histogram"]["rows"]) == 20 and b["longest"] == 10
    assert b["truncation"][0] == {"max_seq_len": 8, "rows": 20, "tokens": 160, "supervised": 80}
    assert b["forecast"]["skipped"] == {"json_invalid": 1}
    assert written["forecast"][-1] == "Merge complete. 40 records, 0.4K tokens."
    assert written["sources"][2]["excluded"] and len(rows(listed)) == 1


def test_lengths_that_make_no_sense(corpus):
    with pytest.raises(UserError, match="lengths holds 0"):
        audit(corpus, lengths=[0, 8])
