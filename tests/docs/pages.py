"""README and docs as text: fenced blocks, inline code, headings, links."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)")
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of the page on which that begins."""

    page: str
    language: str
    text: str
    line: int

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def names() -> list[str]:
    """README and every page of docs, from the project's root."""
    return ["README.md", *sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").rglob("*.md"))]


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    text = text_of(page)
    return [Block(page, m[1], m[2], text[:m.start(2)].count("\n") + 1) for m in FENCE.finditer(text)]


def prose(page: str) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", text_of(page))


def inline(page: str) -> list[str]:
    """What stands in single back quotes, line breaks and table bars undone."""
    return [found.replace("\\|", "|") for found in INLINE.findall(prose(page))]


def anchors(page: str) -> set[str]:
    """The headings as GitHub names them: lower case, punctuation gone, blanks to dashes."""
    found = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    bare = [re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-") for heading in found]
    return {name if not bare[:i].count(name) else f"{name}-{bare[:i].count(name)}" for i, name in enumerate(bare)}


def links(page: str) -> list[tuple[str, str]]:
    """(the file that is linked, from the project's root; its anchor or "") of every link to a file."""
    found = []
    for target in [*LINK.findall(prose(page)), *(m[1] for m in PICTURE.findall(prose(page)))]:
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        place = (ROOT / page).parent / file if file else ROOT / page
        found.append((Path(place).resolve().relative_to(ROOT).as_posix(), anchor))
    return found
