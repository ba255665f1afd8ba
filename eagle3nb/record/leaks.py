"""What must not leave the machine with a record: its paths, its name and its user's, keys. Looked for in every form
that a file of a bundle can hold a text in: JSON strings, HTML, percent signs, terminal colours, pictures' own notes.

    seeker = Seeker.of(run)
    seeker.leaks("5_evaluation.ipynb", path.read_bytes())
"""

import base64
import html
import json
import os
import re
import socket
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import unquote

import psutil

from eagle3nb.errors import UserError
from eagle3nb.record import keys, provenance, runs
from eagle3nb.record.params import load

# Folders that say nothing of a machine, and names that say nothing of a person: of these only `root@` or `@vm` tells.
COMMON_PLACES = {"/", "/usr", "/usr/local", "/opt", "/tmp", "/var/tmp"}
COMMON_NAMES = {"root", "user", "admin", "ubuntu", "debian", "runner", "docker", "jovyan", "nobody", "build", "test",
                "localhost", "host", "node", "vm", "ec2-user", "app", "ci", "python", "conda"}
# Paths as people's folders and clusters' volumes are called, on whatever machine the run was; and addresses inside.
SHAPES = {
    "a home folder": r"/(?<![\w.…>~-]/)(?:home|Users)/[\w.-]+", "a user's folder": r":[\\/]+Users[\\/]+[\w.-]+",
    "a volume": r"/(?<![\w.…>~-]/)(?:mnt|media|scratch\d*|nfs\d*|lustre|gpfs|fsx|efs|workspace|volumes?)/[\w.-]+",
    "an address inside": r"://(?:(?<=http://)|(?<=https://))(?:"
                         r"(?:10|192\.168|172\.(?:1[6-9]|2\d|3[01]))(?:\.\d{1,3}){2,3}(?::\d+)?"
                         r"|(?!localhost\b)[A-Za-z][\w-]*(?::\d+|/)|[\w.-]+\.(?:local|lan|internal|intranet|corp)\b)"}
# Tags that may stand in the midst of a word, and terminals' colours; of other tags a blank is left.
INLINE = "a|abbr|b|code|em|font|i|kbd|label|mark|s|samp|small|span|strong|sub|sup|tspan|u|var|wbr"
BLOCK = ("body|br|button|caption|dd|details|div|dl|dt|figcaption|figure|g|h[1-6]|hr|html|img|input|li|main|nav|ol|p|"
         "pre|section|summary|svg|table|tbody|td|text|th|thead|title|tr|ul")
MARKS = re.compile(rf"\x1b\[[0-9;]*m|</?(?:{INLINE}|(?P<block>{BLOCK}))(?:\s[^<>]*)?/?>|<!--.*?-->")
PICTURES = re.compile(r"data:[\w.+-]+/[\w.+-]+;base64,([A-Za-z0-9+/=\s]{64,})")


@dataclass(frozen=True)
class Leak:
    """`file`: its name in the bundle. `place`: a line, or the way to a JSON value. `what`: told without the secret."""

    file: str
    place: str
    what: str


@dataclass(frozen=True)
class Seeker:
    """`patterns`: (what, expression, whether the find may be shown). `allowed`: finds that someone vouched for."""

    patterns: tuple[tuple[str, re.Pattern, bool], ...]
    allowed: frozenset[str] = frozenset()

    @classmethod
    def of(cls, run: runs.Run, allowed=()) -> "Seeker":
        """What this machine, this user, this environment and this run's parameters give to look for."""
        found = [*known_places(run), *names(), *values_of_secrets(run)]
        found += [(what, shape.pattern, False) for what, shape in keys.SHAPES]
        found += [(what, shape, True) for what, shape in SHAPES.items()]
        return cls(tuple((what, re.compile(shape), may_show) for what, shape, may_show in found), frozenset(allowed))

    def leaks(self, file: str, content: bytes) -> list[Leak]:
        """Each find once; of one place and kind the first."""
        found = {}
        for place, text in [("its name", file), *texts(file, content)]:
            for form in forms(text):
                for what, pattern, may_show in self.patterns:
                    for match in pattern.finditer(form):
                        if not may_show or match[0] not in self.allowed:
                            told = f"{what}: {match[0]}" if may_show else what
                            where = place or f"line {form.count(chr(10), 0, match.start()) + 1}"
                            found.setdefault((where, what), Leak(file, where, told))
        return list(found.values())


# ------------------------------------------------------------------------------------------ what to look for


def known_places(run: runs.Run) -> list[tuple[str, str, bool]]:
    """This machine's folders as records are scrubbed of them, those that the run's profile names, where its work lies,
    and any absolute path that ends as one which the records hide."""
    given = {}
    for profile in {runs.profile(twin) for twin in run.twins.values()}:
        try:
            given |= {name: v for values in load(profile, tuple(run.twins)).values() for name, v in values.full.items()}
        except (UserError, SyntaxError):  # the profile is gone; what it hid is found by its ending
            continue
    places = {*provenance.places(given), str(runs.work_folder(run)), str(runs.outputs())}
    order = sorted((p for p in places if p.startswith("/") and p not in COMMON_PLACES), key=len, reverse=True)
    either = "|".join(re.escape(place[1:]) for place in order)
    listed = [("a path of this machine", rf"/(?<![\w.]/)(?:{either})(?![\w-])", True)]
    hidden = {text for twin in run.twins.values() for text in strings(twin["parameters"]) if text.startswith("…/")}
    return listed + [(f"the path that {ending} hides", r"/(?<![\w.…>:/~-]/)(?:[^\s\"'<>|\\…]+/)?"
                      + re.escape(ending.removeprefix("…/")) + r"(?![\w-])", True) for ending in sorted(hidden)]


def names() -> list[tuple[str, str, bool]]:
    """The host's name, whole and its first label, and the user's."""
    host = {socket.gethostname(), socket.gethostname().partition(".")[0], os.environ.get("HOSTNAME", "")}
    user = {psutil.Process().username(), os.environ.get("USER", ""), os.environ.get("LOGNAME", "")}
    found = []
    for what, known, common in (("this machine's name", host, r"@{}(?![\w-])"),
                                ("the user's name", user, r"(?<![\w.-]){}@")):
        for name in sorted(filter(None, known)):
            plain = name.lower() not in COMMON_NAMES and len(name) > 2
            shape = (r"(?<![\w-]){}(?![\w-])" if plain else common).format(re.escape(name))
            found.append((what, "(?i)" + shape, True))
    return found


def values_of_secrets(run: runs.Run) -> list[tuple[str, str, bool]]:
    """Values of environment variables that are called like secrets, or that the run took its key from; of several lines
    each long one."""
    named = {runs.at(twin, "parameters.key_variable", str) for twin in run.twins.values()}
    return [(f"the value of {name}", re.escape(line), False) for name, value in keys.secrets(named).items()
            for line in value.splitlines() if len(line) >= keys.SHORTEST]


# ------------------------------------------------------------------------------------------ where to look


def texts(file: str, content: bytes) -> Iterator[tuple[str, str]]:
    """(place, text) of all that the file says, place "" where lines are to be counted; pictures give their notes alone,
    since their bytes spell anything."""
    text = content.decode("utf-8", errors="replace")
    if file.endswith((".json", ".ipynb")):
        yield from values(parsed(text), "")
    elif file.endswith(".jsonl"):
        for number, line in enumerate(text.splitlines(), start=1):
            yield from values(parsed(line), f"line {number}")
    else:
        yield from plain_and_pictures("", text)


def parsed(text: str):
    """The JSON value; what is none is looked through as text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def values(value, way: str) -> Iterator[tuple[str, str]]:
    """Every text of a JSON value with the way to it, keys too; a list of lines (a notebook's) also as one text."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield way or "the top", key
            if key.startswith("image/") and key != "image/svg+xml" and isinstance(inner, str | list):
                yield from ((f"{way}.{key}", note) for note in notes("".join(inner)))
            else:
                yield from values(inner, f"{way}.{key}" if way else key)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from values(inner, f"{way}[{i}]")
        if value and all(isinstance(inner, str) for inner in value):
            yield from plain_and_pictures(way, "".join(value))
    elif isinstance(value, str):
        yield from plain_and_pictures(way or "the top", value)


def strings(value) -> Iterator[str]:
    return (text for _, text in values(value, ""))


def plain_and_pictures(place: str, text: str) -> Iterator[tuple[str, str]]:
    """The text without the pictures that it embeds, and their notes."""
    for picture in PICTURES.finditer(text):
        yield from ((place or "a picture", note) for note in notes(picture[1]))
    yield place, PICTURES.sub("data:", text)


def notes(encoded: str) -> Iterator[str]:
    """Texts that a PNG carries beside its pixels (tEXt, zTXt, iTXt, eXIf); all of another file."""
    data = base64.b64decode(re.sub(r"\s", "", encoded) + "==")
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        yield data.decode("utf-8", errors="replace")
        return
    at = 8
    while at + 8 <= len(data):
        length, kind = struct.unpack(">I4s", data[at:at + 8])
        body = data[at + 8:at + 8 + length]
        if kind == b"zTXt":
            body = zlib.decompressobj().decompress(body.partition(b"\0")[2][1:])
        if kind in (b"tEXt", b"zTXt", b"iTXt", b"eXIf"):
            yield body.decode("utf-8", errors="replace")
        at += 12 + length


def forms(text: str) -> list[str]:
    """The text, and what it says once escapes are undone and marks taken out, in any mixture."""
    found = [text]
    for undo in (unescaped, html.unescape, unquote, unmarked, html.unescape):
        found = list(dict.fromkeys([*found, *map(undo, found)]))
    return found


def unescaped(text: str) -> str:
    r"""JSON's escapes undone: \/ and \u002f are a slash."""
    text = re.sub(r"\\u([0-9a-fA-F]{4})", lambda m: chr(int(m[1], 16)), text)
    return re.sub(r"\\([/\\\"])", r"\1", text)


def unmarked(text: str) -> str:
    """Without terminal colours and tags, which may stand in the midst of a word; `<data_root>` is none."""
    return MARKS.sub(lambda mark: " " * bool(mark["block"]), text)
