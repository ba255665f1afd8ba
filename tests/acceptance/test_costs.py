"""What is timed is what it says: widths, contexts and caches are watched from outside. Seconds themselves are not."""

import pytest
import torch

from eagle3nb.acceptance import costs
from eagle3nb.acceptance.decode import decode, decode_by_steps
from eagle3nb.errors import UserError


class Watched:
    """The target; notes (context, width) of each forward."""

    def __init__(self, target):
        self.target, self.facts, self.logits = target, target.facts, target.logits
        self.aux, self.device, self.seen, self.seen_at_once = target.aux, target.device, [], []

    def forward(self, ids, cache=None, room=0):
        self.seen.append((0 if cache is None else cache.length, ids.shape[1]))
        return self.target.forward(ids, cache, room)

    def body(self, input_ids, past_key_values, position_ids, **kwargs):
        assert (position_ids == past_key_values.places).all()
        self.seen_at_once.append((len(input_ids), int(position_ids.min()), input_ids.shape[1]))
        return self.target.body(input_ids=input_ids, past_key_values=past_key_values, position_ids=position_ids,
                                **kwargs)


def test_each_part_is_measured_as_often_as_it_says(world):
    target = Watched(world.target)
    rows = costs.costs(target, world.drafter, widths=(1, 2, 5), contexts=(40, 60), repeats=3, seconds=1e6)
    parts = [(row["what"], row["width"], row["context"]) for row in rows]
    assert len(parts) == len(set(parts)) == 1 + 2 * (1 + 3 + 3)
    assert all(row["repeats"] == 3 and 0 <= row["low"] <= row["seconds"] <= row["high"] for row in rows)
    for context in (40, 60):  # the decode that shows the host's part ends before
        assert [target.seen.count((context, width)) for width in (1, 2, 5)] == [3, 3, 3]
        assert target.seen.count((0, context)) == 1  # the prompt, not timed


def test_batches_are_measured_beside_single_sequences(world):
    target = Watched(world.target)
    rows = costs.costs(target, world.drafter, widths=(1, 3), contexts=(30, 50), repeats=2, seconds=1e6, batches=(3, 1))
    parts = [(row["batch"], row["what"], row["width"], row["context"]) for row in rows]
    assert sorted(parts) == sorted([(1, "overhead", 0, 0)] + [
        (batch, what, width, context) for batch in (1, 3) for context in (30, 50)
        for what, width in (("draft", 1), ("verify", 1), ("verify", 3), ("catch_up", 1), ("catch_up", 3))])
    assert all(row["repeats"] == 2 and row["seconds"] > 0 for row in rows)
    assert sorted(target.seen_at_once) == sorted([(3, context, width) for context in (30, 50) for width in (1, 3)] * 2)
    found = costs.at(rows, 40)
    assert set(found.verify) == set(found.catch_up) == {(batch, width) for batch in (1, 3) for width in (1, 3)}
    assert set(found.draft_step) == {1, 3} and set(found.overhead) == {1}
    once = costs.costs(target, world.drafter, widths=(1,), contexts=(30,), repeats=9, seconds=0, batches=(2,))
    assert [(row["batch"], row["what"], row["repeats"]) for row in once] == [
        (2, "draft", 1), (2, "verify", 1), (2, "catch_up", 1)]


ROOM = 60  # tokens of each sequence at most


def single_caches(target, texts) -> list:
    return [target.forward(text[None], None, ROOM - len(text))[2] for text in texts]


def texts_of(*lengths) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(3, 96, (length,), generator=draw) for length in lengths]


@torch.inference_mode()
def test_a_batched_verify_equals_single_rows(world):
    """Three sequences of unlike length, three turns that keep unlike numbers of tokens, against the whole text without
    a cache. Logits are some units large; another order of the sums moves them by 1e-5, 1e-4 is allowed."""
    texts = texts_of(9, 31, 20)
    caches = single_caches(world.target, texts)
    for cache, text in zip(caches, texts, strict=True):
        for pair in cache.buffers.values():
            for buffer in pair:
                buffer[:, :, len(text):] = torch.nan  # what was never written
    rows = costs.TargetRows(world.target, caches)
    for turn, (width, kept) in enumerate(((4, (1, 4, 2)), (1, (1, 1, 1)), (6, (6, 2, 3)))):
        fresh = torch.randint(3, 96, (3, width), generator=torch.Generator().manual_seed(turn))
        aux, last = rows.forward(fresh)
        whole = world.target.capture([torch.cat(pair).tolist() for pair in zip(texts, fresh, strict=True)])
        for i, (true_aux, true_last) in enumerate(whole):
            logits, true_logits = (world.target.logits(x) for x in (last[i], true_last[-width:]))
            torch.testing.assert_close(logits, true_logits, rtol=0, atol=1e-4)
            torch.testing.assert_close(aux[i], true_aux[-width:], rtol=0, atol=1e-4)
        rows.crop(torch.tensor(kept) - width)
        texts = [torch.cat([text, new[:n]]) for text, new, n in zip(texts, fresh, kept, strict=True)]
    assert rows.length.tolist() == [len(text) for text in texts]


@torch.inference_mode()
def test_a_batched_verify_on_transformers_own_cache_equals_single_rows(world):
    texts = texts_of(17, 17)
    rows = costs.TargetRows(world.target, [world.target.forward(text[None])[2] for text in texts])
    for turn, width in enumerate((3, 2)):
        fresh = torch.randint(3, 96, (2, width), generator=torch.Generator().manual_seed(turn))
        _, last = rows.forward(fresh)
        whole = world.target.capture([torch.cat(pair).tolist() for pair in zip(texts, fresh, strict=True)])
        for found, (_, true) in zip(last, whole, strict=True):
            torch.testing.assert_close(world.target.logits(found), world.target.logits(true[-width:]), rtol=0,
                                       atol=1e-4)
        rows.crop(-width)


@torch.inference_mode()
def test_a_batched_drafter_equals_single_ones(world):
    """Three sequences of unlike length, three turns that keep unlike numbers of new slots: chains equal token by token,
    states to 1e-4 (they are of some units)."""
    answers, slots, rows = [world.answers[i] for i in (0, 5, 8)], [], None
    states = [world.target.capture([a.sequence.tolist()])[0][0] for a in answers]
    for answer, aux in zip(answers, states, strict=True):
        slots.append(costs.DraftCache(world.drafter, ROOM))
        for buffer in (slots[-1].keys, slots[-1].values):
            buffer.fill_(torch.nan)
        slots[-1].extend(torch.tensor(answer.sequence[1:answer.start + 1]), aux[:answer.start])
    rows, at, chains = costs.DraftRows(slots), [a.start for a in answers], []
    for width, kept in ((3, (1, 3, 2)), (1, (1, 1, 1)), (4, (4, 1, 2))):
        chains.append(rows.draft(5))
        assert chains[-1] == [list(one.draft(5).tokens) for one in slots]
        tokens, aux = ([text[t:t + width] for text, t in zip(whole, at, strict=True)] for whole in (
            [torch.tensor(a.sequence[1:]) for a in answers], states))
        rows.extend(torch.stack(tokens), torch.stack(aux))
        for one, new, features in zip(slots, tokens, aux, strict=True):
            one.extend(new, features)
        for name in ("query", "hidden"):
            torch.testing.assert_close(getattr(rows, name), torch.cat([getattr(one, name) for one in slots]), rtol=0,
                                       atol=1e-4)
        at = [t + n for t, n in zip(at, kept, strict=True)]
        rows.length = torch.tensor(at)  # the next turn's slots overwrite what lies behind
        for one, t in zip(slots, at, strict=True):
            one.length = t
    assert len({tuple(chain) for turn in chains for chain in turn}) > 3  # not one chain over and over


def test_it_ends_in_time_with_each_part_once(world):
    rows = costs.costs(world.target, world.drafter, widths=(1, 3), contexts=(10,), repeats=1000, seconds=0)
    assert {row["repeats"] for row in rows} == {1} and len(rows) == 6


@torch.inference_mode()
def test_a_measurement_leaves_the_caches_as_they_were(world, monkeypatch):
    kept = []
    cache = costs.DraftCache
    monkeypatch.setattr(costs, "DraftCache", lambda *args: kept.append(cache(*args)) or kept[-1])
    rows, drafts, target_rows, draft_rows = [], [], costs.TargetRows, costs.DraftRows
    monkeypatch.setattr(costs, "TargetRows", lambda *args: rows.append(target_rows(*args)) or rows[-1])
    monkeypatch.setattr(costs, "DraftRows", lambda *args: drafts.append(draft_rows(*args)) or drafts[-1])
    parts = costs._parts(world.target, world.drafter, [1, 4], 20, 3, (1, 2))
    before, length = kept[0].draft(3), kept[0].length
    assert drafts[0].draft(3) == [list(before.tokens)] * 2
    for measure in parts.values():
        assert measure() > 0
    assert (kept[0].draft(3).tokens, kept[0].length) == (before.tokens, length) and length == 20
    assert drafts[0].draft(3) == [list(before.tokens)] * 2
    assert rows[0].length.tolist() == drafts[0].length.tolist() == [20, 20]


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
    more = [row | {"batch": 4, "seconds": 3 * row["seconds"]} for row in rows if row["what"] != "overhead"]
    both = costs.at(more + [row | {"batch": 1} for row in rows], 150)
    assert both.verify == pytest.approx({(1, 1): 21.0, (1, 2): 22.0, (4, 1): 63.0, (4, 2): 66.0})
    assert both.draft_step == pytest.approx({1: 4.5, 4: 13.5}) and both.overhead == {1: 0.25}
    assert both.catch_up == {(1, 1): 2.0, (1, 2): 3.0, (4, 1): 6.0, (4, 2): 9.0}


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
    for changes in ({"widths": []}, {"widths": [0, 1]}, {"contexts": []}, {"repeats": 0}, {"batches": []},
                    {"batches": (0, 1)}):
        with pytest.raises(UserError, match="costs wants widths, contexts, batches and repeats of 1 and more"):
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
