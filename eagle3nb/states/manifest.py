"""What lies in a store's folder, by name, and the manifest that says which of it is finished.

    states/manifest.json                       schema, fingerprint, sizes, and for each shard its range, counts, hash
    states/head.safetensors                    embedding [V, h], lm_head [V, h] (left out when tied), final_norm [h]
    states/shard-0000000-0000123.safetensors   rows 0 to 123 of the merged order
    states/<one of these>.<pid>.partial        being written
    states/<one of these>.claim                whose it is to write, while a process holds its lock
    states/.lock                               held by all that write the store, and alone by what deletes it

The manifest ends with the checksum of every byte before it, so that no byte of it can change unseen either.
"""

import json
from pathlib import Path

import torch
import xxhash

from eagle3nb.errors import UserError
from eagle3nb.files import atomic_write, shown
from eagle3nb.states.layout import HEAD, LOCK, MANIFEST, OWN, SCHEMA  # noqa: F401 (known as the manifest's)

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8_e4m3": torch.float8_e4m3fn}
BLOCK = 1 << 23  # bytes of one read
SEAL = ',\n "xxh3": "{}"\n}}\n'


def dtype_of(name: str) -> torch.dtype:
    """In which the states of a shard are gathered for a store of this dtype; fp8 is made of fp32 when they are written.
    """
    if name not in DTYPES:
        raise UserError(f"states_dtype {name!r} cannot be written; choose one of {', '.join(DTYPES)}")
    return torch.float32 if name == "fp8_e4m3" else DTYPES[name]


def shard_name(first: int, last: int) -> str:
    return f"shard-{first:07d}-{last:07d}.safetensors"


def shard_ranges(lengths, shard_tokens: int) -> list[tuple[int, int]]:
    """Rows (first, last) of every shard: as many as fit `shard_tokens`; a longer row has a shard of its own."""
    ranges, first, tokens = [], 0, 0
    for row, length in enumerate(map(int, lengths)):
        if row > first and tokens + length > shard_tokens:
            ranges.append((first, row - 1))
            first, tokens = row, 0
        tokens += length
    return [*ranges, (first, len(lengths) - 1)] if len(lengths) else []


# ---------------------------------------------------------------------------------------------------- the manifest


def sealed(manifest: dict) -> bytes:
    """The file's bytes: the manifest as JSON, and as its last key the xxh3-128 of all bytes before that key."""
    body = json.dumps(manifest, indent=1, ensure_ascii=False, allow_nan=False).removesuffix("\n}").encode()
    return body + SEAL.format(xxhash.xxh3_128_hexdigest(body)).encode()


def write_manifest(folder: Path, manifest: dict) -> None:
    with atomic_write(folder / MANIFEST, "wb") as handle:
        handle.write(sealed(manifest))


def read_manifest(folder: Path) -> dict:
    """UserError where there is none, where a byte of it has changed, and for another version's."""
    path = folder / MANIFEST
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{shown(path)} does not exist; run the extraction, which writes it") from None
    size = len(SEAL.format("0" * 32))
    body, seal = raw[:-size], raw[-size:]
    whole = seal == SEAL.format(xxhash.xxh3_128_hexdigest(body)).encode()
    try:
        manifest = json.loads(raw)
        schema = manifest["schema"]
    except (ValueError, KeyError, TypeError):
        whole, schema = False, SCHEMA
    if not whole and (schema == SCHEMA or seal.startswith(SEAL[:6].encode())):
        raise UserError(f"{shown(path)} is not what was written (checksum); bring it back from a copy, or delete it "
                        "and run the extraction again, which makes the store anew")
    if schema != SCHEMA:
        raise UserError(f"{shown(path)} has schema {schema}, this version reads {SCHEMA}; delete {shown(folder)} and "
                        "run the extraction again")
    manifest.pop("xxh3")
    return manifest


def files_of(manifest: dict) -> list[dict]:
    return [*manifest["shards"], *([manifest["head"]] if manifest["head"] else [])]


def rows_of(entry: dict) -> str:
    return f" (rows {entry['first']} to {entry['last']})" if "first" in entry else ""


def whole(folder: Path, entry: dict) -> bool:
    path = folder / entry["file"]
    return path.is_file() and path.stat().st_size == entry["bytes"]


def same(folder: Path, entry: dict, advance=lambda count: None) -> bool:
    """The file has the checksum that the manifest tells. advance(bytes) is called as it is read."""
    digest = xxhash.xxh3_128()
    try:
        with open(folder / entry["file"], "rb", buffering=0) as handle:
            while chunk := handle.read(BLOCK):
                digest.update(chunk)
                advance(len(chunk))
    except OSError:  # gone, or a disk that fails
        return False
    return digest.hexdigest() == entry["xxh3"]


def check_files(folder: Path, manifest: dict) -> None:
    """Every file of the manifest stands there with its size: a stat each."""
    for entry in files_of(manifest):
        if not whole(folder, entry):
            raise UserError(f"{shown(folder / entry['file'])}{rows_of(entry)} is missing or cut short; run the "
                            "extraction again, which makes it anew")
