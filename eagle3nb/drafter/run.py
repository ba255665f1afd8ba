"""A training run between its optimiser steps: the step itself, evaluations, and the records of both (metrics.jsonl)."""

import json
import math
import shutil
import time
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import torch

from eagle3nb.drafter.ahead import Ahead
from eagle3nb.drafter.checks import keep_batch, target_of
from eagle3nb.drafter.curves import read_metrics
from eagle3nb.drafter.distributed import World
from eagle3nb.drafter.metrics import TeacherPrefix
from eagle3nb.drafter.packing import Pack, Plan, make_pack
from eagle3nb.drafter.sources import TABLES, by_source, source_packs, split_sums
from eagle3nb.drafter.ttt import StepCounts, loss_scales, loss_totals, pack_loss
from eagle3nb.errors import UserError
from eagle3nb.files import atomic_write, shown
from eagle3nb.states.streamed import Stream

OVERHEAD = 0.95   # of the time is for steps; the rest goes to evaluations and checkpoints
MAX_SKIPPED = 10  # steps in a row with a gradient that is not finite, before training gives up


class Run:
    """The state of a run between steps, and its records, which the leader alone writes."""

    def __init__(self, settings, model, store, head, held_out, plan: Plan, world: World, identity, scale):
        self.settings, self.model, self.store, self.head, self.world = settings, model, store, head, world
        self.identity, self.folder, self.scale = identity, Path(settings.drafter), scale.to(world.device)
        self.t2d, self.K = model.t2d.cpu().numpy(), settings.ttt_steps
        self.sources, self.validation, self.source_of = source_packs(settings, store, held_out)
        self.step, self.tokens, self.seconds, self.skipped, self.best = 0, 0, 0.0, 0, None
        self.total, self.shortened = len(plan.steps), False
        self.stale, self.early = 0, False                                 # evaluations since the best; patience is out
        self.pace = []                                                    # (tokens, seconds) so far, at each step
        self.started = time.monotonic()
        self.waited, self.waiting = 0.0, isinstance(store, Stream)        # waited: seconds, before this start
        self.waited_already = store.waited if self.waiting else 0.0       # before the run's clock
        self.ahead = Ahead(lambda step: self.read(self.mine(plan.steps[step])), len(plan.steps), not self.waiting)

    def state(self) -> dict:
        return {"identity": self.identity, "tokens": self.tokens, "seconds": self.elapsed(), "best": self.best,
                "total": self.total, "shortened": self.shortened, "waited": self.waits(), "skipped": self.skipped,
                "stale": self.stale, "early": self.early, "target": target_of(self.store.fingerprint)}

    def waits(self) -> float:
        """Seconds of `elapsed` in which the run waited for states."""
        return self.waited + (self.store.waited - self.waited_already if self.waiting else self.ahead.waited)

    def elapsed(self) -> float:
        return self.seconds + time.monotonic() - self.started

    def begin(self, tokens: int, rows: int) -> None:
        """A fresh run: what an earlier, different one left is removed, since its curve is not this one's."""
        if self.world.leads:
            self.sweep()
            shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
            shutil.rmtree(self.folder / "skipped", ignore_errors=True)
            for name in ("metrics.jsonl", "model.safetensors", "config.json"):
                (self.folder / name).unlink(missing_ok=True)
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        self.write("start", steps=self.total, total_tokens=tokens, rows=rows, parameters=trained,
                   device=self.world.device, processes=self.world.size, held_out_rows=sum(map(len, self.validation)),
                   identity=self.identity, **({"waited_s": round(self.waited_already, 3)} if self.waiting else {}))

    def resume(self, state: dict) -> None:
        """Go on at a checkpoint: records of later steps, which will be made again, are dropped."""
        self.step, self.tokens = state["step"], state["tokens"]
        self.seconds, self.best, self.skipped = state["seconds"], state["best"], state.get("skipped", 0)
        self.total, self.shortened, self.waited = state["total"], state["shortened"], state.get("waited", 0.0)
        self.stale, self.early = state.get("stale", 0), state.get("early", False)
        if self.world.leads:
            self.sweep()
            path = self.folder / "metrics.jsonl"
            kept = [line for line in read_metrics(path) if line["step"] <= self.step and line["kind"] != "end"]
            with atomic_write(path) as handle:
                handle.writelines(json.dumps(line) + "\n" for line in kept)
            print(f"resumed at step {self.step}", flush=True)

    def sweep(self) -> None:
        """What a process that was killed had not written to the end: gigabytes, of a large drafter."""
        for name in ("model.safetensors", "config.json", "metrics.jsonl"):
            for left in self.folder.glob(f"{name}.*.partial"):
                left.unlink()

    def write(self, kind: str, **values) -> dict:
        line = {"kind": kind, "step": self.step, "tokens": self.tokens, **values, "seconds": round(self.elapsed(), 3)}
        if self.world.leads:
            with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as handle:
                handle.write(json.dumps(line, allow_nan=False) + "\n")
        return line

    def shorten(self, plan: Plan) -> None:
        """Cuts the schedule, once, to the steps that the time left holds at the pace so far; the cosine ends there.

        The one place where a result depends on the machine's speed; the cut is in metrics.jsonl and in checkpoints.
        """
        ends = np.cumsum([sum(self.costs(packs)) for packs in plan.steps])
        left = 60 * self.settings.minutes - self.elapsed()
        tokens, seconds = np.subtract(self.pace[-1], self.pace[0])
        reached = self.tokens + OVERHEAD * left * tokens / seconds
        total = self.world.told(max(self.step + 1, int(np.searchsorted(ends, reached, side="right"))))
        self.shortened = True
        if total < self.total:
            self.total = total
            self.write("shortened", steps=total, total_tokens=int(ends[total - 1]))

    def read(self, numbers) -> list[Pack]:
        """In memory, pinned where a GPU will copy it; numbers: the row numbers of each pack."""
        packs = [make_pack([self.store.row(int(i)) for i in rows], self.t2d, self.K) for rows in numbers]
        return [pack.pinned() for pack in packs] if self.world.device == "cuda" else packs

    def placed(self, packs: list[Pack]) -> list[Pack]:
        """On the device, the captured layers' columns at unit scale."""
        moved = [pack.to(self.world.device) for pack in packs]
        return [replace(pack, aux=pack.aux / self.scale) for pack in moved]

    def costs(self, numbers) -> list[int]:
        """Tokens of each pack."""
        return [int(self.store.lengths[rows].sum()) for rows in numbers]

    def mine(self, numbers) -> list[np.ndarray]:
        """This process's share of an optimiser step's packs."""
        return [numbers[i] for i in self.world.mine(self.costs(numbers))]

    def train_step(self, numbers, epoch: int, optimizer, rate: float) -> None:
        """One optimiser step over its packs, whoever computes them; a gradient that is not finite is skipped."""
        clock, waited, world, settings = time.monotonic(), self.waits(), self.world, self.settings
        packs = self.placed(self.ahead.take(self.step))
        waited = round(self.waits() - waited, 3)
        optimizer.zero_grad(set_to_none=True)
        totals = world.sum(loss_totals(packs, self.K, settings.loss_average))
        sums, counts = np.zeros(2), np.zeros((4, self.K))                           # loss and tokens; StepCounts
        for pack, scales in zip(packs, loss_scales(packs, settings.ttt_decay, settings.loss_average, totals),
                                strict=True):
            part, one, _ = pack_loss(self.model, pack, self.head, scales, settings.compute)
            part.backward()
            counts, sums = counts + astuple(one), sums + (part.item(), len(pack.ids))
        world.sum_gradients([p for p in self.model.parameters() if p.requires_grad])
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip))
        whole = world.sum([*sums, *counts.ravel()])
        loss, tokens, counts = float(whole[0]), int(whole[1]), StepCounts.of(whole[2:].reshape(4, self.K))
        for group in optimizer.param_groups:
            group["lr"] = rate
        if finite := math.isfinite(norm) and math.isfinite(loss):
            optimizer.step()
        self.skipped = 0 if finite else self.skipped + 1
        if not finite and world.leads:
            first = keep_batch(self.folder / "skipped", self.step + 1, self.store, numbers, loss=finite_or_none(loss),
                               grad_norm=finite_or_none(norm), learning_rate=rate)
            if self.skipped > MAX_SKIPPED:
                raise UserError(f"{self.skipped} steps in a row had a gradient that is not finite ({first} has the "
                                "first such batch); lower learning_rate, and check the states (extraction's probe)")
        seconds = time.monotonic() - clock
        self.step, self.tokens = self.step + 1, self.tokens + tokens
        self.pace.append((self.tokens, self.elapsed()))
        self.write("train", epoch=epoch, loss=finite_or_none(loss), loss_k=rounded(counts.mean_loss),
                   accuracy=rounded(counts.accuracy), counted=counts.counted.tolist(), bearing=counts.bearing.tolist(),
                   learning_rate=rate, grad_norm=finite_or_none(norm), skipped=not finite,
                   tokens_per_s=round(tokens / seconds, 1), waited_s=waited)

    @torch.no_grad()
    def evaluate(self, epoch: int) -> None:
        """Held-out loss, accuracies and acceptance, by source too; the best so far is saved as the drafter."""
        sums = np.zeros((len(self.sources), TABLES, self.K))
        for i in self.world.mine(self.costs(self.validation)):
            (pack,) = self.placed(self.read([self.validation[i]]))
            (scales,) = loss_scales([pack], 1.0, "slot")
            _, one, hits = pack_loss(self.model, pack, self.head, scales)
            prefix = TeacherPrefix(self.K)
            prefix.add(*chain_tables(pack, hits))
            sums[self.source_of[i]] += [*astuple(one), prefix.at_risk, prefix.hits]
        sums = self.world.sum(sums)
        counts, prefix = split_sums(sums.sum(0))
        line = {}
        if self.validation:
            decay = self.settings.ttt_decay ** np.arange(self.K)
            found = by_source(self.sources, sums, decay)
            line = self.write("validation", epoch=epoch, loss=finite_or_none(float((decay * counts.mean_loss).sum())),
                              loss_k=rounded(counts.mean_loss), accuracy=rounded(counts.accuracy),
                              conditional=rounded(prefix.conditional), acceptance=round(prefix.length, 4),
                              counted=counts.counted.tolist(), bearing=counts.bearing.tolist(),
                              **({"sources": found} if found else {}))
        if self.best is None or not line or line["acceptance"] > self.best["acceptance"]:
            self.best, self.stale = line or {"step": self.step, "acceptance": None}, 0
            self.save()
        else:
            self.stale += 1
        if line and self.settings.patience and self.stale >= self.settings.patience and self.step < self.total:
            self.total, self.early = self.step, True

    def save(self) -> None:
        """The drafter as others use it: fc for the captured layers as they come."""
        if not self.world.leads:
            return
        fc = self.model.fc.weight
        scaled = fc.data
        try:
            fc.data = scaled / self.scale
            self.model.save(self.folder, {"identity": self.identity, "best": self.best,
                                          "store": self.store.fingerprint})
        finally:
            fc.data = scaled

    def finish(self) -> None:
        if self.world.leads and not (self.folder / "model.safetensors").is_file():
            raise UserError(f"{shown(self.folder)} lost its model.safetensors; delete its checkpoints and train again")
        early = {"early": True, "total_tokens": self.tokens} if self.early else {}
        self.write("end", best=self.best, **early, waited_s=round(self.waits(), 3),
                   waiting_share=round(self.waits() / self.elapsed(), 4))


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
