"""Checkpoints of a training run: whole or absent, the last two kept, a torn one recognised and passed over.

    <drafter>/checkpoints/step-000200/tensors.safetensors   parameters, optimiser moments, RNG state
                                     /state.json            step, best, identity of the run, xxh3 of the tensors

A checkpoint is written beside its name, fsynced and renamed. The data cursor and the schedule are functions of the step
(packing.Plan, train.learning_rate), so the step is all that is needed of them.
"""

import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from eagle3nb.errors import UserError
from eagle3nb.files import atomic_write, read_json, sync_folder, write_json, xxh3_file

KEPT = 2


def tensors_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """What a checkpoint holds, and `restore` puts back: parameters, moments, RNG state; not copied."""
    tensors = {"rng": torch.get_rng_state()}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        tensors |= {f"{key}.{name}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return tensors


def save_checkpoint(folder: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer,
                    state: dict) -> None:
    """Write `folder`/step-<step>; `state` is JSON (identity, best, seconds, …). Older ones but the last go."""
    for left in folder.glob("partial-*"):                     # of a process that was killed while it wrote
        shutil.rmtree(left)
    partial = folder / f"partial-{os.getpid()}"
    with atomic_write(partial / "tensors.safetensors", "wb") as handle:
        handle.write(save({name: x.cpu().contiguous() for name, x in tensors_of(model, optimizer).items()}))
    write_json(partial / "state.json", {"step": step, "xxh3": xxh3_file(partial / "tensors.safetensors"), **state})
    final = folder / f"step-{step:06d}"
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    sync_folder(folder)
    for old in [path for path in checkpoints(folder) if path != final][KEPT - 1:]:
        shutil.rmtree(old)


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders, the latest first."""
    return sorted(Path(folder).glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def latest(folder: Path, identity: str) -> tuple[dict, dict] | None:
    """(state, tensors) of the latest whole checkpoint of this run; None where there is none.

    One whose tensors do not match their hash is passed over, with a line that says so; one of another run (identity:
    settings, vocabulary, store) does not count.
    """
    for path in checkpoints(folder):
        try:
            state = read_json(path / "state.json")
            if xxh3_file(path / "tensors.safetensors") != state["xxh3"]:
                raise UserError("its tensors do not match their hash")
            tensors = load_file(path / "tensors.safetensors")
        except (UserError, OSError, KeyError, SafetensorError) as error:
            print(f"checkpoint {path.name} is torn ({error}); the one before it is used", flush=True)
            continue
        if state.get("identity") == identity:
            return state, tensors
    return None


def restore(model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: dict) -> None:
    """Parameters, moments and RNG state, in place. UserError for tensors of another drafter."""
    for name, parameter in model.named_parameters():
        if (theirs := tuple(tensors.get(f"model.{name}", torch.empty(0)).shape)) != tuple(parameter.shape):
            raise UserError(f"the checkpoint's {name} is {theirs}, the drafter's {tuple(parameter.shape)}: another "
                            "vocabulary or target; choose another run or work_dir, or delete the checkpoints")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
            moments = {key: tensors[f"{key}.{name}"] for key in ("step", "exp_avg", "exp_avg_sq")
                       if f"{key}.{name}" in tensors}
            if moments:
                # the step count too: fused AdamW reads it where the parameter lies
                optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in moments.items()}
    torch.set_rng_state(tensors["rng"])
