"""HTML that reads well in JupyterLab (trusted or not) and in the exported page, light or dark: inline styles only."""

from html import escape

COLOUR = {"ok": "#2e8b57", "failed": "#d0312d", "running": "#8a8a8a"}
WORD = {"ok": "✔ ok", "failed": "✖ failed", "running": "… running"}
LINE = "1px solid rgba(128,128,128,0.35)"


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
    text = {c for c in columns if any(isinstance(row.get(c), (str, list, dict)) for row in rows)}
    side = {c: "left" if c in text else "right" for c in columns}
    style = f"border-bottom:{LINE};padding:3px 12px 3px 0;vertical-align:top"
    head = "".join(f'<th scope="col" style="{style};text-align:{side[c]}">{escape(str(c))}</th>' for c in columns)
    body = ""
    for i, row in enumerate(rows):
        weight = "font-weight:600;" if i in strong else ""
        body += "<tr>" + "".join(f'<td style="{style};{weight}text-align:{side[c]}">{escape(number(row.get(c)))}</td>'
                                 for c in columns) + "</tr>"
    style = "caption-side:top;text-align:left;font-weight:600;padding:4px 0"
    return ('<table style="border-collapse:collapse;font-variant-numeric:tabular-nums;margin:6px 0">'
            f'<caption style="{style}">{escape(caption)}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def table_text(rows: list[dict], caption: str) -> str:
    """The same table as plain text, for consoles and readers without HTML."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    grid = [[str(c) for c in columns]] + [[number(row.get(c)) for c in columns] for row in rows]
    widths = [max(len(line[i]) for line in grid) for i in range(len(columns))]
    lines = ("  ".join(t.ljust(w) for t, w in zip(line, widths, strict=True)).rstrip() for line in grid)
    return "\n".join([caption, *lines])


def banner(status: str, title: str, sentence: str) -> str:
    """The verdict on top of a record: a coloured edge, the word beside the colour, one sentence."""
    colour = COLOUR[status]
    style = f"border-left:6px solid {colour};background:{colour}1a;padding:8px 14px;margin:4px 0"
    return (f'<div role="status" style="{style}">'
            f'<strong style="color:{colour}">{WORD[status]}</strong> &nbsp;<strong>{escape(title)}</strong><br>'
            f"{escape(sentence)}</div>")
