"""What the extraction will cost in disk, memory and time, told from the config alone, before anything runs."""

import math
from contextlib import suppress
from pathlib import Path

import psutil

from eagle3nb.errors import UserError
from eagle3nb.files import disk_free, read_json
from eagle3nb.states.parameters import experts_of, weights_bytes
from eagle3nb.states.target import BYTES, TargetFacts, facts_of

RUNTIME = 430_000_000  # bytes of a process with Python, torch and Transformers, before it does anything (measured)
SLACK = 64_000_000  # bytes that malloc keeps of what was freed: twice its largest mmap threshold
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))  # of a container
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
    return per_token * tokens + per_teacher * teacher_positions + head_bytes(facts)


def head_bytes(facts: TargetFacts) -> int:
    return 2 * facts.vocab * facts.hidden * (1 if facts.tie_embedding else 2)


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
    """Of the files in it. An extraction may be writing there: one that it renames meanwhile counts for nothing."""
    folder, total = Path(folder), 0
    for file in folder.iterdir() if folder.is_dir() else ():
        with suppress(FileNotFoundError):
            total += file.stat().st_size if file.is_file() else 0
    return total


def store_files(tokens: int, records: int, shard_tokens: int) -> int:
    """Files of a store: shards, each short of `shard_tokens` by half a row on the average, the head, the manifest."""
    if not tokens:
        return 2
    short = tokens / max(records, 1) / 2
    return max(1, math.ceil(tokens / max(shard_tokens - short, 2 * short, 1))) + 2


def hours(tokens: float, tokens_per_s: float, gpus: int = 1) -> dict:
    """{"hours", "gpu_hours", "formula"} of `tokens` at a rate that `gpus` of them reach together."""
    if not tokens_per_s > 0 or gpus < 1:
        raise UserError(f"a rate of {tokens_per_s} tokens/s on {gpus} GPUs gives no time; state both above zero")
    wall = tokens / tokens_per_s / 3600
    return {"hours": wall, "gpu_hours": wall * gpus,
            "formula": f"{tokens:,.0f} tokens / {tokens_per_s:,.0f} tokens/s on {gpus} GPU{'s' * (gpus > 1)}"}


def extraction_memory(folder: str | Path, *, batch_tokens: int, shard_tokens: int, states_dtype: str,
                      weights_dtype: str = "bf16", longest: int = 0, device: str = "cuda") -> dict:
    """Peak memory of the extraction: {"parts": [{"part", "where", "bytes", "formula"}], "device", "host", "total"}.

    T: tokens of one forward, `batch_tokens` or the longest row; h hidden, m the widest MLP of a token, both in the
    weights' compute dtype; C: a chunk of the teacher's logits. The forward and the teacher follow one another, so the
    larger counts; the states of the batch before are still held. device "cuda": weights and batch lie on the GPUs
    ("device"), of all of them together; "cpu": everything is host memory. engine=transformers computes in fp32.
    """
    from eagle3nb.states.forward import LOGITS_BYTES  # torch only here

    facts, c = facts_of(folder), read_json(Path(folder) / "config.json")
    c = c.get("text_config") or c
    weights, how = weights_bytes(folder, weights_dtype)
    T, h, b = max(batch_tokens, longest), facts.hidden, 4 if weights_dtype == "fp32" else 2
    expert, (experts, chosen) = c.get("moe_intermediate_size") or facts.intermediate, experts_of(c)
    routed = (chosen + (c.get("n_shared_experts") or 0)) * expert if experts else 0
    m = max(facts.intermediate if not experts or c.get("first_k_dense_replace") else 0, routed)
    logits = min(LOGITS_BYTES, 4 * facts.vocab * T)
    forward, teacher = b * T * (8 * h + 3 * m), b * T * 4 * h + 2 * logits
    gathered = states_dtype if states_dtype != "fp8_e4m3" else "fp32" if b == 4 else "bf16"  # fp8 is made when written
    shard, encoded = (states_bytes(facts, shard_tokens, shard_tokens, dtype) - head_bytes(facts)
                      for dtype in (gathered, states_dtype))
    parts = [
        ("weights", "device", weights, how),
        ("one batch", "device", max(forward, teacher) + b * T * 5 * h,
         f"{b} T (8 h + 3 m) in the forward or {b} T 4 h + 2 C for the teacher, and {b} T 5 h of the batch before; "
         f"T {T:,}, h {h:,}, m {m:,}, C {logits / 1e6:,.0f} MB"),
        ("shards", "host", 2 * shard + (encoded if gathered != states_dtype else 0),
         f"2 × {shard_tokens:,} tokens in {gathered}, one made and one written, every token a teacher's"
         + (f"; one in {states_dtype}" if gathered != states_dtype else "")),
        ("process", "host", RUNTIME + SLACK, "Python, torch and Transformers as measured, and what malloc keeps")]
    rows = [{"part": name, "where": where if device != "cpu" else "host", "bytes": size, "formula": formula}
            for name, where, size, formula in parts]
    sums = {place: sum(row["bytes"] for row in rows if row["where"] == place) for place in ("device", "host")}
    return {"parts": rows, **sums, "total": sum(sums.values())}


# ---------------------------------------------------------------------------------------------------- this machine


def machine_memory() -> int:
    """Bytes that this process may use: the machine's memory, or its container's limit."""
    limits = [psutil.virtual_memory().total]
    for file in LIMITS:
        text = file.read_text().strip() if file.is_file() else ""
        limits += [int(text)] if text.isdigit() else []
    return min(limits)


def memory_needs(extraction: dict, training: dict, *, device_memory_gb: float = 0, extraction_gpus: int = 1
                 ) -> list[dict]:
    """Rows {"what", "device", "needed", "available", "short"}, in bytes, for the rule memory_short.

    Without a stated device_memory_gb (of one GPU, in 10⁹ bytes) everything must fit this machine's memory. With it, the
    target is spread over `extraction_gpus`, while each of the training's GPUs holds a drafter of its own; the host is
    another machine, so its memory is told without a verdict (available: None).
    """
    if not device_memory_gb:
        here = machine_memory()
        return [need(name, "this machine's memory", plan["total"], here)
                for name, plan in (("extraction", extraction), ("training", training))]
    if not extraction["device"] or not training["device"]:
        raise ValueError("plans made for a CPU say nothing about a GPU: make them with device='cuda'")
    size = round(device_memory_gb * 1e9)
    one = f"GPU of {device_memory_gb:g} GB"
    return [need("extraction", f"{extraction_gpus} × a {one}", extraction["device"], extraction_gpus * size),
            need("extraction", "host memory", extraction["host"], None),
            need("training", f"each {one}", training["device"], size),
            need("training", "host memory, of the first process", training["host"], None)]


def need(what: str, device: str, needed: int, available: int | None) -> dict:
    return {"what": what, "device": device, "needed": needed, "available": available,
            "short": available is not None and needed > available}


def in_gb(rows: list[dict]) -> list[dict]:
    """The same rows for a table: counts of bytes as "… (GB)"."""
    counts = ("bytes", "needed", "available", "start", "step", "save")
    return [{f"{k} (GB)" if k in counts else k: v / 1e9 if k in counts and v is not None else v for k, v in row.items()}
            for row in rows]
