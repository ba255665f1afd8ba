"""Sampled decodes: the rule alone, exactly; a whole decode by chi-square; wrong rules, which the chi-square must see.

Random numbers have fixed seeds, so a p-value is the same on each run. A right rule's p-value is uniform in [0, 1]: one
under 1e-3 fails the test, and each wrong rule below comes out under 1e-12.
"""

from collections import Counter
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eagle3nb.acceptance import rejection
from eagle3nb.acceptance.decode import DraftCache, decode
from eagle3nb.drafter.model import DraftConfig, DraftModel
from eagle3nb.errors import UserError

V, H, TEMPERATURE = 5, 16, 0.8
IDS = torch.tensor([0, 2, 3])  # D: a token outside it comes through the residual alone


def distributions(seed: int):
    """p [V] and q [D] of many kinds: flat, peaked, with zeros, one that is all of the other."""
    rng = np.random.default_rng(seed)
    for sharp in (0.3, 1.0, 5.0, 40.0):
        p, q = (torch.from_numpy(rng.normal(size=n) * sharp).softmax(-1) for n in (V, len(IDS)))
        yield p, q
        hole = p * (torch.arange(V) != seed % V)
        yield hole / hole.sum(), q
    p = torch.zeros(V, dtype=torch.float64)
    p[IDS] = q
    yield p, q  # the drafter is the target: nothing is rejected, nothing is left


@pytest.mark.parametrize("seed", range(20))
def test_drafted_or_replaced_a_token_has_the_targets_probability(seed):
    """Σ over drafts x of q(x)·[x stays] + q(x)·[x goes]·residual = p, by plain loops; float64: 1e-12."""
    for p, q in distributions(seed):
        stays, replaced = rejection.acceptance(p, q, IDS).tolist(), rejection.residual(p, q, IDS).tolist()
        out = [0.0] * V
        for x, token in enumerate(IDS.tolist()):
            out[token] += float(q[x]) * stays[x]
            for y in range(V):
                out[y] += float(q[x]) * (1 - stays[x]) * replaced[y]
        assert np.abs(np.array(out) - p.numpy()).max() < 1e-12
        assert np.sum(np.minimum(p[IDS].numpy(), q.numpy())) == pytest.approx(np.dot(q, stays))  # no more can stay


def test_the_quantile_of_a_distribution():
    p = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0], dtype=torch.float64)
    grid = [rejection.quantile(p, (i + 0.5) / 400) for i in range(400)]
    assert Counter(grid) == {1: 100, 3: 200, 4: 100}
    assert rejection.quantile(p, 0.0) == 1 and rejection.quantile(p, np.nextafter(1.0, 0.0)) == 4


def test_a_verify_ends_at_the_first_rejection():
    p = torch.eye(V, dtype=torch.float64)[[2, 3, 4]]  # the target is sure of 2, 3, 4
    sure = torch.eye(3, dtype=torch.float64)  # drafts drawn with certainty
    def verify(*drafted):
        return rejection.verify(p, sure[list(drafted)], IDS, list(drafted), lambda: 0.5)
    assert verify(1, 2) == [2, 3, 4]
    assert verify(1, 0) == [2, 3]  # 0 is rejected, 3 takes its place
    assert verify(0, 2) == [2]
    assert rejection.verify(p[:1], sure[:0], IDS, [], lambda: 0.5) == [2]


# ------------------------------------------------------------------------------------------------- the whole decode


class Markov:
    """A target whose next token depends on the last two; the interface that the decode uses, no transformer."""

    def __init__(self):
        rng = torch.Generator().manual_seed(3)
        self.facts = SimpleNamespace(eos=(), max_positions=64)
        self.head = torch.randn(V * V, V, generator=rng)  # logits behind (x[t−1], x[t])
        self.features = torch.randn(V * V, 3 * H, generator=rng)

    def forward(self, ids, cache=None, room=0):
        cache = Seen() if cache is None else cache
        pairs = []
        for token in ids[0].tolist():
            pairs.append(cache.tokens[-1] * V + token if cache.tokens else token)
            cache.tokens.append(token)
        return self.features[pairs], torch.tensor(pairs), cache

    def logits(self, last):
        return self.head[last]

    def probability(self, prompt, text) -> float:
        """Of `text` behind `prompt`, by plain numpy."""
        seen, out = list(prompt), 1.0
        for token in text:
            e = np.exp(self.head[seen[-2] * V + seen[-1]].double().numpy() / TEMPERATURE)
            out *= e[token] / e.sum()
            seen.append(token)
        return out


class Seen:
    def __init__(self):
        self.tokens = []

    def crop(self, count):
        del self.tokens[count:]


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(5)
    config = DraftConfig(hidden=H, heads=2, kv_heads=1, head_dim=8, intermediate=16, vocab=V, draft_vocab=len(IDS),
                         eps=1e-6, rope={"rope_type": "default", "rope_theta": 1e4}, max_positions=64)
    drafter = DraftModel(config, torch.randn(V, H), IDS).eval().requires_grad_(False)
    drafter.lm_head.weight.mul_(6)  # it is sure of itself, and wrong: wrong rules show
    return Markov(), drafter


def p_value(models, draws, **settings) -> tuple[float, list[int]]:
    """Of three tokens' joint counts over `draws` decodes against their exact probabilities; accepted numbers seen.

    Cells of fewer than 5 expected are one cell, as the chi-square's approximation wants.
    """
    target, drafter = models
    prompt, texts, accepted = (1, 4), Counter(), []
    for seed in range(draws):
        one = decode(target, drafter, prompt, max_new_tokens=3, temperature=TEMPERATURE, seed=seed, **settings)
        texts[one.ids] += 1
        accepted += one.accepted
    expected = {text: draws * target.probability(prompt, text) for text in product(range(V), repeat=3)}
    assert sum(expected.values()) == pytest.approx(draws)
    rare = [text for text, n in expected.items() if n < 5]
    cells = [(texts[text], n) for text, n in expected.items() if n >= 5]
    cells.append((sum(texts[t] for t in rare), sum(expected[t] for t in rare)))
    assert len(cells) > 20
    square = sum((seen - n) ** 2 / n for seen, n in cells)
    half = torch.tensor([(len(cells) - 1) / 2, square / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*half)), accepted  # the chi-square distribution's upper tail


@pytest.mark.parametrize("settings", [{"steps": 2, "drafts": "sampled"}, {"steps": 2, "drafts": "argmax"}],
                         ids=["sampled", "argmax"])
def test_a_decode_is_distributed_as_the_target(models, settings):
    found, accepted = p_value(models, 1500, **settings)
    assert found > 1e-3
    assert set(accepted) == {0, 1, 2}


@pytest.mark.parametrize("name, wrong", [
    ("acceptance", lambda p, q, ids: torch.ones_like(q)),                               # all drafts stay
    ("residual", lambda p, q, ids: p),                                                  # q is not subtracted
])
def test_a_wrong_rule_is_seen(models, monkeypatch, name, wrong):
    monkeypatch.setattr(rejection, name, wrong)
    assert p_value(models, 600, steps=2, drafts="sampled")[0] < 1e-12


def test_drafts_are_drawn_from_the_q_that_they_are_verified_by(models):
    """Shares of the first and second drafted token over an even grid of uniform numbers."""
    _, drafter = models
    slots = DraftCache(drafter, 8)
    with torch.inference_mode():
        slots.extend(torch.tensor([4, 1]), torch.randn(2, 3 * H, generator=torch.Generator().manual_seed(1)))
        greedy = slots.draft(3)
        chains = [slots.draft(2, 0.9, [(i + 0.5) / 300, 0.3]) for i in range(300)]
        assert slots.draft(0).tokens == ()
    drawn = np.bincount([c.indices[0] for c in chains], minlength=3) / 300
    assert np.abs(drawn - chains[0].q[0].numpy()).max() < 1 / 300
    assert all(torch.equal(c.q[0], chains[0].q[0]) and len(c.q) == 2 for c in chains)
    assert len({c.q[1].tolist()[0] for c in chains}) == len(set(drawn.nonzero()[0]))  # the second's by the first
    assert [int(IDS[i]) for i in greedy.indices] == list(greedy.tokens) and len(greedy.margins) == 3
    cold = slots.draft(3, 1e-4, [0.5] * 3)
    assert cold.tokens == greedy.tokens and cold.margins == ()


# ------------------------------------------------------------------------------------------------- with a real target


@pytest.mark.parametrize("steps", [1, 4])
def test_argmax_drafts_leave_a_seeds_text_as_it_is(world, steps):
    settings = {"max_new_tokens": 20, "stop_ids": (28, 35), "temperature": 0.25, "seed": 11}
    alone = world.target.generate([a.prompt for a in world.answers[:12]], **settings)
    accepted = 0
    for answer, ids in zip(world.answers[:12], alone, strict=True):
        assert decode(world.target, None, answer.prompt, steps=0, **settings).ids == tuple(ids)
        drafted = decode(world.target, world.drafter, answer.prompt, steps=steps, **settings)
        assert drafted.ids == tuple(ids)
        accepted += sum(drafted.accepted)
    assert accepted > 5 and any(tuple(ids) != a.ids for a, ids in zip(world.answers, alone, strict=False))


def test_cold_sampling_is_greedy(world):
    for answer in world.answers[:6]:
        for drafts in ("argmax", "sampled"):
            cold = decode(world.target, world.drafter, answer.prompt, steps=3, max_new_tokens=20, stop_ids=(28, 35),
                          temperature=1e-5, drafts=drafts)
            greedy = decode(world.target, world.drafter, answer.prompt, steps=3, max_new_tokens=20, stop_ids=(28, 35))
            assert (cold.ids, cold.accepted) == (greedy.ids, greedy.accepted)
            assert cold.margins == () and greedy.draft_s + greedy.verify_s <= greedy.decode_s


def test_settings_that_say_nothing_are_refused(world):
    def run(prompt=(5, 6), drafter=world.drafter, **changes):
        decode(world.target, drafter, prompt, **{"steps": 2, "max_new_tokens": 8, **changes})
    for changes in ({"steps": -1}, {"max_new_tokens": 0}, {"temperature": -0.1}, {"temperature": float("nan")}):
        with pytest.raises(UserError, match="decode wants steps ≥ 0"):
            run(**changes)
    with pytest.raises(UserError, match="drafts is 'beam'; choose one of argmax, sampled"):
        run(drafts="beam")
    with pytest.raises(UserError, match="2 drafted tokens need a drafter"):
        run(drafter=None)
    with pytest.raises(UserError, match="prompt 0 has 120 tokens; with 10 new ones"):
        run(prompt=(5,) * 120)
