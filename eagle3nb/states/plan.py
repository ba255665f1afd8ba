"""What the hidden states will cost in disk, told from the config alone, before anything runs."""

from pathlib import Path

from eagle3nb.errors import UserError
from eagle3nb.files import disk_free
from eagle3nb.states.target import BYTES, TargetFacts

PER_TOKEN = 4 + 1  # id, mask
PER_TEACHER = 4 + 4 + 4  # position, argmax, log-sum-exp


def states_bytes(facts: TargetFacts, tokens: int, teacher_positions: int, dtype: str) -> int:
    """Bytes of a store: states of so many tokens and teacher positions, with the embedding and head in bf16."""
    if dtype not in BYTES:
        raise UserError(f"states_dtype {dtype!r} is unknown; choose one of {', '.join(BYTES)}")
    size, h = BYTES[dtype], facts.hidden
    scales = 4 if dtype == "fp8_e4m3" else 0
    per_token = PER_TOKEN + size * 3 * h + 3 * scales
    per_teacher = PER_TEACHER + size * h + scales
    head = 2 * facts.vocab * h * (1 if facts.tie_embedding else 2)
    return per_token * tokens + per_teacher * teacher_positions + head


def disk_plan(facts: TargetFacts, tokens: int, teacher_positions: int, folder: str | Path, dtype: str = "bf16") -> dict:
    """{"bytes": {dtype: n}, "needed": of `dtype`, "free", "standing": what lies in `folder`, "short": bool}, in bytes.

    What stands there counts as room: it is either this store begun, or one that must be deleted first.
    """
    needed = states_bytes(facts, tokens, teacher_positions, dtype)
    sizes = {name: states_bytes(facts, tokens, teacher_positions, name) for name in BYTES}
    free, standing = disk_free(folder), standing_bytes(folder)
    return {"bytes": sizes, "dtype": dtype, "needed": needed, "free": free, "standing": standing,
            "short": needed > free + standing}


def standing_bytes(folder: str | Path) -> int:
    folder = Path(folder)
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) if folder.is_dir() else 0
