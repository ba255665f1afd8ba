"""Links resolve, every page is reached, pictures have alt text, and no page tells of this machine."""

import re
import socket

import pages
import pytest


@pytest.mark.parametrize("page", pages.names())
def test_links_resolve(page):
    for file, anchor in pages.links(page):
        assert (pages.ROOT / file).exists(), f"{page} links to {file}, which is not there"
        assert not anchor or anchor in pages.anchors(file), f"{page} links to {file}#{anchor}; no such heading"
    for alt, file in pages.PICTURE.findall(pages.prose(page)):
        assert len(alt) > 20, f"{page}: picture {file} has no alt text"


def test_every_page_is_reached_from_the_index():
    reached, left = set(), ["docs/index.md"]
    while left:
        page = left.pop()
        reached.add(page)
        left += {file for file, _ in pages.links(page) if file.endswith(".md")} - reached
    assert set(pages.names()) - reached <= {"README.md"}
    assert ("docs/index.md", "") in pages.links("README.md")


def test_the_index_has_one_line_a_page():
    lines = pages.text_of("docs/index.md").splitlines()
    for page in set(pages.names()) - {"README.md", "docs/index.md"}:
        name = page.removeprefix("docs/")
        assert any(line.startswith("- [") and f"]({name})" in line for line in lines), f"docs/index.md lacks {name}"


@pytest.mark.parametrize("page", pages.names())
def test_one_title_headings_in_order_fences_closed(page):
    assert pages.text_of(page).count("\n```") % 2 == 0, f"{page}: a fenced block is not closed"
    levels = [len(h) for h in re.findall(r"^(#+) ", pages.prose(page), re.MULTILINE)]
    assert levels[0] == 1 and levels.count(1) == 1, f"{page} needs one title"
    assert all(b <= a + 1 for a, b in zip(levels[:-1], levels[1:], strict=True)), f"{page} skips a heading's level"
    assert all(len(line) < 500 or line.startswith("|") for line in pages.text_of(page).splitlines())


@pytest.mark.parametrize("page", pages.names())
def test_no_page_tells_of_this_machine(page):
    told = [re.escape(str(pages.ROOT)), "/home/", "/root/", rf"\b{re.escape(socket.gethostname())}\b"]
    assert not (found := re.search(rf"(?<![\w/])({'|'.join(told)})", pages.text_of(page))), f"{page} tells {found[0]}"
