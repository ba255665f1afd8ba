"""Training, as a process of its own: python -m eagle3nb.drafter.train SETTINGS.json

Linear: read settings, store and vocabulary; make or restore the model; for each optimiser step make its packs, add up
their losses, step, write a line of metrics.jsonl; now and then evaluate on the held-out rows and keep the best drafter.
The notebook starts it through launch.py and follows metrics.jsonl:

    {"kind": "start", "step": 0, "steps": …, "tokens": total, …}
    {"kind": "shortened", "step", "steps", "total_tokens"}      where `minutes` cut the schedule
    {"kind": "train", "step", "epoch", "tokens", "loss", "loss_k": [K], "accuracy": [K], "learning_rate", …}
    {"kind": "validation", "step", …, "loss", "loss_k", "accuracy", "conditional": [K], "acceptance", "seconds"}
    {"kind": "end", "step", …, "best": {the chosen evaluation}}

Where states stream (states/stream.py), "start" has "waited_s", the seconds before the run's clock in which the kept
states were made, a "train" line those of its step, and "end" those of the whole run and "waiting_share", their share.

`acceptance` is the joint prefix against the teacher's argmax (metrics.TeacherPrefix): 1 + the drafted tokens that would
be accepted, and what the best drafter is chosen by.
"""

import json
import math
import os
import shutil
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from eagle3nb.drafter import finetune
from eagle3nb.drafter.checkpoint import latest, restore, save_checkpoint
from eagle3nb.drafter.curves import read_metrics
from eagle3nb.drafter.fitting import SCALED
from eagle3nb.drafter.initialise import initialise, target_weights
from eagle3nb.drafter.metrics import TeacherPrefix
from eagle3nb.drafter.model import DraftConfig, DraftModel
from eagle3nb.drafter.packing import Pack, Plan, make_pack, pack_rows, split
from eagle3nb.drafter.settings import Settings, learning_rate, run_identity, warmup_steps
from eagle3nb.drafter.streaming import announce, opened_states
from eagle3nb.drafter.ttt import loss_scales, pack_loss
from eagle3nb.errors import UserError
from eagle3nb.files import atomic_write, read_json, shown
from eagle3nb.parent import die_with_parent
from eagle3nb.states.streamed import Interrupted, Starved, Stream, share_cores
from eagle3nb.states.target import facts_of

OVERHEAD = 0.95   # of the time is for steps; the rest goes to evaluations and checkpoints
PACED = 5         # optimiser steps, at least, before the pace is taken for what it will be
MAX_SKIPPED = 10  # steps in a row with a gradient that is not finite, before training gives up


def make_optimizer(model: DraftModel, settings: Settings) -> torch.optim.AdamW:
    """AdamW, decay on matrices only (norms start at 1 and mean scales)."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() > 1], "weight_decay": settings.weight_decay},
              {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=True)


def train(settings: Settings, store, facts, weights, stop=lambda: False) -> dict:
    """Run to the end, resuming from the latest checkpoint; returns the best evaluation's record.

    store: eagle3nb.states.store.Store or its like, such as a Stream, whose states come meanwhile; facts: TargetFacts;
    weights(): initialise.target_weights of the target, read only for a fresh start. `stop()` true ends the run after a
    checkpoint, with KeyboardInterrupt; so do states that stop coming, with Starved.
    """
    folder, device = Path(settings.drafter), "cuda" if torch.cuda.is_available() else "cpu"
    ids = read_json(folder / "vocabulary.json")["ids"]
    begun = finetune.start(settings, facts, store.embedding(), ids) if settings.finetunes else None
    identity = run_identity(settings, ids, store.fingerprint, begun.content if begun else "")
    rows, held_out = split(store, settings.validation_share, settings.held_out_from)
    plan = Plan.make(rows, store.lengths, epochs=settings.epochs, seed=settings.seed, pack_tokens=settings.pack_tokens,
                     accumulate=settings.accumulate)
    warmup = warmup_steps(settings, len(plan.steps))

    sizes = {"intermediate": settings.intermediate} if settings.intermediate else {}
    config = begun.config if begun else DraftConfig.from_target(
        facts, len(ids), norm_output=settings.norm_output, fc_norm=settings.fc_norm, **sizes)
    model, head = DraftModel(config, store.embedding(), torch.tensor(ids)), store.lm_head_rows(ids).float()
    resumed = latest(folder / "checkpoints", identity)
    if isinstance(store, Stream):
        announce(store, settings, plan, rows, held_out, resumed[0]["step"] if resumed else 0, stop)
    if begun:
        finetune.load(model, begun)
    elif not resumed:
        initialise(model, settings.initialise, head=head, weights=weights(), seed=settings.seed,
                   steps=settings.ttt_steps, rows=(store.row(int(i)) for i in rows))
    model.to(device).lm_head.weight.requires_grad_(not settings.freeze_head)
    optimizer = make_optimizer(model, settings)
    run = Run(settings, model, store, head.to(device), held_out, device, identity,
              column_scale(model, store, rows, SCALED))
    run.total = len(plan.steps)

    if resumed:
        state, tensors = resumed
        restore(model, optimizer, tensors)
        run.resume(state)
    else:
        with torch.no_grad():
            model.fc.weight.mul_(run.scale)
        torch.manual_seed(settings.seed)
        run.begin(plan.tokens, len(rows))
        run.evaluate(0)
    evaluate_at = evaluation_steps(plan, settings.evaluate_every)
    while run.step < run.total:
        step = run.step
        if settings.minutes and step >= warmup and len(run.pace) >= PACED and not run.shortened:
            run.shorten(plan)
        rate = learning_rate(settings, step, run.total, warmup)
        try:
            run.train_step(plan.steps[step], plan.epoch_of[step], optimizer, rate)
        except (Starved, Interrupted):          # while it waited for the step's states: nothing of it has happened
            save_checkpoint(folder / "checkpoints", step, model, optimizer, run.state())
            raise
        evaluates = run.step in evaluate_at or run.step == run.total
        if evaluates:
            run.evaluate(plan.epoch_of[step])
        stopping, every = stop(), settings.checkpoint_every
        if stopping or run.step == run.total or (run.step % every == 0 if every else evaluates):
            save_checkpoint(folder / "checkpoints", run.step, model, optimizer, run.state())
        if stopping:
            raise KeyboardInterrupt
    run.finish()
    return run.best


def column_scale(model: DraftModel, store, rows, tokens: int) -> torch.Tensor:
    """Root mean square of each captured column [3h] over the first `tokens` training tokens, first tokens left out.

    Training divides the captured layers by it and multiplies fc with it. The columns differ a hundredfold (SmolLM2: 3
    in the shallow layer, 416 at most in the deep one), and AdamW moves every weight by about the learning rate:
    unscaled, a few steps on the large columns undo whatever fc held. With fc_norm the layers come normed: ones.
    """
    total, n = torch.zeros(3 * model.config.hidden), 0
    for i in rows:
        aux = store.row(int(i)).aux[1:].float()
        total, n = total + aux.pow(2).sum(0), n + len(aux)
        if n >= tokens:
            break
    return torch.ones_like(total) if model.fc_norm else (total / max(n, 1)).sqrt().clamp(min=1e-3)


def evaluation_steps(plan: Plan, every: int) -> set[int]:
    """After which steps (counted from 1) to evaluate: every so many, or each epoch's last; always the last."""
    total = len(plan.steps)
    ends = {i + 1 for i in range(total) if i + 1 == total or plan.epoch_of[i + 1] != plan.epoch_of[i]}
    return {*range(every, total, every), total} if every else ends


class Run:
    """The state of a run between steps, and its records."""

    def __init__(self, settings, model, store, head, held_out, device, identity, scale):
        self.settings, self.model, self.store, self.head, self.device = settings, model, store, head, device
        self.identity, self.folder, self.scale = identity, Path(settings.drafter), scale.to(device)
        self.t2d = model.t2d.cpu().numpy()
        self.validation = pack_rows(held_out, store.lengths, settings.pack_tokens)
        self.step, self.tokens, self.seconds, self.skipped, self.best = 0, 0, 0.0, 0, None
        self.total, self.shortened, self.pace = 0, False, []              # pace: (tokens, seconds) so far, at each step
        self.started = time.monotonic()
        self.waited, self.waiting = 0.0, isinstance(store, Stream)        # waited: seconds, before this start
        self.waited_already = store.waited if self.waiting else 0.0       # before the run's clock

    def state(self) -> dict:
        return {"identity": self.identity, "tokens": self.tokens, "seconds": self.elapsed(), "best": self.best,
                "total": self.total, "shortened": self.shortened, "waited": self.waits()}

    def waits(self) -> float:
        """Seconds of `elapsed` in which the run waited for states."""
        return self.waited + (self.store.waited - self.waited_already if self.waiting else 0.0)

    def elapsed(self) -> float:
        return self.seconds + time.monotonic() - self.started

    def begin(self, tokens: int, rows: int) -> None:
        """A fresh run: what an earlier, different one left is removed, since its curve is not this one's."""
        shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
        for name in ("metrics.jsonl", "model.safetensors", "config.json"):
            (self.folder / name).unlink(missing_ok=True)
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        self.write("start", steps=self.total, total_tokens=tokens, rows=rows, parameters=trained, device=self.device,
                   held_out_rows=sum(map(len, self.validation)), identity=self.identity,
                   **({"waited_s": round(self.waited_already, 3)} if self.waiting else {}))

    def resume(self, state: dict) -> None:
        """Go on at a checkpoint: records of later steps, which will be made again, are dropped."""
        self.step, self.tokens = state["step"], state["tokens"]
        self.seconds, self.best = state["seconds"], state["best"]
        self.total, self.shortened, self.waited = state["total"], state["shortened"], state.get("waited", 0.0)
        path = self.folder / "metrics.jsonl"
        kept = [line for line in read_metrics(path) if line["step"] <= self.step and line["kind"] != "end"]
        with atomic_write(path) as handle:
            handle.writelines(json.dumps(line) + "\n" for line in kept)
        print(f"resumed at step {self.step}", flush=True)

    def write(self, kind: str, **values) -> dict:
        line = {"kind": kind, "step": self.step, "tokens": self.tokens, **values, "seconds": round(self.elapsed(), 3)}
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as handle:
            handle.write(json.dumps(line, allow_nan=False) + "\n")
        return line

    def shorten(self, plan: Plan) -> None:
        """Cuts the schedule, once, to the steps that the time left holds at the pace so far; the cosine ends there.

        The one place where a result depends on the machine's speed; the cut is in metrics.jsonl and in checkpoints.
        """
        ends = np.cumsum([sum(int(self.store.lengths[rows].sum()) for rows in packs) for packs in plan.steps])
        left = 60 * self.settings.minutes - self.elapsed()
        tokens, seconds = np.subtract(self.pace[-1], self.pace[0])
        reached = self.tokens + OVERHEAD * left * tokens / seconds
        total = max(self.step + 1, int(np.searchsorted(ends, reached, side="right")))
        self.shortened = True
        if total < self.total:
            self.total = total
            self.write("shortened", steps=total, total_tokens=int(ends[total - 1]))

    def packs(self, numbers) -> list[Pack]:
        """On the device, the captured layers' columns at unit scale."""
        made = [make_pack([self.store.row(int(i)) for i in rows], self.t2d, self.settings.ttt_steps).to(self.device)
                for rows in numbers]
        return [replace(pack, aux=pack.aux / self.scale) for pack in made]

    def train_step(self, numbers, epoch: int, optimizer, rate: float) -> None:
        """One optimiser step over its packs; a gradient that is not finite is skipped and counted."""
        clock, counts, loss, waited = time.monotonic(), None, 0.0, self.waits()
        packs = self.packs(numbers)
        streamed = {"waited_s": round(self.waits() - waited, 3)} if self.waiting else {}
        optimizer.zero_grad(set_to_none=True)
        every_scale = loss_scales(packs, self.settings.ttt_decay, self.settings.loss_average)
        for pack, scales in zip(packs, every_scale, strict=True):
            part, one, _ = pack_loss(self.model, pack, self.head, scales)
            part.backward()
            counts, loss = one if counts is None else counts + one, loss + part.item()
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip))
        for group in optimizer.param_groups:
            group["lr"] = rate
        if finite := math.isfinite(norm) and math.isfinite(loss):
            optimizer.step()
        self.skipped = 0 if finite else self.skipped + 1
        if self.skipped > MAX_SKIPPED:
            raise UserError(f"{self.skipped} steps in a row had a gradient that is not finite; lower learning_rate, "
                            "and check the states (extraction's probe)")
        tokens, seconds = sum(len(pack.ids) for pack in packs), time.monotonic() - clock
        self.step, self.tokens = self.step + 1, self.tokens + tokens
        self.pace.append((self.tokens, self.elapsed()))
        self.write("train", epoch=epoch, loss=finite_or_none(loss), loss_k=rounded(counts.mean_loss),
                   accuracy=rounded(counts.accuracy), counted=counts.counted.tolist(), bearing=counts.bearing.tolist(),
                   learning_rate=rate, grad_norm=finite_or_none(norm), skipped=not finite,
                   tokens_per_s=round(tokens / seconds, 1), **streamed)

    @torch.no_grad()
    def evaluate(self, epoch: int) -> None:
        """Held-out loss, accuracies and acceptance; the best so far is saved as the drafter."""
        counts, prefix = None, TeacherPrefix(self.settings.ttt_steps)
        for numbers in self.validation:
            (pack,) = self.packs([numbers])
            (scales,) = loss_scales([pack], 1.0, "slot")
            _, one, hits = pack_loss(self.model, pack, self.head, scales)
            counts = one if counts is None else counts + one
            prefix.add(*chain_tables(pack, hits))
        line = {}
        if counts is not None:
            decay = self.settings.ttt_decay ** np.arange(self.settings.ttt_steps)
            line = self.write("validation", epoch=epoch, loss=finite_or_none(float((decay * counts.mean_loss).sum())),
                              loss_k=rounded(counts.mean_loss), accuracy=rounded(counts.accuracy),
                              conditional=rounded(prefix.conditional), acceptance=round(prefix.length, 4),
                              counted=counts.counted.tolist(), bearing=counts.bearing.tolist())
        if self.best is None or not line or line["acceptance"] > self.best["acceptance"]:
            self.best = line or {"step": self.step, "acceptance": None}
            self.save()

    def save(self) -> None:
        """The drafter as others use it: fc for the captured layers as they come."""
        fc = self.model.fc.weight
        scaled = fc.data
        try:
            fc.data = scaled / self.scale
            self.model.save(self.folder, {"identity": self.identity, "best": self.best,
                                          "store": self.store.fingerprint})
        finally:
            fc.data = scaled

    def finish(self) -> None:
        if not (self.folder / "model.safetensors").is_file():
            raise UserError(f"{shown(self.folder)} lost its model.safetensors; delete its checkpoints and train again")
        waited = {"waited_s": round(self.waits(), 3), "waiting_share": round(self.waits() / self.elapsed(), 4)}
        self.write("end", best=self.best, **(waited if self.waiting else {}))


def chain_tables(pack: Pack, hits: list[torch.Tensor]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """counted, hits, on_argmax as bool [K, T] for TeacherPrefix."""
    K, T = len(pack.slots), len(pack.ids)
    counted, right, on_argmax = (np.zeros((K, T), dtype=bool) for _ in range(3))
    for k in range(K):
        at = pack.slots[k].cpu().numpy()
        counted[k, at] = True
        right[k, at] = hits[k].cpu().numpy()
        on_argmax[k, at] = pack.on_argmax[pack.rows[k]].cpu().numpy()
    return counted, right, on_argmax


def rounded(values: np.ndarray) -> list[float | None]:
    return [finite_or_none(value) for value in values]


def finite_or_none(value: float) -> float | None:
    """JSON has no NaN."""
    return round(float(value), 6) if math.isfinite(value) else None


def main(path: str) -> int:
    """0 done, 1 the user's fault (one line `error: …` on stderr), 130 interrupted with a checkpoint."""
    interrupted = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: interrupted.set())
    die_with_parent()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 0)) or len(os.sched_getaffinity(0)))
    try:
        settings = Settings.from_json(read_json(path))
        with opened_states(settings) as store:
            if isinstance(store, Stream):
                torch.set_num_threads(share_cores()[0])
            train(settings, store, facts_of(settings.target), lambda: target_weights(settings.target),
                  stop=interrupted.is_set)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the next start goes on from its checkpoint", file=sys.stderr, flush=True)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
