"""A page as a parser sees it that knows nothing of how pages are made, and what must hold of every one of them."""

import re
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "img", "br", "hr", "link", "input", "wbr", "col", "source"}
LOADS = {"img": "src", "script": "src", "link": "href", "iframe": "src", "video": "src", "audio": "src",
         "source": "src", "object": "data", "embed": "src", "use": "href", "image": "href", "input": "src"}


class Page(HTMLParser):
    """What a page holds. `faults`: tags that do not nest, and whatever would run or load."""

    def __init__(self, html: str):
        super().__init__(convert_charrefs=True)
        self.open, self.faults, self.ids, self.headings, self.images, self.links = [], [], [], [], [], []
        self.tables, self.html, self.title, self.styles, self.policy = [], {}, "", "", ""
        self.text, self.folded = "", []
        self.feed(html)
        self.close()
        self.faults += [f"<{tag}> is never closed" for tag in self.open]

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.faults += [f"{name} on <{tag}>" for name in attributes if name.startswith("on")]
        if tag in ("script", "iframe", "object", "embed", "base"):
            self.faults.append(f"<{tag}>")
        if (address := attributes.get(LOADS.get(tag, ""), "")) and not address.startswith("data:image/"):
            self.faults.append(f"<{tag}> loads {address}")
        if re.search(r"url\(|@import|expression\(", attributes.get("style", "") or ""):
            self.faults.append(f"a style of <{tag}> loads something")
        self.ids += [attributes["id"]] if "id" in attributes else []
        if tag == "html":
            self.html = attributes
        elif tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy":
            self.policy = attributes["content"]
        elif tag == "img":
            self.images.append(attributes)
        elif tag == "a":
            self.links.append(attributes.get("href", ""))
        elif re.fullmatch("h[1-6]", tag):
            self.headings.append([int(tag[1]), ""])
        elif tag == "table":
            self.tables.append({"caption": "", "scopes": [], "rows": []})
        elif tag == "th":
            self.tables[-1]["scopes"].append(attributes.get("scope"))
        elif tag == "tr":
            self.tables[-1]["rows"].append(0)
        if tag in ("td", "th"):
            self.tables[-1]["rows"][-1] += 1
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in VOID:
            return
        if not self.open or self.open[-1] != tag:
            self.faults.append(f"</{tag}> closes <{self.open[-1] if self.open else ''}>")
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    def handle_data(self, data):
        if "style" in self.open:
            self.styles += data
        elif "title" in self.open:
            self.title += data
        else:
            self.text += data
        if self.headings and re.fullmatch("h[1-6]", self.open[-1] if self.open else ""):
            self.headings[-1][1] += data
        if "caption" in self.open:
            self.tables[-1]["caption"] += data
        if "summary" in self.open:
            self.folded.append(data)


def check(html: str, folder: Path | None = None) -> Page:
    """Everything that holds of every page; `folder` where its neighbours lie."""
    seen = Page(html)
    assert html.startswith("<!DOCTYPE html>") and len(html.encode()) < 2_000_000
    assert seen.faults == [] and not re.search(r"url\(|@import", seen.styles)
    assert seen.html.get("lang") == "en" and seen.title.strip() and "default-src 'none'" in seen.policy
    assert 'name="viewport"' in html and "prefers-color-scheme: dark" in seen.styles and "@media print" in seen.styles
    levels = [level for level, _ in seen.headings]
    assert levels[0] == 1 and levels.count(1) == 1 and all(text.strip() for _, text in seen.headings)
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False)), seen.headings
    assert len(set(seen.ids)) == len(seen.ids)
    for picture in seen.images:
        assert len(picture.get("alt", "")) > 10 and int(picture["width"]) > 0 and int(picture["height"]) > 0
    for table in seen.tables:
        assert table["caption"].strip() and set(table["scopes"]) == {"col"} and len(set(table["rows"])) == 1, table
    for link in seen.links:
        if link.startswith("#"):
            assert link[1:] in seen.ids
        elif folder and not re.match("https?://", link):
            assert (folder / link).exists(), link
    return seen
