"""Extraction: every row of the merged corpus through the target, into the store.

Rows are sorted by length for batching inside one shard's range and put back in order, so a shard's content depends on
nothing but its rows. The lm_head runs only where a teacher is needed (p with l[p] l[p+1] = 1), in chunks: training then
never sees the whole vocabulary. A killed extraction goes on with the first shard that is not in the manifest.
"""

import time
from pathlib import Path

import numpy as np
import torch

from eagle3nb.corpus.masks import teacher_positions
from eagle3nb.corpus.merged import Corpus
from eagle3nb.errors import UserError
from eagle3nb.files import disk_free, shown
from eagle3nb.lock import only_one
from eagle3nb.progress import progress
from eagle3nb.states import store as stores
from eagle3nb.states import target as targets
from eagle3nb.states.plan import states_bytes

LOGITS_BYTES = 1 << 26  # of one chunk of teacher logits in float32


def extract(corpus: Corpus, target, folder: str | Path, *, dtype: str, batch_tokens: int, shard_tokens: int,
            limit: int = 0) -> dict:
    """Write the store of `corpus` (its first `limit` rows; 0: all), or finish the one that stands.

    batch_tokens: padded tokens of one forward; shard_tokens: bound of one shard, which is held in memory. Returns
    counts, seconds and rates. Raises UserError for a row that the target cannot take, states that are not finite, a
    full disk, and a store of something else standing in `folder`.
    """
    stores.dtype_of(dtype)
    folder = Path(folder)
    rows = min(limit, len(corpus)) if limit else len(corpus)
    lengths = corpus.index["tokens"].to_numpy(np.int64)[:rows]
    check_corpus(corpus, lengths, target.facts)
    sizes = {"hidden": target.facts.hidden, "vocab": target.facts.vocab, "rows": rows, "tokens": int(lengths.sum())}
    ranges = stores.shard_ranges(lengths, shard_tokens)
    with only_one(folder / ".lock", wait=False, busy=f"another extraction is writing to {shown(folder)}; wait for it"):
        writer = stores.open_writer(folder, fingerprint(corpus, target, rows, dtype, shard_tokens), sizes)
        left = [r for r in ranges if r not in writer.done]
        check_disk(folder, target.facts, corpus, left, lengths, dtype)
        if not writer.manifest["head"]:
            writer.write_head(head_of(target))
        clock, began = {"forward_s": 0.0, "teacher_s": 0.0, "write_s": 0.0}, time.perf_counter()
        todo = int(sum(lengths[first : last + 1].sum() for first, last in left))
        with progress(todo, "extraction", "tokens") as bar:
            for first, last in left:
                tensors = shard(corpus, target, first, last, stores.dtype_of(dtype), batch_tokens, clock, bar)
                started = time.perf_counter()
                writer.write(first, last, tensors)
                clock["write_s"] += time.perf_counter() - started
        seconds = time.perf_counter() - began
    shards = writer.manifest["shards"]
    return {"rows": rows, "tokens": sizes["tokens"], "teacher_positions": sum(s["teacher"] for s in shards),
            "shards": len(shards), "shards_kept": len(ranges) - len(left), "dtype": dtype,
            "bytes": sum(entry["bytes"] for entry in stores.files_of(writer.manifest)), "extracted_tokens": todo,
            "seconds": seconds, "tokens_per_s": todo / seconds if todo else 0.0, **clock}


def fingerprint(corpus: Corpus, target, rows: int, dtype: str, shard_tokens: int) -> dict:
    """What makes two stores the same: equal fingerprints, equal content (up to the rounding of another batch size)."""
    identity = targets.target_identity(target.dir)
    return {"target config": identity["config"], "target weights": identity["weights"],
            "tokenizer": identity["tokenizer"], "layers": list(target.layers), "last": "after the final norm",
            "corpus": corpus.hash, "rows": rows, "dtype": dtype, "shard_tokens": shard_tokens, "engine": target.engine,
            "computed in": str(target.dtype).removeprefix("torch.")}


def check_corpus(corpus: Corpus, lengths, facts) -> None:
    if not len(lengths):
        raise UserError("the corpus has no rows; run the merge again")
    longest = int(lengths.argmax())
    if lengths[longest] > facts.max_positions:
        raise UserError(f"row {longest} of the corpus has {lengths[longest]} tokens, the target takes "
                        f"{facts.max_positions}; lower max_seq_len and merge again")
    if corpus.vocab_size > facts.vocab:
        raise UserError(f"the corpus was merged for a vocabulary of {corpus.vocab_size}, the target's is "
                        f"{facts.vocab}; merge again with this target")


def check_disk(folder: Path, facts, corpus: Corpus, left, lengths, dtype: str) -> None:
    """Refuse to begin what cannot end: the rest must fit the free space."""
    teacher = corpus.index["teacher_positions"].to_numpy(np.int64)
    tokens, positions = (int(sum(part[first : last + 1].sum() for first, last in left)) for part in (lengths, teacher))
    needed, free = states_bytes(facts, tokens, positions, dtype) if left else 0, disk_free(folder)
    if needed > free:
        raise UserError(f"the states need {needed / 1e9:,.2f} GB, {free / 1e9:,.2f} GB are free at {shown(folder)}; "
                        "free space, choose a work_dir on a larger disk, or a smaller states_dtype")


def head_of(target) -> dict:
    """What stands beside the manifest: the embedding and the final norm, and the head unless it is the embedding."""
    tensors = {"embedding": targets.embedding(target.dir), "final_norm": targets.final_norm(target.dir)}
    if not target.facts.tie_embedding:
        tensors["lm_head"] = targets.lm_head(target.dir)
    return tensors


def batches(lengths, batch_tokens: int) -> list[list[int]]:
    """Indices, longest first, in batches of at most `batch_tokens` tokens with their padding; at least one row each."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    made = []
    for i in order:
        if made and (len(made[-1]) + 1) * lengths[made[-1][0]] <= batch_tokens:
            made[-1].append(i)
        else:
            made.append([i])
    return made


def shard(corpus: Corpus, target, first: int, last: int, dtype: torch.dtype, batch_tokens: int, clock: dict,
          bar) -> dict:
    """The tensors of one shard, as store.py lays them out."""
    rows = [corpus.row(i) for i in range(first, last + 1)]
    positions = [teacher_positions(mask) for _, mask in rows]
    offsets = np.concatenate([[0], np.cumsum([len(ids) for ids, _ in rows])])
    last_offsets = np.concatenate([[0], np.cumsum([len(p) for p in positions])])
    N, S, h = offsets[-1], last_offsets[-1], target.facts.hidden
    out = {"input_ids": torch.from_numpy(np.concatenate([ids for ids, _ in rows])),
           "loss_mask": torch.from_numpy(np.concatenate([mask for _, mask in rows])),
           "aux": torch.empty(N, 3 * h, dtype=dtype), "last": torch.empty(S, h, dtype=dtype),
           "last_positions": torch.from_numpy(np.concatenate(positions).astype(np.int32)),
           "teacher_argmax": torch.empty(S, dtype=torch.int32), "teacher_lse": torch.empty(S, dtype=torch.float32),
           "row_offsets": torch.from_numpy(offsets.astype(np.int64)),
           "last_offsets": torch.from_numpy(last_offsets.astype(np.int64)), "rows": torch.arange(first, last + 1)}
    check_ids(out["input_ids"], target.facts.vocab, first, offsets)
    for batch in batches(np.diff(offsets), batch_tokens):
        started = time.perf_counter()
        states = target.capture([rows[i][0] for i in batch])
        forwarded = time.perf_counter()
        for i, (aux, final) in zip(batch, states, strict=True):
            check_finite(aux, final, first + i, target.layers)
            place = slice(last_offsets[i], last_offsets[i + 1])
            final = final[torch.from_numpy(positions[i]).to(final.device)]  # [S_i, h], in the target's dtype
            out["aux"][offsets[i] : offsets[i + 1]] = aux
            out["last"][place] = final
            out["teacher_argmax"][place], out["teacher_lse"][place] = teacher(target, final)
        bar.advance(int(sum(offsets[i + 1] - offsets[i] for i in batch)))
        clock["forward_s"] += forwarded - started
        clock["teacher_s"] += time.perf_counter() - forwarded
    return out


def teacher(target, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(argmax int32 [S], log-sum-exp fp32 [S]) over the whole vocabulary, from states in the target's own dtype."""
    chunk = max(1, LOGITS_BYTES // (4 * target.facts.vocab))
    argmax, lse = [torch.empty(0, dtype=torch.int32)], [torch.empty(0)]
    for part in last.split(chunk) if len(last) else ():
        logits = target.logits(part).float()  # [chunk, V]
        argmax.append(logits.argmax(-1).int().cpu())
        lse.append(logits.logsumexp(-1).cpu())
    return torch.cat(argmax), torch.cat(lse)


def check_ids(ids: torch.Tensor, vocab: int, first: int, offsets) -> None:
    wrong = ((ids < 0) | (ids >= vocab)).nonzero()
    if len(wrong):
        at = int(wrong[0])
        row = int(np.searchsorted(offsets, at, side="right")) - 1
        raise UserError(f"row {first + row} of the corpus holds id {int(ids[at])}, beyond the target's vocabulary of "
                        f"{vocab}; merge again with this target")


def check_finite(aux: torch.Tensor, last: torch.Tensor, row: int, layers) -> None:
    """UserError naming row, token and layer of the first NaN or infinity."""
    if aux.isfinite().all() and last.isfinite().all():
        return
    names = [*(f"layer {layer}" for layer in layers), "the last layer"]
    for name, part in zip(names, [*aux.chunk(3, dim=-1), last], strict=True):
        bad = (~part.isfinite().all(-1)).nonzero()
        if len(bad):
            raise UserError(f"row {row}, token {int(bad[0])}: {name} is not finite; check the target's weights and "
                            "dtype (fp16 overflows)")
