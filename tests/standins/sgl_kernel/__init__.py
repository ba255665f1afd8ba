"""A stand-in for SGLang's kernels on a CPU, for tests: what SGLang 0.5.23 needs of the package to prefill and decode.

The real package has no build on PyPI for a machine without a GPU. This folder is put on PYTHONPATH for tests only, and
must never lie in site-packages, where it would hide the real one. With `attention_backend="torch_native"` SGLang
computes in PyTorch; one function is left to do. Speculative decoding wants `intel_amx`: its attention and the
bookkeeping of drafts are in the two modules beside this one.
"""

from . import attention as attention  # declares its operators to torch
from .speculative import (  # noqa: F401  (SGLang takes them from here)
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    build_draft_decode_metadata_cpu,
    build_tree_kernel_efficient_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
    verify_tree_greedy_cpu,
)

__version__ = "0.4.10"  # what SGLang 0.5.23 pins


def assign_req_to_token_pool_cpu(slots, table, starts, ends, places, width) -> None:
    """Note where a batch's new tokens lie in the KV cache: row `slots[i]` of `table`, positions starts[i] to ends[i].

    slots, starts, ends: int [R]; table: int32 [requests, positions], written in place; places: int [sum of ends −
    starts], request after request. `width` is the table's, for kernels that see only a pointer.
    """
    taken = 0
    for slot, start, end in zip(slots.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[slot, start:end] = places[taken : taken + end - start]
        taken += end - start


def __getattr__(name: str):
    """SGLang's modules import other kernels too. Here they can be imported, and not called."""
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*arguments, **named):
        raise NotImplementedError(f"{name} has no stand-in in tests/standins")

    return missing
