"""The Triton kernels of the training step on a GPU: time, peak memory, fraction of the roofline, beside others.

    python tests/benchmarks/attention_and_loss.py [--tokens 8192] [--document 2048] [--heads 32] [--kv-heads 8]
        [--head-dim 128] [--own 3] [--supervised 0.6] [--hidden 4096] [--draft-vocab 32000] [--steps 4]
        [--positions 1024] [--dtype bf16] [--repeat 20] [--sweep] [--json FILE]
    TRITON_INTERPRET=1 python tests/benchmarks/attention_and_loss.py --tiny      shapes and results on a CPU; no speed

Attention of step `own` of training-time test, forward, and forward with backward: the kernel, FlexAttention (compiled,
own keys appended to the keys and found by a mask, as its users do) and the plain twin. Cross-entropy with gradients for
x and the head, `positions` teacher positions of `steps` students each: the kernel between cuBLAS products, the twin,
and the products alone. The roofline is measured in the same run: the rate of a large matrix product in this dtype and
of a large copy. It counts useful FLOPs (pairs of query and key that see one another: 4·dh a head forward, 10·dh
backward; 6·n·h·D + 2·m·h·D) and bytes that must be moved once. --sweep times every blocks of the table that fit.
Written without a GPU at hand: --tiny is all that has been run.
"""

import argparse
import json
import statistics
import time

import torch

from eagle3nb.drafter import loss
from eagle3nb.drafter.attention import plain_attention
from eagle3nb.drafter.kernels import attention, cross_entropy, shared_memory
from eagle3nb.drafter.kernels.shared_memory import Blocks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TINY = {"tokens": 48, "document": 24, "heads": 2, "kv_heads": 1, "head_dim": 16, "own": 1, "hidden": 12,
        "draft_vocab": 40, "steps": 2, "positions": 5, "dtype": "fp32", "repeat": 1}


def measured(run, repeat: int, device: str) -> tuple[float, int]:
    """(median seconds, bytes allocated at the peak above what stood before)."""
    if device == "cpu":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started, 0
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, spent = torch.cuda.memory_allocated(), []
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        spent.append(start.elapsed_time(end) / 1e3)
    return statistics.median(spent), torch.cuda.max_memory_allocated() - before


def roofline(dtype, device: str, size: int) -> tuple[float, float]:
    """FLOP/s of a size³ matrix product and bytes/s of a copy of size² values (read and written), here and now."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return (2 * size ** 3 / measured(lambda: a @ b, 10, device)[0],
            2 * a.nbytes / measured(lambda: a.clone(), 10, device)[0])


def attention_case(o, device):
    """(leaves, slots, starts, pairs that see one another)."""
    torch.manual_seed(0)
    dtype = DTYPES[o.dtype]
    starts = torch.arange(o.tokens) // o.document * o.document
    slots = torch.nonzero(torch.arange(o.tokens) % o.document >= (1 - o.supervised) * o.document)[:, 0]
    shapes = [(len(slots), o.heads, o.head_dim), *[(o.tokens, o.kv_heads, o.head_dim)] * 2,
              *[(len(slots), o.kv_heads, o.head_dim)] * 2 * o.own]
    leaves = [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes]
    pairs = int((slots - starts[slots] + 1 + o.own).sum())
    return leaves, slots.to(device), starts.to(device), pairs


def flex(o, slots, starts):
    """FlexAttention of the same: key T + j·N + i is query i's own key of step j + 1."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    T, N = o.tokens, len(slots)
    compiled = torch.compile(flex_attention, dynamic=False) if slots.is_cuda else flex_attention

    def seen(batch, head, i, key):
        at = key.clamp(max=T - 1)
        return torch.where(key < T, (at <= slots[i]) & (at >= starts[slots[i]]), (key - T) % N == i)

    mask = create_block_mask(seen, None, None, N, T + o.own * N, device=slots.device)

    def run(q, k0, v0, own_k, own_v, *_):
        k, v = (torch.cat([x, *own]).transpose(0, 1)[None] for x, own in ((k0, own_k), (v0, own_v)))
        out = compiled(q.transpose(0, 1)[None], k, v, block_mask=mask, enable_gqa=o.heads != o.kv_heads)
        return out[0].transpose(0, 1).flatten(1)

    return run


def attention_rows(o, device, limits) -> list[dict]:
    leaves, slots, starts, pairs = attention_case(o, device)
    given = (*leaves[:3], leaves[3:3 + o.own], leaves[3 + o.own:], slots, starts)
    blocks = dict.fromkeys(attention.KERNELS, Blocks(16, 16, 4, 1)) if o.tiny else None
    by = {"kernel": lambda *x: attention.ttt_attention(*x, blocks=blocks), "plain": plain_attention,
          "FlexAttention": flex(o, slots, starts)}
    bare = (*(x.detach() for x in given[:3]), *([x.detach() for x in own] for own in given[3:5]), slots, starts)
    direction = torch.randn_like(plain_attention(*given))
    size = sum(x.nbytes for x in leaves) + leaves[0].nbytes
    rows, expected = [], None
    for name in ("plain", *[name for name in by if name != "plain"]):
        backward = device == "cuda" or name != "FlexAttention"              # which has none on a CPU
        out = by[name](*(given if backward else bare))
        found = [x.detach().double() for x in (out, *(torch.autograd.grad(out, leaves, direction) if backward else ()))]
        expected = expected or found
        error = max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(found, expected, strict=False))
        flops = 4 * pairs * o.heads * o.head_dim
        forward, held = measured(lambda run=by[name]: run(*bare), o.repeat, device)
        rows.append(row("attention forward", name, forward, held, flops, size, limits, error))
        if backward:
            whole, peak = measured(lambda run=by[name]: torch.autograd.grad(run(*given), leaves, direction), o.repeat,
                                   device)
            rows.append(row("attention backward", name, max(whole - forward, 1e-9), peak, 2.5 * flops, 2 * size, limits,
                            error))
    return rows


def cross_entropy_rows(o, device, limits, blocks) -> list[dict]:
    torch.manual_seed(1)
    n, m, h, D, dtype = o.positions * o.steps, o.positions, o.hidden, o.draft_vocab, DTYPES[o.dtype]
    x, head, teacher, teacher_head = (
        (torch.randn(size, h) * h ** -0.5).to(device, dtype) for size in (n, D, m, D))
    x.requires_grad_()
    head.requires_grad_()
    row_of = torch.arange(n, device=device) % m
    label, scale = torch.randint(D, (n,), device=device), torch.full((n,), 1 / n, device=device, dtype=dtype)

    def step(part):
        loss.row_part = lambda _: part
        value, each, _ = loss.soft_cross_entropy(x, head, teacher, teacher_head, row_of, label, scale)
        return each, torch.autograd.grad(value, (x, head))

    def products():
        for at in range(0, n, 2 * loss.CHUNK * o.steps):
            logits = x[at:at + 2 * loss.CHUNK * o.steps].detach() @ head.detach().T
            (logits @ head.detach(), logits.T @ x[at:at + len(logits)].detach())
        return teacher @ teacher_head.T

    def kernel_rows(*given):
        return cross_entropy.rows(*given, blocks)

    flops, size = 6 * n * h * D + 2 * m * h * D, 2 * (x.nbytes + head.nbytes) + teacher.nbytes + teacher_head.nbytes
    kept, rows, expected = loss.row_part, [], None
    for name, part in (("plain", (loss.plain_rows, loss.CHUNK)), ("kernel", (kernel_rows, loss.CHUNK))):
        each, grads = step(part)
        found = [each.double(), *(grad.double() for grad in grads)]
        expected = expected or found
        error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))
        rows.append(row("cross-entropy", name, *measured(lambda part=part: step(part), o.repeat, device), flops, size,
                        limits, error))
    loss.row_part = kept
    rows.append(row("cross-entropy", "products alone", *measured(products, o.repeat, device), flops, size, limits, 0.0))
    return rows


def row(what, by, seconds, peak, flops, size, limits, error) -> dict:
    bound = max(flops / limits[0], size / limits[1])
    return {"what": what, "by": by, "ms": 1e3 * seconds, "peak_mb": peak / 1e6, "tflops": flops / seconds / 1e12,
            "fraction": bound / seconds, "error": error}


def sweep(o, device) -> list[dict]:
    """Every blocks of the table that fit this GPU, one kernel at a time, the others as chosen."""
    arch, limit = shared_memory.device_limit(torch.device(device))
    leaves, slots, starts, _ = attention_case(o, device)
    given = (*leaves[:3], leaves[3:3 + o.own], leaves[3 + o.own:], slots, starts)
    chosen = {name: shared_memory.choose(name, arch, limit, o.head_dim, o.dtype).blocks for name in attention.KERNELS}
    direction, rows = torch.randn(len(slots), o.heads * o.head_dim, device=device, dtype=DTYPES[o.dtype]), []
    for one in shared_memory.table():
        if (one.kernel in chosen and (one.arch, one.head_dim, one.dtype) == (arch, o.head_dim, o.dtype)
                and one.shared <= limit):
            blocks = chosen | {one.kernel: one.blocks}
            spent, _ = measured(lambda blocks=blocks: torch.autograd.grad(
                attention.ttt_attention(*given, blocks=blocks), leaves, direction), o.repeat, device)
            rows.append({"kernel": one.kernel, "blocks": one.blocks.text, "chosen": one.blocks == chosen[one.kernel],
                         "spilled": one.spilled, "forward_and_backward_ms": 1e3 * spent})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"tokens": 8192, "document": 2048, "heads": 32, "kv_heads": 8, "head_dim": 128, "own": 3, "hidden": 4096,
             "draft_vocab": 32000, "steps": 4, "positions": 1024, "repeat": 20}
    for name, value in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--supervised", type=float, default=0.6)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", default="")
    o = parser.parse_args()
    vars(o).update(TINY if o.tiny else {})
    device = "cpu" if o.tiny else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here; TRITON_INTERPRET=1 and --tiny check the shapes on a CPU")
    limits = roofline(DTYPES[o.dtype], device, 64 if o.tiny else 8192)
    small = dict.fromkeys(cross_entropy.KERNELS, Blocks(1, 16, 4, 1)) if o.tiny else None
    rows = attention_rows(o, device, limits) + cross_entropy_rows(o, device, limits, small)
    swept = sweep(o, device) if o.sweep and not o.tiny else []
    print(f"{o.dtype}: {limits[0] / 1e12:,.1f} TFLOP/s in products and {limits[1] / 1e9:,.0f} GB/s in copies, measured")
    print(f"{'what':<20}{'by':<16}{'ms':>10}{'peak MB':>10}{'TFLOP/s':>10}{'fraction':>10}{'error':>10}")
    for one in rows:
        print(f"{one['what']:<20}{one['by']:<16}{one['ms']:>10.3f}{one['peak_mb']:>10,.0f}{one['tflops']:>10.1f}"
              f"{one['fraction']:>10.2f}{one['error']:>10.1e}")
    for one in swept:
        print(f"{one['kernel']:<20}{one['blocks']:<32}{'chosen' * one['chosen']:<8}{one['spilled']:>6} spilled"
              f"{one['forward_and_backward_ms']:>10.3f} ms")
    if o.json:
        with open(o.json, "w", encoding="utf-8") as handle:
            json.dump({"options": vars(o), "flops": limits[0], "bytes_a_second": limits[1], "rows": rows,
                       "sweep": swept}, handle, indent=1)


if __name__ == "__main__":
    main()
