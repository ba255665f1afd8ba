"""The index over all runs and a run's own: against the twins read by hand, damaged at random, written by several at
once."""

import json
import os
import random
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path

import made_runs
import pytest
from htmlpage import check

from eagle3nb.lock import only_one
from eagle3nb.record import index, runs


class Page(HTMLParser):
    """The cells of a page's table by row, headings, links and tags."""

    def __init__(self, html: str):
        super().__init__()
        self.rows, self.heads, self.links, self.tags, self.open, self.text = [], [], [], [], [], ""
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        self.links += [attributes["href"]] if "href" in attributes else []
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append({**attributes, "text": ""})
        if tag in ("h1", "h2", "h3"):
            self.heads.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        if any(tag in self.open for tag in ("td", "th")):
            self.rows[-1][-1]["text"] += data
        if not any(tag in self.open for tag in ("style", "script")):
            self.text += data


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return made_runs.project(tmp_path)


def listed() -> list[dict[str, str]]:
    """The index's rows: {head: text}."""
    page = Page(index.write_runs(runs.outputs()).read_text())
    heads, *rows = page.rows or [[]]
    return [{head["text"]: cell["text"].replace("\xa0", " ") for head, cell in zip(heads, row, strict=True)}
            for row in rows]


def test_each_run_is_a_row_newest_first(root):
    folder = made_runs.make(root, "older", day=3)
    made_runs.make(root, "newer", day=7, learning_rate=0.001, exclude=["B1"])
    made_runs.make(root, "half", day=5, stages=("audit", "merge"))
    shutil.copytree(folder, root / "outputs/specimen-older")
    assert "../index.html" not in index.write_index(root / "outputs/specimen-older").read_text()
    (root / "outputs/empty").mkdir()
    (root / "outputs/some.txt").write_text("no run")
    rows = listed()
    assert [row["Run"] for row in rows] == ["newer", "half", "older", "specimen-olderkept record of run older"]
    row, half = rows[0], rows[1]
    assert row["Verdict"] == "✔ ok all 5 stages" and half["Verdict"] == "✔ ok audit, merge"
    assert row["Target"] == "SmolLM2-135M-Instruct (embedded)" and row["Started (UTC)"] == "2026-11-07 01:04"
    assert row["Commit"] == "0707070707" and row["Tokens"] == "1,200" and row["Time"] == "1 min 0 s"  # 10+11+12+13+14 s
    counts = json.loads((folder / "work/evaluation/acceptance.json").read_text())["prompts"]
    three = [r for r in counts if r["steps"] == 3]
    tau = 1 + sum(r["accepted"] for r in three) / sum(r["verifies"] for r in three)
    assert row["Acceptance length, 3 drafted"] == f"{tau:.2f} [{tau - 0.125:.2f}, {tau + 0.25:.2f}]"
    assert half["Acceptance length, 3 drafted"] == "–" and half["Time"] == "21.0 s"
    assert row["Profile, and what was set otherwise"] == "demo: exclude [\"B1\"], learning_rate 0.001"
    assert half["Profile, and what was set otherwise"] == "demo"
    shutil.rmtree(root / "outputs/older")
    assert [row["Run"] for row in listed()] == ["newer", "half", "specimen-olderkept record of run older"]


def test_without_a_run_it_says_how_to_make_one(root):
    assert listed() == [] and "eagle3nb run demo" in (root / "outputs/index.html").read_text()


def test_many_settings_fold(root):
    changed = {"learning_rate": 0.001, "epochs": 9, "ttt_steps": 5, "bootstrap": 400, "limit": 7, "steps_max": 4,
               "clip": 2.0}
    folder = made_runs.make(root, "run", **changed)
    (cell,) = [row["Profile, and what was set otherwise"] for row in listed()]
    assert [name for name, value in changed.items() if f"{name} {value}" not in cell] == [] and "and 2 more" in cell
    for stage in made_runs.STEMS:  # one that ran in Lab has no command: the notebooks' defaults are the measure
        twin = made_runs.change(folder, stage)
        made_runs.change(folder, stage, provenance=twin["provenance"] | {"command": ""})
    assert listed()[0]["Profile, and what was set otherwise"].startswith("notebooks’ defaults: ")


def test_the_worst_stage_is_the_verdict(root):
    folder = made_runs.make(root, "run")
    made_runs.change(folder, "training", status="failed", error="<script>alert(1)</script> & more " + "x" * 200)
    (row,) = listed()
    assert row["Verdict"].startswith("✖ failed training: <script>alert(1)</script> & more xxx")  # as text, escaped
    assert Page((root / "outputs/index.html").read_text()).tags.count("script") == 1  # its own
    made_runs.change(folder, "training", status="failed", error="did not finish")
    assert listed()[0]["Verdict"] == "✖ failed training: did not finish"
    with only_one(folder / "work/.runner/lock"):  # a runner holds it
        assert listed()[0]["Verdict"].startswith("… running training")
        assert "… running" in index.run_page(runs.read_run(folder))
    (folder / "2_merge.json").write_text('{"stage": "merge", "sta')
    (row,) = listed()
    assert row["Verdict"].startswith("✖ failed 2_merge.json is not valid JSON; delete it and run the stage again")
    page = index.write_index(folder).read_text()
    assert "2_merge.json is not valid JSON" in page and "3 extraction" in page and "✖ failed" in page


def test_a_stage_that_read_what_was_made_anew_since_is_named(root):
    folder = made_runs.make(root, "demo")
    twin = json.loads((folder / "4_training.json").read_text())
    weights = next(e for e in twin["outputs"] if e["path"].endswith("model.safetensors"))
    made_runs.change(folder, "evaluation", inputs=[weights])
    assert listed()[0]["Verdict"] == "✔ ok all 5 stages"
    made_runs.change(folder, "evaluation", inputs=[weights | {"xxh3": "0" * 32}])
    assert listed()[0]["Verdict"] == "✔ ok all 5 stages; evaluation is of an earlier training"
    assert "evaluation is of an earlier training" in index.write_index(folder).read_text()


JUNK = (None, True, -1, 10**30, 1.5, "", "text", "2026-99-99", [], [None], {}, {"tau": "x"}, [{"steps": 3}], [1, [2]],
        [{"steps": 3, "source": "all", "tau": None}], [{"steps": 3, "source": "all", "tau": 1.5}], "eagle3nb run 'demo")


def places(value, way=()):
    yield way
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*way, key))


@pytest.mark.parametrize("seed", range(4))
def test_no_damage_breaks_a_page(root, seed, monkeypatch):
    """Any value anywhere in a twin replaced by any other: the pages are whole all the same, and the other run's row."""
    chance, folder = random.Random(seed), made_runs.make(root, "demo")
    made_runs.make(root, "other", day=9)
    usual = runs.usual("demo")
    monkeypatch.setattr(runs, "usual", lambda profile: usual)  # read once: it is the same for all
    whole = {stage: (folder / f"{stem}.json").read_text() for stage, stem in made_runs.STEMS.items()}
    for _ in range(40):
        stage = chance.choice(list(whole))
        twin = json.loads(whole[stage])
        for _ in range(chance.randint(1, 3)):
            way = chance.choice([w for w in places(twin) if w])
            inner = twin
            for key in way[:-1]:
                inner = inner[key]
            inner[way[-1]] = chance.choice(JUNK)
        (folder / f"{made_runs.STEMS[stage]}.json").write_text(json.dumps(twin))
        rows = listed()
        assert len(rows) == 2 and [r["Verdict"] for r in rows if r["Run"] == "other"] == ["✔ ok all 5 stages"]
        assert index.run_page(runs.read_run(folder)).rstrip().endswith("</html>")
        (folder / f"{made_runs.STEMS[stage]}.json").write_text(whole[stage])


def test_a_run_s_page_has_words_and_percent(root):
    folder = made_runs.make(root, "demo", day=2)
    page = Page(index.write_index(folder).read_text())
    for said in ("SmolLM2-135M-Instruct (embedded)", "data/demo: 6 records, 1,200 tokens, 2 sources, left out: A1",
                 "2026-11-02 01:04 UTC", "0202020202", "first drafts right 43.8 %", "held-out acceptance length 1.75",
                 "text the draft vocabulary covers 97.1 %", "hidden states on disk 5.0 MB", "real decode equal 8 of 8",
                 "records cut 1", "training went well", "95 % interval"):
        assert said in page.text, said
    for name in ("truncated", "tokens_per", "best", "delivered_per_verify", "tau", "0.9712", "0.4375"):
        assert name not in page.text, name
    assert page.heads == ["h1", "h2", "h2"] and "script" not in page.tags
    assert {link for link in page.links if not (folder / link).exists()} == set()
    assert "../index.html" in page.links and "work/export/README.md" in page.links
    check((folder / "index.html").read_text(), folder)
    half = made_runs.make(root, "half", stages=("audit",))
    text = index.write_index(half).read_text()
    assert "5 evaluation: not run" in text and "synthesis" not in text and "card" not in text.partition("<main>")[2]


def test_the_work_s_file_is_the_record_s_own_or_none(root):
    folder = made_runs.make(root, "demo")
    run, ending = runs.read_run(folder), "evaluation/acceptance.json"
    file = folder / "work" / ending
    assert runs.work_file(run, "evaluation", ending) == (file, "")
    elsewhere = root / "elsewhere"  # a work_dir outside, of which records tell nothing: the runner's own note does
    shutil.move(folder / "work/evaluation", elsewhere / "evaluation")
    assert runs.work_file(run, "evaluation", ending) == (None, f"{ending} is not here")
    (folder / "work/.runner/status.json").write_text(json.dumps({"work": str(elsewhere)}))
    assert runs.work_file(run, "evaluation", ending) == (elsewhere / ending, "")
    text = (elsewhere / ending).read_text()
    (elsewhere / ending).write_text(text.replace("chat", "chut"))
    assert runs.work_file(run, "evaluation", ending)[1].endswith("is not the file that its record tells of")
    assert runs.work_file(run, "training", "drafter/none")[1] == "the record of its training names no none"


def test_the_last_writer_has_seen_what_others_wrote(root, monkeypatch):
    """One has read the runs and dawdles; meanwhile another run ends. Its row must be there once both are through."""
    made_runs.make(root, "first", stages=("audit",))
    read, done = runs.all_runs, threading.Event()
    other = threading.Thread(target=lambda: [index.write_runs(root / "outputs"), done.set()])

    def dawdle():
        found = read()
        if threading.current_thread() is not other:
            made_runs.make(root, "second", stages=("audit",))
            other.start()
            done.wait(1.0)  # without a lock the other is through by then, and this one writes over it
        return found

    monkeypatch.setattr(runs, "all_runs", dawdle)
    index.write_runs(root / "outputs")
    other.join()
    assert [row[0]["text"] for row in Page((root / "outputs/index.html").read_text()).rows[1:]] == ["first", "second"]


WRITER = """
import sys, pathlib, made_runs
from eagle3nb.record import index
root = pathlib.Path.cwd()
for i in range(4):
    if i == 2:
        sys.stdin.read()
    index.write_index(made_runs.make(root, f"{sys.argv[1]}-{i}", stages=("audit",)))
"""


def test_several_runs_at_once_lose_no_row_and_tear_nothing(root):
    """Whoever writes last has seen all: without the lock around reading and writing a run could be missing."""
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, name], cwd=root, stdin=subprocess.PIPE,
                                env={**os.environ, "PYTHONPATH": str(Path(made_runs.__file__).parent)})
               for name in "abc"]
    page, seen = root / "outputs/index.html", 0
    while any(writer.poll() is None for writer in writers):
        if page.exists():
            assert page.read_text().rstrip().endswith("</html>")
            seen += 1
            for writer in writers:  # each stops halfway until the page has been seen once
                writer.stdin.close()
    assert [writer.returncode for writer in writers] == [0, 0, 0] and seen
    rows = Page(page.read_text()).rows[1:]
    assert sorted(row[0]["text"] for row in rows) == sorted(f"{name}-{i}" for name in "abc" for i in range(4))
    assert not list((root / "outputs").glob("*.partial"))
