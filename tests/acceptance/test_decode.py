"""A real decode: the target's text, the walk's counts verify by verify, and a decoder without any cache as witness.

The witness shares no code with the package: the target runs over the whole text at each verify, by Transformers' own
hidden_states; the drafter is loops over slots, heads and keys in float64 numpy, from the checkpoint's tensors.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle3nb.acceptance import offline
from eagle3nb.acceptance.decode import (
    NEAR_TIE,
    Decode,
    compare,
    decode,
    decode_all,
    difference,
    summary,
    verdict,
)
from eagle3nb.errors import UserError

K = 7


@pytest.fixture(scope="module")
def found(world):
    return offline.chains(world.target, world.drafter, world.answers, K, batch_tokens=300)


def run(world, answer, steps, **changes):
    settings = {"steps": steps, "max_new_tokens": 20, "stop_ids": (28, 35), **changes}
    return decode(world.target, world.drafter, answer.prompt, **settings)


@pytest.mark.parametrize("steps", range(1, K + 1))
def test_walk_equals_decode(world, found, steps):
    """32 prompts: text token by token, accepted counts verify by verify, exactly."""
    rows = [difference(c.answer, run(world, c.answer, steps), c.walk(steps).lengths) for c in found]
    assert len(rows) == 32
    assert [r for r in rows if not (r["same_text"] and r["same_counts"])] == []
    assert sum(r["accepted"] for r in rows) >= 60
    for row, chain in zip(rows, found, strict=True):
        walk = chain.walk(steps)
        assert (row["verifies"], row["accepted"], row["delivered"]) == (walk.verifies, walk.accepted, walk.delivered)


def test_the_equality_is_not_an_easy_one(found):
    """Chains of many lengths, chains past the end by a stop token and by the limit, answers that accept nothing."""
    walks = [chain.walk(K) for chain in found]
    lengths = set(np.concatenate([w.lengths for w in walks]).tolist())
    assert {0, K} <= lengths and len(lengths) >= 6  # 0 to 7 can occur
    past = [c.answer.stopped for c, w in zip(found, walks, strict=True) if w.verifies + w.accepted > w.delivered]
    assert set(past) == {True, False}
    assert any(w.verifies and not w.accepted for w in walks)
    assert {chain.answer.stopped for chain in found} == {True, False}


def test_the_target_alone_gives_the_answer(world):
    for answer in world.answers:
        alone = run(world, answer, 0)
        assert alone.ids == answer.ids and set(alone.accepted) <= {0} and len(alone.accepted) == len(answer.ids) - 1
        assert len(alone.margins) == len(answer.ids) and min(alone.margins) > 0


def test_stop_ids_are_the_targets_own_by_default(world):
    answer = world.answers[0]
    default = decode(world.target, world.drafter, answer.prompt, steps=2, max_new_tokens=12)
    assert default.ids == run(world, answer, 2, max_new_tokens=12, stop_ids=(2,)).ids
    assert run(world, answer, 2, max_new_tokens=1).accepted == ()  # the prefill's token is all of the answer


# ------------------------------------------------------------------------------------------------------ the witness


def norm(x, weight, eps):
    return x / math.sqrt(float((x * x).mean()) + eps) * weight


def rope(x, position, theta):
    """One head's vector [dh], turned by halves."""
    half, out = len(x) // 2, x.copy()
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


class Witness:
    def __init__(self, world):
        self.w = {name: tensor.double().numpy() for name, tensor in world.drafter.state_dict().items()}
        self.embedding = world.drafter.embed_tokens.double().numpy()
        self.ids = np.flatnonzero(self.w["t2d"])
        self.model = AutoModelForCausalLM.from_pretrained(world.folder, dtype=torch.float32)
        self.Hq, self.Hkv, self.dh, self.theta, self.eps = 4, 2, 8, 10000.0, 1e-6

    def target(self, ids):
        with torch.no_grad():
            out = self.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        aux = torch.cat([out.hidden_states[i][0] for i in (2, 4, 5)], -1)  # 8 layers: 2, 8 // 2, 8 − 3
        return aux.double().numpy(), out.logits[0].argmax(-1).tolist()

    def projected(self, name, token, hidden, position, heads):
        w = self.w
        u = np.concatenate([norm(self.embedding[token], w["midlayer.input_layernorm.weight"], self.eps),
                            norm(hidden, w["midlayer.hidden_norm.weight"], self.eps)])
        x = (w[f"midlayer.self_attn.{name}_proj.weight"] @ u).reshape(heads, self.dh)
        return x if name == "v" else np.stack([rope(head, position, self.theta) for head in x])

    def chain(self, ids, aux, steps):
        """Drafts behind ids[..t+1], from features aux[..t]."""
        w, t = self.w, len(ids) - 2
        fused = [w["fc.weight"] @ aux[i] for i in range(t + 1)]
        keys = [self.projected("k", ids[i + 1], fused[i], i, self.Hkv) for i in range(t + 1)]
        values = [self.projected("v", ids[i + 1], fused[i], i, self.Hkv) for i in range(t + 1)]
        g, token, drafted = fused[t], ids[t + 1], []
        for k in range(steps):
            if k:
                keys.append(self.projected("k", token, g, t + k, self.Hkv))
                values.append(self.projected("v", token, g, t + k, self.Hkv))
            q = self.projected("q", token, g, t + k, self.Hq)
            heads = []
            for head in range(self.Hq):
                scores = [math.exp(q[head] @ key[head // 2] / math.sqrt(self.dh)) for key in keys]
                heads.append(sum(s * v[head // 2] for s, v in zip(scores, values, strict=True)) / sum(scores))
            h1 = g + w["midlayer.self_attn.o_proj.weight"] @ np.concatenate(heads)
            x = norm(h1, w["midlayer.post_attention_layernorm.weight"], self.eps)
            gate, up = w["midlayer.mlp.gate_proj.weight"] @ x, w["midlayer.mlp.up_proj.weight"] @ x
            g = h1 + w["midlayer.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
            token = int(self.ids[(w["lm_head.weight"] @ norm(g, w["norm.weight"], self.eps)).argmax()])
            drafted.append(token)
        return drafted

    def decode(self, prompt, steps, limit, stops):
        ids, accepted = [*prompt, self.target(list(prompt))[1][-1]], []
        while len(ids) - len(prompt) < limit and not set(ids[len(prompt):]) & set(stops):
            aux, _ = self.target(ids[:-1])
            drafted = self.chain(ids, aux, steps)
            _, greedy = self.target(ids + drafted)
            n = 0
            while n < steps and drafted[n] == greedy[len(ids) - 1 + n]:
                n += 1
            ids += greedy[len(ids) - 1:len(ids) + n]
            accepted.append(n)
        text = ids[len(prompt):][:limit]
        ends = [i for i, token in enumerate(text) if token in stops]
        return tuple(text[:ends[0] + 1] if ends else text), tuple(accepted)


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_caches_change_nothing(world, steps):
    witness = Witness(world)
    for answer in world.answers[:12]:
        decoded = run(world, answer, steps)
        assert (decoded.ids, decoded.accepted) == witness.decode(answer.prompt, steps, 20, (28, 35)), answer.id


# ------------------------------------------------------------------------------------------- honest comparison, speed


def test_a_difference_is_told_with_its_margin(world):
    answer = world.answers[0]
    same = Decode(answer.ids, (2, 0), (5.0,) * len(answer.ids), ((1.0, 2.0, 3.0), (0.5, 4.0, 4.0)), 0.1, 0.2)
    assert difference(answer, same, [2, 0])["where"] == "" and difference(answer, same, [2, 0])["margin"] is None
    counts = difference(answer, same, np.array([2, 1]))
    assert counts["same_text"] and not counts["same_counts"]
    assert (counts["where"], counts["margin"]) == ("verify 1", 0.5)  # the walk accepted a draft that the decode missed
    fewer = difference(answer, same, [2])
    assert (fewer["where"], fewer["margin"], fewer["same_counts"]) == ("verify 1", None, False)
    other = (*answer.ids[:1], answer.ids[1] + 1, *answer.ids[2:])
    text = difference(answer, Decode(other, (2, 0), (5.0, NEAR_TIE / 2, *[5.0] * 18), ((), ()), 0.1, 0.2), [2, 0])
    assert not text["same_text"] and text["where"] == "answer token 1" and text["margin"] < NEAR_TIE


def test_the_verdict_forgives_only_near_ties():
    row = {"id": "a", "verifies": 3, "accepted": 2, "delivered": 5, "walk_verifies": 3, "walk_accepted": 2,
           "same_text": True, "same_counts": True, "equal": True, "where": "", "margin": None}
    tie = {**row, "same_counts": False, "equal": False, "where": "verify 1", "margin": NEAR_TIE / 2}
    assert "2 prompts gave the same" in verdict([row, row])
    assert "1 of 2 prompts; 1 parted at a near tie" in verdict([row, tie])
    assert "not compared" in verdict([]) and summary([])["prompts"] == 0
    for margin in (NEAR_TIE * 2, None):
        with pytest.raises(UserError, match="differ at verify 1"):
            verdict([row, {**tie, "margin": margin}])
    total = summary([row, tie])
    assert (total["prompts"], total["verifies"], total["accepted"], total["equal"]) == (2, 6, 4, 1)


def test_many_decodes_and_the_target_alone(world, found):
    answers = [chain.answer for chain in found[:3]]
    target = Limited(world.target)
    decodes = decode_all(target, world.drafter, answers, 2, 20)
    assert [row["equal"] for row in compare(found[:3], decodes, 2)] == [True] * 3
    alone = decode_all(target, None, answers, 0, 20)
    assert [d.ids for d in alone] == [d.ids for d in decodes]
    assert sum(len(d.accepted) for d in alone) >= sum(len(d.accepted) for d in decodes)


class Limited:
    """The world's target with the tests' stop tokens as its own."""

    def __init__(self, target):
        self.facts = replace(target.facts, eos=(28, 35))
        self.forward, self.logits = target.forward, target.logits
