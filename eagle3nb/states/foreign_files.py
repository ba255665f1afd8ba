"""Files of hidden states that other tools wrote, one a row of text.

    specforge     SpecForge's prepare_hidden_states.py: data_<i>.ckpt, .ckpt.gz (torch.save of a dict of tensors)
                  input_ids [T], loss_mask [T], aux_hidden_state [1, T, 3h], hidden_state [1, T, h]
    speculators   speculators' generate-offline-data: hs_<i>.safetensors
                  token_ids [T], hidden_states [T, 4, h]; in fp8 also hidden_states_scales [T, 1, 1], one for all four
                  and before its 0.5: data_<i>.pt: input_ids [T], loss_mask [T], hidden_states, a list of four [T, h]

What torch.save wrote is read with weights_only: a pickle that could run code is refused, never loaded.
"""

import gzip
import io
import pickle
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from eagle3nb.errors import UserError
from eagle3nb.files import shown

NAMES = {"specforge": ("*.ckpt", "*.ckpt.gz"), "speculators": ("hs_*.safetensors", "data_*.pt")}
AGAIN = "move it away, or have it made again"
BROKEN = (OSError, EOFError, RuntimeError, ValueError, TypeError, zlib.error, SafetensorError)


@dataclass(frozen=True)
class Sample:
    """One file. ids int32 [T], aux [T, 3h], last [T, h]; fp8 is decoded to float32."""

    ids: np.ndarray
    aux: torch.Tensor
    last: torch.Tensor


def find_files(kind: str, folder: Path) -> list[Path]:
    """Every file of this kind below the folder. UserError where there is none."""
    if kind not in NAMES:
        raise UserError(f"{kind!r} is no known kind of states; choose one of {', '.join(NAMES)}")
    found = sorted({path for pattern in NAMES[kind] for path in folder.rglob(pattern)}, key=str)
    if not found:
        raise UserError(f"{shown(folder)} holds no file {' or '.join(NAMES[kind])}; give the folder that {kind} wrote")
    return found


def read_tokens(path: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """(ids int32 [T], mask uint8 [T] or None where the file has none); the states are not read, unless compressed."""
    if path.suffix == ".safetensors":
        return flat(content(path, ["token_ids"])["token_ids"], path).astype(np.int32), None
    found = content(path, ["input_ids", "loss_mask"])
    ids, mask = flat(found["input_ids"], path).astype(np.int32), flat(found["loss_mask"], path).astype(np.uint8)
    if len(ids) != len(mask):
        raise UserError(f"{shown(path)} has {len(ids)} tokens and a mask of {len(mask)}; {AGAIN}")
    return ids, mask


def read_sample(kind: str, path: Path, hidden: int) -> Sample:
    """The whole file. UserError where its states are not one a token, or those of another target."""
    ids, (aux, last) = read_tokens(path)[0], read_states(kind, path)
    for name, part, width in (("three layers", aux, 3 * hidden), ("the last layer", last, hidden)):
        if part.shape[-1] != width:
            raise UserError(f"{shown(path)} has states ({name}) of {part.shape[-1]} channels, the target's have "
                            f"{width}; give the target that made them")
        if len(part) != len(ids):
            raise UserError(f"{shown(path)} has {len(ids)} tokens and {len(part)} states ({name}): a prefix cache or "
                            f"chunked prefill cut them off; have {kind} make it again without")
    if aux.dtype == torch.float8_e4m3fn:
        scale = content(path, ["hidden_states_scales"])["hidden_states_scales"].reshape(-1, 1).float()
        aux, last = aux.float() * scale, last.float() * scale
    return Sample(ids, aux, last)


def read_states(kind: str, path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """(aux [T, 3h], last [T, h]), as they are stored."""
    if kind == "specforge":
        found = content(path, ["aux_hidden_state", "hidden_state"])
        aux, last = (torch.as_tensor(value) for value in found.values())
        return aux.reshape(-1, aux.shape[-1]), last.reshape(-1, last.shape[-1])
    states = content(path, ["hidden_states"])["hidden_states"]
    layers = states if isinstance(states, list) else list(states.unbind(1)) if states.ndim == 3 else []
    if len(layers) != 4:
        raise UserError(f"{shown(path)} holds {len(layers)} layers, not the three captured ones and the last; have "
                        f"{kind} take the layers 2, n // 2, n - 3 and n")
    if layers[0].dtype == torch.float8_e4m3fn:  # which cannot be concatenated as it is
        return torch.cat([layer.view(torch.uint8) for layer in layers[:3]], -1).view(layers[0].dtype), layers[3]
    return torch.cat(layers[:3], -1), layers[3]


def content(path: Path, keys: list[str]) -> dict:
    """These entries of a safetensors file or of a dict that torch.save wrote. One line for whatever else is found."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as handle:
                held = set(handle.keys())
                found = {key: handle.get_tensor(key) for key in keys if key in held}
        else:
            whole = torch_file(path)
            found = {key: whole[key] for key in keys if key in whole}
    except pickle.UnpicklingError:
        raise UserError(f"{shown(path)} holds more than tensors, and reading it could run code: it is not loaded; save "
                        "its tensors anew, as a dict") from None
    except BROKEN as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
        raise UserError(f"{shown(path)} cannot be read ({reason}); {AGAIN}") from None
    for key in keys:
        if key not in found:
            raise UserError(f"{shown(path)} has no {key}; {AGAIN}")
    return found


def torch_file(path: Path) -> dict:
    """Mapped where it is a zip file, as since torch 1.6: what is not asked for is not read."""
    settings = {"map_location": "cpu", "weights_only": True}
    if path.suffix == ".gz":
        with gzip.open(path) as handle:
            return torch.load(io.BytesIO(handle.read()), **settings)
    with open(path, "rb") as handle:
        zipped = handle.read(2) == b"PK"
    return torch.load(path, mmap=zipped, **settings)


def flat(value, path: Path) -> np.ndarray:
    """A tensor or list of numbers as int64 [T]."""
    try:
        return torch.as_tensor(value).reshape(-1).long().numpy()
    except BROKEN:
        raise UserError(f"{shown(path)} has tokens or a mask that are no numbers; {AGAIN}") from None
