"""A stand-in for SGLang's kernels on a CPU, for tests: what SGLang 0.5.23 needs of the package to prefill and decode.

The real package has no build on PyPI for a machine without a GPU. This folder is put on PYTHONPATH for tests only, and
must never lie in site-packages, where it would hide the real one. With `attention_backend="torch_native"` SGLang
computes in PyTorch; one function is left to do.
"""

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
    """SGLang's modules import the kernels of speculative decoding too. Here they can be imported, and not called."""
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*arguments, **named):
        raise NotImplementedError(f"{name} has no stand-in in tests/standins")

    return missing
