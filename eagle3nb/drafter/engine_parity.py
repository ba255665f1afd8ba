"""The export in SGLang's own LlamaForCausalLMEagle3: its config reading, weight loading, norms, RoPE, MLP and head.

The class runs on a CPU in a process of its own, in SGLang's environment (see states/sglang_process.py), and computes
the steps of training-time test over random states; its logits are held against the drafter's. Only the attention over
keys is replaced, since SGLang's needs its memory pools. So a config key that SGLang reads otherwise, a tensor that
reaches no parameter, and a parameter that no tensor reaches show before anybody serves the export.

The worker (python -m eagle3nb.drafter.engine_parity FOLDER) reads FOLDER/jobs.json, a list of {"export"} with
FOLDER/<i>.safetensors {"rows" [T + K, h]: embeddings, "aux" [T, 3h], "positions" [P]}, and writes
FOLDER/<i>.out.safetensors {"<k>" [T, D], "rope" [P, dh]: cos, then sin, "ids" [D]} and FOLDER/reports.json.
"""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file

from eagle3nb.drafter import export
from eagle3nb.drafter.model import DraftModel
from eagle3nb.drafter.ttt import steps as ttt_steps
from eagle3nb.errors import UserError
from eagle3nb.files import read_json, shown, write_json
from eagle3nb.parent import die_with_parent, environment
from eagle3nb.states.sglang_process import LONGEST, new_log, python, why

BOUND = 1e-4  # of the largest logit, float32: 3e-6 on the demo's drafter, other orders of the same sums
ROPE_BOUND = (1e-5, 5e-7)  # at position 0, and a position: the last bit of an inverse frequency
IGNORED = ("t2d",)  # by SGLang, on purpose: d2t says the same


# ------------------------------------------------------------------------------------------ this side


def sglang(model: DraftModel, folder: str | Path, *, steps: int = 3, tokens: int = 24, seed: int = 0) -> dict:
    """One export's report; see `sglang_all`."""
    return sglang_all([(model, folder)], steps=steps, tokens=tokens, seed=seed)[0]


def sglang_all(pairs: list[tuple[DraftModel, str | Path]], *, steps: int = 3, tokens: int = 24, seed: int = 0,
               seconds: float = 1800) -> list[dict]:
    """A report an export: {"engine", "version", "checked": True, "max_relative", "by_step" [K], "argmax_equal",
    "compared", "rope", "ids_equal", "unused", "unset", "dtype_auto", "context"}; {…, "refused"} with SGLang's own error
    where it does not take it; {"engine", "checked": False, "reason"} where SGLang is not installed or does not run.

    Compared are the logits of `steps` steps at `tokens` slots of one random text, in float32, with those of the drafter
    as the export rounds it. "rope": largest difference of RoPE's cos and sin over the whole context, in what float32
    allows. "unused": tensors that reach no parameter; "unset": parameters that no tensor reaches; "dtype_auto" and
    "context": what the server would take by default. About half a minute, most of it SGLang's imports.
    """
    try:
        interpreter = python()
    except UserError as error:
        return [unchecked(str(error)) for _ in pairs]
    with tempfile.TemporaryDirectory() as name:
        work, expected = Path(name), []
        for i, (model, folder) in enumerate(pairs):
            found = expect(model, folder, steps, tokens, seed + i)
            save_file({key: found[key] for key in ("rows", "aux", "positions")}, work / f"{i}.safetensors")
            expected.append(found)
        write_json(work / "jobs.json", [{"export": str(Path(folder).resolve())} for _, folder in pairs])
        if failed := run(interpreter, work, seconds):
            return [unchecked(failed) for _ in pairs]
        return [compared(ours, report, work / f"{i}.out.safetensors")
                for i, (ours, report) in enumerate(zip(expected, read_json(work / "reports.json"), strict=True))]


def unchecked(reason: str) -> dict:
    return {"engine": "SGLang", "checked": False, "reason": f"not checked in SGLang: {reason}"}


@torch.no_grad()
def expect(model: DraftModel, folder: str | Path, steps: int, tokens: int, seed: int) -> dict:
    """A random text and what the drafter, rounded as the export, makes of it; all float32 on the CPU.

    {"rows" [T + K, h]: embeddings of x[1..], "aux" [T, 3h], "logits": K of [T, D], "ids" [D]: target ids of D,
    "positions" int64 [P] over the whole context, "rope" [P, dh]: cos, then sin there, where some tokens' text would not
    show a wrong base or factor}.
    """
    generator, c, context = torch.Generator().manual_seed(seed), model.config, model.config.max_positions
    rounded = export.rounded(model, read_json(Path(folder) / "config.json")["torch_dtype"])
    ids = torch.randint(c.vocab, (tokens + steps + 1,), generator=generator)
    aux = torch.randn(len(ids), 3 * c.hidden, generator=generator)
    outputs = ttt_steps(rounded, ids, aux, torch.zeros(len(ids), dtype=torch.int64), [torch.arange(tokens)] * steps)
    places = torch.tensor(sorted({min(p, context - 1) for p in (0, 1, 17, 300, context // 8, context // 2, context)}))
    angles = torch.cat([x[:, 0, :c.head_dim // 2] for x in rounded.angles(places)], -1)
    return {"rows": rounded.embed(ids[1:]).contiguous(), "aux": aux[:tokens].contiguous(), "positions": places,
            "logits": [rounded.logits(h2) for h2 in outputs], "ids": rounded.vocabulary_ids, "rope": angles}


def run(interpreter: str, work: Path, seconds: float) -> str:
    """The worker over work/jobs.json, without a GPU: "" where it ended well, else why not, in a line."""
    log = new_log(f"parity-{os.getpid()}")
    around = environment(EAGLE3NB_PARENT=str(os.getpid()), SGLANG_USE_CPU_ENGINE="1", CUDA_VISIBLE_DEVICES="")
    with open(log, "wb") as handle:
        process = subprocess.Popen([interpreter, "-m", "eagle3nb.drafter.engine_parity", str(work)], stdout=handle,
                                   stderr=handle, stdin=subprocess.DEVNULL, env=around, start_new_session=True)
    try:
        failed = process.wait(timeout=seconds) != 0
    except subprocess.TimeoutExpired:
        return f"SGLang took longer than {seconds:.0f} s; its log is {shown(log)}"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet: the group is still its own
            process.wait()
    if failed:
        return why(log)
    log.unlink()
    return ""


def compared(ours: dict, report: dict, file: Path) -> dict:
    """The report with the differences; relative to the largest logit of each step, and to what RoPE may differ by."""
    report = {"engine": "SGLang", "checked": True, **report}
    if "refused" in report:
        return report
    theirs = load_file(file)
    pairs = [(logits, theirs[str(k)]) for k, logits in enumerate(ours["logits"])]
    by_step = [float((a - b).abs().max() / a.abs().max()) if a.shape == b.shape and b.isfinite().all() else math.inf
               for a, b in pairs]
    equal = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in pairs)
    turns = (ours["rope"] - theirs["rope"]).abs().amax(-1) / (ROPE_BOUND[0] + ROPE_BOUND[1] * ours["positions"])
    return report | {"max_relative": max(by_step), "by_step": by_step, "argmax_equal": equal,
                     "compared": sum(len(a) for a, _ in pairs), "rope": float(turns.max()),
                     "ids_equal": "ids" in theirs and torch.equal(ours["ids"], theirs["ids"])}


def check(report: dict, folder: str | Path) -> str:
    """One sentence of a report. Raises UserError where SGLang refuses the export or computes something else from it."""
    if not report["checked"]:
        return report["reason"]
    if wrong := faults(report):
        raise UserError(f"{shown(folder)} in SGLang {report['version']}: {'; '.join(wrong)}; do not serve it, "
                        "report it")
    return (f"SGLang {report['version']}'s own class gives the drafter's logits within {report['max_relative']:.1e} of "
            f"the largest over {len(report['by_step'])} steps, argmax equal at {report['argmax_equal']} of "
            f"{report['compared']}")


def faults(report: dict) -> list[str]:
    """What is wrong, a phrase each; empty where SGLang computes what the drafter does."""
    if "refused" in report:
        return [report["refused"]]
    wrong = [f"{what} {', '.join(report[key])}" for key, what in
             (("unused", "no parameter takes"), ("unset", "no tensor reaches")) if report[key]]
    if not report["ids_equal"]:
        wrong.append("drafted ids are mapped to other tokens")
    if not report["rope"] <= 1:
        wrong.append("RoPE turns by other angles than in training")
    if not report["max_relative"] <= BOUND:
        wrong.append(f"logits differ by {report['max_relative']:.1e} of the largest, {BOUND:.0e} is allowed")
    return wrong


# ------------------------------------------------------------------------------------------ SGLang's side


def worker(work: Path) -> None:
    """All jobs in one process: SGLang's import costs more than a draft layer."""
    import sglang

    start(read_json(work / "jobs.json")[0]["export"])
    reports = []
    for i, job in enumerate(read_json(work / "jobs.json")):
        given = load_file(work / f"{i}.safetensors")
        try:
            model, report = load(job["export"], given["rows"])
            logits = steps_of(model, given["aux"], len(given["rows"]) - len(given["aux"]))
            rope = turned(model, given["positions"])
        except Exception as error:  # what SGLang refuses is a result: the other exports are still computed
            traceback.print_exc()
            reports.append({"version": sglang.__version__, "refused": f"{type(error).__name__}: {error}"[:LONGEST]})
            continue
        found = {str(k): x.contiguous() for k, x in enumerate(logits)} | {"rope": rope}
        if model.hot_token_id is not None:
            found["ids"] = model.hot_token_id.contiguous()
        save_file(found, work / f"{i}.out.safetensors")
        reports.append({"version": sglang.__version__, **report})
    (work / "reports.json").write_text(json.dumps(reports))


def start(folder: str) -> None:
    """What a scheduler process sets up before it builds a model: arguments, and groups of one rank."""
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    publish(ServerArgs(model_path=folder, device="cpu", dtype="float32", attention_backend="torch_native"),
            role="test", ranks=SpawnRanks(world_rank=0))
    init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo",
                                 distributed_init_method=f"file://{tempfile.mktemp()}")
    initialize_model_parallel(backend="gloo")


def load(folder: str, rows: torch.Tensor):
    """(SGLang's model of an export over the embeddings `rows`, {"unused", "unset", "dtype_auto", "context"}).

    Every parameter is NaN before loading, so what no tensor has reached is found whatever the loader says.
    """
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3

    config = ModelConfig(model_path=folder, dtype="auto", is_draft_model=True)
    torch.set_default_dtype(torch.float32)
    model = LlamaForCausalLMEagle3(config.hf_config)
    model.set_embed(torch.nn.Parameter(rows, requires_grad=False))  # as the engine shares the target's
    for name, parameter in model.named_parameters():
        if "embed_tokens" not in name:
            parameter.data.fill_(float("nan"))
    unused, left = [], missing(model)
    for name, tensor in load_file(Path(folder) / "model.safetensors").items():
        if "embed_tokens" in name:  # whatever it is, the target's takes its place
            continue
        ids = model.hot_token_id
        model.load_weights([(name, tensor.float() if tensor.is_floating_point() else tensor)])
        now = missing(model)
        if now == left and model.hot_token_id is ids and name not in IGNORED:
            unused.append(name)
        left = now
    return model, {"unused": unused, "unset": sorted(left), "dtype_auto": str(config.dtype).split(".")[-1],
                   "context": config.context_len}


def missing(model) -> dict[str, int]:
    """Parameter → how many of its values no tensor has set."""
    counts = {name: int(parameter.isnan().sum()) for name, parameter in model.named_parameters()}
    return {name: count for name, count in counts.items() if count}


@torch.no_grad()
def steps_of(model, aux: torch.Tensor, K: int) -> list[torch.Tensor]:
    """Logits, K of [T, D], of training-time test's steps: slot t of step k at position t + k reads embedding t + k."""
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    T, history, found, hidden = len(aux), [], [], aux
    RadixAttention.forward = lambda layer, q, k, v, *_, **__: attend(layer, q, k, v, history)
    for k in range(K):
        batch = SimpleNamespace(spec_info=SimpleNamespace(hidden_states=hidden), mm_input_embeds=None, batch_size=1,
                                forward_mode=ForwardMode.EXTEND, contains_mm_inputs=lambda: False)
        to_head, (hidden,) = model.model(torch.arange(k, T + k), torch.arange(k, T + k), batch)
        logits = model.logits_processor._compute_lm_head(to_head, model.lm_head)
        found.append(logits[:, :model.config.draft_vocab_size])  # the head is padded to a multiple of 64
    return found


@torch.no_grad()
def turned(model, positions: torch.Tensor) -> torch.Tensor:
    """cos, then sin [P, dh] by which SGLang's RoPE turns: what becomes of a vector of ones, then zeros."""
    attention = model.model.layers[0].self_attn
    one = torch.cat([torch.ones(attention.head_dim // 2), torch.zeros(attention.head_dim // 2)])
    if hasattr(attention.rotary_emb, "_ensure_cos_sin_cache_length"):  # as model_runner does for a long context
        attention.rotary_emb._ensure_cos_sin_cache_length(int(positions.max()))
    q, k = one.repeat(len(positions), attention.num_heads), one.repeat(len(positions), attention.num_kv_heads)
    return attention.rotary_emb(positions, q.clone(), k.clone())[1][:, :attention.head_dim].float().contiguous()


def attend(layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, history: list) -> torch.Tensor:
    """q [T, Hq·dh] over step 0's keys up to its slot and, at later steps, its own slot's of every step since."""
    dh, T = layer.head_dim, len(q)
    q, k, v = (x.view(T, -1, dh).transpose(0, 1) for x in (q, k, v))                        # [H, T, dh]
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))                       # GQA, written out
    history.append((k, v))
    (k0, v0), own = history[0], history[1:]
    scores = (q @ k0.transpose(1, 2) * layer.scaling).masked_fill(torch.ones(T, T).triu(1).bool(), float("-inf"))
    diagonal = [(q * key).sum(-1, keepdim=True) * layer.scaling for key, _ in own]          # [H, T, 1] each
    weights = torch.cat([scores, *diagonal], -1).softmax(-1)
    out = weights[..., :T] @ v0 + sum(weights[..., T + j, None] * value for j, (_, value) in enumerate(own))
    return out.transpose(0, 1).reshape(T, -1)


if __name__ == "__main__":
    die_with_parent()
    worker(Path(sys.argv[1]))
