"""What is timed is what it says: widths, contexts and caches are watched from outside. Seconds themselves are not."""

import pytest
import torch

from eagle3nb.acceptance import costs
from eagle3nb.acceptance.decode import decode, decode_by_steps
from eagle3nb.errors import UserError


class Watched:
    """The target; notes (context, width) of each forward."""

    def __init__(self, target):
        self.target, self.facts, self.logits, self.body = target, target.facts, target.logits, target.body
        self.seen = []

    def forward(self, ids, cache=None, room=0):
        self.seen.append((0 if cache is None else cache.length, ids.shape[1]))
        return self.target.forward(ids, cache, room)


def test_each_part_is_measured_as_often_as_it_says(world):
    target = Watched(world.target)
    rows = costs.costs(target, world.drafter, widths=(1, 2, 5), contexts=(40, 60), repeats=3, seconds=1e6)
    parts = [(row["what"], row["width"], row["context"]) for row in rows]
    assert len(parts) == len(set(parts)) == 1 + 2 * (1 + 3 + 3)
    assert all(row["repeats"] == 3 and 0 <= row["low"] <= row["seconds"] <= row["high"] for row in rows)
    for context in (40, 60):  # the decode that shows the host's part ends before
        assert [target.seen.count((context, width)) for width in (1, 2, 5)] == [3, 3, 3]
        assert target.seen.count((0, context)) == 1  # the prompt, not timed


def test_it_ends_in_time_with_each_part_once(world):
    rows = costs.costs(world.target, world.drafter, widths=(1, 3), contexts=(10,), repeats=1000, seconds=0)
    assert {row["repeats"] for row in rows} == {1} and len(rows) == 6


@torch.inference_mode()
def test_a_measurement_leaves_the_caches_as_they_were(world, monkeypatch):
    kept = []
    cache = costs.DraftCache
    monkeypatch.setattr(costs, "DraftCache", lambda *args: kept.append(cache(*args)) or kept[-1])
    parts = costs._parts(world.target, world.drafter, [1, 4], 20, 3)
    before, length = kept[0].draft(3), kept[0].length
    for measure in parts.values():
        assert measure() > 0
    assert (kept[0].draft(3).tokens, kept[0].length) == (before.tokens, length) and length == 20


def test_costs_at_a_context_lie_on_the_line_between():
    rows = [{"what": what, "width": width, "context": context, "seconds": base + context * slope + width}
            for what, widths, base, slope in (("verify", (1, 2), 5.0, 0.1), ("catch_up", (1, 2), 1.0, 0.0),
                                              ("draft", (1,), 2.0, 0.01))
            for width in widths for context in (100, 300)]
    rows.append({"what": "overhead", "width": 0, "context": 0, "seconds": 0.25})
    found = costs.at(rows, 150)
    assert found.verify == pytest.approx({(1, 1): 21.0, (1, 2): 22.0})
    assert found.catch_up == {(1, 1): 2.0, (1, 2): 3.0} and found.overhead == {1: 0.25}
    assert found.draft_step == pytest.approx({1: 4.5})
    assert costs.at(rows, 10).verify[1, 1] == pytest.approx(16.0)  # as the shortest: nothing is known before it
    assert costs.at(rows, 900).verify[1, 1] == pytest.approx(36.0)
    halves = costs.at([row | {"low": row["seconds"] / 2} for row in rows], 150, "low")
    assert halves.verify == pytest.approx({(1, 1): 10.5, (1, 2): 11.0}) and halves.overhead == {1: 0.125}


def test_a_busy_machine_is_told():
    quiet = {"what": "verify", "seconds": 1.0, "low": 0.95, "high": 1.05}
    busy = {"what": "verify", "seconds": 2.0, "low": 1.5, "high": 2.5}
    small = {"what": "draft", "seconds": 0.1, "low": 0.0, "high": 9.0}  # a stall there decides nothing
    assert "within 10%" in costs.steadiness([quiet, small])
    assert "over 50% of their median: the machine was busy" in costs.steadiness([quiet, busy, small])


def test_the_mean_context_is_the_tokens_own(world):
    places = [position for a in world.answers for position in range(a.start, a.end)]
    assert costs.mean_context(world.answers) == pytest.approx(sum(places) / len(places) + 0.5)


def test_bad_settings_are_refused(world):
    for changes in ({"widths": []}, {"widths": [0, 1]}, {"contexts": []}, {"repeats": 0}):
        with pytest.raises(UserError, match="costs wants widths, contexts and repeats"):
            costs.costs(world.target, world.drafter, **changes)
    with pytest.raises(UserError, match="context 512 and 8 tokens pass the target's 128 positions"):
        costs.costs(world.target, world.drafter)


def test_decodes_by_steps_take_turns_and_end_in_time(world):
    answers = world.answers[:3]
    runs = decode_by_steps(world.target, world.drafter, answers, [0, 2], 8)
    assert {steps: [d.ids for d in found] for steps, found in runs.items()} == {
        steps: [decode(world.target, world.drafter, a.prompt, steps=steps, max_new_tokens=8).ids for a in answers]
        for steps in (0, 2)}
    short = decode_by_steps(world.target, world.drafter, answers, [0, 2], 8, seconds=0)
    assert [len(found) for found in short.values()] == [1, 1]
