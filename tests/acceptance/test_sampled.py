"""Expected walks at a temperature against a real sampled decode, played thousands of times.

The target has four tokens and its answers at most four, so all texts can be written down with their probabilities: the
package's figure is then exact, and only the decode that is played has a sampling error. It shares no code with the
package but the draft layer's rows (projections, block, head): target by Transformers alone, attention written out.
"""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from eagle3nb.acceptance import benchmarks, offline, sampled
from eagle3nb.acceptance.benchmarks import Answer, Prompt
from eagle3nb.drafter import metrics
from eagle3nb.drafter.model import DraftConfig, DraftModel
from eagle3nb.errors import UserError
from eagle3nb.states.hf import TransformersTarget
from eagle3nb.states.target import embedding, facts_of

V, STOP, LIMIT, STEPS, TEMPERATURE = 4, 3, 4, 2, 0.7
PROMPT, BEYOND = (1, 3), 2
DRAFTABLE = [0, 1, 3]
DECODES = 6000


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """target, drafter (random, over three of the four tokens), the reference, all answers and their weights."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("small")
    LlamaForCausalLM(LlamaConfig(vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=8, head_dim=8,
                                 num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
                                 initializer_range=0.4, eos_token_id=STOP, bos_token_id=1, pad_token_id=STOP,
                                 tie_word_embeddings=False)).save_pretrained(folder)
    drafter = DraftModel(DraftConfig.from_target(facts_of(folder), len(DRAFTABLE)), embedding(folder),
                         torch.tensor(DRAFTABLE)).eval().requires_grad_(False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference = Reference(model, drafter)
    answers = {}
    for y in itertools.product(range(V), repeat=LIMIT + BEYOND):
        end = next((i + 1 for i, token in enumerate(y[:LIMIT]) if token == STOP), LIMIT)
        answers[y[:end], y[end:end + BEYOND]] = None
    weights = [np.prod([reference.p(ids[:i])[ids[i]] for i in range(len(ids))])
               for ids in (answer + beyond for answer, beyond in answers)]
    assert sum(weights) == pytest.approx(1)
    taken = [Answer(f"a{i}", "chat", PROMPT, *pair, pair[0][-1] == STOP, False) for i, pair in enumerate(answers)]
    target = TransformersTarget(folder, torch.float32, "cpu")
    found = sampled.chances(target, drafter, taken, STEPS, temperature=TEMPERATURE)
    return SimpleNamespace(target=target, reference=reference, found=found, weights=np.array(weights))


class Reference:
    """Every distribution that a decode of this prompt can meet, from all texts at once [B, T]."""

    def __init__(self, model, drafter):
        texts = torch.tensor([PROMPT + y for y in itertools.product(range(V), repeat=LIMIT + BEYOND)])
        with torch.no_grad():
            out = model(texts, output_hidden_states=True, use_cache=False)
            aux = torch.cat([out.hidden_states[i] for i in (2, 4, 5)], -1)
            self.target = (out.logits.double() / TEMPERATURE).softmax(-1).numpy()          # [B, T, V]
            self.drafts = [np.zeros((*texts.shape, V)) for _ in range(STEPS)]              # [B, T, V] of each step
            for t in range(texts.shape[1] - STEPS):
                self.slot(drafter, texts, aux, t)

    def slot(self, drafter, texts, aux, t):
        keys, values, g = [], [], drafter.fuse(aux[:, t])
        for s in range(t):
            _, k, v = self.projected(drafter, texts[:, s + 1], drafter.fuse(aux[:, s]), s)
            keys.append(k)
            values.append(v)
        for step in range(STEPS):
            q, k, v = self.projected(drafter, texts[:, t + 1 + step], g, t + step)
            keys.append(k)
            values.append(v)
            scores = torch.einsum("bhd,bshd->bhs", q, torch.stack(keys, 1).expand(-1, -1, 2, -1)) / 8 ** 0.5
            mixed = torch.einsum("bhs,bshd->bhd", scores.softmax(-1), torch.stack(values, 1).expand(-1, -1, 2, -1))
            g = drafter.block(g, mixed.reshape(len(texts), -1))
            self.drafts[step][:, t, DRAFTABLE] = (drafter.logits(g).double() / TEMPERATURE).softmax(-1).numpy()

    @staticmethod
    def projected(drafter, tokens, g, position):
        return drafter.qkv(drafter.embed(tokens), g, torch.full((len(tokens),), position))

    @staticmethod
    def row(y) -> int:
        """A text that begins with the answer's tokens `y`."""
        return sum(int(token) * V ** (LIMIT + BEYOND - 1 - i) for i, token in enumerate(y))

    def p(self, y) -> np.ndarray:
        """[V] behind the answer's tokens `y`."""
        return self.target[self.row(y), len(PROMPT) + len(y) - 1]

    def q(self, y, chain) -> np.ndarray:
        """[V] of the draft behind `y` and the drafts `chain`."""
        return self.drafts[len(chain)][self.row((*y, *chain)), len(PROMPT) + len(y) - 2]


def real_decode(reference, rng, drafts: str, steps: int) -> tuple[tuple, int, int]:
    """(text, verifies, accepted drafts) of one sampled decode with drafts: Chen et al., algorithm 2."""
    def draw(p):
        return int(np.searchsorted(np.cumsum(p / p.sum()), rng.random(), side="right"))

    y = (draw(reference.p(())),)
    verifies = accepted = 0
    while len(y) < LIMIT and STOP not in y:
        chain = []
        for _ in range(steps):
            q = reference.q(y, chain)
            chain.append(int(q.argmax()) if drafts == "argmax" else draw(q))
        n, token = 0, None
        for k, x in enumerate(chain):
            p = reference.p((*y, *chain[:k]))
            if drafts == "argmax":
                token = draw(p)
                right = token == x
            else:
                q = reference.q(y, chain[:k])
                right = rng.random() < min(1, p[x] / q[x])
                token = x if right else draw(np.maximum(p - q, 0))
            if not right:
                break
            n += 1
        y = (*y, *chain[:n], token if n < steps else draw(reference.p((*y, *chain))))
        verifies += 1
        accepted += n
    return y, verifies, accepted


@pytest.mark.parametrize("drafts, steps", [("argmax", 2), ("sampled", 1), ("sampled", 2)])
def test_it_is_what_a_real_sampled_decode_counts(small, drafts, steps):
    """τ, verifies and accepted of 6,000 decodes within 4 standard errors of the exact expectation."""
    rng = np.random.default_rng(7)
    played = np.array([real_decode(small.reference, rng, drafts, steps)[1:] for _ in range(DECODES)], dtype=float)
    walks = [chain.walk(steps, drafts) for chain in small.found]
    verifies, accepted = (small.weights @ [getattr(walk, name) for walk in walks] for name in ("verifies", "accepted"))
    error = played.std(axis=0) / DECODES ** 0.5
    assert abs(played[:, 0].mean() - verifies) < 4 * error[0] and abs(played[:, 1].mean() - accepted) < 4 * error[1]
    ratio = played[:, 1].sum() / played[:, 0].sum()
    error = (played[:, 1] - ratio * played[:, 0]).std() / DECODES ** 0.5 / played[:, 0].mean()
    assert abs(ratio - accepted / verifies) < 4 * error < 0.05
    assert 0.1 < ratio < steps - 0.1  # something is accepted, something is not


def test_the_decode_that_is_played_is_lossless(small):
    """Its texts are the target's: else it would be no witness. Chi-square over the first two tokens, 15 degrees of
    freedom: above 46 by chance once in 20,000."""
    rng, seen = np.random.default_rng(1), np.zeros(V * V)
    for _ in range(4000):
        y = real_decode(small.reference, rng, "sampled", 2)[0]
        seen[y[0] * V + (y[1] if y[0] != STOP else 0)] += 1
    p = np.array([small.reference.p(())[a] * (small.reference.p((a,))[b] if a != STOP else b == 0)
                  for a in range(V) for b in range(V)]) * 4000
    assert ((seen - p)[p > 0] ** 2 / p[p > 0]).sum() < 46 and seen[p == 0].sum() == 0


def test_chances_are_min_1_q_over_p(small):
    """By every slot and step of every text; float32 sums in two orders: 1e-4 apart at most."""
    outside = 0
    for chain in small.found:
        y = chain.answer.ids + chain.answer.beyond
        assert chain.sampled.shape == chain.argmax.shape == chain.drafted.shape == (STEPS, len(chain.answer.ids) - 1)
        for i in range(len(chain.answer.ids) - 1):
            for k in range(STEPS):
                before, x = y[:i + 1 + k], y[i + 1 + k]
                p, q = small.reference.p(before)[x], small.reference.q(y[:i + 1], y[i + 1:i + 1 + k])
                assert chain.sampled[k, i] == pytest.approx(min(1, q[x] / p), abs=1e-4)
                assert chain.drafted[k, i] == q.argmax() and chain.argmax[k, i] == (x == q.argmax())
                outside += x not in DRAFTABLE and chain.sampled[k, i] == 0
    assert outside


# ------------------------------------------------------------------------------------------------- the expectation


def test_of_chances_0_and_1_it_is_the_walk():
    rng = np.random.default_rng(0)
    for _ in range(40):
        start, length, K = int(rng.integers(1, 5)), int(rng.integers(1, 30)), int(rng.integers(1, 6))
        hits = np.zeros((K, start + length + K), dtype=bool)
        slots = slice(start - 1, max(start + length - 2, start - 1))
        hits[:, slots] = rng.random((K, max(length - 1, 0))) < 0.6
        for steps in range(1, K + 1):
            walk = metrics.walk(hits, start, start + length, steps)
            found = sampled.expected(hits[:, slots], steps)
            assert (found.verifies, found.accepted, found.delivered) == (walk.verifies, walk.accepted, walk.delivered)
            assert found.per_position.tolist() == walk.per_position.tolist()


@pytest.mark.parametrize("steps", [1, 3])
def test_against_draws(steps):
    """4,000 walks whose drafts are tossed, within 4 standard errors."""
    rng = np.random.default_rng(2)
    chances = rng.random((3, 17))
    drawn = []
    for _ in range(4000):
        i = verifies = 0
        positions = np.zeros(steps)
        while i < 17:
            n = 0
            while n < steps and rng.random() < chances[n, i]:
                positions[n] += 1
                n += 1
            i, verifies = i + n + 1, verifies + 1
        drawn.append([verifies, positions.sum(), *positions])
    drawn = np.array(drawn)
    found = sampled.expected(chances, steps)
    wanted = np.array([found.verifies, found.accepted, *found.per_position])
    assert (abs(drawn.mean(axis=0) - wanted) < 4 * drawn.std(axis=0) / 4000 ** 0.5).all() and found.delivered == 17
    with pytest.raises(ValueError, match="walk of 4 steps"):
        sampled.expected(chances, 4)


# ---------------------------------------------------------------------------------------------------- from end to end


def test_answers_are_sampled_and_kept(small, tmp_path):
    prompts = [Prompt(f"p{i}", "chat", ids=(1, i % V, i // V % V)) for i in range(16)]
    settings = {"max_new_tokens": 5, "beyond": 3, "cache_dir": tmp_path, "batch": 3}
    taken = sampled.answers(small.target, prompts, temperature=1.0, seed=1, **settings)
    assert [a.id for a in taken] == [p.id for p in prompts] and all(len(a.beyond) == 3 for a in taken)
    for answer in taken:
        assert answer.stopped == (answer.ids[-1] == STOP) and STOP not in answer.ids[:-1] and len(answer.ids) <= 5
        assert answer.stopped or len(answer.ids) == 5
    greedy = benchmarks.answers(small.target, prompts, **settings)
    other = sampled.answers(small.target, prompts, temperature=1.0, seed=2, **settings)
    assert len(list(tmp_path.iterdir())) == 3 * 16  # none of them is another's
    assert taken != greedy and taken != other
    small_target = SimpleNamespace(dir=small.target.dir, facts=small.target.facts, generate=None)  # decodes nothing
    assert sampled.answers(small_target, prompts, temperature=1.0, seed=1, **settings) == taken
    past = [small.target.generate([list(a.prompt + a.ids)], max_new_tokens=3)[0] for a in taken]
    assert [list(a.beyond) for a in taken] != past  # not the greedy ones
    for temperature in (0, -1.0, float("nan")):
        with pytest.raises(UserError, match="temperature is"):
            sampled.answers(small.target, prompts, temperature=temperature, seed=1, **settings)


def test_rows_like_those_of_greedy_answers(world):
    """Any text has chances; at a temperature near 0 sampled drafts become argmax ones."""
    found = sampled.chances(world.target, world.drafter, world.answers, 5, temperature=1e-3, batch_tokens=200)
    plain = offline.chains(world.target, world.drafter, world.answers, 5)
    counts = {name: sampled.counts(found, [1, 5], name) for name in sampled.DRAFTS}
    wanted = offline.counts(plain, [1, 5])
    assert counts["argmax"].to_dict("list") == wanted.to_dict("list")
    for name in ("verifies", "accepted", "delivered"):  # the answers are the target's greedy ones
        np.testing.assert_allclose(counts["sampled"][name], wanted[name], atol=0.05)
    rows = offline.acceptance(counts["sampled"], bootstrap=50, seed=1)
    assert [r["source"] for r in rows] == ["all", "even", "odd"] * 2 and rows[0]["low"] < rows[0]["tau"]
    assert offline.sentence(rows[3]) and offline.console(rows, 5)
    for chain, other in zip(found, plain, strict=True):
        assert np.array_equal(chain.drafted, other.drafted)
    with pytest.raises(UserError, match="drafts is 'greedy'; choose one of argmax, sampled"):
        sampled.counts(found, [1], "greedy")
    short = Answer("short", "chat", (1,), (1, 2), (1,), False, False)
    with pytest.raises(ValueError, match="short"):
        sampled.chances(None, None, [short], 5, temperature=1.0)
