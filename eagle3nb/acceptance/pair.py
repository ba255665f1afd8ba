"""A target and the drafter that was trained for it. With any other target the figures would be silently meaningless."""

from pathlib import Path

from eagle3nb.acceptance import offline
from eagle3nb.drafter import export
from eagle3nb.drafter.model import DraftModel
from eagle3nb.errors import UserError
from eagle3nb.files import read_json, resolve, shown
from eagle3nb.states.hf import TransformersTarget
from eagle3nb.states.target import embedding, target_identity

PARITY = 1e-5  # of the largest logit: what float32 allows between two orders of the same sums

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
    """The drafter in float32 over the target's embedding, for reading only; checked to be this target's, and numbers.

    A weight that is none would not stop a walk: argmax takes NaN for the largest logit, and every chain breaks quietly.
    """
    check_pair(drafter_dir, target_dir)
    drafter = DraftModel.load(drafter_dir, embedding(target_dir)).float().eval().requires_grad_(False)
    if bad := [name for name, weight in drafter.named_parameters() if not weight.isfinite().all()]:
        raise UserError(f"{shown(drafter_dir)}: {bad[0]} holds NaN or infinite weights; train again")
    return drafter


def counts_of(drafter_dir: str, target_dir: Path, target, taken, steps: int):
    """offline.counts of another drafter of this target over the same answers. UserError as load_drafter's."""
    drafter = load_drafter(resolve(drafter_dir), target_dir)
    return offline.counts(offline.chains(target, drafter, taken, steps), [steps])


def load_target(target_dir: str | Path, engine: str, **options):
    """The target in float32, by `engine`; SGLang's on a GPU in the checkpoint's own dtype, in which it will serve.

    `options` (tensor_parallel, engine_args) are for SGLang. Both give greedy answers and states, which is all that the
    walk takes. Only Transformers' runs step by step with a cache: a real decode in PyTorch, and margins of near ties,
    are there where `.engine` is "transformers". UserError for another engine, and where SGLang does not start.
    """
    if engine == "sglang":
        from eagle3nb.states.sglang import SGLangTarget

        return SGLangTarget(target_dir, **options)
    if engine != "transformers":
        raise UserError(f"engine {engine!r} is unknown; choose transformers or sglang")
    return TransformersTarget(target_dir)


def check_export(drafter: DraftModel, folder: str | Path) -> float:
    """Largest difference between the drafter's logits and the reloaded export's. Raises UserError above 1e-5."""
    found = export.parity(drafter, folder)
    if not found <= PARITY:
        raise UserError(f"{shown(folder)}: the reloaded export's logits differ by {found:.1e} of the largest, "
                        f"{PARITY:.0e} is allowed; do not serve it, report it")
    return found
