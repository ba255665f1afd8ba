"""Our training step against a plain EAGLE-3 loop and against the machine, in one run:

    python tests/benchmarks/training_step.py [--steps 3] [--tokens 1024] [--draft-vocab 4096] [--repeat 3] [--json FILE]

SmolLM2's shapes, float32, random weights and states, documents of 256 tokens of which 60 % are supervised. Three things
are timed in turn, so that a busy machine slows all alike; the best of the repeats counts.
  ours    steps on counted slots, teacher once a position, fused loss
  plain   the usual loop: every slot at every step, [T, T] masks, [T, D] logits and teacher, autograd for all
  bound   nothing but the matrix products that our step needs, one after another: no step can be faster
"""

import argparse
import json
import math
import os
import time
from types import SimpleNamespace

import numpy as np
import torch

from eagle3nb.drafter.model import DraftConfig, DraftModel
from eagle3nb.drafter.packing import make_pack
from eagle3nb.drafter.ttt import loss_scales, pack_loss

HIDDEN, VOCAB, DENSITY, DOCUMENT = 576, 49152, 0.6, 256


def make_case(tokens: int, draft_vocab: int, K: int):
    """(model, pack, teacher_head, documents): every token lies in D, so that both sides count the same slots."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    facts = SimpleNamespace(hidden=HIDDEN, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab=VOCAB, eps=1e-5,
                            rope={"theta": 1e5, "scaling": None}, max_positions=8192)
    D = np.sort(rng.choice(VOCAB, draft_vocab, replace=False))
    model = DraftModel(DraftConfig.from_target(facts, draft_vocab), torch.randn(VOCAB, HIDDEN), torch.from_numpy(D))
    rows = []
    for _ in range(tokens // DOCUMENT):
        ids, mask = rng.choice(D, DOCUMENT).astype(np.int32), np.zeros(DOCUMENT, np.uint8)
        mask[round((1 - DENSITY) * DOCUMENT):] = 1
        positions = np.flatnonzero(mask[:-1] & mask[1:])
        rows.append(SimpleNamespace(ids=ids, mask=mask, aux=torch.randn(DOCUMENT, 3 * HIDDEN).bfloat16(),
                                    last=torch.randn(len(positions), HIDDEN), last_positions=positions,
                                    teacher_argmax=rng.choice(D, len(positions))))
    head = torch.randn(draft_vocab, HIDDEN) * 0.1
    return model, make_pack(rows, model.t2d.numpy(), K), head, rows


def ours(model, pack, head) -> None:
    model.zero_grad(set_to_none=True)
    (scales,) = loss_scales([pack], 0.8, "slot")
    pack_loss(model, pack, head, scales)[0].backward()


def plain(model, pack, head, mask, K: int) -> None:
    """The loop of the EAGLE-3 trainers, one packed sequence, document mask."""
    model.zero_grad(set_to_none=True)
    c, T = model.config, len(pack.ids)
    positions = torch.arange(T) - pack.starts
    causal = (pack.starts[:, None] == pack.starts[None]) & torch.ones(T, T, dtype=torch.bool).tril()
    states = torch.randn(T, HIDDEN)                                   # the teacher's, at every position
    teacher = torch.softmax(states @ head.T, -1)                      # [T, D]
    g, ids, loss = model.fuse(pack.aux), pack.ids, 0.0
    keys, values = [], []
    for k in range(K):
        ids, teacher, mask = (torch.cat([x[1:], torch.zeros_like(x[:1])]) for x in (ids, teacher, mask))
        q, key, value = model.qkv(model.embed(ids), g, positions + k)
        group = c.heads // c.kv_heads
        keys.append(key.repeat_interleave(group, 1))
        values.append(value.repeat_interleave(group, 1))
        scores = torch.einsum("ihd,jhd->hij", q, keys[0]).masked_fill(~causal, float("-inf"))
        own = [(q * x).sum(-1).T[..., None] for x in keys[1:]]
        p = torch.softmax(torch.cat([scores, *own], -1) / math.sqrt(c.head_dim), -1)
        attn = torch.einsum("hij,jhd->ihd", p[..., :T], values[0])
        for j, x in enumerate(values[1:]):
            attn = attn + p[..., T + j].T[..., None] * x
        h2 = model.block(g, attn.reshape(T, -1))
        log_q = torch.log_softmax(model.logits(h2), -1)               # [T, D]
        loss = loss - 0.8 ** k * ((teacher * log_q).sum(-1) * mask).sum() / mask.sum()
        g = model.next_hidden(h2)
    loss.backward()


def products(model, pack, head) -> list[tuple[int, int, int]]:
    """(rows, in, out) of every matrix product that our step needs, backward ones included, attention's left out."""
    T, slots = len(pack.ids), [len(at) for at in pack.slots]
    shapes = []

    def linear(rows, weight, backward=2):
        shapes.extend([(rows, weight.shape[1], weight.shape[0])] * (1 + backward))

    layer = model.midlayer
    linear(T, model.fc.weight, backward=1)                            # its input needs no gradient
    for k, rows in enumerate(slots):
        for weight in (layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight):
            linear(T if k == 0 else rows, weight)
        for weight in (layer.self_attn.q_proj.weight, layer.self_attn.o_proj.weight, layer.mlp.gate_proj.weight,
                       layer.mlp.up_proj.weight, layer.mlp.down_proj.weight, model.lm_head.weight):
            linear(rows, weight)
    linear(len(pack.last), head, backward=0)
    return shapes


def bound(shapes) -> None:
    for rows, inner, outer in shapes:
        torch.mm(BUFFERS[rows, inner], BUFFERS[inner, outer])


BUFFERS: dict = {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--draft-vocab", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, pack, head, rows = make_case(options.tokens, options.draft_vocab, options.steps)
    mask = torch.from_numpy(np.concatenate([row.mask for row in rows])).float()
    shapes = products(model, pack, head)
    BUFFERS.update({size: torch.randn(*size) for rows, a, b in shapes for size in ((rows, a), (a, b))})
    runs = {"ours": lambda: ours(model, pack, head), "plain": lambda: plain(model, pack, head, mask, options.steps),
            "bound": lambda: bound(shapes)}
    best = dict.fromkeys(runs, math.inf)
    for repeat in range(options.repeat + 1):                          # the first warms up
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - started if repeat else math.inf)
    gflop = sum(2 * a * b * c for a, b, c in shapes) / 1e9
    speed = {name: options.tokens / seconds for name, seconds in best.items()}
    result = {"tokens": options.tokens, "steps": options.steps, "draft_vocab": options.draft_vocab,
              "threads": options.threads, "counted": [len(at) for at in pack.slots], "tokens_per_s": speed,
              "ours_over_plain": speed["ours"] / speed["plain"], "ours_over_bound": speed["ours"] / speed["bound"],
              "bound_gflops": gflop / best["bound"]}
    for name, value in speed.items():
        print(f"{name:<6} {value:>8,.0f} tokens/s  {best[name]:>7.2f} s a step of {options.tokens} tokens")
    print(f"ours is {result['ours_over_plain']:.1f} times plain, {100 * result['ours_over_bound']:.0f} % of the bound "
          f"({result['bound_gflops']:.0f} GFLOP/s, {options.threads} threads)")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as handle:
            json.dump(result, handle, indent=1)


if __name__ == "__main__":
    main()
