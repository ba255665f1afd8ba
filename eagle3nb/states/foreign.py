"""Hidden states that other tools left on disk, read into a store of ours through the checks that an engine passes.

Which file belongs to a row the token ids alone decide; nothing is substituted and no row is left out. Whether `last`
went through the final norm is tested, not believed (SGLang's has, vLLM's has not), and so are the layers, against the
checkpoint as far as this machine can load it. The formats: foreign_files.py.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import xxhash

from eagle3nb.errors import UserError
from eagle3nb.files import shown
from eagle3nb.progress import progress
from eagle3nb.states import conformance
from eagle3nb.states import target as targets
from eagle3nb.states.compare import Tolerance, explain_last, layers_match, median, over_rows, tolerance
from eagle3nb.states.extract import extract
from eagle3nb.states.foreign_files import find_files, read_sample, read_states, read_tokens
from eagle3nb.states.reference import final_norm, load_reference

ROWS, CUT = 8, 256  # rows that are compared with the checkpoint, and their tokens
BATCH_TOKENS = 1 << 14  # whose states are in memory at once
SEARCHED = 1000  # files that are looked through for the one that a missing row might have been
FP8 = Tolerance(0.5, 0.15, 0.9)  # e4m3 rounds by 0.03, a shallow layer under a scale for all four by 0.09
STORED = {torch.float32: "fp32", torch.float16: "fp32"}  # the store's dtype, unless told; bf16 for all others


def import_states(kind: str, folder: str | Path, corpus, target: str | Path, states: str | Path, *, dtype: str = "",
                  masks: str = "same", shard_tokens: int = 16384, limit: int = 0, seed: int = 0,
                  memory: int | None = None) -> dict:
    """The store of `corpus` (its first `limit` rows; 0: all) in the folder `states`, out of another tool's files.

    kind: specforge or speculators; target: directory of the model whose states they are; dtype: the store's (empty: the
    files' own); masks: "same" (a file's loss mask must be the corpus's) or "corpus" (the corpus's counts). Returns the
    tables "checks", "layers" and "last", and "files", "unused", "reference", "store" (what extract returns). UserError
    where a row has no file or a check fails. An import that was killed goes on when it is called again.
    """
    if masks not in ("same", "corpus"):
        raise UserError(f"masks is {masks!r}; choose same or corpus")
    files = FileTarget(kind, Path(folder), Path(target))
    conformance.same_vocabulary(corpus, files)
    count = min(limit, len(corpus)) if limit else len(corpus)
    used = files.assign(corpus, count, masks)
    found = check_files(files, corpus, count, seed, memory)
    made = extract(corpus, files, states, dtype=dtype or STORED.get(files.dtype, "bf16"), batch_tokens=BATCH_TOKENS,
                   shard_tokens=shard_tokens, limit=limit)
    return {"files": used, "unused": len(files.paths) - used, **found, "store": made}


class FileTarget:
    """Files in an engine's place: `facts`, `layers`, `dir`, `dtype`, `engine`, `capture`, `logits`. It cannot generate.

    capture knows the rows that `assign` has found files for. `normed`: is the files' `last` after the final norm?
    """

    def __init__(self, kind: str, folder: Path, target: Path):
        self.kind, self.folder, self.dir, self.engine = kind, folder, target, f"{kind} files"
        self.facts = targets.facts_of(target)
        self.layers = targets.captured_layers(self.facts.layers)
        self.paths = find_files(kind, folder)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.head = targets.lm_head(target).to(self.device, torch.float32)
        self.norm, self.normed = final_norm(target), True
        stored = read_states(kind, self.paths[0])[0].dtype
        self.eight = stored == torch.float8_e4m3fn
        self.dtype = torch.bfloat16 if self.eight else stored
        self.by_ids = {}  # key_of the ids → file

    def assign(self, corpus, count: int, masks: str) -> int:
        """Find the file of each of the corpus's first `count` rows; how many files that are. UserError names a row."""
        told, hashes = {}, corpus.index["xxh3"].to_numpy()[:count]
        with progress(len(self.paths), "import: reading tokens", "files") as bar:
            for path in self.paths:
                ids, mask = read_tokens(path)
                if key_of(ids) not in self.by_ids:
                    self.by_ids[key_of(ids)], told[key_of(ids)] = path, mask
                bar.advance()
        missing = [i for i, key in enumerate(hashes) if key not in self.by_ids]
        if missing:
            raise UserError(f"{len(missing)} of {count} rows of the corpus have no file with their tokens in "
                            f"{shown(self.folder)}, the first is {self.nearest(corpus, missing[0])}; merge the rows "
                            "that the files were made of, cut at the same length")
        for i, key in enumerate(hashes if masks == "same" else ()):
            if told[key] is None:
                continue
            wrong = np.flatnonzero(told[key] != corpus.row(i)[1])
            if len(wrong):
                raise UserError(f"the loss mask in {shown(self.by_ids[key])} is not that of row {i} of the corpus, "
                                f"first at token {wrong[0]}; set masks to corpus to take the corpus's")
        return len({self.by_ids[key] for key in hashes})

    def nearest(self, corpus, row: int) -> str:
        """The row, and the file that begins most like it: a row cut off at another length is the usual reason."""
        ids, found, best = corpus.row(row)[0], "", 7
        for path in self.paths[:SEARCHED]:
            other = read_tokens(path)[0]
            n = min(len(ids), len(other))
            apart = np.flatnonzero(ids[:n] != other[:n])
            same = int(apart[0]) if len(apart) else n
            if same > best:
                best, found = same, f" ({path.name} has the same first {same} tokens, and {len(other)} in all)"
        return f"row {row} of {len(ids)} tokens{found}"

    def capture(self, rows) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [self.states(np.asarray(ids, np.int32)) for ids in rows]

    def states(self, ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        path = self.by_ids[key_of(ids)]
        sample = read_sample(self.kind, path, self.facts.hidden)
        if not np.array_equal(sample.ids, ids):
            raise UserError(f"{shown(path)} has changed since its tokens were read; run the import again")
        if bad := conformance.not_finite(sample.aux, sample.last, self.layers):
            raise UserError(f"{shown(path)}, {bad}; have {self.kind} make it again")
        last = sample.last if self.normed else self.norm(sample.last)
        return sample.aux.to(self.dtype), last.to(self.dtype)

    @torch.inference_mode()
    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """[., h] after the final norm → [., V] in float32, through the checkpoint's head."""
        return F.linear(last.to(self.device, torch.float32), self.head)


def key_of(ids: np.ndarray) -> str:
    """As the merge's index has it: xxh3-128 of the ids' int32 bytes."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(ids, "<i4").tobytes())


# ---------------------------------------------------------------------------------------------------- checks


def check_files(files: FileTarget, corpus, count: int, seed: int, memory: int | None) -> dict:
    """Layers and norm of a few files against the checkpoint, as far as it can be loaded; sets `files.normed`.

    In what precision they were computed no file tells: bf16's tolerance holds for all but fp8.
    """
    allowed = FP8 if files.eight else tolerance(torch.bfloat16, files.dir)
    rows = [corpus.row(i) for i in np.random.default_rng(seed).permutation(count)[:ROWS].tolist()]
    states = [(aux[:CUT], last[:CUT]) for aux, last in conformance.captured(files, [ids for ids, _ in rows])]
    reference, what = load_reference(files.dir, files.layers, memory)
    layers, normed = [], None
    try:
        apart = conformance.distinct_layers(files, states, allowed)
        if reference:
            truth = [reference.streams(ids[:CUT]) for ids, _ in rows]
            layers = layers_match(states, truth, files.layers, allowed)
            normed = read_as(states, truth, files.norm, allowed) if reference.whole else None
    except UserError as error:
        raise UserError(str(error).replace("probe: ", f"{shown(files.folder)}: ", 1)) from None
    last = readings(files, rows, states)
    files.normed = decide(files, last) if normed is None else normed
    for row, reading in zip(last, (True, False), strict=True):
        row["taken"] = files.normed is reading
    told, how = "holds" if files.normed else "came before it, and is normed here", "lm_head, root mean square"
    line, bare = conformance.line, layers or [{"layer": layer, "median": None} for layer in files.layers]
    table = [
        line("as many states as tokens, every value finite", "the files", None, None, "holds"),
        line("three different layers (median of the nearest two, above)", "the files", apart, allowed.middle),
        *(line(f"layer {row['layer']} is the stream after {row['layer']} layers (median)", what, row["median"],
               allowed.middle, unless="not loaded that far") for row in bare),
        line("last went through the final norm", how if normed is None else what, None, None, told)]
    return {"reference": what, "checks": table, "layers": layers, "last": last}


def read_as(states, truth, norm, allowed: Tolerance) -> bool:
    """Is `last` the checkpoint's after the final norm (True) or before it (False)? UserError where it is neither."""
    mine, right = [last for _, last in states], [s.last for s in truth]
    found = {"after the final norm": over_rows(mine, right),
             "before it": over_rows(mine, [s.residual[-1] for s in truth]),
             "after it twice": over_rows(mine, [norm(last) for last in right])}
    after, before = found["after the final norm"], found["before it"]
    if not allowed.fits(after) and not allowed.fits(before):
        raise UserError(explain_last(found, mine, right, allowed))
    return median(after) <= median(before)


@torch.inference_mode()
def readings(files: FileTarget, rows, states) -> list[dict]:
    """`last` as it is and through the norm: the share of supervised tokens that lm_head makes likeliest, and rms."""
    table = []
    for name, change in (("as it is", lambda last: last), ("through the final norm", files.norm)):
        hits = tokens = 0
        for (ids, mask), (_, last) in zip(rows, states, strict=True):
            at = np.flatnonzero(mask[1 : len(last)])  # the position before each supervised token predicts it
            chosen = files.logits(change(last)[at]).argmax(-1).cpu().numpy()
            hits, tokens = hits + int((chosen == ids[at + 1]).sum()), tokens + len(at)
        rms = conformance.root_mean_square([(None, change(last)) for _, last in states], files.norm, files.facts)
        table.append({"last is read": name, "argmax share": hits / tokens if tokens else None, "tokens": tokens,
                      "rms over the norm's weight": rms})
    return table


def decide(files: FileTarget, table: list[dict]) -> bool:
    """Without the checkpoint's own states: after the norm if the root mean square says so, and lm_head agrees.

    Of text that is not the target's, lm_head may say nothing; where it does say, by four standard errors, it counts.
    """
    plain, normed = (row["argmax share"] or 0.0 for row in table)
    rms = table[0]["rms over the norm's weight"]
    says = abs(plain - normed) > 4 * (0.5 / max(1, table[0]["tokens"])) ** 0.5
    after = plain > normed if rms is None else abs(rms - 1) <= conformance.UNIT
    if (says and (plain > normed) is not after) or (rms is None and not says):
        raise UserError(f"{shown(files.folder)}: whether its last states are before or after the final norm cannot be "
                        f"told (lm_head makes {plain:.0%} of the text from them, {normed:.0%} through the norm); free "
                        "the memory to load the target")
    return after
