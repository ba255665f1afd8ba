"""Comparisons against plain loops over the same counts; every reason not to pair; the page and its charts read back."""

import json
import math
import random
import re
import shutil

import made_runs
import numpy as np
import pytest
from htmlpage import check

from eagle3nb.cli import main
from eagle3nb.errors import UserError
from eagle3nb.record import charts, compare, compare_page, runs


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return made_runs.project(tmp_path)


def two(root, **changed):
    """Runs a and b over the same prompts, b's drafter a little better."""
    rng = np.random.default_rng(3)
    counts = made_runs.prompt_counts(rng)
    better = [row | {"accepted": min(row["accepted"] + int(rng.integers(0, 4)), row["steps"] * row["verifies"])}
              for row in counts]
    made_runs.make(root, "a", counts=counts)
    made_runs.make(root, "b", counts=better, seed=1, day=2, **changed)
    return counts, better


def test_paired_differences_are_those_of_a_loop(root):
    counts, better = two(root)
    found = compare.compare(["a", "b"])
    (pair,) = found.pairs
    assert found.steps == 3 and pair.why == "" and pair.notes == () and found.warnings == []
    for source, row in pair.rows.items():
        one, other = ([r for r in table if r["steps"] == 3 and source in ("all", r["source"])]
                      for table in (counts, better))
        draws = np.random.default_rng(1).integers(len(one), size=(1000, len(one)))  # the demo's seed and bootstrap
        gains = [tau([other[i] for i in draw]) - tau([one[i] for i in draw]) for draw in draws]
        assert row["difference"] == pytest.approx(tau(other) - tau(one)) and row["prompts"] == len(one)
        ends = np.quantile(gains, [0.025, 0.975])
        assert (row["difference_low"], row["difference_high"]) == pytest.approx(tuple(ends))
    assert set(pair.rows) == {"all", *made_runs.SOURCES}
    row = pair.rows["all"]
    said = compare.claim(pair, found.runs[0])
    assert said == (f"a → b: {row['tau'] - row['difference']:.2f} → {row['tau']:.2f}, {row['difference']:+.2f} "
                    f"[{row['difference_low']:.2f}, {row['difference_high']:.2f}] on the same 12 prompts: better.")
    assert compare.claim(compare.compare(["b", "a"]).pairs[0], runs.run_named("b")).endswith(": worse.")
    told = compare.sources(found)[0]
    assert told["b less a"].replace("\xa0", " ") == (f"+{row['difference']:.2f} [+{row['difference_low']:.2f}, "
                                                     f"+{row['difference_high']:.2f}]")


def tau(rows) -> float:
    return 1 + sum(r["accepted"] for r in rows) / sum(r["verifies"] for r in rows)


def test_no_difference_is_said_to_be_none(root):
    rng = np.random.default_rng(5)
    counts = made_runs.prompt_counts(rng)
    either = [row | {"accepted": max(row["accepted"] + (1 if i % 8 < 4 else -1), 0)} for i, row in enumerate(counts)]
    made_runs.make(root, "a", counts=counts)
    made_runs.make(root, "b", counts=either)
    made_runs.make(root, "c", counts=counts)
    found = compare.compare(["a", "b", "c"])
    said = [compare.claim(pair, found.runs[0]) for pair in found.pairs]
    assert said[0].endswith("no difference that these prompts could show.") and "equal in every resample" in said[1]


def other_counts(change):
    return lambda root: rewrite(root, lambda rows: [row | change(row) for row in rows])


def rewrite(root, change):
    """b's counts changed, and the record with them."""
    path = root / "outputs/b/work/evaluation/acceptance.json"
    text = json.dumps({"prompts": change(json.loads(path.read_text())["prompts"])})
    path.write_text(text)
    evaluation(root, outputs=[made_runs.entry("outputs/b/work/evaluation/acceptance.json", text)])


def evaluation(root, **parts):
    twin = json.loads((root / "outputs/b/5_evaluation.json").read_text())
    made_runs.change(root / "outputs/b", "evaluation", **parts)
    return twin


def fingerprint(root):
    twin = made_runs.change(root / "outputs/b", "extraction")
    twin["result"]["fingerprint"]["target weights"] = "x" * 32
    made_runs.change(root / "outputs/b", "extraction", result=twin["result"])


REASONS = {
    "weights": (fingerprint, "their targets differ (target weights)"),
    "file": (lambda root: evaluation(root, inputs=[{"path": "data/heldout.jsonl", "xxh3": "1" * 32}]),
             "data/heldout.jsonl was another file in each"),
    "gone": (lambda root: (root / "outputs/b/work/evaluation/acceptance.json").unlink(),
             "the counts of each prompt of run b are not at hand: evaluation/acceptance.json is not here"),
    "touched": (lambda root: (root / "outputs/b/work/evaluation/acceptance.json").write_text("{}"),
                "is not the file that its record tells of"),
    "old": (lambda root: rewrite(root, lambda rows: []), "not at hand: an older record"),
    "text": (other_counts(lambda row: {"text": "other"} if row["id"] == "p3" else {}),
             "drafters a and b saw different answers to B1_code/p3 of as many tokens"),
    "tokens": (other_counts(lambda row: {"tokens": 7}), "saw different answers to A2_chat/p0 (20 and 7 tokens)"),
    "prompts": (other_counts(lambda row: {"id": row["id"] + "x"}), "were not evaluated on the same prompts"),
    "steps": (other_counts(lambda row: {"steps": row["steps"] + 10}), "no counts for 3 drafted tokens"),
}


@pytest.mark.parametrize("reason", REASONS)
def test_why_there_is_no_pair(root, reason, capsys):
    two(root)
    change, why = REASONS[reason]
    change(root)
    found = compare.compare(["a", "b"])
    assert found.pairs[0].rows == {} and why in found.pairs[0].why
    assert main(["compare", "a", "b"]) == 0
    said, page = capsys.readouterr().out, (root / "outputs/compare-a-b.html").read_text()
    assert "a and b: not paired, since " in said and "a and b: not paired, since " in page
    assert "b less a" not in page  # each run's own interval still stands there
    assert all(runs.length(runs.acceptance(run)).replace(" ", "\xa0") in page for run in found.runs)


def test_answers_cut_elsewhere_and_other_targets_are_said_plainly(root):
    two(root, max_new_tokens=128)
    found = compare.compare(["a", "b"])
    assert found.pairs[0].why == "their answers end at 64 and 128 tokens (max_new_tokens)"
    assert found.warnings == ["Different prompts: a: data/heldout.jsonl 00000000, answers of at most 64 tokens; "
                              "b: data/heldout.jsonl 00000000, answers of at most 128 tokens."]
    made_runs.make(root, "c", target="models/other-7b")
    found = compare.compare(["a", "c"])
    assert found.pairs[0].why.startswith("their targets differ (name)")
    assert found.warnings[0].startswith("Different targets (a: SmolLM2-135M-Instruct (embedded), c: other-7b)")


def test_the_prompts_that_both_walked(root):
    counts, _ = two(root)
    rewrite(root, lambda rows: [row for row in rows if row["id"] not in ("p0", "p1", "p5")])
    (pair,) = compare.compare(["a", "b"]).pairs
    assert pair.rows["all"]["prompts"] == 9
    assert pair.notes == ("Paired on the 9 prompts that both walked, of 12 of a and 9 of b.",)
    part = [r for r in counts if r["steps"] == 3 and r["id"] not in ("p0", "p1", "p5")]
    assert pair.rows["all"]["tau"] - pair.rows["all"]["difference"] == pytest.approx(tau(part))


def test_records_without_texts_are_paired_with_a_word_of_warning(root):
    two(root)
    rewrite(root, lambda rows: [{k: v for k, v in row.items() if k != "text"} for row in rows])
    (pair,) = compare.compare(["a", "b"]).pairs
    assert pair.rows and "no hash of its answers" in pair.notes[0]


def test_the_headline_s_steps_are_those_that_all_have(root):
    rng = np.random.default_rng(0)
    made_runs.make(root, "a", counts=made_runs.prompt_counts(rng, steps_max=7))
    made_runs.make(root, "b", counts=made_runs.prompt_counts(rng, steps_max=2))
    assert compare.compare(["a", "b"]).steps == 2
    made_runs.make(root, "c", stages=("audit", "merge", "extraction", "training"))
    found = compare.compare(["b", "c"])
    assert found.steps == 2 and found.pairs[0].why == "run c has no acceptance length"
    assert found.warnings == ["Run c has no evaluation that ended well: no acceptance length of it."]
    page = compare_page.html(found)
    assert "Training" in page and "no acceptance length of it" in page
    made_runs.make(root, "d", stages=("audit", "merge"))
    found = compare.compare(["c", "d"])
    assert found.steps is None and "Acceptance length</h2>" not in compare_page.html(found)
    five = [row | {"steps": 5} for row in made_runs.prompt_counts(rng, steps_max=1)]
    made_runs.make(root, "e", counts=five)
    assert compare.compare(["b", "e"]).warnings[0].startswith("No number of drafted tokens was measured in all runs")
    shutil.rmtree(root / "outputs/b/work/drafter")
    page = compare_page.html(compare.compare(["b", "c"]))
    assert "No curve of b: drafter/metrics.jsonl is not here." in page


def test_settings_that_differ(root):
    two(root, learning_rate=0.001, exclude=["A1", "B2"])
    twin = json.loads((root / "outputs/b/2_merge.json").read_text())
    del twin["parameters"]["caps"]
    (root / "outputs/b/2_merge.json").write_text(json.dumps(twin))
    rows = {(row["stage"], row["parameter"]): (row["a"], row["b"]) for row in compare.settings(
        compare.compare(["a", "b"]))}
    assert rows == {("audit, merge, extraction, training, evaluation", "exclude"): ("A1", "A1, B2"),
                    ("training", "learning_rate"): ("0.0003", "0.001"), ("merge", "caps"): ("{}", "not declared")}


def test_the_page_stands_alone(root):
    two(root, ttt_steps=4)
    found = compare.compare(["a", "b"])
    twin = json.loads((root / "outputs/a/2_merge.json").read_text())
    twin["result"]["merge"]["sources"][0]["name"] = "<b>A2</b>"
    made_runs.change(root / "outputs/a", "merge", result=twin["result"])
    page = compare_page.html(compare.compare(["a", "b"]))
    assert "<b>A2</b>" not in page and "&lt;b&gt;A2&lt;/b&gt;" in page
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page) and "<script" not in page
    assert len(page) < 200_000 and re.findall(r"<h(\d)", page) == ["1", "2", "2", "2", "2", "2", "2"]
    drawn = re.findall(r'<svg viewBox="0 0 460[^>]*role="img" aria-label="([^"]+)"', page)
    assert len(drawn) == 5 and all(f"<figcaption>{alt}</figcaption>" in page for alt in drawn)
    links = re.findall(r'href="([^"]*)"', page)
    assert "index.html" in links and "../" not in "".join(links)
    assert "href" not in compare_page.html(found, inside=False)
    (root / "outputs/index.html").write_text("")
    for name in "ab":
        (root / f"outputs/{name}/index.html").write_text("")
    check(compare_page.html(found), root / "outputs")


def test_wrong_use(root, capsys):
    made_runs.make(root, "demo")
    folder = made_runs.make(root, "broken", stages=("audit",))
    made_runs.change(folder, "audit", status="failed", error="no")
    for names, said in ((["demo"], "compare wants two runs or more"), (["demo", "demo"], "each once"),
                        (["demo", "dmo"], "no run 'dmo' in outputs/; did you mean demo? (runs: broken, demo)"),
                        (["demo", "broken"], "run broken has no stage that ended well")):
        with pytest.raises(UserError, match=re.escape(said)):
            compare.compare(names)
        assert main(["compare", *names]) == 2 and said in capsys.readouterr().err
    assert not list((root / "outputs").glob("*.html"))


def test_out_and_the_index_of_comparisons(root, capsys):
    two(root)
    assert main(["compare", "a", "b", "--out", "pages/one.html"]) == 0
    assert (root / "pages/one.html").is_file() and capsys.readouterr().out.endswith("Open pages/one.html\n")
    assert main(["compare", "b", "a"]) == 0
    assert 'href="compare-b-a.html"' in (root / "outputs/index.html").read_text()


# ------------------------------------------------------------------------------------------ charts


def test_points_lie_where_their_values_say(root):
    """The way from pixels back to values, by the ticks' own labels, gives the data: to the 0.05 that places are rounded
    to, of 400 pixels."""
    chance = random.Random(2)
    for _ in range(30):
        x = sorted(chance.uniform(0, 10 ** chance.randint(0, 6)) for _ in range(9))
        y = [chance.uniform(-1, 1) * 10 ** chance.randint(-3, 4) for _ in range(9)]
        svg = charts.lines([charts.Series("one", x, y)], "x", "y", "alt")
        points = [tuple(map(float, p.split(","))) for p in re.search(r'points="([^"]*)"', svg)[1].split()]
        ticks = [(float(a), float(b), text.replace(",", "")) for a, b, text in
                 re.findall(r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="middle">([^<]+)</text>', svg)][:-1]
        sides = [(float(b), float(text)) for b, text in
                 re.findall(r'<text x="[\d.]+" y="([\d.]+)" text-anchor="end">([^<]+)</text>', svg)]
        (x0, v0), (x1, v1) = [(a, float(text)) for a, _, text in (ticks[0], ticks[-1])]
        (y0, w0), (y1, w1) = sides[0], sides[-1]
        for (px, py), vx, vy in zip(points, x, y, strict=True):
            assert v0 + (px - x0) * (v1 - v0) / (x1 - x0) == pytest.approx(vx, abs=(v1 - v0) / 2000)
            assert w0 + (py - (y0 - 4.5)) * (w1 - w0) / (y1 - y0) == pytest.approx(vy, abs=(w1 - w0) / 1000)


def test_ticks_are_round_and_cover_the_data():
    chance = random.Random(1)
    for _ in range(500):
        low = chance.uniform(-1, 1) * 10 ** chance.randint(-4, 6)
        high = low + chance.uniform(0.1, 1) * 10 ** chance.randint(-2, 8)
        marks = charts.ticks(low, high)
        step = marks[1] - marks[0]
        assert marks[0] <= low + 1e-6 * step and marks[-1] >= high - 1e-6 * step and 2 <= len(marks) <= 9
        assert round(step / 10 ** math.floor(math.log10(step) + 1e-6), 4) in (1, 2, 5)


def test_long_curves_are_thinned_to_means_and_gaps_left_out():
    y = [float(i % 7) for i in range(2400)]
    points = charts.thinned(list(range(2400)), y)
    assert len(points) == 240 and points[0] == (4.5, sum(y[:10]) / 10)
    assert charts.thinned([1, 2, 3], [1.0, math.nan, 3.0]) == [(1.0, 1.0), (3.0, 3.0)]
    nothing = charts.lines([charts.Series("a", [], [])], "x", "y", "alt")
    assert nothing == "" and charts.dots(["s"], [charts.Series("a", [], [math.nan], 0, [None], [None])], "x", "") == ""
