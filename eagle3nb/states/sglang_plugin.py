"""The project's SGLang plugin: hidden states as files, not as JSON.

SGLang loads it in every process of an engine (entry point group sglang.srt.plugins, name eagle3nb). It does nothing
unless EAGLE3NB_SGLANG_STATES names a folder: then a request that asks for hidden states has them written there, as
<request id>.safetensors with `aux` [T, 3h] and `last` [T, h] in the model's dtype, and finds in its meta_info, under
`hidden_states`, the one string "path <file>", or "error <why>" where the file could not be written.

Without it the states of 8192 tokens of Kimi-K2.5 (470 MB) would travel as 235 million numbers in JSON, and the last
hidden state would not come back at all. Written for SGLang 0.5.23; register() says so where a version differs.
"""

import inspect
import os
from pathlib import Path

FOLDER = "EAGLE3NB_SGLANG_STATES"
APPEND = ("sglang.srt.managers.scheduler_components.batch_result_processor",
          "SchedulerBatchResultProcessor", "_append_prefill_hidden_states")
NEEDED = {"req", "logits_output", "hidden_state_offset", "capture_hidden_mode", "extend_input_len", "store"}


def register() -> None:
    """Hook the place where the scheduler takes a request's states out of a batch's. Called by SGLang."""
    if not os.environ.get(FOLDER):
        return
    from importlib import import_module

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    module, owner, method = APPEND
    taken = inspect.signature(getattr(getattr(import_module(module), owner), method)).parameters
    if not NEEDED.issubset(taken):
        raise RuntimeError(f"eagle3nb: {owner}.{method} takes {', '.join(taken)}; this SGLang is not 0.5.23")
    HookRegistry.register(".".join(APPEND), append, HookType.AROUND)


def append(original, self, *, req, logits_output, hidden_state_offset, capture_hidden_mode, extend_input_len,
           store=True) -> int:
    """Write the request's rows of the batch's states [tokens, ·]; the offset of the next request's.

    Every tensor-parallel rank comes here with the whole states; the one that answers requests writes.
    """
    whole = capture_hidden_mode.is_full() and req.return_hidden_states is True
    if not (whole and store and answers()):
        return original(self, req=req, logits_output=logits_output, hidden_state_offset=hidden_state_offset,
                        capture_hidden_mode=capture_hidden_mode, extend_input_len=extend_input_len,
                        store=store and not whole)
    end = hidden_state_offset + extend_input_len
    req.hidden_states.append(written(req.rid, logits_output, slice(hidden_state_offset, end)))
    return end


def answers() -> bool:
    """Is this the process whose results go back to the caller? One of a tensor-parallel group is."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return parallel.pp_rank == parallel.attn_tp_rank == parallel.attn_cp_rank == 0


def written(name: str, output, rows: slice) -> str:
    """The file's path, or why there is none: an exception here would end the engine, a full disk need not."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if output.last_hidden_states is None:
        return "error SGLang kept no last hidden states; start it with enable_return_aux_hidden_states"
    path = Path(os.environ[FOLDER]) / f"{name}.safetensors"
    # A copy of the rows alone: a view would write, or on a GPU hold, the whole batch.
    tensors = {"aux": output.hidden_states[rows], "last": output.last_hidden_states[rows]}
    try:
        save_file({key: value.detach().to("cpu", copy=True).contiguous() for key, value in tensors.items()}, path)
    except (OSError, SafetensorError) as error:
        path.unlink(missing_ok=True)
        return f"error {error}"
    return f"path {path}"
