"""The indexes and a comparison in a real browser: sorted and filtered by hand and by keyboard, whole without a script,
on a telephone, in the dark."""

import json

import made_runs
import pytest
from test_pages import CONTRAST, SIDEWAYS

from eagle3nb.record import compare, compare_page, index, runs

NAMES = """[...document.querySelectorAll("tbody tr")].filter(row => row.checkVisibility())
  .map(row => row.cells[0].innerText)"""
STATE = "[...document.querySelectorAll('th[aria-sort]')].map(th => [th.innerText, th.ariaSort])"


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Five runs that differ in all that is sorted by; one is half, one failed with a long error, one a specimen."""
    monkeypatch.chdir(tmp_path)
    made_runs.project(tmp_path)
    made_runs.make(tmp_path, "wide", day=4, seed=1, learning_rate=0.001, target="models/" + "long-name-" * 6,
                   base_model="owner/" + "n" * 40, prompts=["data/" + "p" * 40], rendezvous="h" * 40)
    made_runs.make(tmp_path, "alpha", day=2, seed=2, limit=7, epochs=9, clip=2.0, ttt_steps=5, bootstrap=9, steps_max=4)
    made_runs.make(tmp_path, "half", day=6, stages=("audit",))
    folder = made_runs.make(tmp_path, "failed-run-with-a-name-that-is-rather-long", day=5, seed=3)
    made_runs.change(folder, "training", status="failed", error="E" * 300)
    folder = made_runs.make(tmp_path, "specimen-x", day=3, seed=4)
    twin = json.loads((folder / "5_evaluation.json").read_text())
    made_runs.change(folder, "evaluation", parameters=twin["parameters"] | {"run": "x"})
    for run in runs.all_runs():
        index.write_index(run.folder)
    return tmp_path


def opened(tab, root, **options):
    page, said = tab(offline=True, **options), []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto((root / "outputs/index.html").as_uri())
    assert said == []
    return page


def test_rows_are_sorted_by_a_click_or_a_key(root, tab):
    page, all_names = opened(tab, root), [run.name for run in runs.all_runs()]
    short = [name.split("\n")[0] for name in page.evaluate(NAMES)]
    assert short == all_names and all_names[::2] == ["half", "wide", "alpha"]
    values = {"Run": lambda run: run.name, "Started (UTC)": runs.started,
              "Target": lambda run: runs.target(run).lower(),
              "Acceptance length, 3 drafted": lambda run: (runs.acceptance(run) or {"tau": None})["tau"],
              "Tokens": lambda run: runs.data(run)["tokens"], "Time": runs.seconds}
    order = all_names
    for head, value in values.items():
        button, of = page.get_by_role("button", name=head), {run.name: value(run) for run in runs.all_runs()}
        for _ in range(2):
            button.focus()
            page.keyboard.press("Enter")
            state = page.evaluate(STATE)
            assert len(state) == 1 and state[0][0].startswith(head)
            known = [name for name in order if of[name] is not None]  # a sort leaves equals in their order
            down = state[0][1] == "descending"
            order = sorted(known, key=lambda name: of[name], reverse=down) + [n for n in order if of[n] is None]
            assert [name.split("\n")[0] for name in page.evaluate(NAMES)] == order, (head, state)


def test_the_filter_wants_every_word(root, tab):
    page = opened(tab, root)
    field = page.get_by_role("searchbox")
    field.fill("learning_rate OK")
    assert page.evaluate(NAMES) == ["wide"] and page.get_by_role("status").inner_text() == "1 of 5"
    field.fill("nowhere")
    assert page.evaluate(NAMES) == []
    field.fill("")
    assert len(page.evaluate(NAMES)) == 5


def test_without_a_script_the_table_is_complete(root, tab):
    page = opened(tab, root, java_script_enabled=False)
    assert page.locator("tbody tr").count() == 5 and page.locator("button, input").count() == 0
    assert page.get_by_role("columnheader", name="Verdict").is_visible()


def test_pages_on_a_telephone_and_in_the_dark(root, tab):
    found = compare.compare(["wide", "alpha", "specimen-x"])
    compare_page.write(found, root / "outputs" / compare.file_name(found))
    for path in (root / "outputs/index.html", root / "outputs/alpha/index.html",
                 root / "outputs/failed-run-with-a-name-that-is-rather-long/index.html",
                 *(root / "outputs").glob("compare-*.html")):
        page = tab(viewport={"width": 400, "height": 800}, color_scheme="dark", offline=True)
        page.goto(path.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= 400 and page.evaluate(SIDEWAYS) == [], path.name
        for scheme in ("dark", "light"):
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate(CONTRAST, 4.5) == [], (path.name, scheme)
        page.set_viewport_size({"width": 1100, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 1100, path.name
        page.emulate_media(media="print")
        assert page.pdf(format="A4").startswith(b"%PDF")
        page.close()
