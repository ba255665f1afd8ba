"""One shard: what it holds, how it is written and checked, how a row is read out of it.

R rows, N tokens, S teacher positions (p with l[p] l[p+1] = 1), h hidden:

    input_ids int32 [N]   loss_mask uint8 [N]   aux [N, 3h]            row_offsets int64 [R+1]   rows int64 [R]
    last [S, h]   last_positions int32 [S], inside their row           last_offsets int64 [R+1]
    teacher_argmax int32 [S]   teacher_lse fp32 [S]                    both over the full vocabulary
    aux_scale fp32 [N, 3]   last_scale fp32 [S, 1]                     where aux and last are float8 e4m3
    row_xxh3 int64 [R, 3]                                              of each row: its tokens, its aux, its last

The file's checksum lies in the manifest and tells whether a byte changed. Those of the rows are for reading: what is
looked at is checked, and no more, so that one row costs no gigabytes and eight processes read each their own.
"""

import ctypes
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle3nb.errors import UserError
from eagle3nb.files import shown
from eagle3nb.states.manifest import DTYPES, rows_of
from eagle3nb.states.quantise import decode, encode

LAYERS = {"aux": 3, "last": 1}  # layers side by side in a row of the tensor
TOKENS, AUX, LAST = range(3)  # columns of row_xxh3
OF_TOKENS = ("input_ids", "loss_mask")
OF_TEACHER = ("last_positions", "teacher_argmax", "teacher_lse")
FORMATS = {torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16",
           torch.float16: "F16", torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8"}  # in the order of the file
BLOCK = 1 << 22  # bytes of one write
START = getattr(ctypes.CDLL(None), "sync_file_range", None)  # of Linux alone: man 2 sync_file_range


@dataclass(frozen=True)
class StoredRow:
    """One row. Arrays and tensors are views of the mapped file, which cost nothing until read, and are not to be
    written to; the states of an fp8 store are decoded (to bf16) when they are asked for."""

    row: int  # line in merged.jsonl
    ids: np.ndarray  # int32 [T]
    mask: np.ndarray  # uint8 [T]
    last_positions: np.ndarray  # int32 [S], inside the row
    teacher_argmax: np.ndarray  # int32 [S]
    teacher_lse: np.ndarray  # float32 [S]
    shard: "Shard"
    place: int  # in its shard

    @cached_property
    def aux(self) -> Tensor:
        """[T, 3h], the store's dtype. UserError where its checksum is looked at and wrong."""
        return self.shard.states("aux", self.place)

    @cached_property
    def last(self) -> Tensor:
        """[S, h], as `aux`."""
        return self.shard.states("last", self.place)


class Shard:
    """A shard that is read, mapped. `entry`: what the manifest says of it. `.lengths` int64 [R].

    verify, of what is looked at: "each" time, "first" time, or "never".
    """

    def __init__(self, folder: Path, entry: dict, verify: str = "first"):
        self.path, self.entry, self.verify = folder / entry["file"], entry, verify
        self.tensors = map_file(self.path, entry)
        self.checked = np.zeros((entry["rows"], 3), bool)
        try:
            expected = {"row_offsets": entry["tokens"], "last_offsets": entry["teacher"]}
            for name, end in expected.items():
                steps, offsets = self.tensors[name].diff(), self.tensors[name]
                if len(steps) != entry["rows"] or offsets[0] != 0 or offsets[-1] != end or (steps < 0).any():
                    raise self.damaged()
            self.lengths = self.tensors["row_offsets"].diff().numpy()
        except (KeyError, RuntimeError, TypeError, IndexError):
            raise self.damaged() from None

    def row(self, r: int) -> StoredRow:
        """The shard's row r, from 0."""
        self.check(r, TOKENS)
        t = {name: value.numpy() for name, value in parts(self.tensors, r, TOKENS).items()}
        return StoredRow(int(t["rows"][0]), t["input_ids"], t["loss_mask"], t["last_positions"], t["teacher_argmax"],
                         t["teacher_lse"], self, r)

    def states(self, name: str, r: int) -> Tensor:
        """aux or last of row r, as stored, or in bf16 where that is fp8."""
        column = AUX if name == "aux" else LAST
        self.check(r, column)
        stored = parts(self.tensors, r, column)
        scale = stored.get(f"{name}_scale")
        return stored[name] if scale is None else decode(stored[name], scale, torch.bfloat16)

    def check(self, r: int, column: int) -> None:
        if self.verify == "never" or self.verify == "first" and self.checked[r, column]:
            return
        try:
            right = checksum(self.tensors, r, column) == int(self.tensors["row_xxh3"][r, column])
        except (KeyError, IndexError, RuntimeError, TypeError):
            right = False
        if not right:
            raise self.damaged(f"row {self.entry['first'] + r} in ")
        self.checked[r, column] = True

    def damaged(self, where: str = "") -> UserError:
        return UserError(f"{where}{shown(self.path)}{rows_of(self.entry)} is not what was written (checksum); run the "
                         "extraction again, which makes that file anew")


def map_file(path: Path, entry: dict) -> dict[str, Tensor]:
    """The tensors of a safetensors file as views of the mapped file."""
    try:
        with safe_open(path, "pt") as handle:
            return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{shown(path)}{rows_of(entry)} cannot be read ({error}); run the extraction again, which "
                        "makes that file anew") from None


# ---------------------------------------------------------------------------------------------------- rows


def parts(tensors: dict, r: int, column: int) -> dict[str, Tensor]:
    """What one of row r's checksums is of, as views."""
    tokens, teacher = (slice(*map(int, tensors[name][r : r + 2])) for name in ("row_offsets", "last_offsets"))
    if column == TOKENS:
        return ({"rows": tensors["rows"][r : r + 1]} | {name: tensors[name][tokens] for name in OF_TOKENS}
                | {name: tensors[name][teacher] for name in OF_TEACHER})
    name, rows = ("aux", tokens) if column == AUX else ("last", teacher)
    return {key: tensors[key][rows] for key in (name, f"{name}_scale") if key in tensors}


def checksum(tensors: dict, r: int, column: int) -> int:
    """xxh3-64, as int64, of names, dtypes, shapes and bytes."""
    digest = xxhash.xxh3_64()
    for name, value in parts(tensors, r, column).items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(as_bytes(value))
    return int(np.uint64(digest.intdigest()).view(np.int64))


def as_bytes(value) -> np.ndarray:
    """The bytes of a tensor or array, uint8; a view where it lies in one piece."""
    tensor = torch.as_tensor(value).contiguous().flatten()
    return tensor.view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)


# ---------------------------------------------------------------------------------------------------- writing


def as_stored(tensors: dict, first: int, last: int, dtype: str | None) -> dict:
    """The tensors of rows first to last as a shard holds them: states in `dtype` (None: as they are), checksums added.

    ValueError where the tensors do not fit one another.
    """
    check_shapes(tensors, first, last)
    made = dict(tensors)
    for name, layers in LAYERS.items():
        if dtype == "fp8_e4m3":
            made[name], made[f"{name}_scale"] = encode(tensors[name], layers)
        elif dtype:
            made[name] = tensors[name].to(DTYPES[dtype])
    made = {name: value.cpu().contiguous() for name, value in made.items()}
    sums = [[checksum(made, r, column) for column in range(3)] for r in range(last - first + 1)]
    return made | {"row_xxh3": torch.tensor(sums, dtype=torch.int64)}


def check_shapes(tensors: dict, first: int, last: int) -> None:
    R, N, S = last - first + 1, len(tensors["input_ids"]), len(tensors["last_positions"])
    sizes = {name: len(tensors[name]) for name in (*OF_TOKENS, *OF_TEACHER, *LAYERS)}
    wanted = dict.fromkeys((*OF_TOKENS, "aux"), N) | dict.fromkeys((*OF_TEACHER, "last"), S)
    ends = [tensors[name][at].item() for name in ("row_offsets", "last_offsets") for at in (0, -1)]
    if sizes != wanted or ends != [0, N, 0, S] or tensors["rows"].tolist() != list(range(first, last + 1)):
        raise ValueError(f"rows {first} to {last}: {R} rows, offsets {ends}, lengths {sizes} do not fit one another")


def write_tensors(path: Path, tensors: dict) -> tuple[int, str]:
    """A safetensors file, byte for byte as the library writes it, fsynced; returns its size and its xxh3-128.

    Written here for the checksum: it is of what was to be written, and costs no second reading, for which a shard may
    have left the page cache already.
    """
    order = sorted(tensors, key=lambda name: (list(FORMATS).index(tensors[name].dtype), name))
    header, at = {}, 0
    for name in order:
        end = at + tensors[name].numel() * tensors[name].element_size()
        header[name] = {"dtype": FORMATS[tensors[name].dtype], "shape": list(tensors[name].shape),
                        "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = xxhash.xxh3_128()
    with open(path, "wb", buffering=0) as handle:
        for part in (len(text).to_bytes(8, "little") + text, *(as_bytes(tensors[name]) for name in order)):
            part = memoryview(part)
            for start in range(0, len(part), BLOCK):
                left = part[start : start + BLOCK]
                digest.update(left)
                while len(left):  # a write may be cut short, by a full disk first of all
                    left = left[handle.write(left):]
                start_writing(handle)
        os.fsync(handle.fileno())
    return 8 + len(text) + at, digest.hexdigest()


def start_writing(handle) -> None:
    """Have the disk begin with what was written so far, while the rest is prepared: half as fast again as leaving all
    of it to fsync, which still says whether it is there."""
    if START:
        START(handle.fileno(), ctypes.c_int64(0), ctypes.c_int64(0), 2)  # from 0 to the end; SYNC_FILE_RANGE_WRITE
