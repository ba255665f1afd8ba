"""What training will need, from sizes alone: parameters, memory at its three peaks, and whether that is there.

The peaks follow one another: at the start the closed-form regression (fitting.py), then the step (the moment inside the
loss when all activations are held), then the saving of a checkpoint. Symbols: T tokens of a pack, N counted slots of a
step, n slots of a chunk of the loss, K steps, h hidden, m MLP, D draft vocabulary, P trainable parameters; all of it is
float32, or with compute bf16 the activations half of that. Activations are what ttt.py and loss.py leave for the
backward pass, counted tensor by tensor against the allocations of a real step; on a GPU they are an upper bound.
"""

import math
import time
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from eagle3nb.drafter.attention import BLOCK
from eagle3nb.drafter.export import engine_config, expected_shapes
from eagle3nb.drafter.fitting import SLOTS
from eagle3nb.drafter.initialise import random_weights
from eagle3nb.drafter.loss import CHUNK, PART
from eagle3nb.drafter.model import DraftConfig, DraftModel
from eagle3nb.drafter.packing import Pack, make_pack
from eagle3nb.drafter.train import make_optimizer
from eagle3nb.drafter.ttt import loss_scales, pack_loss
from eagle3nb.errors import UserError
from eagle3nb.states.plan import RUNTIME, machine_memory
from eagle3nb.states.target import BYTES

PEAKS = ("start", "step", "save")
MMAPPED = 1 << 25  # bytes: glibc hands larger pieces back at once, smaller ones stay with the process
LIBRARIES = 30_000_000  # bytes that the matrix products' own buffers take (measured)


@dataclass(frozen=True)
class Shape:
    """What of the training's parameters decides its memory. longest: tokens of the longest row; 0: as a pack."""

    pack_tokens: int
    ttt_steps: int
    accumulate: int = 1
    longest: int = 0
    supervised: float = 1.0  # share of the tokens that are slots which count, at most
    initialise: str = "fitted"
    states_dtype: str = "bf16"
    freeze_head: bool = False
    teacher_positions: int = SLOTS  # of the corpus; the regression takes no more than SLOTS
    compute: str = "fp32"           # or bf16: activations, and the copies of weights and heads that it makes


def parameters(config: DraftConfig) -> dict:
    """{"trainable", "head", "frozen"}: parameters of the drafter, of its lm_head among them, and of the embedding."""
    shapes = expected_shapes(engine_config(config, 8, (), None, "float32"))
    trainable = sum(math.prod(shape) for name, shape in shapes.items() if name.endswith(".weight"))
    return {"trainable": trainable, "head": config.draft_vocab * config.hidden, "frozen": config.vocab * config.hidden}


def training_memory(config: DraftConfig, shape: Shape, *, device: str = "cuda") -> dict:
    """{"parts": [{"part", "where", "start", "step", "save", "formula"}], "device", "host", "total"}, in bytes.

    Sums are of the largest peak. device "cuda": weights and activations on each GPU ("device"), the regression and the
    checkpoint's copy in its process ("host"); "cpu": everything is host memory. UserError for a shape that cannot be.
    """
    check(shape)
    gpu, sizes = device != "cpu", parameters(config)
    P, frozen, D, h = sizes["trainable"], sizes["frozen"], config.draft_vocab, config.hidden
    trained = P - sizes["head"] * shape.freeze_head
    held, scratch, pieces = activations(config, shape), *loss(config, shape, gpu)
    kept = 0 if gpu else held + (scratch if pieces < MMAPPED else 0)  # by malloc, when a checkpoint is saved
    fit, how = regression(config, shape)
    rows = [
        part("weights", "device", 4 * P, f"4 P; P {P / 1e6:,.1f} M", PEAKS),
        part("gradients", "device", 4 * trained, "4 for each trained parameter"),
        part("AdamW's moments", "device", 8 * trained, "8 for each trained parameter"),
        part("teacher's head", "device", 4 * D * h, f"4 D h; D {D:,}, h {h:,}", PEAKS),
        part("embedding", "device", BYTES["bf16"] * frozen, f"2 V h, frozen, as stored; V {config.vocab:,}", PEAKS),
        part("regression", "host", fit, how, ("start",)),
        part("bf16 copies", "device", (2 * P + 2 * D * h) * (shape.compute == "bf16"), "2 P + 2 D h", ("step",)),
        part("activations", "device", held, text_of(config, shape), ("step",)),
        part("loss", "device", scratch, f"4 n D + 4 D h, or attention's scores; n {CHUNK * (shape.ttt_steps + 1):,}",
             ("step",)),
        part("allocator", "device", held // 8, "an eighth of the activations lies between them", ("step",)),
        part("allocator", "host", fit // 16, "a sixteenth of the regression", ("start",)),
        part("checkpoint", "host", (12 if gpu else 8) * (P + 2 * trained) + kept, "the copies of weights and moments "
             "that are written; on a CPU with what malloc keeps of the step", ("save",)),
        part("process", "host", RUNTIME + LIBRARIES, "Python, torch and their buffers, as measured", PEAKS),
        part("notebook", "host", RUNTIME, "its kernel, which waits beside the process", PEAKS)]
    rows = [row if gpu else row | {"where": "host"} for row in rows if any(row[peak] for peak in PEAKS)]
    sums = {where: {peak: sum(row[peak] for row in rows if row["where"] == where) for peak in PEAKS}
            for where in ("device", "host")}
    return {"parts": rows, "device": max(sums["device"].values()), "host": max(sums["host"].values()),
            "total": max(sums["device"][peak] + sums["host"][peak] for peak in PEAKS)}


def part(name: str, where: str, size: int, formula: str, when=("step", "save")) -> dict:
    return {"part": name, "where": where, **{peak: int(size) if peak in when else 0 for peak in PEAKS},
            "formula": formula}


def check(shape: Shape) -> None:
    if shape.pack_tokens < 1 or shape.ttt_steps < 1 or shape.accumulate < 1 or not 0 <= shape.supervised <= 1:
        raise UserError("pack_tokens, ttt_steps and accumulate must be 1 or more, supervised in 0 … 1")


def tokens(shape: Shape) -> tuple[int, int]:
    """(T, N): of a pack, where a longer row is a pack of its own, and the slots that count."""
    T = max(shape.pack_tokens, shape.longest)
    return T, math.ceil(shape.supervised * T)


def activations(c: DraftConfig, shape: Shape) -> int:
    """Bytes that the forward pass of a pack leaves, and of the packs of the same optimiser step that wait."""
    (T, N), K, h = tokens(shape), shape.ttt_steps, c.hidden
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    packs = shape.accumulate * (4 * 3 * h * T + BYTES[shape.states_dtype] * h * N)  # aux, scaled; last
    once = T * (4 * h + 6 * h * c.fc_norm)          # normed e and g, u; each chunk's norm and their concatenation
    keys = K * T * 2 * kv + K * (K - 1) * N * kv    # step 0's keys and values, once a step; own ones
    steps = K * N * (9 * h + 3 * q + 4 * c.intermediate) - 2 * N * h + (K - 1) * N * h * c.norm_output
    return packs + BYTES[shape.compute] * (once + keys + steps + 3 * K * N * h)


def text_of(c: DraftConfig, shape: Shape) -> str:
    T, N = tokens(shape)
    return (f"12 A T h of the packs; then 4 each of T (4 h + 2 K kv), K N (12 h + 3 q + 4 m) and K² N kv; A "
            f"{shape.accumulate}, T {T:,}, N {N:,}, K {shape.ttt_steps}, q {c.heads * c.head_dim:,}, kv "
            f"{c.kv_heads * c.head_dim:,}, m {c.intermediate:,}")


def loss(c: DraftConfig, shape: Shape, gpu: bool = False) -> tuple[int, int]:
    """(bytes of the loss's or the attention's passing tensors, whichever is more; bytes of the largest piece)."""
    (T, N), K, D, half = tokens(shape), shape.ttt_steps, c.draft_vocab, shape.compute == "bf16"
    teacher = 4 * min(CHUNK, N) * D
    chunk = teacher * K // (1 + half)                         # logits, in whose place q − p comes
    as_it_came = teacher // 2 * half                          # in bf16: the memory that all chunks share
    teacher += as_it_came                                     # and in float32
    passing = min((8 + 4 * half) * max(PART, D), 2 * chunk)   # of a few rows: the teacher's, and their product
    scores = 4 * c.heads * min(BLOCK, N) * min(T, shape.longest or T)
    head = 0 if shape.freeze_head else 4 * D * c.hidden
    widened = 0
    if half and head and not gpu:                             # q − p and its rows in float32, for the head's gradient
        widened = 2 * chunk + as_it_came + 6 * K * min(CHUNK, N) * c.hidden
    return max(chunk + max(teacher + passing, widened) + head, 5 * scores), max(chunk, scores)


def regression(c: DraftConfig, shape: Shape) -> tuple[int, str]:
    """(bytes, formula) of the closed-form start over n slots; its normal equations are in float64, five times over."""
    K, h, n = shape.ttt_steps, c.hidden, min(shape.teacher_positions, SLOTS)
    if shape.initialise == "fitted":
        sides, columns = max(4 * h, c.intermediate), (4 + 10 * K) * h + 3 * c.intermediate
        held = (3 + 2 * K) * h + 4 * h
        what = "n (4 h + 10 K h + 3 m)"
    elif shape.initialise == "target":
        sides, columns, held, what = 3 * h, 11 * h, 5 * h, "n 11 h"
    else:
        return 0, "none"
    return (max(4 * n * columns, 4 * n * held + 40 * sides ** 2),
            f"4 {what}, or with the normal equations 40 × {sides:,}²; n {n:,}")


# ---------------------------------------------------------------------------------------------------- time


def probe_rate(config: DraftConfig, shape: Shape, *, row_tokens: int = 512, seconds: float = 4.0) -> dict:
    """Measured here: {"tokens_per_s", "tokens", "seconds"} of training steps over packs of random states.

    Documents of `row_tokens` (the corpus's mean length), the last `supervised` share of each counted, every token in D.
    One step warms up; then at least one, and until `seconds` are over. UserError where the memory is not there.
    """
    needed, here = training_memory(config, shape, device="cpu")["total"], machine_memory()
    if needed > here:
        raise UserError(f"training takes {needed / 1e9:,.1f} GB, this machine has {here / 1e9:,.1f}; state a rate "
                        "instead of probing it")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    embedding = torch.zeros(config.vocab, config.hidden, dtype=torch.bfloat16)
    model = DraftModel(config, embedding, torch.arange(config.draft_vocab))
    random_weights(model, 0)
    model.to(device).lm_head.weight.requires_grad_(not shape.freeze_head)
    head = model.lm_head.weight.detach().clone()
    pack = random_pack(config, shape, row_tokens).to(device)
    optimizer = make_optimizer(model, SimpleNamespace(weight_decay=0.0, learning_rate=1e-6))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for scales in loss_scales([pack] * shape.accumulate, 0.8, "slot"):
            pack_loss(model, pack, head, scales)[0].backward()
        float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))  # and the device has finished
        optimizer.step()

    step()
    started, done = time.perf_counter(), 0
    while not done or time.perf_counter() - started < seconds:
        step()
        done += len(pack.ids) * shape.accumulate
    spent = time.perf_counter() - started
    return {"tokens_per_s": done / spent, "tokens": done, "seconds": spent}


def random_pack(config: DraftConfig, shape: Shape, row_tokens: int) -> Pack:
    """`pack_tokens` tokens in documents of `row_tokens`, random float32 states of unit scale."""
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    length, rows = max(2, min(row_tokens, shape.pack_tokens)), []
    mask = (np.arange(length) >= (1 - shape.supervised) * length).astype(np.uint8)
    positions = np.flatnonzero(mask[:-1] & mask[1:])
    for _ in range(max(1, shape.pack_tokens // length)):
        rows.append(SimpleNamespace(
            ids=rng.integers(0, config.draft_vocab, length), mask=mask, last_positions=positions,
            aux=torch.randn(length, 3 * config.hidden, generator=generator),
            last=torch.randn(len(positions), config.hidden, generator=generator),
            teacher_argmax=rng.integers(0, config.draft_vocab, len(positions))))
    return make_pack(rows, np.arange(config.vocab) < config.draft_vocab, shape.ttt_steps)
