"""HTML that reads well in JupyterLab (trusted or not) and in the exported page, light or dark: inline styles only.

A table's columns come with the code's names, as JSON keeps them; a reader sees words with units, shares as percent.
"""

import re
from html import escape

# White letters on each have a contrast of 5 or more, whatever the page's own colour is.
COLOUR = {"ok": "#1e7145", "failed": "#b3261e", "running": "#5c5f66"}
WORD = {"ok": "✔ ok", "failed": "✖ failed", "running": "… running"}
LINE = "1px solid rgba(128,128,128,0.35)"
FRACTION = re.compile(r"-?\d{1,4}(\.\d+)?")  # as number() and percent() write it: neither 1e-05 nor 1,234
LONG = 30  # characters from which a cell's column is kept wide enough to be read on a telephone

# Words for columns whose name alone says too little; of others underscores become blanks and endings become units.
WORDS = {
    "tau": "acceptance length", "low": "95 % from", "high": "95 % to", "steps": "drafted tokens",
    "delivered_per_verify": "delivered a verify", "walk_tau": "acceptance length of the walk",
    "walk_verifies": "verifies of the walk", "walk_accepted": "accepted by the walk", "past_end": "tokens past the end",
    "arch": "architecture", "gpus": "GPUs", "gpu_hours": "GPU hours", "topk": "top-k",
    "hungriest": "hungriest kernel", "shared_kb": "shared memory (KB)", "limit_kb": "limit (KB)",
    "spilled": "spilled (bytes a thread)", "load_s": "loading (s)", "speedup": "speed-up", "batch": "sequences at once",
    "speedup_predicted": "speed-up, predicted", "speedup_measured": "speed-up, measured",
    "markers_agree": "template's markers agree", "markers_disagree": "template's markers disagree"}
# Shares, 0 … 1 in the data.
SHARES = {
    "share": "share (%)", "conditional": "accepted of those reached (%)", "joint": "accepted of all verifies (%)",
    "first_share": "first drafts accepted (%)", "hit_share": "accepted where it stood (%)",
    "of_breaks": "of all breaks (%)", "better_share": "prompts with more accepted (%)",
    "on-policy share": "on-policy share (%)", "argmax share": "argmax share (%)",
    "share within top 0.9": "share within top 0.9 (%)", "expected at least": "expected at least (%)",
    **{f"accuracy {k}": f"accuracy {k} (%)" for k in range(1, 17)}}
# (words, is it a share) of a name beside another one.
BESIDE = {
    ("share", "reached"): ("accepted of those reached (%)", True), ("share", "breaks"): ("of all breaks (%)", True),
    ("low", "share"): ("95 % from (%)", True), ("high", "share"): ("95 % to (%)", True),
    ("difference", "measured"): ("predicted too high by (%)", True), ("where", "margin"): ("first difference", False)}
UNITS = {"_per_s": "/s", "_s": " (s)", "_kb": " (KB)", "_gb": " (GB)", "_bytes": " (bytes)"}


def heading(column: str, columns=()) -> tuple[str, bool]:
    """(the words a reader sees, whether values are shares to be shown as percent)."""
    for beside in columns:
        if (column, beside) in BESIDE:
            return BESIDE[column, beside]
    if column in SHARES:
        return SHARES[column], True
    if column in WORDS:
        return WORDS[column], False
    for ending, unit in UNITS.items():
        if column.endswith(ending):
            return column.removesuffix(ending).replace("_", " ") + unit, False
    return column.replace("_", " "), False


def cells(rows: list[dict]) -> tuple[list[str], list[list[str]]]:
    """(headings, rows of texts) of the rows' columns in the order in which they first come up."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    words = [heading(str(column), columns) for column in columns]
    forms = [percent if share else number for _, share in words]
    shown = []
    for form, column in zip(forms, columns, strict=True):
        values = [row.get(column) for row in rows]
        texts = [form(value) for value in values]
        shown.append(even(texts) if all(value is None or isinstance(value, float) for value in values) else texts)
    return [word for word, _ in words], [list(line) for line in zip(*shown, strict=True)]


def even(texts: list[str]) -> list[str]:
    """A column of one kind of figure, each with the decimals of the longest, as far as number() gives them: 1.6 beside
    1.549 becomes 1.600."""
    most = max((len(text.partition(".")[2]) for text in texts if FRACTION.fullmatch(text)), default=0)

    def padded(text: str) -> str:
        whole = text.lstrip("-").partition(".")[0]
        return f"{float(text):.{min(most, 4 - len(whole)) if whole != '0' else most}f}"

    return [padded(text) if FRACTION.fullmatch(text) else text for text in texts]


def percent(share) -> str:
    """A share of 0 … 1 as 39.2; what is no number as it is."""
    share = share.item() if hasattr(share, "item") else share
    if isinstance(share, bool) or not isinstance(share, (int, float)) or share != share:
        return number(share)
    return f"{100 * share:.1f}"


def number(value) -> str:
    """1,234 · 12.35 · 0.00012 · – for what is not there."""
    if value is None or value != value:
        return "–"
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def size(count: int) -> str:
    """Bytes for people: 12.3 MB (powers of 1000)."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000


def span(seconds: float) -> str:
    """Seconds for people: 8.2 s, 4 min 10 s, 3 h 5 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def table(rows: list[dict], caption: str, strong=()) -> str:
    """An HTML table with caption and column heads; numbers to the right; rows whose index is in `strong` in bold."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    heads, texts = cells(rows)
    style = f"border-bottom:{LINE};padding:3px 12px 3px 0;vertical-align:top;text-align:"
    sides = ["left" if any(isinstance(row.get(c), (str, list, dict)) for row in rows) else "right" for c in columns]
    wide = ["min-width:10em;" if any(len(line[i]) > LONG for line in texts) else "" for i in range(len(columns))]
    head = "".join(f'<th scope="col" style="{style}{side}">{escape(name)}</th>'
                   for name, side in zip(heads, sides, strict=True))
    body = ""
    for i, line in enumerate(texts):
        weight = "font-weight:600;" if i in strong else ""
        body += "<tr>" + "".join(f'<td style="{weight}{room}{style}{side}">{escape(text)}</td>'
                                 for text, room, side in zip(line, wide, sides, strict=True)) + "</tr>"
    style = "caption-side:top;text-align:left;font-weight:600;padding:4px 0"
    return ('<table style="border-collapse:collapse;font-variant-numeric:tabular-nums;margin:6px 0">'
            f'<caption style="{style}">{escape(caption)}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def table_text(rows: list[dict], caption: str) -> str:
    """The same table as plain text, for consoles and readers without HTML."""
    heads, texts = cells(rows)
    widths = [max(len(line[i]) for line in (heads, *texts)) for i in range(len(heads))]
    lines = ("  ".join(t.ljust(w) for t, w in zip(line, widths, strict=True)).rstrip() for line in (heads, *texts))
    return "\n".join([caption, *lines])


def banner(status: str, title: str, sentence: str) -> str:
    """The verdict on top of a record: a coloured edge and word, one sentence."""
    colour = COLOUR[status]
    style = f"border-left:6px solid {colour};background:rgba(128,128,128,0.12);padding:8px 14px;margin:4px 0"
    word = f"background:{colour};color:#ffffff;padding:1px 8px;border-radius:4px"
    return (f'<div role="status" style="{style}">'
            f'<strong style="{word}">{WORD[status]}</strong> &nbsp;<strong>{escape(title)}</strong><br>'
            f"{escape(sentence)}</div>")
