"""metrics.jsonl read, as a table, a figure and a line. Draws on axes that the caller made; needs no torch."""

import json
from pathlib import Path

import numpy as np


def read_metrics(path: str | Path) -> list[dict]:
    """The whole lines of metrics.jsonl; a torn last line is left out."""
    if not Path(path).is_file():
        return []
    lines = []
    for text in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def of_kind(lines: list[dict], kind: str) -> list[dict]:
    return [line for line in lines if line["kind"] == kind]


def draw(axes, lines: list[dict]) -> None:
    """Three axes against tokens seen: loss (training smoothed, held out), acceptance length, accuracy of each step."""
    trained, held_out = of_kind(lines, "train"), of_kind(lines, "validation")
    loss, acceptance, accuracy = axes
    if trained:
        loss.plot(thousands(trained), smooth(mean_loss(trained)), linewidth=1, label="training")
    if held_out:
        seen = thousands(held_out)
        loss.plot(seen, mean_loss(held_out), marker="o", markersize=3, label="held out")
        acceptance.plot(seen, [line["acceptance"] for line in held_out], marker="o", markersize=3)
        for k in range(len(held_out[0]["accuracy"])):
            accuracy.plot(seen, [100 * line["accuracy"][k] for line in held_out], marker="o^sDvPX"[k % 7], markersize=3,
                          label=f"step {k + 1}")
    for ax, name in zip(axes, ("loss a slot (nats, mean of the steps)", "held-out acceptance (tokens a verify)",
                               "held-out accuracy (%)"), strict=True):
        ax.set_xlabel("tokens seen (thousands)")
        ax.set_ylabel(name)
        if ax.get_legend_handles_labels()[0]:
            ax.legend(fontsize=8, frameon=False)


def thousands(lines: list[dict]) -> list[float]:
    return [line["tokens"] / 1000 for line in lines]


def mean_loss(lines: list[dict]) -> np.ndarray:
    """Mean over the chain's steps, unweighted: comparable between training and validation whatever ttt_decay."""
    return np.array([np.mean([x for x in line["loss_k"] if x is not None] or [np.nan]) for line in lines])


def smooth(values: np.ndarray, width: int = 9) -> np.ndarray:
    """A running mean over the last `width` values."""
    return np.array([np.nanmean(values[max(0, i + 1 - width):i + 1]) for i in range(len(values))])


def sentence(lines: list[dict]) -> str:
    """The figure's alt text: where the curve started and where it stands."""
    held_out = of_kind(lines, "validation")
    if not held_out:
        return "Training has begun; no evaluation yet."
    first, last = held_out[0], held_out[-1]
    return (f"Held-out acceptance length went from {first['acceptance']:.2f} to {last['acceptance']:.2f} over "
            f"{last['tokens']:,} tokens; mean loss from {mean_loss([first])[0]:.2f} to {mean_loss([last])[0]:.2f}.")


def table(lines: list[dict], last: int = 8) -> list[dict]:
    """The last evaluations, a row each; the chosen one is marked."""
    best = next((line["best"] for line in of_kind(lines, "end")), {}) or {}
    return [{"epoch": line["epoch"] + 1, "step": line["step"], "tokens": line["tokens"],
             "loss": round(float(mean_loss([line])[0]), 3), "acceptance": round(line["acceptance"], 3),
             **{f"accuracy {k + 1}": round(value, 3) for k, value in enumerate(line["accuracy"])},
             "minutes": round(line["seconds"] / 60, 1), "": "chosen" if line["step"] == best.get("step") else ""}
            for line in of_kind(lines, "validation")[-last:]]


def last_row(lines: list[dict]) -> str:
    """The curve's last row, for the console."""
    held_out, end = of_kind(lines, "validation"), of_kind(lines, "end")[-1]
    if not held_out:
        return f"step {end['step']}, {end['tokens']:,} tokens, no rows held out"
    line, best = held_out[-1], end["best"]
    accuracies = " / ".join(f"{value:.3f}" for value in line["accuracy"])
    return (f"step {line['step']}, {line['tokens']:,} tokens, held-out loss {mean_loss([line])[0]:.3f}, accuracy "
            f"{accuracies}, acceptance {line['acceptance']:.3f}; best {best['acceptance']:.3f} at step {best['step']}")


def by_source(lines: list[dict]) -> list[dict]:
    """A row a source for a table or plot, the largest first: the chosen evaluation's figures and the first one's
    acceptance; empty where evaluations know no sources (training's settings name no corpus)."""
    held_out = [line for line in of_kind(lines, "validation") if line.get("sources")]
    if not held_out:
        return []
    first, best = held_out[0]["sources"], max(held_out, key=lambda line: line["acceptance"])["sources"]
    return [{"source": name, "slots": best[name]["counted"], "weighted sum of losses": best[name]["loss"],
             "acceptance at the start": first[name]["acceptance"], "acceptance": best[name]["acceptance"]}
            for name in sorted(best, key=lambda name: -best[name]["counted"])]
