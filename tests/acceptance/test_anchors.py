"""Published figures: each possible under its own settings, named once, and given by benchmark with chains first."""

from collections import Counter

from eagle3nb.acceptance.anchors import BENCHMARKS, anchors, beside
from eagle3nb.acceptance.prompts import PACKAGES


def test_every_figure_is_possible_and_stands_once():
    found = anchors()
    assert all(1 < a.tau <= a.steps + 1 for a in found if a.steps), "more than all drafts and the bonus token"
    assert all(a.steps == a.draft_tokens - 1 for a in found if a.topk == 1)
    assert all(a.who and a.target and a.source and a.benchmark == a.benchmark.lower() for a in found)
    assert max(Counter((a.who, a.target, a.benchmark, a.steps) for a in found).values()) == 1
    assert all(a.temperature in (0.0, None) for a in found)
    assert set(BENCHMARKS) == set(PACKAGES) <= {a.benchmark for a in found}


def test_the_rows_of_ones_own_benchmarks():
    """Chains of as many steps first, with their settings; the paper's trees only where they are asked for."""
    rows = beside(["mtbench", "B1_code", "mtbench", "gsm8k"], steps=3)
    assert [row["benchmark"] for row in rows] == sorted([row["benchmark"] for row in rows], reverse=True)
    of_mtbench = [row for row in rows if row["benchmark"] == "mtbench"]
    assert (of_mtbench[0]["tau"], of_mtbench[0]["target"], of_mtbench[0]["setting"]) == (2.96, "Llama-3.3-70B",
                                                                                       "3-1-4, SGLang")
    steps = [row["steps"] for row in of_mtbench]
    assert steps == [3] * steps.count(3) + [7] * 2 and all(row["topk"] == 1 for row in of_mtbench)
    assert {"setting": "3-1-4, batch 8, SGLang", "tau": 2.39}.items() <= next(
        row for row in rows if row["target"] == "Kimi-K2-Instruct").items()
    assert [row["setting"] for row in beside(["gsm8k"], 3)][-1] == "?-?-?"  # unstated ones last
    assert beside(["mtbench"], 7)[0]["steps"] == 7
    trees = beside(["mtbench"], 3, trees=True)
    assert [row["tau"] for row in trees] == [6.65, 6.13, 5.63, 5.58] and {row["kind"] for row in trees} == {"tree"}
    assert trees[0]["setting"] == "tree, 8 steps, greedy" and trees[0]["topk"] is None
    assert beside(["A2_chat"], 3) == beside([], 3) == []
