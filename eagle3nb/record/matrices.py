"""Findings as a picture: datasets down, rules across, a cell a count, coloured by severity and told in figures."""

from eagle3nb.corpus.audit import RULES, THEME, Finding
from eagle3nb.corpus.survey import Survey

SHADES = {"red": "#d0312d", "amber": "#f0a500", "info": "#9ecae9", "": "#f2f2f2"}
INK = {"red": "white", "amber": "black", "info": "black", "": "#666666"}


def draw(ax, found: Survey, listed: list[Finding], theme: str) -> str:
    """One theme's rules over the datasets; returns a sentence for the figure's alt text."""
    rules = [rule for rule in RULES if THEME[rule] == theme]
    cells = {(finding.source, finding.rule): finding for finding in listed if finding.theme == theme}
    for y, source in enumerate(found.sources):
        for x, rule in enumerate(rules):
            finding = cells.get((source.name, rule))
            severity, text = (finding.severity, f"{finding.count:,}") if finding else ("", "–")
            ax.fill_between([x - 0.48, x + 0.48], y - 0.46, y + 0.46, color=SHADES[severity], linewidth=0)
            mark = {"red": "✖ ", "amber": "▲ "}.get(severity, "")
            ax.text(x, y, mark + text, ha="center", va="center", color=INK[severity], fontsize=8)
    ax.set_xticks(range(len(rules)), [rule.replace("_", "\n") for rule in rules], fontsize=8)
    names = [source.name + " (excluded)" * source.excluded for source in found.sources]
    ax.set_yticks(range(len(names)), names)
    ax.set_xlim(-0.5, len(rules) - 0.5)
    ax.set_ylim(len(found.sources) - 0.5, -0.5)
    ax.grid(False)
    ax.tick_params(length=0)
    return sentence(list(cells.values()), theme)


def clean(listed: list[Finding], theme: str) -> str:
    """A sentence where no finding is of this theme, which needs no picture; "" otherwise."""
    if any(finding.theme == theme for finding in listed):
        return ""
    return f"{sentence([], theme)[:-1]}: {', '.join(rule for rule in RULES if THEME[rule] == theme)}."


def sentence(of_theme: list[Finding], theme: str) -> str:
    if not of_theme:
        return f"No dataset breaks a rule on {theme}."
    told = ", ".join(f"{finding.source or 'the run'}: {finding.rule} ({finding.count:,}, {finding.severity})"
                     for finding in of_theme[:8])
    return f"Rules on {theme} by dataset: {told}{' and others' if len(of_theme) > 8 else ''}."
