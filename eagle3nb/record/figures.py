"""Figures of one look: a palette that colour-blind readers can tell apart, labelled axes, no global state.

    fig, ax = new()
    ax.plot(steps, loss, color=COLOURS[0], label="training")
    label(ax, "optimiser step", "loss (nats)")
    stage.figure(fig, "The loss falls from 6.1 to 2.3 over 400 steps")

Figures are made without pyplot: nothing to close, no window system needed, nothing shown twice in a notebook.
"""

import base64
import io
import sys
from itertools import count

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito's palette, its yellow left out (too pale on white).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # a second cue beside colour
GREY = "#666666"
DPI, SCREEN = 220, 110  # dots an inch in the file, and as a page shows it: sharp on a telephone, in print, zoomed in


def new(width: float = 7.0, height: float = 3.6, columns: int = 1, rows: int = 1, **shared):
    """(figure, axes), sizes in inches; one Axes or an array. `shared`: sharex, sharey as `Figure.subplots` has them."""
    fig = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(fig)
    axes = fig.subplots(rows, columns, **shared)
    for ax in fig.axes:
        ax.set_prop_cycle(color=COLOURS)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(True, color="#dddddd", linewidth=0.6)
        ax.set_axisbelow(True)
        ax.tick_params(labelsize=9, colors="#333333")
    return fig, axes


def label(ax, x: str, y: str, title: str = "") -> None:
    """Axis labels with their units, the title as a finding, and a legend where anything is named."""
    ax.set_xlabel(x, fontsize=10)
    ax.set_ylabel(y, fontsize=10)
    if title:
        ax.set_title(title, fontsize=11, loc="left")
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=9, frameon=False)


def styles():
    """Endless (colour, marker) pairs, the first 49 all different: lines stay apart beyond seven, and in grey print."""
    for i in count():
        yield COLOURS[i % len(COLOURS)], MARKERS[(i + i // len(COLOURS)) % len(MARKERS)]


def thousands(axis) -> None:
    """Ticks as 1,234 on `ax.xaxis` or `ax.yaxis`."""
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def png(fig) -> tuple[str, int]:
    """(base64 PNG, width in CSS pixels). 256 colours are all that lines and letters use, at a third of the bytes.

    A pyplot figure is closed, so that it is not shown twice.
    """
    from PIL import Image  # matplotlib brings it

    drawn, packed = io.BytesIO(), io.BytesIO()
    fig.savefig(drawn, format="png", dpi=DPI)
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close(fig)
    picture = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    picture.save(packed, format="png", optimize=True)
    return base64.b64encode(packed.getvalue()).decode(), round(picture.width * SCREEN / DPI)
