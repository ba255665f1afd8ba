"""A target and the drafter that was trained for it. With any other target the figures would be silently meaningless."""

from pathlib import Path

from eagle3nb.drafter.model import DraftModel
from eagle3nb.errors import UserError
from eagle3nb.files import read_json, shown
from eagle3nb.states.target import embedding, target_identity

# What the store of hidden states says of its target → the same in target_identity.
SAME = {"target config": "config", "target weights": "weights", "tokenizer": "tokenizer"}


def check_pair(drafter_dir: str | Path, target_dir: str | Path) -> dict:
    """The drafter's provenance. Raises UserError where there is none, or it learnt another target's states."""
    config = Path(drafter_dir) / "config.json"
    if not config.is_file():
        raise UserError(f"{shown(drafter_dir)} holds no drafter; run the training stage first")
    provenance = read_json(config).get("provenance", {})
    store, identity = provenance.get("store"), target_identity(target_dir)
    if not store:
        raise UserError(f"{shown(config)} does not say which target's states trained it; train again")
    if different := [name for name, key in SAME.items() if store.get(name) != identity[key]]:
        raise UserError(f"the drafter in {shown(drafter_dir)} was trained for another target than {shown(target_dir)} "
                        f"(differs in: {', '.join(different)}); set target, or extract and train again")
    return provenance


def load_drafter(drafter_dir: str | Path, target_dir: str | Path) -> DraftModel:
    """The drafter in float32 over the target's embedding, for reading only; checked to be this target's."""
    check_pair(drafter_dir, target_dir)
    return DraftModel.load(drafter_dir, embedding(target_dir)).float().eval().requires_grad_(False)
