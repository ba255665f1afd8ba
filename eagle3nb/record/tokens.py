"""The examples of findings as a reader wants them: the row is read again, and the tokens around the fault are shown.

    html, text = examples(listed, found, tokenizer)
    stage.html(html, text)

Rows are other people's data: everything in them is escaped, and what would move the cursor or turn the reading
direction is written out. Inline styles only, of those that JupyterLab leaves in a page that it does not trust.
"""

import unicodedata
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path

import numpy as np

from eagle3nb.corpus.audit import Finding
from eagle3nb.corpus.hits import EXAMPLES
from eagle3nb.corpus.lines import Chunk, read
from eagle3nb.corpus.masks import mask_from_markers
from eagle3nb.corpus.records import Unusable
from eagle3nb.corpus.records import tokens as row_of
from eagle3nb.corpus.survey import Survey

AROUND = 24  # tokens shown on each side
WIDEST = 20  # characters shown of a token: a run of blanks can be one of a hundred
RAW, DETAIL = 200, 300  # characters shown of a line that is no row, and of what is said about a fault
LIMIT = 8000  # bytes of HTML an example
WHOLE = 600_000  # characters of HTML after which no further example is shown: a page with many findings stays small
FAR = 256 << 20  # bytes that are read of a file to come to a line: seconds
BY_ANSWER = {"duplicate_rows", "near_duplicates", "think_unbalanced", "tool_json_invalid", "mask_disagrees"}
LINE_BREAKS = {"\n": "⏎", "\r": "␍", "\t": "⇥", "\u2028": "⏎", "\u2029": "⏎"}
JOINERS = "\u200c\u200d"  # control nothing but the letters beside them
SUPERVISED = "background:rgba(0,158,115,0.28);border-bottom:2px solid #009E73"
FAULT = "outline:2px solid #D55E00;padding:0 2px"
BOX = "border-left:3px solid #888888;padding:2px 10px;margin:6px 0"
STRIP = "font-family:monospace;white-space:pre-wrap;overflow-wrap:break-word;line-height:1.8"
LEGEND = (f'<p style="font-size:90%">Tokens around the fault: <span style="{SUPERVISED}">supervised</span>, not '
          f'supervised, <strong style="{FAULT}">❲here is the fault❳</strong>; ⏎ a line break, � a part of a character; '
          "tokens count from 0, the number under the pointer is an id.</p>")
MARKS = (f'<p style="font-size:90%"><span style="{SUPERVISED}">supervised</span>, not supervised; ⏎ a line break; the '
         "number under the pointer is a token's id.</p>")
LEGEND_TEXT = "Tokens around the fault: ⟦supervised⟧, not supervised, [[here is the fault]]; ⏎ a line break."


@dataclass(frozen=True)
class Window:
    """Tokens begin … begin + n of a row of `total`; `at`: the one at the fault, counted in the row, or None."""

    begin: int
    total: int
    at: int | None
    ids: list[int]
    texts: list[str]
    mask: list[int]

    def runs(self):
        """(is it supervised, [(is it at the fault, id, text)]) of neighbours with the same mask."""
        tokens = [(m, (self.begin + i == self.at, token, text)) for i, (m, token, text) in enumerate(
            zip(self.mask, self.ids, self.texts, strict=True))]
        return [(bool(m), [token for _, token in run]) for m, run in groupby(tokens, key=lambda token: token[0])]

    def ends(self) -> tuple[str, str]:
        """What stands before and behind where the row goes on there."""
        return "… " if self.begin else "", " …" if self.begin + len(self.ids) < self.total else ""


def examples(listed: list[Finding], found: Survey, tokenizer=None, most: int = EXAMPLES) -> tuple[str, str]:
    """(HTML, plain text) of the first `most` examples of each finding that has any; ("", "") where none has.

    Without a tokenizer ids stand for their text. Reads the lines again; what cannot be read is said, never raised.
    """
    chosen = [(finding, finding.examples[:most]) for finding in listed if finding.examples[:most]]
    if not chosen:
        return "", ""
    lines = _lines(found, {(example["file"], example["line"]) for _, some in chosen for example in some})
    html, text, left_out = [LEGEND], [LEGEND_TEXT], 0
    for finding, some in chosen:
        title, message = (visible(text, DETAIL) for text in (
            f"{finding.severity} · {finding.rule} · {finding.source}", finding.message))
        html.append(f"<p><strong>{escape(title)}</strong>: {escape(message)}</p>")
        text.append(f"\n{title}: {message}")
        for example in some:
            if sum(map(len, html)) > WHOLE:
                left_out += 1
                continue
            raw = lines.get((example["file"], example["line"]))
            for parts, part in zip((html, text), _example(finding.rule, example, raw, found, tokenizer), strict=True):
                parts.append(part)
    if left_out:
        html.append(f"<p>{left_out:,} more examples are named in findings.json.</p>")
        text.append(f"\n{left_out:,} more examples are named in findings.json.")
    return "".join(html), "\n".join(text)


def strips(rows: list[tuple[str, list[int], list[int]]], tokenizer=None, most: int = 160) -> tuple[str, str]:
    """(HTML, plain text) of rows (title, ids, mask): `most` tokens of each around where its first answer begins."""
    html, text = [MARKS], ["⟦supervised⟧, not supervised; ⏎ a line break."]
    for title, ids, mask in rows:
        begin = max(0, mask.index(1) - most // 3) if 1 in mask else 0
        here = slice(begin, begin + most)
        texts = [token_text(token, tokenizer) for token in ids[here]]
        window = Window(begin, len(ids), None, ids[here], texts, mask[here])
        html.append(_box(title, _tokens_html(window)))
        text.append(f"  {title}\n    {_tokens_text(window)}")
    return "".join(html), "\n".join(text)


def _example(rule: str, example: dict, raw: bytes | None, found: Survey, tokenizer) -> tuple[str, str]:
    """(HTML, text) of one. Rows of long tokens full of markup get a narrower window, so that LIMIT holds."""
    rest = "(the line cannot be read again)"
    try:
        row = None if raw is None else row_of(raw, found.vocab_size, tokenizer and (lambda: tokenizer))[:2]
    except Unusable:
        row, rest = None, visible(raw[:4 * RAW].decode("utf-8", "replace"), RAW) or "(an empty line)"
    if row is None:
        where = _where(example, None)
        return _box(where, f"<bdi>{escape(rest)}</bdi>"), f"  {where}\n    {rest}"
    for around in (AROUND, AROUND // 2, AROUND // 4):
        window = _window(rule, example.get("at"), *row, found, tokenizer, around)
        where = _where(example, window)
        html = _box(where, _tokens_html(window))
        if len(html.encode()) <= LIMIT:
            break
    return html, f"  {where}\n    {_tokens_text(window)}"


def _box(where: str, body: str) -> str:
    return f'<div style="{BOX}"><div>{escape(where)}</div><div style="{STRIP}">{body}</div></div>'


def _where(example: dict, window: Window | None) -> str:
    """File, line, token and what is wrong there: a sentence that needs no colour."""
    place = f"{visible(example['file'], DETAIL)} line {example['line']}"
    if window and window.at is not None:
        i = window.at - window.begin
        state = "supervised" if window.mask[i] else "not supervised"
        place += f", token {window.at:,} of {window.total:,} (id {window.ids[i]}, {state})"
    elif window:
        place += f", tokens {window.begin:,} to {window.begin + len(window.ids) - 1:,} of {window.total:,}"
    return f"{place}: {visible(example['detail'], DETAIL)}"


def _window(rule: str, at: int | None, ids, mask, found: Survey, tokenizer, around: int) -> Window:
    """About `around` tokens on each side of the fault; else of the first answer or from the row's beginning."""
    total = len(ids)
    if mask is None:
        markers = found.rules.markers
        mask = np.zeros(total, np.uint8) if markers is None else mask_from_markers(ids, markers)
    at = at if at is not None and 0 <= at < total else None
    centre = at if at is not None else int(np.argmax(mask)) if rule in BY_ANSWER else 0
    begin = max(0, min(centre - around, total - 2 * around - 1))
    here = slice(begin, min(begin + 2 * around + 1, total))
    shown = ids[here].tolist()
    return Window(begin, total, at, shown, [token_text(token, tokenizer) for token in shown], mask[here].tolist())


def _tokens_html(window: Window) -> str:
    before, behind = window.ends()
    parts = [before]
    for supervised, run in window.runs():
        inner = "".join(
            f'<strong title="{token}" style="{FAULT}">❲<u>{escape(text)}</u>❳</strong>' if fault else
            f'<span title="{token}">{escape(text)}</span>' for fault, token, text in run)
        parts.append(f'<span style="{SUPERVISED}">{inner}</span>' if supervised else inner)
    return "".join([*parts, behind])


def _tokens_text(window: Window) -> str:
    before, behind = window.ends()
    runs = []
    for supervised, run in window.runs():
        inner = "".join(f"[[{text}]]" if fault else text for fault, _, text in run)
        runs.append(f"⟦{inner}⟧" if supervised else inner)
    return before + "".join(runs) + behind


# ---------------------------------------------------------------------------------------------------- text


def token_text(token: int, tokenizer) -> str:
    """The token as it stands in a text, with its blank; its id where it has none. Never empty."""
    if tokenizer is None or token >= len(tokenizer):
        return f"‹{token}›"
    once, twice = (tokenizer.decode([token] * n, skip_special_tokens=False, clean_up_tokenization_spaces=False)
                   for n in (1, 2))
    text = twice[len(once):] if twice.startswith(once) else once  # some decoders drop the blank of what comes first
    return visible(text, WIDEST) or f"‹{token}›"


def visible(text: str, most: int) -> str:
    """At most so many characters, each of which can be seen: a line break as ⏎, an escape as ␛, others by number."""
    short = text if len(text) <= most else text[:most - 1] + "…"
    return "".join(map(_seen, short))


def _seen(character: str) -> str:
    if character in LINE_BREAKS:
        return LINE_BREAKS[character]
    if unicodedata.category(character) not in ("Cc", "Cf", "Cs") or character in JOINERS:
        return character
    code = ord(character)
    return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else f"‹U+{code:04X}›"


# ---------------------------------------------------------------------------------------------------- reading


def _lines(found: Survey, wanted: set[tuple[str, int]]) -> dict[tuple[str, int], bytes]:
    """The wanted lines (file as shown, 1-based line), each file opened once; without those that cannot be read."""
    places = {name: (source, number, place.files[number]) for source, place in
              zip(found.sources, found.places, strict=True) for number, name in enumerate(source.files)}
    lines = {}
    for name in sorted({name for name, _ in wanted}):
        if name not in places:
            continue
        source, number, path = places[name]
        numbers = sorted(line for file, line in wanted if file == name)
        try:
            here = _plain(path, numbers, source, number) if path.suffix == ".jsonl" else _unpacked(path, numbers)
            lines |= {(name, line): raw for line, raw in here.items()}
        except OSError:
            continue
    return lines


def _plain(path: Path, numbers: list[int], source, file: int) -> dict[int, bytes]:
    """Lines of a plain file, from the nearest row before each that the survey knows the place of."""
    mine = np.flatnonzero(source.file == file)
    known, offsets, lines = source.line[mine], source.offset[mine], {}
    with open(path, "rb") as handle:
        for number in numbers:
            nearest = int(np.searchsorted(known, number, side="right")) - 1
            line, begin = (int(known[nearest]), int(offsets[nearest])) if nearest >= 0 else (1, 0)
            handle.seek(begin)
            raw = handle.readline()
            while line < number and raw and handle.tell() - begin < FAR:
                raw, line = handle.readline(), line + 1
            if line == number:
                lines[number] = raw.strip()
    return lines


def _unpacked(path: Path, numbers: list[int]) -> dict[int, bytes]:
    """Lines of a compressed file, which is read up to the last of them, or as far as is bearable."""
    lines, line, unpacked = {}, 0, 0
    for part in read(Chunk(0, 0, path, 0, path.stat().st_size)):
        lines |= {n + 1: raw for n, raw in zip(part.numbers, part.raws, strict=True) if n + 1 in numbers}
        line, unpacked = line + part.breaks, unpacked + sum(map(len, part.raws))
        if line >= numbers[-1] or unpacked > FAR:
            break
    return lines
