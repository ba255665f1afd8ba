"""Records' pages as HTML: whole, offline, without scripts, in order, small, told to readers who see no picture."""

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from htmlpage import check
from PIL import Image

from eagle3nb.record import figures, report, tables
from eagle3nb.record.page import LIMIT, calm, page, summary

ROOT = Path(__file__).resolve().parents[2]
SPECIMEN = sorted((ROOT / "outputs/specimen-demo").glob("[0-9]_*.ipynb"))


def stream(text, name="stdout"):
    return {"output_type": "stream", "name": name, "text": text}


def shows(metadata=None, **data):
    return {"output_type": "display_data", "metadata": metadata or {}, "data": data}


def code(*outputs):
    return {"cell_type": "code", "source": "secret = 1", "metadata": {}, "outputs": list(outputs)}


def markdown(source, tags=()):
    return {"cell_type": "markdown", "source": source, "metadata": {"tags": list(tags)}}


def twin(status="ok", **more):
    return {"stage": "merge", "status": status, "parameters": {"run": "x<y"}, "error": "it broke",
            "result": {"verdict": "2 rows & <all> kept"}, "cost": {"total_s": 250.0},
            "provenance": {"command": "eagle3nb run demo"}, **more}


def picture() -> str:
    fig, ax = figures.new(3, 2)
    ax.plot([1, 2])
    return figures.png(fig)[0]


def every_kind() -> dict:
    """A notebook with every kind of output, the hostile ones too."""
    parameters = tables.table([{"parameter": n, "value": repr(n), "default": "''", "set": "● set" * (n in "ab"),
                                "what it means": "words " * 12} for n in "abcd"], "Parameters", strong=[0, 1])
    wide = tables.table([{f"column_{i}_per_s": 10.0**i for i in range(14)}], "A caption that goes on " * 8)
    rows = [{"source": "A & <b>", "tau": 1.5, "low": 1.4, "high": None, "share": 0.123}]
    hostile = '<p>row</p><script>alert(2)</script><SCRIPT src="http://x/y.js">'
    bar = "rows:  50%|█████     | 2/4 [00:01<00:01,  2.00 rows/s]\r"
    bar += "rows: 100%|██████████| 4/4 [00:02<00:00,  2.00 rows/s]\n"
    return {"cells": [
        markdown('<div role="status">✔ ok an older verdict</div>', ["eagle3nb-verdict"]),
        markdown("# 2 · Merge\n\n**Bold**, `code`, [a link](https://example.org/).\n\n## First?\n\nText."),
        code(shows(**{"text/html": parameters, "text/plain": "as text"}), stream("one\n"), stream("two\n"),
             stream(bar, "stderr")),
        markdown("## Second?\n\n### Deeper\n\n- a\n- b"),
        code(shows(**{"text/html": [wide, tables.table(rows, "Short")], "text/plain": ""}),
             shows(**{"text/html": hostile, "text/plain": ""})),
        markdown("## Third?"),
        code(shows({"image/png": {"alt": 'A line "rises" from 1 to 2', "width": 330}}, **{"image/png": picture() + "\n",
             "text/plain": "no"}), shows(**{"image/png": picture(), "text/plain": "what is to be seen"}),
             shows(**{"text/plain": "plain <text>"}), shows(**{"text/markdown": "some *words*"}),
             {"output_type": "error", "ename": "E", "evalue": "v", "traceback": ["\x1b[31mE\x1b[0m: <v>"]})]}


@pytest.mark.parametrize("path", SPECIMEN, ids=lambda path: path.stem)
def test_every_page_of_the_specimen(path):
    committed = check(path.with_suffix(".html").read_text(), path.parent)
    anew = check(page(json.loads(path.read_text()), json.loads(path.with_suffix(".json").read_text())), path.parent)
    for seen in (committed, anew):
        assert seen.images and len(seen.tables) > 5 and seen.headings[0][1].startswith(path.stem[0])
        assert any(text.startswith("Parameters · ") for text in seen.folded)
        assert re.search(r"✔ ok.*run demo", seen.text) and seen.text.count("✔ ok") == 1


def test_a_page_of_every_kind_of_output():
    seen = check(page(every_kind(), twin()))
    assert seen.title == "2_merge · x<y" and seen.text.count("✔ ok") == 1
    order = ["2 · Merge", "✔ ok", "2 rows & <all> kept", "Bold", "First?", "one\ntwo",
             "rows: 4 in 00:02, 2.00 rows/s", "Second?", "95 % from", "Third?", "plain <text>", "some words", "E: <v>"]
    at = [seen.text.rindex(words) for words in order]  # the headings stand among the contents as well
    assert at == sorted(at)
    assert [image["alt"] for image in seen.images] == ['A line "rises" from 1 to 2', "what is to be seen"]
    assert [(image["width"], image["height"]) for image in seen.images] == [("330", "220"), ("660", "440")]
    for absent in ("secret", "alert(2)", "x/y.js", "older verdict", "█", "as text"):
        assert absent not in seen.text
    assert [text for text in seen.folded if "·" in text] == ["Parameters · 4, set: a 'a', b 'b'"]
    assert [link for link in seen.links if link[0] == "#"] == ["#First?", "#Second?", "#Third?"]


def test_failed_and_retired_pages_say_so_and_never_ok(tmp_path):
    failed = check(page(every_kind(), twin("failed")))
    assert "✖ failed" in failed.text and "to resume: eagle3nb run demo" in failed.text and "✔ ok" not in failed.text
    report.write_records(tmp_path, every_kind(), twin())
    kept = {name: (tmp_path / name).stat().st_mode & 0o777 for name in ("2_merge.html", "2_merge.ipynb")}
    assert set(kept.values()) == {0o444}
    for name in ("index.html", "2_merge.json"):
        (tmp_path / name).write_text("")
    report.retire_records(tmp_path, twin("failed"), "eagle3nb run demo --stages merge")
    retired = check((tmp_path / "2_merge.html").read_text(), tmp_path)
    assert "has not ended yet" in retired.text and "eagle3nb run demo --stages merge" in retired.text
    assert "✔ ok" not in retired.text and not (tmp_path / "2_merge.ipynb").exists()


def test_a_page_stays_under_its_limit_and_says_what_it_leaves_out():
    """What grows with the data are examples of rows and figures; of both more than fit, the largest go first."""
    book = every_kind()
    big, small = "<p>" + "x" * 700_000 + "</p>", "<p>" + "y" * 1000 + "</p>"
    book["cells"].append(code(*(shows(**{"text/html": h, "text/plain": ""}) for h in (small, big, big, big, small))))
    html = page(book, twin())
    seen = check(html)
    assert len(html.encode()) <= LIMIT and html.count("x" * 700_000) == 2 and html.count("y" * 1000) == 2
    assert seen.text.count("700 KB are left out") == 1 and "2_merge.ipynb" in seen.links[3:]


def test_progress_bars_are_told_in_words():
    bar = "a: 100%|██████████| 1,024/1,024 [1:00:02<00:00, 17.04 rows/s]"
    assert calm(bar) == "a: 1,024 in 1:00:02, 17.04 rows/s"
    assert calm("x\rb:  43%|████▎     | 3/7 [00:01<00:02,  1.5it/s]\nc") == "b:  43% · 3/7 [00:01<00:02,  1.5it/s]\nc"
    assert calm("a | b || c\r\n") == "a | b || c\n"


def test_tables_speak_words_and_percent():
    rows = [{"class": "code", "first_share": 0.5, "reached": 8, "share": np.float32(0.25), "low": 0.1, "high": 0.4}]
    heads, texts = tables.cells(rows)
    assert heads == ["class", "first drafts accepted (%)", "reached", "accepted of those reached (%)", "95 % from (%)",
                     "95 % to (%)"]
    assert texts == [["code", "50.0", "8", "25.0", "10.0", "40.0"]]
    heads, texts = tables.cells([{"steps": 3, "tau": 1.604, "low": 1.536, "high": None, "tokens_per_s": 734.12}])
    assert heads == ["drafted tokens", "acceptance length", "95 % from", "95 % to", "tokens/s"]
    assert texts == [["3", "1.604", "1.536", "–", "734.1"]]
    assert tables.cells([{256: 1.5, "load_s": 2, "accuracy 2": 0.331, "share %": 12.0, "difference": 0.1}])[0] == [
        "256", "loading (s)", "accuracy 2 (%)", "share %", "difference"]
    assert tables.cells([{"where": "host"}])[0] == ["where"]
    assert tables.cells([{"where": "text at 3", "margin": 0.1}])[0] == ["first difference", "margin"]
    text = tables.table_text(rows, "By class")
    assert text.splitlines()[1].split("  ")[1].strip() == "first drafts accepted (%)" and "25.0" in text


def test_a_column_of_fractions_has_as_many_decimals_as_its_longest():
    def column(*values):
        return [texts[0] for texts in tables.cells([{"x": value} for value in values])[1]]

    assert column(1.6, 1.549, None, 12.0, 123.4, 1234.5) == ["1.600", "1.549", "–", "12.00", "123.4", "1,234"]
    assert column(-1.5, -0.25, 0.0) == ["-1.50", "-0.25", "0.00"] and column(2.0, 3.0) == ["2", "3"]
    assert column(1e-7, 0.5, 0.25) == ["1e-07", "0.50", "0.25"]  # what needs a power of ten keeps it, and adds none
    assert column(8192, 0.25) == ["8,192", "0.25"] and column("a", 0.5, 0.25) == ["a", "0.5", "0.25"]  # no one kind
    assert tables.cells([]) == ([], [])


def test_parameters_fold_to_what_was_set():
    def folded(count, changed):
        rows = [{"parameter": f"p{i}", "value": str(i), "default": "", "set": "● set" * (i < changed)}
                for i in range(count)]
        return summary("Parameters", tables.table(rows, "Parameters"))

    assert folded(3, 0) == "Parameters · 3, all as the notebook has them"
    assert folded(3, 1) == "Parameters · 3, set: p0 0"
    assert folded(20, 10).endswith("p7 7, and 2 more")
    assert summary("Inputs", tables.table([{"file": "a"}], "Inputs")) == "Inputs · 1 file"


def test_words_on_a_verdict_can_be_read_on_any_ground():
    """White letters on each colour: WCAG's 4.5."""
    def luminance(colour):
        parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for status, colour in tables.COLOUR.items():
        assert 1.05 / (luminance(colour) + 0.05) >= 4.5
        assert f"background:{colour};color:#ffffff" in tables.banner(status, "t", "s")


def test_figures_are_small_sharp_and_keep_their_colours():
    fig, ax = figures.new(7, 3)
    for i, (colour, marker) in zip(range(7), figures.styles(), strict=False):
        ax.plot([0, 1], [i, i + 1], color=colour, marker=marker)
    drawn = io.BytesIO()
    fig.savefig(drawn, format="png", dpi=figures.DPI)
    text, width = figures.png(fig)
    small, plain = (np.asarray(Image.open(f).convert("RGB")).astype(int)
                    for f in (io.BytesIO(base64.b64decode(text)), drawn))
    assert width == 770 and small.shape == plain.shape == (660, 1540, 3)
    assert (np.abs(small - plain).max(axis=2) > 32).mean() < 1e-3  # 256 colours hide nothing
    assert len(base64.b64decode(text)) < 0.5 * len(drawn.getvalue())


def test_lines_stay_apart_beyond_seven_sources():
    assert len({pair for _, pair in zip(range(49), figures.styles(), strict=False)}) == 49
    first = [pair for _, pair in zip(range(14), figures.styles(), strict=False)]
    assert [colour for colour, _ in first[:7]] == [colour for colour, _ in first[7:]]
    assert all(a != b for a, b in zip(first[:7], first[7:], strict=True))
