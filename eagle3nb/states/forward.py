"""One shard's tensors out of the target: its rows in batches of like length, and back in their order.

The lm_head runs only where a teacher is needed (p with l[p] l[p+1] = 1), in chunks; its time is told apart. On a GPU
nothing waits: a batch is started before the states of the one before are brought to the host, on a stream of their own.

Shapes: R rows, N tokens, S teacher positions, h hidden, V vocabulary.
"""

import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from eagle3nb.corpus.masks import teacher_positions
from eagle3nb.errors import UserError

LOGITS_BYTES = 1 << 26  # of one chunk of teacher logits in float32
FORWARD = 32  # what a forward costs of itself, as a share of `batch_tokens`: 1/32


@dataclass(frozen=True)
class Flight:
    """A batch whose forward was started; on a GPU it may still run, and what follows is not to be read before."""

    batch: list[int]  # rows of the shard
    states: list[tuple[Tensor, Tensor]]  # (aux [T, 3h], last [T, h]) of each
    last: Tensor  # [sum of T, h]: all of them
    needed: Tensor  # [S, h]: where a teacher is needed
    argmax: Tensor  # int32 [S]
    lse: Tensor  # float32 [S]
    marks: tuple  # before the forward, after it, after the teacher; see `mark`


class Room:
    """Memory for one shard's states after the other: what is new to a process costs its first pass threefold."""

    def __init__(self):
        self.held = {}

    def take(self, name: str, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """[rows, width]; what was taken by this name before is overwritten."""
        size = rows * width * dtype.itemsize
        if size > len(self.held.get(name, "")):
            self.held[name] = torch.empty(size, dtype=torch.uint8)
        return self.held[name][:size].view(dtype).view(rows, width) if size else torch.empty(rows, width, dtype=dtype)


def shard(corpus, target, first: int, last: int, dtype: torch.dtype, batch_tokens: int, clock: dict, bar,
          check=lambda: None, room: Room | None = None) -> dict:
    """The tensors of rows first to last, as shard.py lays them out, states in `dtype`.

    clock: "forward_s", "teacher_s" and "gather_s" (states checked, cast and put in place) grow by what is spent;
    bar.advance(tokens) and check() are called after each batch. room: where the states are to lie. UserError for an id
    beyond the target's vocabulary, and for states that are not finite or not as many as there are tokens.
    """
    rows = [corpus.row(i) for i in range(first, last + 1)]
    positions = [teacher_positions(mask) for _, mask in rows]
    offsets = np.concatenate([[0], np.cumsum([len(ids) for ids, _ in rows])])
    last_offsets = np.concatenate([[0], np.cumsum([len(p) for p in positions])])
    N, S, h, room = int(offsets[-1]), int(last_offsets[-1]), target.facts.hidden, room or Room()
    out = {"input_ids": torch.from_numpy(np.concatenate([ids for ids, _ in rows])),
           "loss_mask": torch.from_numpy(np.concatenate([mask for _, mask in rows])),
           "aux": room.take("aux", N, 3 * h, dtype), "last": room.take("last", S, h, dtype),
           "last_positions": torch.from_numpy(np.concatenate(positions).astype(np.int32)),
           "teacher_argmax": torch.empty(S, dtype=torch.int32), "teacher_lse": torch.empty(S, dtype=torch.float32),
           "row_offsets": torch.from_numpy(offsets.astype(np.int64)),
           "last_offsets": torch.from_numpy(last_offsets.astype(np.int64)), "rows": torch.arange(first, last + 1)}
    check_ids(out["input_ids"], target.facts.vocab, first, offsets)
    ahead = None
    for batch in [*batches(np.diff(offsets), batch_tokens), None]:
        flight, ahead = ahead, launch(target, batch, rows, positions, first) if batch else None
        if flight:
            land(flight, out, first, target.layers, clock)
            bar.advance(int(sum(offsets[i + 1] - offsets[i] for i in flight.batch)))
            check()
    return out


def batches(lengths, batch_tokens: int) -> list[list[int]]:
    """Indices, longest first, in batches of at most `batch_tokens` tokens with their padding; at least one row each.

    Cut where it costs least: the tokens with padding, and batch_tokens / 32 of them a forward.
    """
    lengths = [int(length) for length in lengths]
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    cost, cut = [0.0], [0]  # of the first `end` rows; where the last of their batches starts
    for end in range(1, len(order) + 1):
        found = []
        for start in range(end - 1, -1, -1):
            padded = (end - start) * lengths[order[start]]
            if padded > batch_tokens and start < end - 1:
                break
            found.append((cost[start] + padded + batch_tokens / FORWARD, start))
        best, start = min(found)
        cost.append(best)
        cut.append(start)
    made, end = [], len(order)
    while end:
        made.append(order[cut[end] : end])
        end = cut[end]
    return made[::-1]


# ---------------------------------------------------------------------------------------------------- one batch


def launch(target, batch: list[int], rows, positions, first: int) -> Flight:
    """Start the forward and the teacher of these rows."""
    device = getattr(target, "device", torch.device("cpu"))
    began = mark(device)
    states = target.capture([rows[i][0] for i in batch])
    forwarded = mark(device)
    starts, at = 0, []
    for i, (aux, last) in zip(batch, states, strict=True):
        T = len(rows[i][0])
        if len(aux) != T or len(last) != T:
            raise UserError(f"row {first + i} has {T} tokens, the engine gave {len(aux)} states (aux) and {len(last)} "
                            "(last); switch off its prefix cache and its chunked prefill")
        at.append(starts + positions[i])
        starts += T
    last, at = torch.cat([last for _, last in states]), torch.from_numpy(np.concatenate(at))
    if last.is_cuda:  # pinned, since another copy would wait for the forward
        at = at.pin_memory().to(last.device, non_blocking=True)
    needed = last[at]
    return Flight(batch, states, last, needed, *teacher(target, needed), (began, forwarded, mark(device)))


def land(flight: Flight, out: dict, first: int, layers, clock: dict) -> None:
    """Check the batch's states and put them in their rows' places."""
    began, (started, forwarded, taught) = time.perf_counter(), flight.marks
    with beside(taught):
        aux = [states[0] for states in flight.states]
        whole = [torch.cat(aux)] if flight.last.is_cuda else aux  # there one transfer, and check, is worth a copy
        if not all(map(finite, [*whole, flight.last])):
            for i, states in zip(flight.batch, flight.states, strict=True):
                check_finite(*states, first + i, layers)
        needed = flight.needed
        if flight.last.is_cuda:
            aux = whole[0].to(out["aux"].dtype).cpu().split([len(states) for states in aux])
            needed = needed.to(out["last"].dtype).cpu()
        found = {"last": needed, "teacher_argmax": flight.argmax.cpu(), "teacher_lse": flight.lse.cpu()}
    offsets, last_offsets, done = out["row_offsets"].tolist(), out["last_offsets"].tolist(), 0
    for i, states in zip(flight.batch, aux, strict=True):
        out["aux"][offsets[i] : offsets[i + 1]] = states
        place = slice(last_offsets[i], last_offsets[i + 1])
        count = place.stop - place.start
        for name, value in found.items():
            out[name][place] = value[done : done + count]
        done += count
    for name, seconds in (("forward_s", between(started, forwarded)), ("teacher_s", between(forwarded, taught)),
                          ("gather_s", time.perf_counter() - began)):
        clock[name] = clock.get(name, 0.0) + seconds


def teacher(target, last: Tensor) -> tuple[Tensor, Tensor]:
    """(argmax int32 [S], log-sum-exp fp32 [S]) over the whole vocabulary, of states [S, h] in the target's dtype."""
    chunk = max(1, LOGITS_BYTES // (4 * target.facts.vocab))
    found = []
    for part in last.split(chunk):
        logits = target.logits(part).float()  # [chunk, V]
        found.append((logits.argmax(-1).int(), logits.logsumexp(-1)))
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


# ---------------------------------------------------------------------------------------------------- checks


def check_ids(ids: Tensor, vocab: int, first: int, offsets) -> None:
    wrong = ((ids < 0) | (ids >= vocab)).nonzero()
    if len(wrong):
        at = int(wrong[0])
        row = int(np.searchsorted(offsets, at, side="right")) - 1
        raise UserError(f"row {first + row} of the corpus holds id {int(ids[at])}, beyond the target's vocabulary of "
                        f"{vocab}; merge again with this target")


def finite(states: Tensor) -> bool:
    """One pass and no mask of every value: a tenth of what isfinite().all() costs. NaN and infinity are extremes."""
    return not states.numel() or bool(torch.stack(torch.aminmax(states)).isfinite().all())


def check_finite(aux: Tensor, last: Tensor, row: int, layers) -> None:
    """UserError naming row, token and layer of the first NaN or infinity."""
    if bad := not_finite(aux, last, layers):
        token, name, _ = bad
        raise UserError(f"row {row}, token {token}: {name} is not finite; check the target's weights and dtype (fp16 "
                        "overflows)")


def not_finite(aux: Tensor, last: Tensor, layers) -> tuple[int, str, float] | None:
    """(token, layer in words, value) of the first value that is no number, layer by layer; None where all are."""
    names = [*(f"layer {layer}" for layer in layers), "the last layer"]
    for name, part in zip(names, [*aux.chunk(3, dim=-1), last], strict=True):
        bad = (~part.isfinite()).nonzero()
        if len(bad):
            token, channel = map(int, bad[0])
            return token, name, float(part[token, channel])
    return None


# ---------------------------------------------------------------------------------------------------- a GPU's own time


def mark(device: torch.device):
    """A moment of the device's work: the time, or on a GPU, which runs behind, an event."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(a, b) -> float:
    """Seconds; both moments have passed."""
    return b - a if isinstance(a, float) else a.elapsed_time(b) / 1e3


@contextmanager
def beside(event):
    """On a GPU: after `event`, on a stream of its own, so that no forward begun since is waited for; done at the end.
    """
    if isinstance(event, float):
        yield
        return
    stream = copies(torch.cuda.current_device())
    with torch.cuda.stream(stream):
        stream.wait_event(event)
        yield
        stream.synchronize()


@cache
def copies(device: int):
    return torch.cuda.Stream(device)
