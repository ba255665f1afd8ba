"""The target run by SGLang: the engine of a GPU box, with tensor parallelism, quantised weights and every model it has.

It captures layers without a draft (new in 0.5.23), the project's plugin hands the states over as files, and the lm_head
runs here, from the checkpoint, only where logits are asked for. SGLang forms its own batches out of the rows of one
call (max_prefill_tokens), without padding: give it many.

Shapes as in hf.py: aux [T, 3h] = HF hidden_states[i] of the captured layers i, side by side; last [T, h] = after the
final norm. SGLang counts layer outputs: its ids are one less.
"""

import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from eagle3nb.errors import UserError
from eagle3nb.files import disk_free, read_json, shown
from eagle3nb.states import target as targets
from eagle3nb.states.sglang_process import EngineProcess

TRIAL = 4  # tokens of the first row, which shows that the plugin works
SPARE = 8  # positions beyond the target's: SGLang keeps 6 of its context free, one more is the token it must make
CPU_TOKENS = 1 << 14  # of KV cache on a CPU, at least
OURS = ("model_path", "skip_tokenizer_init", "dtype", "device", "tp_size", "context_length", "disable_radix_cache",
        "chunked_prefill_size", "speculative_algorithm", "speculative_draft_model_path",
        "enable_return_aux_hidden_states", "return_aux_hidden_state_layer_ids", "return_hidden_states_mode",
        "disable_overlap_schedule", "disable_cuda_graph")


class SGLangTarget:
    """A target that SGLang has loaded. `.facts`, `.layers` (captured), `.dtype`, `.device` (of the lm_head).

    `.version` is SGLang's, `.load_s` the seconds that its start took.
    """

    engine = "sglang"

    def __init__(self, folder: str | Path, dtype: torch.dtype | None = None, device: str | None = None, *,
                 tensor_parallel: int = 1, engine_args=(), scratch: str | Path | None = None):
        """Start the engine: a minute for a small model, many for a large one.

        dtype: of the computation; None: the checkpoint's own, on a CPU float32. engine_args: more of SGLang's
        arguments, as "name=value". scratch: where states change hands (see sglang_process.py). UserError, with the
        engine's own reason and the place of its log, where it does not start.
        """
        self.dir = Path(folder)
        self.facts = targets.facts_of(folder)
        self.layers = targets.captured_layers(self.facts.layers)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.dtype = dtype or (torch.float32 if self.device.type == "cpu" else stored_dtype(self.dir))
        # Before the engine, which takes what memory it finds free.
        self.head = targets.lm_head(self.dir).to(self.device, self.dtype)
        arguments = {**self.arguments(tensor_parallel), **extra(engine_args)}
        began = time.perf_counter()
        self.process = EngineProcess(arguments, environment(self.device.type), scratch)
        self.version = self.process.version
        try:
            self.capture([[0] * TRIAL])
            self.load_s = time.perf_counter() - began
        except BaseException:
            self.close()
            raise

    def arguments(self, tensor_parallel: int) -> dict:
        found = {
            "model_path": str(self.dir), "skip_tokenizer_init": True, "dtype": str(self.dtype).removeprefix("torch."),
            "tp_size": tensor_parallel, "context_length": self.facts.max_positions + SPARE,
            # Capture without a draft: the algorithm only names the convention.
            "speculative_algorithm": "EAGLE3", "enable_return_aux_hidden_states": True,
            "return_aux_hidden_state_layer_ids": [layer - 1 for layer in self.layers],
            # A cached prefix is not computed, and of a row in chunks only the last one's states would come.
            "disable_radix_cache": True, "chunked_prefill_size": -1,
            # Of a batch in flight only the first of the two tensors is copied to the host.
            "disable_overlap_schedule": True, "disable_cuda_graph": True,
            "skip_server_warmup": True, "log_level": "warning", "random_seed": 0}
        if self.device.type == "cpu":
            found |= {"device": "cpu", "attention_backend": "torch_native", "mem_fraction_static": 0.2,
                      "max_total_tokens": max(CPU_TOKENS, min(self.facts.max_positions, 1 << 17) + 2 * SPARE),
                      "max_running_requests": 64}
        return found

    def capture(self, rows) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(aux [T, 3h], last [T, h]) of each row of ids, on the CPU. SGLang's batches hold all of them it can."""
        rows = [[int(i) for i in ids] for ids in rows]
        self.check(rows)
        answers = self.process.ask(rows, states=True, temperature=0, max_new_tokens=1)
        return [self.read(answer["states"], len(ids)) for answer, ids in zip(answers, rows, strict=True)]

    def check(self, rows) -> None:
        longest = max(map(len, rows))
        if longest > self.process.longest:
            raise UserError(f"a row has {longest} tokens, SGLang takes {self.process.longest} here; lower max_seq_len, "
                            "or raise mem_fraction_static or max_total_tokens in engine_args")
        needed = sum(map(len, rows)) * 4 * self.facts.hidden * self.dtype.itemsize
        free = disk_free(self.process.folder)
        if needed > free:
            raise UserError(f"the states of {len(rows)} rows need {needed / 1e9:,.2f} GB, {free / 1e9:,.2f} GB are "
                            f"free at {shown(self.process.folder)}; lower batch_tokens, or name a larger disk in "
                            "EAGLE3NB_SCRATCH")

    def read(self, found: str, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The file's two tensors; the file goes. UserError for any other shape or dtype than asked for."""
        kind, _, rest = found.partition(" ")
        if kind == "error":
            raise UserError("SGLang did not load the plugin eagle3nb; install this package where SGLang is (pip "
                            "install --no-deps -e .)" if rest == "no plugin" else
                            f"SGLang could not hand over its states: {rest}")
        try:
            states = load_file(rest)  # mapped: the tensors outlive the file's name
        finally:
            Path(rest).unlink(missing_ok=True)
        h = self.facts.hidden
        for name, width in (("aux", 3 * h), ("last", h)):
            if states[name].shape != (tokens, width) or states[name].dtype != self.dtype:
                raise UserError(f"SGLang's {name} has shape {list(states[name].shape)} in {states[name].dtype}, not "
                                f"[{tokens}, {width}] in {self.dtype}; see engine_args")
        return states["aux"], states["last"]

    @torch.inference_mode()
    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """[., h] after the final norm → [., V], in the target's dtype. The caller bounds the rows: 4 V bytes each."""
        return F.linear(last.to(self.device, self.dtype), self.head)

    def generate(self, prompts, *, max_new_tokens: int, temperature: float = 0.0, top_p: float = 1.0, seed=0,
                 stop_ids=(), beyond: int = 0, batch: int = 24, done=None) -> list[list[int]]:
        """Greedy new tokens for each prompt (ids): to its first stop id or `max_new_tokens`, then `beyond` more.

        Nothing else stops it. `done(index, ids)` is called for each at the end. SGLang's own batches; `batch`, `seed`
        and `top_p` are there for the interface that both engines share. UserError for temperature > 0.
        """
        from eagle3nb.states.generation import check

        if temperature > 0:
            raise UserError("engine sglang answers greedily here; set temperature to 0, or engine to transformers")
        if not prompts:
            return []
        prompts = [[int(i) for i in ids] for ids in prompts]
        check(self, prompts, max_new_tokens + beyond)
        # SGLang stops at the config's own ends too, unless told to stop nowhere.
        stops = {"stop_token_ids": list(stop_ids)} if set(self.facts.eos) <= set(stop_ids) else {"ignore_eos": True}
        answers = [cut(answer["ids"], stop_ids)
                   for answer in self.process.ask(prompts, states=False, temperature=0, max_new_tokens=max_new_tokens,
                                                  **stops)]
        if beyond:
            whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
            more = self.process.ask(whole, states=False, temperature=0, max_new_tokens=beyond, ignore_eos=True)
            answers = [answer + extra["ids"] for answer, extra in zip(answers, more, strict=True)]
        for index, answer in enumerate(answers if done else ()):
            done(index, answer)
        return answers

    def close(self) -> None:
        """End the engine and free its memory; the target is of no use after. At the latest, it ends with the kernel."""
        self.process.close()


def cut(ids: list[int], stop_ids) -> list[int]:
    """Up to the first stop id, which is part of the answer."""
    return ids[: next((i for i, token in enumerate(ids) if token in stop_ids), len(ids)) + 1]


def stored_dtype(folder: Path) -> torch.dtype:
    """What config.json says the weights were made for; SGLang's own choice for float32 would be float16."""
    whole = read_json(folder / "config.json")
    config = whole.get("text_config") or {}
    name = whole.get("dtype") or whole.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    return torch.float16 if name == "float16" else torch.bfloat16


def extra(engine_args, ours=OURS, whose: str = "the extraction itself, since its states depend on it") -> dict:
    """{"mem_fraction_static": 0.8} of ["mem_fraction_static=0.8"]; values as in JSON, else strings. UserError for a
    name among `ours`, which `whose` sets."""
    found = {}
    for item in engine_args:
        name, equals, value = item.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if not equals or not name:
            raise UserError(f"engine_args: {item!r} is not name=value; write 'mem_fraction_static=0.8'")
        if name in ours:
            raise UserError(f"engine_args: {name} is set by {whose}; leave it out")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value.strip()
    return found


def environment(device: str) -> dict:
    """For the engine's processes: no network, a context longer than the config's by SPARE, the CPU where it is one."""
    found = {"HF_HUB_OFFLINE": "1", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1", "TOKENIZERS_PARALLELISM": "false"}
    return found | ({"SGLANG_USE_CPU_ENGINE": "1"} if device == "cpu" else {})
