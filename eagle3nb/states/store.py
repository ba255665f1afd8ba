"""Hidden states on disk: shards of whole rows, a manifest, and the target's embedding and head beside them.

    states/manifest.json                       schema, fingerprint, sizes, and for each shard its range, counts, hash
    states/head.safetensors                    embedding [V, h], lm_head [V, h] (left out when tied), final_norm [h]
    states/shard-0000000-0000123.safetensors   rows 0 to 123 of the merged order

A shard of R rows, N tokens and S teacher positions (p with l[p] l[p+1] = 1) holds

    input_ids int32 [N]   loss_mask uint8 [N]   aux [N, 3h]            row_offsets int64 [R+1]   rows int64 [R]
    last [S, h]   last_positions int32 [S], inside their row   last_offsets int64 [R+1]
    teacher_argmax int32 [S]   teacher_lse fp32 [S]                    both over the full vocabulary

Writing: the shard beside its name, fsync, rename, and only then its entry in the manifest; so a process killed at any
moment leaves finished shards and files that the next one knows to be nobody's. The ranges follow from the corpus and
`shard_tokens` alone. Reading maps the files: a row is a view, and any number of processes share the pages.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open

from eagle3nb.errors import UserError
from eagle3nb.files import shown, xxh3_file
from eagle3nb.states.manifest import (  # noqa: F401 (names that others know as this module's)
    DTYPES,
    HEAD,
    MANIFEST,
    OWN,
    SCHEMA,
    check_files,
    dtype_of,
    files_of,
    read_manifest,
    rows_of,
    shard_name,
    shard_ranges,
)
from eagle3nb.states.writing import ShardWriter, open_writer  # noqa: F401 (as above)


@dataclass(frozen=True)
class StoredRow:
    """One row. Tensors are views of the mapped file: they cost nothing until read, and are not to be written to."""

    row: int  # line in merged.jsonl
    ids: np.ndarray  # int32 [T]
    mask: np.ndarray  # uint8 [T]
    aux: torch.Tensor  # [T, 3h]
    last: torch.Tensor  # [S, h]
    last_positions: np.ndarray  # int32 [S], inside the row
    teacher_argmax: np.ndarray  # int32 [S]
    teacher_lse: np.ndarray  # float32 [S]


class Store:
    """A finished store, read-only. `.lengths` int64 [R], `.fingerprint`, `.manifest`, `.hidden`, `.vocab`, len()."""

    def __init__(self, folder: Path, manifest: dict):
        self.folder, self.manifest, self.fingerprint = folder, manifest, manifest["fingerprint"]
        self.hidden, self.vocab = manifest["hidden"], manifest["vocab"]
        self.shards = manifest["shards"]
        self.firsts = np.array([shard["first"] for shard in self.shards])
        self.mapped, self.head = {}, None
        offsets = [self.tensors(i)["row_offsets"] for i in range(len(self.shards))]
        self.lengths = np.concatenate([np.diff(part.numpy()) for part in offsets]).astype(np.int64)

    @classmethod
    def open(cls, folder: str | Path) -> "Store":
        """Raises UserError where the extraction has not run or has not finished, and where a file is cut or gone."""
        folder = Path(folder)
        manifest = read_manifest(folder)
        have = sum(shard["rows"] for shard in manifest["shards"])
        if have != manifest["rows"] or not manifest["head"]:
            raise UserError(f"{shown(folder)} holds {have} of {manifest['rows']} rows; run the extraction to its end")
        check_files(folder, manifest)
        return cls(folder, manifest)

    def __len__(self) -> int:
        return len(self.lengths)

    def tensors(self, shard: int) -> dict[str, torch.Tensor]:
        """All tensors of one shard, mapped; opened once a process."""
        if shard not in self.mapped:
            self.mapped[shard] = map_file(self.folder / self.shards[shard]["file"], self.shards[shard])
        return self.mapped[shard]

    def row(self, i: int) -> StoredRow:
        """Row i of the merged order. IndexError outside the store."""
        if not 0 <= i < len(self):
            raise IndexError(i)
        shard = int(np.searchsorted(self.firsts, i, side="right")) - 1
        t, r = self.tensors(shard), i - int(self.firsts[shard])
        tokens = slice(int(t["row_offsets"][r]), int(t["row_offsets"][r + 1]))
        teacher = slice(int(t["last_offsets"][r]), int(t["last_offsets"][r + 1]))
        return StoredRow(
            row=int(t["rows"][r]), ids=t["input_ids"][tokens].numpy(), mask=t["loss_mask"][tokens].numpy(),
            aux=t["aux"][tokens], last=t["last"][teacher], last_positions=t["last_positions"][teacher].numpy(),
            teacher_argmax=t["teacher_argmax"][teacher].numpy(), teacher_lse=t["teacher_lse"][teacher].numpy())

    def head_tensors(self) -> dict[str, torch.Tensor]:
        if self.head is None:
            self.head = map_file(self.folder / HEAD, self.manifest["head"])
        return self.head

    def embedding(self) -> torch.Tensor:
        """The target's input embedding [V, h], in the checkpoint's dtype."""
        return self.head_tensors()["embedding"]

    def lm_head(self) -> torch.Tensor:
        """The target's output head [V, h], in the checkpoint's dtype; of a tied target, its embedding."""
        return self.head_tensors().get("lm_head", self.embedding())

    def lm_head_rows(self, ids) -> torch.Tensor:
        """[D, h]: the head's rows of these target ids."""
        return self.lm_head()[torch.as_tensor(ids, dtype=torch.long)]

    def final_norm(self) -> torch.Tensor:
        return self.head_tensors()["final_norm"]

    def verify(self) -> int:
        """Read every byte against its checksum. Returns the bytes; UserError names the first shard that differs."""
        for entry in files_of(self.manifest):
            if xxh3_file(self.folder / entry["file"]) != entry["xxh3"]:
                raise UserError(f"{shown(self.folder / entry['file'])}{rows_of(entry)} is not what was written "
                                "(checksum): delete that file and run the extraction again, which makes it anew")
        return sum(entry["bytes"] for entry in files_of(self.manifest))

    def check_corpus(self, corpus) -> None:
        """Every row's ids and mask against the merged corpus. UserError names the row; nothing is substituted."""
        if self.fingerprint["corpus"] != corpus.hash:
            raise UserError(f"{shown(self.folder)} holds the states of another corpus; delete it and extract again")
        for i in range(len(self)):
            stored, (ids, mask) = self.row(i), corpus.row(i)
            if stored.row != i or not np.array_equal(stored.ids, ids) or not np.array_equal(stored.mask, mask):
                raise UserError(f"row {i} of {shown(self.folder)} has other tokens than row {i} of the corpus; "
                                f"delete {shown(self.folder)} and extract again")

    def content_hash(self) -> str:
        """xxh3-128 over every tensor of every row and of the head: equal content, however it is cut into shards."""
        digest = xxhash.xxh3_128()
        for i in range(len(self)):
            row = self.row(i)
            for value in (row.ids, row.mask, row.aux, row.last, row.last_positions, row.teacher_argmax,
                          row.teacher_lse):
                digest.update(as_bytes(value))
        for name in sorted(self.head_tensors()):
            digest.update(as_bytes(self.head_tensors()[name]))
        return digest.hexdigest()


def map_file(path: Path, entry: dict) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file as views of the mapped file."""
    try:
        with safe_open(path, "pt") as handle:
            return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{shown(path)}{rows_of(entry)} cannot be read ({error}): delete that file and run the "
                        "extraction again, which makes it anew") from None


def as_bytes(value) -> np.ndarray:
    tensor = torch.as_tensor(value).contiguous()
    return tensor.view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)
