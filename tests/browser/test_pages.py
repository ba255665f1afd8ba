"""Records' pages in a real browser: no request, no sideways scrolling at 400 px, letters that can be read, paper."""

import io
import re
from pathlib import Path

import pytest
from PIL import Image

from eagle3nb.record import figures, tables
from eagle3nb.record.page import page

ROOT = Path(__file__).resolve().parents[2]
SPECIMEN = sorted((ROOT / "outputs/specimen-demo").glob("*.html"))

# Contrast of every text with what lies behind it, by WCAG 2: [[ratio, text]] of those below `least`.
CONTRAST = """least => {
  const parse = text => {
    const n = text.match(/[\\d.]+/g).map(Number);
    return [...n.slice(0, 3), n.length > 3 ? n[3] : 1];
  };
  const over = (top, below) => top.slice(0, 3).map((c, i) => c * top[3] + below[i] * (1 - top[3]));
  const luminance = rgb => rgb.map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const canvas = matchMedia("(prefers-color-scheme: dark)").matches ? [18, 18, 18] : [255, 255, 255];
  const ground = node => {
    const layers = [];
    for (let at = node; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, top) => over(top, below), canvas);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [], seen = new Map();
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim(), node = walker.currentNode.parentElement;
    if (!text || ["STYLE", "SCRIPT"].includes(node.tagName)) continue;
    if (!seen.has(node)) {
      const below = ground(node), ink = over(parse(getComputedStyle(node).color), below);
      const [a, b] = [luminance(ink), luminance(below)].sort((x, y) => y - x);
      seen.set(node, (a + 0.05) / (b + 0.05));
    }
    if (seen.get(node) < least) found.push([seen.get(node), text.slice(0, 40)]);
  }
  return found;
}"""
# What sticks out of the window, or scrolls sideways and is neither a table's strip nor preformatted.
SIDEWAYS = """() => [...document.querySelectorAll("body, body *")].filter(node => {
  const style = getComputedStyle(node), box = node.getBoundingClientRect();
  const scrolls = ["auto", "scroll"].includes(style.overflowX);
  if (scrolls && node.scrollWidth > node.clientWidth + 1) return !node.matches(".wide, pre, main > table");
  return box.width && box.right > innerWidth + 1 && !node.closest(".wide, pre, main > table");
}).map(node => node.outerHTML.slice(0, 200))"""


def made(folder: Path) -> Path:
    """A page with what is hardest: a very wide table, long words, a large figure, a traceback."""
    fig, ax = figures.new(12, 3)
    ax.plot([1, 2])
    data = {"image/png": figures.png(fig)[0], "text/plain": "two numbers"}
    numbers, texts = {f"a_long_column_{i}": i / 3 for i in range(20)}, {f"what {i}": "word " * 60 for i in range(5)}
    wide = tables.table([numbers | texts], "Wide " * 30)
    folded = tables.table([{"parameter": "run", "value": "'r'", "what it means": "word " * 60}], "Parameters")
    outputs = [{"output_type": "display_data", "metadata": {}, "data": {"text/html": wide + folded}},
               {"output_type": "display_data", "metadata": {}, "data": data},
               {"output_type": "stream", "name": "stderr", "text": "y" * 400},
               {"output_type": "stream", "name": "stdout", "text": f"  a{' ' * 60}12 records\n  b{' ' * 60}3 records"},
               {"output_type": "error", "ename": "E", "evalue": "v", "traceback": ["\x1b[31m" + "x" * 300 + "\x1b[0m"]}]
    book = {"cells": [
        {"cell_type": "markdown", "source": "# 2 · Merge\n\n`" + "long/" * 60 + "`\n\n## " + "Z" * 90, "metadata": {}},
        {"cell_type": "code", "source": "", "metadata": {}, "outputs": outputs}]}
    twin = {"stage": "merge", "status": "failed", "error": "e" * 200, "parameters": {"run": "r"}, "result": {},
            "cost": {}, "provenance": {"command": "eagle3nb run " + "p" * 100}}
    (folder / "made.html").write_text(page(book, twin))
    return folder / "made.html"


@pytest.mark.parametrize("name", [*(path.name for path in SPECIMEN), "made"])
def test_a_page_offline_on_a_telephone_in_the_dark_and_on_paper(name, tab, tmp_path):
    path = made(tmp_path) if name == "made" else ROOT / "outputs/specimen-demo" / name
    asked, said = [], []
    telephone = tab(viewport={"width": 400, "height": 800}, color_scheme="dark", offline=True)
    telephone.on("request", lambda request: asked.append(request.url))
    telephone.on("console", lambda message: said.append(message.text))
    telephone.on("pageerror", lambda error: said.append(str(error)))
    telephone.goto(path.as_uri())
    assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()] and said == []
    assert telephone.evaluate("document.documentElement.scrollWidth") <= 400
    assert telephone.evaluate(SIDEWAYS) == []
    grid = "[...document.querySelectorAll('pre.grid')].some(grid => grid.scrollWidth > grid.clientWidth)"
    assert telephone.evaluate(grid) or name != "made"  # text in columns scrolls, where other text wraps
    assert telephone.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
    assert telephone.evaluate(CONTRAST, 4.5) == []
    dark = Image.open(io.BytesIO(telephone.screenshot())).convert("RGB")
    telephone.emulate_media(color_scheme="light")
    assert telephone.evaluate(CONTRAST, 4.5) == []
    light = Image.open(io.BytesIO(telephone.screenshot())).convert("RGB")
    assert dark.getpixel((2, 2)) < (60, 60, 60) and light.getpixel((2, 2)) == (255, 255, 255)
    assert min(len(set(picture.getdata())) for picture in (dark, light)) > 20  # letters: neither is blank

    telephone.set_viewport_size({"width": 703, "height": 1000})  # A4 less 12 mm on each side, at 96 dots an inch
    telephone.emulate_media(media="print")
    assert telephone.evaluate("document.documentElement.scrollWidth") <= 703
    assert telephone.evaluate(f"({SIDEWAYS.replace('.wide, ', '').replace(', main > table', '')})()") == []
    assert telephone.evaluate("[...document.querySelectorAll('nav')].every(nav => nav.offsetParent === null)")
    folded = telephone.evaluate("[...document.querySelectorAll('details:not(.contents) .wide')].map("
                                "table => table.checkVisibility())")
    assert all(folded) and (folded or name == "index.html")  # paper cannot be unfolded
    paper = telephone.pdf(format="A4")
    assert paper.startswith(b"%PDF") and 1 <= len(re.findall(rb"/Type\s*/Page\b", paper)) < 40


def test_the_checks_themselves_find_what_is_wrong(tab, tmp_path):
    """A page with every fault that the test above looks for."""
    (tmp_path / "bad.html").write_text(
        '<!DOCTYPE html><body style="background:#fff"><p style="color:#999">pale</p><p style="color:#000">good</p>'
        '<div style="width:900px">wide</div><div style="overflow-x:auto"><div style="width:700px">x</div></div>'
        '<img src="picture.png">')
    bad = tab(viewport={"width": 400, "height": 800})
    asked = []
    bad.on("request", lambda request: asked.append(request.url))
    bad.goto((tmp_path / "bad.html").as_uri())
    assert [text for _, text in bad.evaluate(CONTRAST, 4.5)] == ["pale"]
    assert len(bad.evaluate(SIDEWAYS)) >= 2 and len(asked) == 2
    assert not bad.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
