"""The contestants of the training benchmark, each run alone: `python training_contestants.py NAME TASK.json`.

TASK.json: {"tokens", "ttt_steps", "draft_vocab", "document", "density", "seed", "threads", "seconds", "slow", "said"}.
Each makes the same case (SmolLM2's shapes, random float32 weights and states), takes one optimiser step to warm up,
then steps until `seconds` are over; where the first took more than `slow` seconds it is the measurement itself. AdamW's
moments stand before the first step. What was found goes to the file `said`: {"seconds": [a step each], "cpu_seconds":
[…], "peak": bytes of the process, "standing": bytes before the first step, "gflop" (the bounds), "loss" (of the first
step, before any change of weights, where the contestant has one)}.
"""

import json
import math
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB, THETA, EPS = 576, 9, 3, 64, 1536, 49152, 1e5, 1e-5  # SmolLM2
LEARNING_RATE, DECAY = 1e-4, 0.8


def make_case(task: dict, freeze_head: bool = True):
    """(model, pack, teacher's head [D, h]). Every token and every teacher's argmax lies in D: all sides count alike."""
    from eagle3nb.drafter.initialise import random_weights
    from eagle3nb.drafter.model import DraftConfig, DraftModel
    from eagle3nb.drafter.packing import make_pack

    rng, generator = np.random.default_rng(task["seed"]), torch.Generator().manual_seed(task["seed"])
    facts = SimpleNamespace(hidden=HIDDEN, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, vocab=VOCAB, eps=EPS,
                            intermediate=INTERMEDIATE, rope={"theta": THETA, "scaling": None}, max_positions=8192)
    D = np.sort(rng.choice(VOCAB, task["draft_vocab"], replace=False))
    model = DraftModel(DraftConfig.from_target(facts, len(D)),
                       torch.randn(VOCAB, HIDDEN, generator=generator).bfloat16(), torch.from_numpy(D))
    random_weights(model, task["seed"])
    model.lm_head.weight.requires_grad_(not freeze_head)
    rows, T = [], task["document"]
    mask = (np.arange(T) >= round((1 - task["density"]) * T)).astype(np.uint8)
    positions = np.flatnonzero(mask[:-1] & mask[1:])
    for _ in range(task["tokens"] // T):
        rows.append(SimpleNamespace(
            ids=rng.choice(D, T).astype(np.int32), mask=mask, last_positions=positions,
            aux=torch.randn(T, 3 * HIDDEN, generator=generator),
            last=torch.randn(len(positions), HIDDEN, generator=generator),
            teacher_argmax=rng.choice(D, len(positions))))
    head = torch.randn(len(D), HIDDEN, generator=generator) * 0.1
    return model, make_pack(rows, model.t2d.numpy(), task["ttt_steps"]), head


def optimised(model, loss, optimizer):
    """One whole optimiser step; the loss before it."""
    optimizer.zero_grad(set_to_none=True)
    value = loss()
    value.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return value.item()


def adamw(model):
    """AdamW as this trainer's, its moments made: by a step of zero gradients at a rate of zero."""
    from eagle3nb.drafter.train import make_optimizer

    optimizer = make_optimizer(model, SimpleNamespace(weight_decay=0.01, learning_rate=0.0))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE
    return optimizer


# ------------------------------------------------------------------------------------------- the contestants


def ours(task: dict, freeze_head: bool = True):
    """This trainer's step: counted slots, teacher once a position, fused loss, attention without a T × T mask."""
    from eagle3nb.drafter.ttt import loss_scales, pack_loss

    model, pack, head = make_case(task, freeze_head)
    optimizer = adamw(model)

    def loss():
        (scales,) = loss_scales([pack], DECAY, "slot")
        return pack_loss(model, pack, head, scales)[0]
    return lambda: optimised(model, loss, optimizer)


def ours_head(task: dict):
    return ours(task, freeze_head=False)


def plain(task: dict):
    """The straightforward implementation: every slot at every step, [T, T] masks, [T, D] logits, autograd for all."""
    model, pack, head = make_case(task)
    optimizer = adamw(model)
    teacher_states = torch.zeros(len(pack.ids), HIDDEN)
    teacher_states[pack.slots[0] + 1] = pack.last[pack.rows[0]]
    counted = torch.zeros(len(pack.slots), len(pack.ids))
    for k, at in enumerate(pack.slots):
        counted[k, at] = 1.0
    return lambda: optimised(model, lambda: plain_loss(model, pack, teacher_states, head, counted), optimizer)


def plain_loss(model, pack, teacher_states, head, counted):
    """DESIGN section 4's loss, as one writes it first. counted float [K, T]; teacher_states [T, h]."""
    from eagle3nb.drafter.model import rotate

    T, group, layer = len(pack.ids), HEADS // KV_HEADS, model.midlayer.self_attn
    positions = torch.arange(T) - pack.starts
    mask = (pack.starts[:, None] == pack.starts[None]) & torch.ones(T, T, dtype=torch.bool).tril()
    with torch.no_grad():
        teacher = torch.softmax(teacher_states @ head.T, -1)                                     # [T, D]
    ids, g, loss = pack.ids, model.fc(pack.aux), 0.0
    keys, values = [], []
    for k in range(len(counted)):
        ids = torch.cat([ids[1:], ids[:1]])
        teacher = torch.cat([teacher[1:], teacher[:1]])
        u = torch.cat([model.midlayer.input_layernorm(model.embed(ids)), model.midlayer.hidden_norm(g)], -1)
        angles = model.angles(positions + k)
        q = rotate(layer.q_proj(u).view(T, HEADS, HEAD_DIM), *angles).transpose(0, 1)            # [Hq, T, dh]
        keys.append(rotate(layer.k_proj(u).view(T, KV_HEADS, HEAD_DIM), *angles).repeat_interleave(group, 1)
                    .transpose(0, 1))
        values.append(layer.v_proj(u).view(T, KV_HEADS, HEAD_DIM).repeat_interleave(group, 1).transpose(0, 1))
        scores = (q @ keys[0].transpose(1, 2)).masked_fill(~mask, -math.inf)                     # [Hq, T, T]
        own = [(q * key).sum(-1, keepdim=True) for key in keys[1:]]
        p = torch.softmax(torch.cat([scores, *own], -1) / math.sqrt(HEAD_DIM), -1)
        attn = p[..., :T] @ values[0]
        for j, value in enumerate(values[1:]):
            attn = attn + p[..., T + j, None] * value
        h2 = model.block(g, attn.transpose(0, 1).reshape(T, HEADS * HEAD_DIM))
        log_q = torch.log_softmax(model.logits(h2), -1)                                          # [T, D]
        loss = loss - DECAY ** k * ((teacher * log_q).sum(-1) * counted[k]).sum() / counted[k].sum()
        g = model.next_hidden(h2)
    return loss


def speculators(task: dict, attention: str = "sdpa"):
    """speculators 0.9.0's own model and loss (its "eager" one: the fused is Triton's), with our AdamW and clipping."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    source, pack, head = make_case(task)
    layer = LlamaConfig(
        hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
        intermediate_size=INTERMEDIATE, vocab_size=VOCAB, rms_norm_eps=EPS, num_hidden_layers=1,
        max_position_embeddings=8192, rope_parameters={"rope_type": "default", "rope_theta": THETA})
    layer._attn_implementation = attention
    greedy = GreedyTokenProposalConfig(speculative_tokens=task["ttt_steps"])
    model = Eagle3DraftModel(Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=task["draft_vocab"], norm_before_residual=False,
        eagle_aux_hidden_state_layer_ids=[2, 15, 27],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=[greedy], default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]))))
    weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in source.state_dict().items()}
    weights |= {"embed_tokens.weight": source.embed_tokens.float(), "verifier_lm_head.weight": head,
                "verifier_norm.weight": torch.ones(HIDDEN)}
    model.load_state_dict(weights)
    model.float().train()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained == sum(p.numel() for p in source.parameters() if p.requires_grad)
    # in its own coordinates, from which the first token is dropped: slot t reads x[t+1], target and mask of t+1
    T = len(pack.ids)
    states, mask = torch.zeros(1, T, HIDDEN), torch.zeros(1, T)
    states[0, pack.slots[0]], mask[0, pack.slots[0]] = pack.last[pack.rows[0]], 1.0
    batch = {"hidden_states": pack.aux[None], "input_ids": pack.ids.roll(-1)[None], "loss_mask": mask,
             "document_ids": pack.documents[None], "verifier_last_hidden_states": states,
             "position_ids": (torch.arange(T) - pack.starts)[None] + 1}
    del source, weights
    loss_config, optimizer = resolve_loss_config("kl_div", "eager"), adamw(model)

    def loss():
        return model(**batch, ttt_steps=task["ttt_steps"], ttt_step_loss_decay=DECAY, loss_config=loss_config)[1]
    return lambda: optimised(model, loss, optimizer)


def speculators_eager(task: dict):
    return speculators(task, "eager")


def bound(task: dict, freeze_head: bool = True):
    """Nothing but the matrix products that our step needs, one after another: no step can be faster."""
    model, pack, _ = make_case(task, freeze_head)
    products = needed_products(model, pack)
    made: dict[tuple, torch.Tensor] = {}

    def buffer(*size: int) -> torch.Tensor:
        return made.setdefault(size, torch.randn(*size))
    pairs = [(buffer(*a).mT if a_turned else buffer(*a), buffer(*b).mT if b_turned else buffer(*b))
             for a, a_turned, b, b_turned in products]
    task["gflop"] = sum(2 * math.prod(a.shape) * b.shape[-1] for a, b in pairs) / 1e9

    def step():
        for a, b in pairs:
            torch.matmul(a, b)
    return step


def bound_head(task: dict):
    return bound(task, freeze_head=False)


def needed_products(model, pack) -> list[tuple]:
    """Every product (a, a turned?, b, b turned?) of a step with these sizes, those of the backward pass included."""
    from eagle3nb.drafter.attention import query_blocks

    T, layer, found = len(pack.ids), model.midlayer, []

    def linear(rows: int, weight: torch.Tensor, of_input: bool = True, of_weight: bool = True) -> None:
        out, inner = weight.shape
        found.append(((rows, inner), False, (out, inner), True))                                 # y = x Wᵀ
        if of_input:
            found.append(((rows, out), False, (out, inner), False))                              # dx = dy W
        if of_weight:
            found.append(((rows, out), True, (rows, inner), False))                              # dW = dyᵀ x

    linear(T, model.fc.weight, of_input=False)
    for k, at in enumerate(pack.slots):
        rows = len(at)
        for weight in (layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight):
            linear(T if k == 0 else rows, weight)
        for weight in (layer.self_attn.q_proj.weight, layer.self_attn.o_proj.weight, layer.mlp.gate_proj.weight,
                       layer.mlp.up_proj.weight, layer.mlp.down_proj.weight):
            linear(rows, weight)
        linear(rows, model.lm_head.weight, of_weight=model.lm_head.weight.requires_grad)
        for a, b, first, end in query_blocks(at, pack.starts):                                   # step 0's keys
            n, m, H, dh = (b - a) * HEADS // KV_HEADS, end - first, KV_HEADS, HEAD_DIM
            queries, keys, pairs = (H, n, dh), (H, m, dh), (H, n, m)
            found += [(queries, False, keys, True), (pairs, False, keys, False),                 # scores, p v
                      (queries, False, keys, True), (pairs, False, keys, False),                 # dp, dq
                      (pairs, True, queries, False), (pairs, True, queries, False)]              # dv, dk
    linear(len(pack.last), model.lm_head.weight, of_input=False, of_weight=False)                # the teacher
    return found


CONTESTANTS = {"ours": ours, "ours-head": ours_head, "plain": plain, "speculators": speculators,
               "speculators-eager": speculators_eager, "bound": bound, "bound-head": bound_head}


def memory(key: str) -> int:
    """VmRSS or VmHWM of this process, bytes; unlike getrusage's, not inherited from the process that started it."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def main(name: str, path: str) -> None:
    task = json.loads(Path(path).read_text())
    torch.set_num_threads(task["threads"])
    torch.manual_seed(task["seed"])
    step = CONTESTANTS[name](task)
    said = {"standing": memory("VmRSS"), "seconds": [], "cpu_seconds": []}
    begun = math.inf
    while not said["seconds"] or time.perf_counter() - begun < task["seconds"]:
        clock, cpu = time.perf_counter(), time.process_time()
        value = step()
        spent = time.perf_counter() - clock, time.process_time() - cpu
        if begun == math.inf:
            said["loss"], begun = value, time.perf_counter()
            if spent[0] < task["slow"]:
                continue
            begun = -math.inf                        # it is the measurement
        for key, one in zip(("seconds", "cpu_seconds"), spent, strict=True):
            said[key].append(one)
    said |= {"peak": memory("VmHWM"), "gflop": task.get("gflop")}
    Path(task["said"]).write_text(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
