"""Acceptance against tokens seen, fitted: what twice the tokens would give, and how far to trust it.

a(n) = A − B·n^(−c): a power law that saturates at A, or, where its exponent c goes to nothing, a = A + B·log n, which
saturates nowhere. All evaluations of one run share its schedule, so the last ones stand at a small learning rate and
the first ones do not: a doubling is read from it as of the same schedule over twice the data, roughly.
"""

from dataclasses import dataclass

import numpy as np

from eagle3nb.drafter.curves import of_kind

ENOUGH = 6  # evaluations after the first tokens, below which three parameters fit anything
EXPONENTS = np.concatenate([[0.0], np.geomspace(0.05, 2.0, 60)])  # 0: logarithmic
DRAWS = 300  # of residuals, for the interval


@dataclass(frozen=True)
class Fit:
    """Of acceptance (tokens a verify) against tokens; `trusted` is false where the curve does not foretell itself."""

    tokens: int                      # seen at the last evaluation
    exponent: float                  # c; 0: logarithmic
    ceiling: float | None            # A; None where it is logarithmic
    offset: float                    # A
    slope: float                     # B
    now: float                       # fitted, at `tokens`
    gain: float                      # of twice the tokens
    low: float                       # its interval, residuals redrawn: 1 % and 99 % of the draws, within which the
    high: float                      # real gain lay for 91 to 93 of 100 synthetic curves
    error: float                     # root mean square of the residuals
    foretold: float                  # |last evaluation − its value by a fit of the first two thirds|
    trusted: bool                    # that is no more than the gain, and the interval no wider than twice the gain

    def at(self, tokens) -> np.ndarray:
        """Acceptance by the fit, float of the shape of `tokens` (above 0)."""
        return value(np.asarray(tokens, float), self.exponent, self.offset, self.slope)


def fit(lines: list[dict]) -> Fit | None:
    """The fit of metrics.jsonl's evaluations; None with fewer than ENOUGH, or no tokens' spread between them."""
    held_out = [(line["tokens"], line["acceptance"]) for line in of_kind(lines, "validation") if line["tokens"]]
    if len(held_out) < ENOUGH:
        return None
    n, a = (np.array(values, float) for values in zip(*held_out, strict=True))
    c, A, B = least_squares(n, a[None])
    c, A, B = c[0], A[0], B[0]
    fitted = value(n, c, A, B)
    residuals = a - fitted
    gain = float(value(2 * n[-1], c, A, B) - fitted[-1])
    rng = np.random.default_rng(0)
    redrawn = fitted + rng.choice(residuals, (DRAWS, len(n))) * np.sqrt(len(n) / (len(n) - 3))
    cs, As, Bs = least_squares(n, redrawn)
    low, high = np.percentile(value(2 * n[-1], cs, As, Bs) - value(n[-1], cs, As, Bs), [1, 99])
    part = max(4, 2 * len(n) // 3)
    foretold = abs(float(value(n[-1], *(x[0] for x in least_squares(n[:part], a[None, :part]))) - a[-1]))
    trusted = bool(gain > 0 and foretold <= gain and high - low <= 2 * gain)
    return Fit(int(n[-1]), float(c), float(A) if c else None, float(A), float(B), float(fitted[-1]), gain, float(low),
               float(high), float(np.sqrt((residuals ** 2).mean())), foretold, trusted)


def least_squares(n: np.ndarray, a: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(c, A, B), each [M], of curves a [M, N] at tokens n [N]: for each exponent the straight line, then the best."""
    x = np.stack([basis(n, c) for c in EXPONENTS])                                    # [C, N]
    centred, means = x - x.mean(1, keepdims=True), a.mean(1, keepdims=True)
    slope = (a - means) @ centred.T / (centred ** 2).sum(1)                           # [M, C]
    offset = means - slope * x.mean(1)                                                # [M, C]
    squares = ((a[:, None] - offset[..., None] - slope[..., None] * x) ** 2).sum(-1)  # [M, C]
    best, rows = squares.argmin(1), np.arange(len(a))
    return EXPONENTS[best], offset[rows, best], slope[rows, best]


def basis(n, c):
    """What the curve is linear in, growing in n: log n for c = 0, else −n^(−c)."""
    return np.where(c == 0, np.log(n), -np.power(n, -np.asarray(c, float)))


def value(n, c, A, B):
    return A + B * basis(n, c)


def draw(ax, lines: list[dict], found: Fit | None) -> None:
    """Evaluations against tokens seen (thousands), and the fit, dashed past them to twice the tokens."""
    held_out = [line for line in of_kind(lines, "validation") if line["tokens"]]
    ax.plot([line["tokens"] / 1000 for line in held_out], [line["acceptance"] for line in held_out], "o", markersize=3,
            label="held out")
    if found:
        seen, beyond = (np.geomspace(*ends, 50) for ends in ((held_out[0]["tokens"], found.tokens),
                                                             (found.tokens, 2 * found.tokens)))
        (line,) = ax.plot(seen / 1000, found.at(seen), linewidth=1, label="fitted")
        ax.plot(beyond / 1000, found.at(beyond), "--", linewidth=1, color=line.get_color(), label="foretold")
    ax.set_xlabel("tokens seen (thousands)")
    ax.set_ylabel("held-out acceptance (tokens a verify)")
    ax.legend(fontsize=8, frameon=False)


def sentence(found: Fit | None) -> str:
    """For the record, the doubt included."""
    if found is None:
        return f"Too few evaluations for a learning curve: it takes {ENOUGH} after the first tokens."
    logarithmic = "as the logarithm of tokens, no end in sight"
    ceiling = logarithmic if found.ceiling is None else f"towards {found.ceiling:.2f}"
    doubt = "" if found.trusted else (f" Not to be relied on: from its first two thirds the curve misses the last "
                                      f"evaluation by {found.foretold:.3f}.")
    return (f"Acceptance grows {ceiling}; twice the {found.tokens:,} tokens would add {found.gain:.3f} "
            f"(90 % interval {found.low:.3f} to {found.high:.3f}).{doubt}")
