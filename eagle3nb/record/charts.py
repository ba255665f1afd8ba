"""Charts as inline SVG, which follow the page's light or dark setting and stay sharp at any width.

    lines([Series("demo", tokens, loss)], "tokens seen (thousands)", "loss (nats)", alt)

A series has one colour, dash and marker in all charts of a page, by its place; `legend` names them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 460, 290
LEFT, RIGHT, TOP, BOTTOM = 52, 26, 10, 44  # margins for ticks and names
MOST = 240  # points of a line; of more, neighbours are drawn as their mean
DASHES = ("", "7 4", "2 3", "10 3 2 3", "1 5", "12 5")
KINDS = 6  # colours, markers and dashes each; beyond that they come again
# Colours after Okabe and Ito, moved until each has a contrast of 3 or more on the page's own ground.
STYLE = """
.chart { --s0: #0072b2; --s1: #c24e00; --s2: #007f5f; --s3: #a8437f; --s4: #7a6200; --s5: #333333; }
@media (prefers-color-scheme: dark) { .chart { --s0: #56b4e9; --s1: #f0904d; --s2: #2fc999; --s3: #e6a0c8;
  --s4: #e0c341; --s5: #dddddd; } }
figure.chart { background: none; padding: 0; margin: 1rem 0; max-width: 44rem; width: auto; }
figure.chart svg { width: 100%; height: auto; font: 13px system-ui, sans-serif; fill: currentColor; }
.chart .grid { stroke: rgba(128,128,128,.3); stroke-width: 1; } .chart .axis { stroke: rgba(128,128,128,.8); }
.chart .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; } .chart .bar { stroke-width: 1.6; }
figure.chart figcaption { font-size: .92rem; } .charts { display: grid; gap: 0 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
ul.legend { list-style: none; padding: 0; margin: .5rem 0; display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; }
ul.legend svg { width: 34px; height: 12px; margin-right: .4rem; }
@media print { figure.chart { break-inside: avoid; } }
"""


@dataclass(frozen=True)
class Series:
    """One line or set of points. `low`, `high`: ends of error bars, None where there are none. `place` is its style."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    place: int = 0
    low: Sequence[float | None] = field(default=())
    high: Sequence[float | None] = field(default=())


def colour(place: int) -> str:
    return f"var(--s{place % KINDS})"


def marker(place: int, x: float, y: float) -> str:
    """A filled form of about 8 units across, centred at x, y."""
    forms = (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>',
             f'<rect x="{x - 3.6:.1f}" y="{y - 3.6:.1f}" width="7.2" height="7.2"/>',
             f'<path d="M{x:.1f} {y - 4.8:.1f}l4.6 8h-9.2z"/>', f'<path d="M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z"/>',
             f'<path d="M{x:.1f} {y + 4.8:.1f}l4.6 -8h-9.2z"/>',
             f'<path d="M{x - 4:.1f} {y - 1.3:.1f}h2.7v-2.7h2.6v2.7h2.7v2.6h-2.7v2.7h-2.6v-2.7h-2.7z"/>')
    return forms[place % KINDS]


def legend(names: Sequence[str]) -> str:
    """Which line is which; it stands once above the charts that share it."""
    items = ""
    for place, name in enumerate(names):
        line = f'<line class="line" x1="0" y1="6" x2="34" y2="6" stroke="{colour(place)}"{dash(place)}/>'
        items += (f'<li><svg viewBox="0 0 34 12" aria-hidden="true">{line}<g fill="{colour(place)}">'
                  f"{marker(place, 17, 6)}</g></svg>{escape(name)}</li>")
    return f'<ul class="legend chart">{items}</ul>'


def dash(place: int) -> str:
    pattern = DASHES[place % KINDS]
    return f' stroke-dasharray="{pattern}"' if pattern else ""


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from below `low` to above `high`, at most about `most`: steps of 1, 2 or 5 times a power of ten."""
    spread = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(spread / most))
    step = next(power * n for n in (1, 2, 5, 10, 20) if spread / (power * n) <= most)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def thinned(x: Sequence[float], y: Sequence[float]) -> list[tuple[float, float]]:
    """Points without NaN, at most MOST: means over runs of neighbours."""
    points = [(float(a), float(b)) for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b)]
    size = math.ceil(len(points) / MOST) or 1
    groups = [points[i:i + size] for i in range(0, len(points), size)]
    return [(sum(p[0] for p in group) / len(group), sum(p[1] for p in group) / len(group)) for group in groups]


def lines(series: Sequence[Series], x_name: str, y_name: str, alt: str, *, markers: bool = True) -> str:
    """A figure of lines over one another; "" where no series has a point. `alt`, what is seen, stands below it."""
    drawn = [(one, thinned(one.x, one.y)) for one in series]
    drawn = [(one, points) for one, points in drawn if points]
    if not drawn:
        return ""
    xs = [x for _, points in drawn for x, _ in points]
    ys = [y for _, points in drawn for _, y in points]
    ys += [end for one, _ in drawn for end in (*one.low, *one.high) if end is not None]
    across, up = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))
    place_x = scale(across, LEFT, WIDTH - RIGHT)
    place_y = scale(up, HEIGHT - BOTTOM, TOP)
    body = frame(across, up, place_x, place_y, x_name, y_name)
    for number, (one, points) in enumerate(drawn):
        aside = 5 * (number - (len(drawn) - 1) / 2) if one.low else 0  # error bars beside, not upon, one another
        points = [(place_x(x) + aside, place_y(y)) for x, y in points]
        way = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        body += f'<polyline class="line" points="{way}" stroke="{colour(one.place)}"{dash(one.place)}/>'
        if one.low and one.high:
            body += "".join(bar(one.place, place_x(x) + aside, place_y(low), place_x(x) + aside, place_y(high))
                            for x, low, high in zip(one.x, one.low, one.high, strict=True)
                            if low is not None and high is not None)
        if markers:
            body += "".join(f'<g fill="{colour(one.place)}">{marker(one.place, x, y)}</g>' for x, y in points)
    return figure(body, HEIGHT, alt)


def dots(rows: Sequence[str], series: Sequence[Series], x_name: str, alt: str) -> str:
    """Points with error bars on a line a row, one below another; each Series has a `y` for each row as its place on x,
    NaN where there is none, and no `x`."""
    values = [v for one in series for v in (*one.y, *one.low, *one.high) if v is not None and math.isfinite(v)]
    if not rows or not values:
        return ""
    gap, room = 9 * len(series) + 9, 8 * max(map(len, rows)) + 10
    high = TOP + gap * len(rows) + BOTTOM
    across = ticks(min(values), max(values), 5)
    place_x = scale(across, min(room, WIDTH // 3), WIDTH - RIGHT)
    body = "".join(f'<line class="grid" x1="{place_x(t):.1f}" y1="{TOP}" x2="{place_x(t):.1f}" y2="{high - BOTTOM}"/>'
                   f'<text x="{place_x(t):.1f}" y="{high - BOTTOM + 17}" text-anchor="middle">{t:g}</text>'
                   for t in across)
    body += f'<text x="{(place_x(across[0]) + place_x(across[-1])) / 2:.1f}" y="{high - 8}" text-anchor="middle">'
    body += f"{escape(x_name)}</text>"
    for i, name in enumerate(rows):
        middle = TOP + gap * (i + 0.5)
        body += f'<text x="{place_x(across[0]) - 8:.1f}" y="{middle + 4.5:.1f}" text-anchor="end">{escape(name)}</text>'
        for number, one in enumerate(series):
            y = middle + 9 * (number - (len(series) - 1) / 2)
            if one.low and one.low[i] is not None and one.high[i] is not None:
                body += bar(one.place, place_x(one.low[i]), y, place_x(one.high[i]), y)
            if math.isfinite(one.y[i]):
                body += f'<g fill="{colour(one.place)}">{marker(one.place, place_x(one.y[i]), y)}</g>'
    return figure(body, high, alt)


def scale(marks: list[float], start: float, end: float):
    """value → place, the first mark at `start`, the last at `end`."""
    return lambda value: start + (end - start) * (value - marks[0]) / (marks[-1] - marks[0])


def frame(across, up, place_x, place_y, x_name: str, y_name: str) -> str:
    """Grid, ticks and names of both axes."""
    left, right, bottom = place_x(across[0]), place_x(across[-1]), place_y(up[0])
    body = "".join(f'<line class="grid" x1="{left:.1f}" y1="{place_y(t):.1f}" x2="{right:.1f}" y2="{place_y(t):.1f}"/>'
                   f'<text x="{left - 6:.1f}" y="{place_y(t) + 4.5:.1f}" text-anchor="end">{t:g}</text>' for t in up)
    body += "".join(f'<text x="{place_x(t):.1f}" y="{bottom + 17:.1f}" text-anchor="middle">{t:,.10g}</text>'
                    for t in across)
    body += f'<line class="axis" x1="{left:.1f}" y1="{bottom:.1f}" x2="{right:.1f}" y2="{bottom:.1f}"/>'
    body += f'<text x="{(left + right) / 2:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_name)}</text>'
    middle = (place_y(up[0]) + place_y(up[-1])) / 2
    return body + (f'<text transform="translate(13 {middle:.1f}) rotate(-90)" text-anchor="middle">{escape(y_name)}'
                   "</text>")


def bar(place: int, x1: float, y1: float, x2: float, y2: float) -> str:
    return (f'<line class="bar" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
            f'stroke="{colour(place)}"/>')


def figure(body: str, height: float, alt: str) -> str:
    return (f'<figure class="chart"><svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(alt)}">'
            f"{body}</svg><figcaption>{escape(alt)}</figcaption></figure>")
