"""Extraction: every row of the merged corpus through the target, into the store.

A shard's content depends on nothing but its rows, so any process can make any shard alone. Processes that call
`extract` on one folder share its shards: each claims one, makes it, goes on with the next that is free, and returns
when the store is whole; what a killed process had begun is free at once. While a shard is encoded and written, the next
one is in the target (Background). So two are open at most, which is what a kill loses.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from eagle3nb.corpus.merged import Corpus
from eagle3nb.errors import UserError
from eagle3nb.files import disk_free, shown
from eagle3nb.progress import progress
from eagle3nb.states import store as stores
from eagle3nb.states import target as targets
from eagle3nb.states.conformance import same_vocabulary
from eagle3nb.states.forward import Room, batches, check_ids, shard  # noqa: F401 (known as ours)
from eagle3nb.states.plan import states_bytes

POLL = 0.5  # seconds between looks at what other processes still hold
CLOCK = ("forward_s", "teacher_s", "gather_s", "wait_s", "others_s", "write_s")


def extract(corpus: Corpus, target, folder: str | Path, *, dtype: str, batch_tokens: int, shard_tokens: int,
            limit: int = 0) -> dict:
    """Write the store of `corpus` (its first `limit` rows; 0: all), or finish the one that stands.

    batch_tokens: padded tokens of one forward; shard_tokens: bound of one shard, of which two are held in memory. Other
    processes may call this on the same folder at any time.

    Returns counts and seconds. Of this process: "extracted_tokens", "shards_made", and "seconds" in all, of which
    "forward_s", "teacher_s", "gather_s" (states checked and put in place), "wait_s" (for a shard to be written) and
    "others_s" (for other processes) follow one another; "write_s" ran beside them. "tokens_per_s" leaves others_s out.
    Of the store: "shards_kept" stood before, "shards_by_others" came meanwhile.

    Raises UserError for a row that the target cannot take, states that are not finite, a full disk, and a store of
    something else standing in `folder`; shards that were finished before stay.
    """
    kind = gathered_in(target, dtype)
    folder = Path(folder)
    rows = min(limit, len(corpus)) if limit else len(corpus)
    lengths = corpus.index["tokens"].to_numpy(np.int64)[:rows]
    check_corpus(corpus, lengths, target)
    sizes = {"hidden": target.facts.hidden, "vocab": target.facts.vocab, "rows": rows, "tokens": int(lengths.sum())}
    ranges = stores.shard_ranges(lengths, shard_tokens)
    tokens = {(first, last): int(lengths[first : last + 1].sum()) for first, last in ranges}
    with stores.open_writer(folder, fingerprint(corpus, target, rows, dtype, shard_tokens), sizes) as writer:
        left = missing(writer, tokens)
        check_disk(folder, target.facts, corpus, left, lengths, dtype)
        if not writer.manifest["head"]:
            writer.write_head(head_of(target))
        clock, began = dict.fromkeys(CLOCK, 0.0), time.perf_counter()
        with progress(sum(tokens[r] for r in left), "extraction", "tokens") as bar:
            made = share(corpus, target, writer, tokens, kind, batch_tokens, clock, bar)
        seconds, count = time.perf_counter() - began, sum(tokens[r] for r in made)
        manifest = writer.manifest
    shards = manifest["shards"]
    return {"rows": rows, "tokens": sizes["tokens"], "teacher_positions": sum(s["teacher"] for s in shards),
            "shards": len(shards), "shards_kept": len(ranges) - len(left), "shards_made": len(made),
            "shards_by_others": len({*left} - {*made}), "dtype": dtype,
            "bytes": sum(entry["bytes"] for entry in stores.files_of(manifest)), "extracted_tokens": count,
            "seconds": seconds, "tokens_per_s": count / (seconds - clock["others_s"]) if count else 0.0, **clock}


def share(corpus, target, writer, tokens: dict, dtype: torch.dtype, batch_tokens: int, clock: dict, bar) -> list:
    """Make every shard of `tokens` ({(first, last): its tokens}) that no other process makes; returns those made here.

    Ends when all stand. What another process holds is waited for, and taken over where that process dies.
    """
    made, begun, rooms = [], missing(writer, tokens), (Room(), Room())
    with Background(writer, clock) as background:
        while left := missing(writer, tokens):
            before = len(made)
            for first, last in left:
                with ExitStack() as claim:
                    if not claim.enter_context(writer.claim(first, last)):
                        continue
                    tell(bar, tokens, begun, made, missing(writer, tokens))
                    tensors = shard(corpus, target, first, last, dtype, batch_tokens, clock, bar, background.check,
                                    rooms[len(made) % 2])  # free: the shard before the one before is written
                    background.hand(first, last, tensors, claim.pop_all())
                made.append((first, last))
            background.wait()
            if len(made) == before:
                tell(bar, tokens, begun, made, left, "waits for other processes")
                time.sleep(POLL)
                clock["others_s"] += POLL
        tell(bar, tokens, begun, made, [])
    return made


def missing(writer, ranges) -> list[tuple[int, int]]:
    done = writer.done
    return [r for r in ranges if r not in done]


def tell(bar, tokens: dict, begun: list, made: list, left: list, note: str = "") -> None:
    """The bar's total: what was made here, and what nobody has made so far."""
    bar.expect([sum(tokens[r] for r in {*made, *left})])
    others = len({*begun} - {*made, *left})
    bar.advance(0, note or (f"{others} shards by other processes" if others else ""))


class Background:
    """Encodes and writes one shard in a thread, while the next is made. Its claim ends when it stands.

    What goes wrong there is raised here, at the next batch at the latest; where this block ends by an error of its own,
    the shard that is being written is finished first.
    """

    def __init__(self, writer, clock: dict):
        self.writer, self.clock, self.writing = writer, clock, None
        self.thread = ThreadPoolExecutor(1, "writer")

    def hand(self, first: int, last: int, tensors: dict, claim: ExitStack) -> None:
        """Waits for the shard before, so that two at most are in memory."""
        with claim:
            self.wait()
            self.writing = self.thread.submit(self.write, first, last, tensors, claim.pop_all())

    def write(self, first: int, last: int, tensors: dict, claim: ExitStack) -> None:
        began, name = time.perf_counter(), stores.shard_name(first, last)
        with claim:
            try:
                self.writer.write(first, last, tensors)
            except Exception as error:
                if not isinstance(error, UserError):
                    error.add_note(f"while {name} was written")
                elif name not in str(error):
                    raise UserError(f"{name}: {error}") from error
                raise
        self.clock["write_s"] += time.perf_counter() - began

    def check(self) -> None:
        """Raises what went wrong, if anything has so far."""
        if self.writing and self.writing.done():
            self.wait()

    def wait(self) -> None:
        began, (writing, self.writing) = time.perf_counter(), (self.writing, None)
        if writing:
            writing.result()
        self.clock["wait_s"] += time.perf_counter() - began

    def __enter__(self) -> "Background":
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            self.wait()
        except Exception:
            if kind is None:
                raise
        finally:
            self.thread.shutdown()


def fingerprint(corpus: Corpus, target, rows: int, dtype: str, shard_tokens: int) -> dict:
    """What makes two stores the same: equal fingerprints, equal content (up to the rounding of another batch size)."""
    identity = targets.target_identity(target.dir)
    return {"target config": identity["config"], "target weights": identity["weights"],
            "tokenizer": identity["tokenizer"], "layers": list(target.layers), "last": "after the final norm",
            "corpus": corpus.hash, "rows": rows, "dtype": dtype, "shard_tokens": shard_tokens, "engine": target.engine,
            "computed in": str(target.dtype).removeprefix("torch.")}


def gathered_in(target, dtype: str) -> torch.dtype:
    """In which the states of a shard wait to be written. UserError for a states_dtype that cannot be written."""
    kind = stores.dtype_of(dtype)
    return target.dtype if dtype == "fp8_e4m3" else kind  # exact, and of a target in bf16 half the memory of fp32


def check_corpus(corpus: Corpus, lengths, target) -> None:
    """UserError where the target cannot take the rows, by their lengths or by their vocabulary."""
    if not len(lengths):
        raise UserError("the corpus has no rows; run the merge again")
    longest = int(lengths.argmax())
    if lengths[longest] > target.facts.max_positions:
        raise UserError(f"row {longest} of the corpus has {lengths[longest]} tokens, the target takes "
                        f"{target.facts.max_positions}; lower max_seq_len and merge again")
    same_vocabulary(corpus, target)


def check_disk(folder: Path, facts, corpus: Corpus, left, lengths, dtype: str) -> None:
    """Refuse to begin what cannot end: the rest must fit the free space."""
    needing = corpus.index["teacher_positions"].to_numpy(np.int64)
    tokens, positions = (int(sum(part[first : last + 1].sum() for first, last in left)) for part in (lengths, needing))
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
