"""Training, as a process of its own: python -m eagle3nb.drafter.train SETTINGS.json

Linear: read settings, store and vocabulary; make or restore the model; for each optimiser step make its packs, add up
their losses, step, write a line of metrics.jsonl; now and then evaluate on the held-out rows and keep the best drafter.
The notebook starts it through launch.py and follows metrics.jsonl:

    {"kind": "start", "step": 0, "steps": …, "tokens": total, …}
    {"kind": "shortened", "step", "steps", "total_tokens"}      where `minutes` cut the schedule
    {"kind": "train", "step", "epoch", "tokens", "loss", "loss_k": [K], "accuracy": [K], "learning_rate", …}
    {"kind": "validation", "step", …, "loss", "loss_k", "accuracy", "conditional": [K], "acceptance",
                                               "sources": {name: {"loss", "acceptance", "counted"}}}
    {"kind": "end", "step", …, "best": {the chosen evaluation}, "early": true where patience ended the run}

"waited_s" of a "train" line: seconds in which its step waited for states; of "end": the whole run's, "waiting_share"
their share. Where states stream (states/stream.py), "start" has those in which the kept ones were made, before the
run's clock.

`acceptance` is the joint prefix against the teacher's argmax (metrics.TeacherPrefix): 1 + the drafted tokens that would
be accepted, and what the best drafter is chosen by.
"""

import os
import signal
import sys
import threading
import time  # noqa: F401 (the run's clock, as tests set it)
from pathlib import Path

import torch

from eagle3nb.drafter import finetune
from eagle3nb.drafter.checkpoint import latest, restore, save_checkpoint, tensors_of
from eagle3nb.drafter.checks import check_slots, check_target, read_vocabulary
from eagle3nb.drafter.distributed import World, alone, joined
from eagle3nb.drafter.fitting import SCALED
from eagle3nb.drafter.initialise import initialise, target_weights
from eagle3nb.drafter.model import DraftConfig, DraftModel
from eagle3nb.drafter.packing import Plan, split
from eagle3nb.drafter.run import Run
from eagle3nb.drafter.settings import INTERRUPTED, ONE_READER, Settings, learning_rate, run_identity, warmup_steps
from eagle3nb.drafter.streaming import announce, opened_states
from eagle3nb.errors import UserError
from eagle3nb.files import read_json
from eagle3nb.parent import die_with_parent
from eagle3nb.states.streamed import Interrupted, Starved, Stream, share_cores
from eagle3nb.states.target import facts_of

PACED = 5  # optimiser steps, at least, before the pace is taken for what it will be


def make_optimizer(model: DraftModel, settings: Settings) -> torch.optim.AdamW:
    """AdamW, decay on matrices only (norms start at 1 and mean scales)."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() > 1], "weight_decay": settings.weight_decay},
              {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=True)


def train(settings: Settings, store, facts, weights, stop=lambda: False, world: World | None = None) -> dict:
    """Run to the end, resuming from the latest checkpoint; returns the best evaluation's record.

    store: eagle3nb.states.store.Store or its like, such as a Stream, whose states come meanwhile; facts: TargetFacts;
    weights(): initialise.target_weights of the target, read only for a fresh start. `stop()` true, at any process, ends
    the run after a checkpoint, with KeyboardInterrupt; so do states that stop coming, with Starved. world: whose part
    of the work this process does (distributed.joined); None: all of it.
    """
    world, folder = world or alone(), Path(settings.drafter)
    ids = world.told(read_vocabulary(folder / "vocabulary.json", facts.vocab) if world.leads else None)
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
    found = latest(folder / "checkpoints", identity) if world.leads else None
    state = world.told(found and found[0])
    if world.leads:
        if not state:
            check_target(folder, store.fingerprint)
        check_slots(store, rows, model.t2d.numpy())
    if isinstance(store, Stream):
        if world.size > 1:
            raise UserError(ONE_READER)
        announce(store, settings, plan, rows, held_out, state["step"] if state else 0, stop)
    scale = world.told(column_scale(model, store, rows, SCALED) if world.leads else None)
    if begun:
        finetune.load(model, begun)
    elif not state and world.leads:
        initialise(model, settings.initialise, head=head, weights=weights(), seed=settings.seed,
                   steps=settings.ttt_steps, rows=(store.row(int(i)) for i in rows))
        if not all(p.isfinite().all() for p in model.parameters()):
            raise UserError(f"initialise: {settings.initialise} gives weights that are not finite, as some states are; "
                            "run the extraction's probe, then extract again")
    model.to(world.device).lm_head.weight.requires_grad_(not settings.freeze_head)
    optimizer = make_optimizer(model, settings)
    run = Run(settings, model, store, head.to(world.device), held_out, plan, world, identity, scale)

    torch.manual_seed(settings.seed)
    if not state:
        with torch.no_grad():
            model.fc.weight.mul_(run.scale)
    restore(model, optimizer, world.tensors(found[1] if found else tensors_of(model, optimizer)))
    if state:
        run.resume(state)
    else:
        run.begin(plan.tokens, len(rows))
        run.evaluate(0)

    def save():
        if world.leads:
            save_checkpoint(folder / "checkpoints", run.step, model, optimizer, run.state())

    evaluate_at = evaluation_steps(plan, settings.evaluate_every)
    with run.ahead:
        while run.step < run.total:
            step = run.step
            if settings.minutes and step >= warmup and len(run.pace) >= PACED and not run.shortened:
                run.shorten(plan)
            rate = learning_rate(settings, step, run.total, warmup)
            try:
                run.train_step(plan.steps[step], plan.epoch_of[step], optimizer, rate)
            except (Starved, Interrupted):          # while it waited for the step's states: nothing of it has happened
                save()
                raise
            evaluates = run.step in evaluate_at or run.step == run.total
            if evaluates:
                run.evaluate(plan.epoch_of[step])
            stopping, every = world.any(stop()), settings.checkpoint_every
            if stopping or run.step == run.total or (run.step % every == 0 if every else evaluates):
                save()
            if stopping:
                raise KeyboardInterrupt
    run.finish()
    return run.best


def column_scale(model: DraftModel, store, rows, tokens: int) -> torch.Tensor:
    """Root mean square of each captured column [3h] over the first `tokens` training tokens, first tokens left out.

    Training divides the captured layers by it and multiplies fc with it. The columns differ a hundredfold (SmolLM2: 3
    in the shallow layer, 416 at most in the deep one), and AdamW moves every weight by about the learning rate:
    unscaled, a few steps on the large columns undo whatever fc held. With fc_norm the layers come normed: ones.
    UserError for states that are no numbers.
    """
    total, n = torch.zeros(3 * model.config.hidden), 0
    for i in rows:
        row = store.row(int(i))
        aux = row.aux[1:].float()
        if not (aux.isfinite().all() and row.last.isfinite().all()):
            raise UserError(f"the states of row {i} are not finite; run the extraction's probe, then extract again")
        total, n = total + aux.pow(2).sum(0), n + len(aux)
        if n >= tokens:
            break
    return torch.ones_like(total) if model.fc_norm else (total / max(n, 1)).sqrt().clamp(min=1e-3)


def evaluation_steps(plan: Plan, every: int) -> set[int]:
    """After which steps (counted from 1) to evaluate: every so many, or each epoch's last; always the last."""
    total = len(plan.steps)
    ends = {i + 1 for i in range(total) if i + 1 == total or plan.epoch_of[i + 1] != plan.epoch_of[i]}
    return {*range(every, total, every), total} if every else ends


def main(path: str) -> int:
    """0 done, 1 the user's fault (one line `error: …` on stderr), 130 interrupted with a checkpoint.

    One of torchrun's processes is interrupted with 0, since torchrun would take another code for a failure.
    """
    interrupted = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: interrupted.set())
    die_with_parent()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 0)) or len(os.sched_getaffinity(0)))
    world = alone()
    try:
        settings = Settings.from_json(read_json(path))
        with joined() as world, opened_states(settings) as store:
            if isinstance(store, Stream):
                torch.set_num_threads(share_cores()[0])
            train(settings, store, facts_of(settings.target), lambda: target_weights(settings.target),
                  stop=interrupted.is_set, world=world)
    except UserError as error:
        where = f" (process {world.rank} of {world.size})" if world.size > 1 else ""
        sys.stderr.write(f"error: {error}{where}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write(INTERRUPTED + "\n")
        return 130 if world.size == 1 else 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
