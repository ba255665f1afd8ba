"""Reading a store: rows of a finished extraction, by any number of processes at once.

The files are mapped: a row is a view, and all processes share the pages. What is read is checked against its checksum
on the way, as `verify` says: "each" time, the "first" time in this process, or "never". Layout: manifest.py (the
folder), shard.py (one file of it); writing: writing.py.
"""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import xxhash

from eagle3nb.errors import UserError
from eagle3nb.files import resolve, shown
from eagle3nb.progress import progress
from eagle3nb.states.manifest import (  # noqa: F401 (some are what others know as this module's)
    HEAD,
    MANIFEST,
    OWN,
    SCHEMA,
    check_files,
    dtype_of,
    files_of,
    read_manifest,
    rows_of,
    same,
    shard_name,
    shard_ranges,
)
from eagle3nb.states.shard import AUX, LAST, TOKENS, Shard, StoredRow, as_bytes, map_file, parts
from eagle3nb.states.writing import ShardWriter, open_writer  # noqa: F401 (as above)

VERIFY = ("each", "first", "never")


class Store:
    """A finished store, read-only. `.lengths` int64 [R], `.fingerprint`, `.manifest`, `.hidden`, `.vocab`, len()."""

    def __init__(self, folder: Path, manifest: dict, verify: str):
        self.folder, self.manifest, self.fingerprint = folder, manifest, manifest["fingerprint"]
        self.hidden, self.vocab, self.verifies = manifest["hidden"], manifest["vocab"], verify
        self.shards = manifest["shards"]
        self.opened = [Shard(folder, entry, verify) for entry in self.shards]
        self.firsts = np.array([entry["first"] for entry in self.shards])
        self.lengths = np.concatenate([shard.lengths for shard in self.opened])
        self.head = None

    @classmethod
    def open(cls, folder: str | Path, verify: str = "first") -> "Store":
        """Raises UserError where the extraction has not run or has not finished, and where a file is cut or gone."""
        if verify not in VERIFY:
            raise UserError(f"verify is {verify!r}; choose one of {', '.join(VERIFY)}")
        folder = Path(folder)
        manifest = read_manifest(folder)
        check_finished(folder, manifest)
        check_files(folder, manifest)
        return cls(folder, manifest, verify)

    def __len__(self) -> int:
        return len(self.lengths)

    def row(self, i: int) -> StoredRow:
        """Row i of the merged order. IndexError outside the store; UserError where what is read is not what was
        written."""
        if not 0 <= i < len(self):
            raise IndexError(i)
        shard = int(np.searchsorted(self.firsts, i, side="right")) - 1
        return self.opened[shard].row(i - int(self.firsts[shard]))

    def tensors(self, shard: int) -> dict[str, torch.Tensor]:
        """All tensors of one shard, mapped, as they are stored and unchecked."""
        return self.opened[shard].tensors

    def head_tensors(self) -> dict[str, torch.Tensor]:
        if self.head is None:
            if self.verifies != "never" and not same(self.folder, self.manifest["head"]):
                raise differs(self.folder, self.manifest["head"])
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

    def verify(self, show: bool = False) -> int:
        """Read every byte against its checksum. Returns the bytes; UserError names the first file that differs."""
        return verify_files(self.folder, self.manifest, show)

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
        for shard in self.opened:
            for r in range(len(shard.lengths)):
                for column in (TOKENS, AUX, LAST):
                    shard.check(r, column)
                    for value in parts(shard.tensors, r, column).values():
                        digest.update(as_bytes(value))
        for name in sorted(self.head_tensors()):
            digest.update(as_bytes(self.head_tensors()[name]))
        return digest.hexdigest()


# ---------------------------------------------------------------------------------------------------- the whole


def check_finished(folder: Path, manifest: dict) -> None:
    have = sum(shard["rows"] for shard in manifest["shards"])
    if have != manifest["rows"] or not manifest["head"]:
        raise UserError(f"{shown(folder)} holds {have} of {manifest['rows']} rows; run the extraction to its end")


def verify(folder: str | Path) -> str:
    """`eagle3nb verify`: what was found, in a line. UserError names the first file that is not what was written."""
    folder = resolve(folder)
    manifest = read_manifest(folder)
    size = verify_files(folder, manifest, show=True)
    check_finished(folder, manifest)
    return (f"{shown(folder)}: {manifest['rows']:,} rows, {len(manifest['shards']):,} shards, {size / 1e9:,.3f} GB; "
            "every byte is what was written")


def verify_files(folder: Path, manifest: dict, show: bool) -> int:
    """Every byte of every file against its checksum; show: with rate and time left. Returns the bytes."""
    check_files(folder, manifest)
    total = sum(entry["bytes"] for entry in files_of(manifest))
    with progress(total, "checksums", "bytes") if show else nullcontext() as bar:
        for entry in files_of(manifest):
            if not same(folder, entry, bar.advance if show else lambda count: None):
                raise differs(folder, entry)
    return total


def differs(folder: Path, entry: dict) -> UserError:
    return UserError(f"{shown(folder / entry['file'])}{rows_of(entry)} is not what was written (checksum); run the "
                     "extraction again, which makes that file anew")
