"""The learning curve on synthetic ones, and the sources' table."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from eagle3nb.drafter.curves import by_source
from eagle3nb.drafter.learning_curve import draw, fit, sentence


def evaluations(tokens, acceptance) -> list[dict]:
    return [{"kind": "validation", "tokens": int(n), "acceptance": float(a)}
            for n, a in zip(tokens, acceptance, strict=True)]


@pytest.mark.parametrize(("A", "B", "c"), [(3.0, 20.0, 0.3), (2.5, 900.0, 0.7), (2.2, 3.0, 0.1)])
def test_a_power_law_is_found(A, B, c):
    """Without noise: exponent to the grid's step (6 %), gain to 2 %."""
    n = np.linspace(2e4, 4e5, 20)
    found = fit(evaluations([0, *n], [1.0, *(A - B * n ** -c)]))
    assert found.exponent == pytest.approx(c, rel=0.07) and found.trusted and found.tokens == 400_000
    real = B * (4e5 ** -c - 8e5 ** -c)
    assert found.gain == pytest.approx(real, rel=0.02) and found.low <= found.gain * 1.001
    assert found.now == pytest.approx(A - B * 4e5 ** -c, abs=1e-3)
    assert f"add {found.gain:.3f}" in sentence(found) and "relied" not in sentence(found)


def test_a_logarithm_is_found():
    n = np.geomspace(1e3, 1e6, 12)
    found = fit(evaluations(n, 0.5 + 0.1 * np.log(n)))
    assert found.exponent == 0 and found.ceiling is None
    assert found.gain == pytest.approx(0.1 * np.log(2), rel=1e-3)  # tokens are whole
    assert "no end in sight" in sentence(found)


def test_the_figure_goes_through_the_points():
    n = np.linspace(2e4, 4e5, 20)
    a = 3.0 - 20.0 * n ** -0.3
    lines = evaluations([0, *n], [1.0, *a])
    found, axes = fit(lines), Figure().add_subplot()
    draw(axes, lines, found)
    points, fitted, foretold = axes.get_lines()
    np.testing.assert_allclose(points.get_ydata(), a)
    np.testing.assert_allclose(found.at(n), a, atol=2e-3)
    assert fitted.get_ydata()[-1] == foretold.get_ydata()[0] == pytest.approx(found.now)
    assert foretold.get_xdata()[-1] == 800 and foretold.get_ydata()[-1] == pytest.approx(found.now + found.gain)
    draw(Figure().add_subplot(), lines[:3], None)


def test_the_interval_holds_the_real_gain():
    """Over 40 noises, at least 33 times."""
    n, held = np.linspace(2e4, 4e5, 20), 0
    real = 20.0 * (4e5 ** -0.3 - 8e5 ** -0.3)
    for seed in range(40):
        noise = np.random.default_rng(seed).normal(0, 0.005, 20)
        found = fit(evaluations(n, 3.0 - 20.0 * n ** -0.3 + noise))
        held += found.low <= real <= found.high
    assert held >= 33


def test_what_is_not_to_be_trusted():
    """Noise around a constant, a curve that turns down; and too few evaluations give none."""
    n, rng = np.linspace(1e4, 2e5, 12), np.random.default_rng(3)
    assert not fit(evaluations(n, 1.8 + rng.normal(0, 0.05, 12))).trusted
    overfitted = fit(evaluations(n, 2.0 + 0.3 * np.sin(np.linspace(0, 3, 12))))
    assert not overfitted.trusted and "Not to be relied on" in sentence(overfitted)
    assert fit(evaluations(n[:5], n[:5])) is None and fit([]) is None and "Too few" in sentence(None)


def test_a_table_of_sources():
    lines = [{"kind": "validation", "acceptance": a, "sources": {
        "A2": {"loss": 2 - a, "acceptance": a, "counted": 5}, "B1": {"loss": 3 - a, "acceptance": a + 1, "counted": 9}}}
        for a in (1.0, 1.5, 1.4)]
    assert by_source(lines) == [
        {"source": "B1", "slots": 9, "weighted sum of losses": 1.5, "acceptance at the start": 2.0, "acceptance": 2.5},
        {"source": "A2", "slots": 5, "weighted sum of losses": 0.5, "acceptance at the start": 1.0, "acceptance": 1.5}]
    assert by_source(evaluations([1], [2.0])) == []
