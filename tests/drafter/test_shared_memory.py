"""The table of compiled kernels: whole, within every GPU's limit, chosen from by limit, true to what Triton makes."""

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from itertools import product

import pytest
import torch

from eagle3nb.drafter.kernels import shared_memory
from eagle3nb.drafter.kernels.shared_memory import DTYPES, GPUS, HEAD_DIMS, LIMITS, Blocks, arch_of, choose
from eagle3nb.errors import UserError
from eagle3nb.files import project_root

ATTENTION = ("attention_forward", "attention_dq", "attention_dkdv", "attention_own")
CROSS_ENTROPY = ("cross_entropy_teacher", "cross_entropy_rows")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs pip install triton==3.9.0")


@pytest.fixture
def in_version(monkeypatch):
    """The table as an environment with that Triton reads it."""

    def use(version: str) -> None:
        monkeypatch.setattr(shared_memory.metadata, "version", lambda name: version)

    return use


@pytest.mark.parametrize("version", ["3.8.0", "3.9.0"])
def test_every_gpu_can_run_every_kernel(in_version, version):
    """And what is chosen spills nothing: a spilled value is a trip to memory in the innermost loop."""
    in_version(version)
    assert shared_memory.version() == version
    assert shared_memory.kernels() == ATTENTION + CROSS_ENTROPY and set(GPUS) == set(LIMITS)
    for arch, head_dim, dtype in product(LIMITS, HEAD_DIMS, DTYPES):
        for kernel in ATTENTION + CROSS_ENTROPY:
            row = choose(kernel, arch, 1024 * LIMITS[arch], head_dim, dtype)
            assert 0 <= row.shared <= 1024 * LIMITS[arch] and row.registers <= 255
            assert row.spilled == 0, row


def test_which_triton_the_table_is_of(in_version, monkeypatch):
    for installed, expected in (("3.8.7", "3.8.0"), ("3.9.0", "3.9.0"), ("4.0.0", "3.9.0"), ("3.10.1", "3.9.0")):
        in_version(installed)
        assert shared_memory.version() == expected

    def missing(name):
        raise shared_memory.PackageNotFoundError(name)

    monkeypatch.setattr(shared_memory.metadata, "version", missing)
    assert shared_memory.version() == "3.9.0"


def test_a_smaller_limit_takes_smaller_blocks(in_version):
    in_version("3.9.0")
    rows = [row for row in shared_memory.table()
            if (row.kernel, row.arch, row.head_dim, row.dtype) == ("attention_forward", 80, 128, "bf16")]
    most = max(row.shared for row in rows)
    assert len(rows) > 1
    chosen = choose("attention_forward", 80, most - 1, 128, "bf16")
    assert chosen.shared < most and chosen in rows
    with pytest.raises(UserError) as refused:
        choose("attention_forward", 80, 48 * 1024, 128, "bf16")
    assert "KB of shared memory and this sm_80 gives 48" in str(refused.value) and "\n" not in str(refused.value)


def test_the_preferred_of_equals_and_the_least_spilled(monkeypatch):
    row = choose("attention_dq", 90, 1024 * LIMITS[90], 64, "bf16")

    first, second, third = (replace(row, shared=shared, spilled=spilled)
                            for shared, spilled in ((900, 8), (800, 0), (700, 0)))
    monkeypatch.setattr(shared_memory, "table", lambda: (first, second, third))
    for limit, expected in ((1000, second), (750, third)):
        assert choose("attention_dq", 90, limit, 64, "bf16") is expected
    monkeypatch.setattr(shared_memory, "table", lambda: (first,))
    assert choose("attention_dq", 90, 1000, 64, "bf16") is first, "with spills rather than not at all"
    with pytest.raises(UserError, match="not compiled for head_dim 96"):
        choose("attention_dq", 90, 1000, 96, "bf16")


def test_architectures():
    assert [arch_of(*one) for one in ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))] == [
        80, 86, 86, 89, 90, 100, 100, 120, 120]
    assert arch_of(7, 5) is None and arch_of(11, 0) is None


def test_where_the_twins_work(monkeypatch):
    def supports(kind, head_dim, dtype):
        shared_memory.supports.cache_clear()
        return shared_memory.supports(torch.device(kind), head_dim, dtype)

    assert not supports("cpu", 64, torch.float32)
    monkeypatch.setattr(shared_memory, "device_limit", lambda device: (90, 1024 * LIMITS[90]))
    assert supports("cuda", 64, torch.bfloat16) and supports("cuda", 0, torch.float16)
    assert not supports("cuda", 96, torch.bfloat16) and not supports("cuda", 64, torch.float64)
    assert shared_memory.on_device("attention_own", torch.device("cuda"), 64, torch.bfloat16) == choose(
        "attention_own", 90, 1024 * LIMITS[90], 64, "bf16").blocks
    monkeypatch.setattr(shared_memory, "device_limit", lambda device: (None, 65536))
    assert not supports("cuda", 64, torch.bfloat16)
    shared_memory.supports.cache_clear()
    shared_memory.on_device.cache_clear()


def test_rows_of_the_audit(monkeypatch):
    rows = shared_memory.rows(128, 64, 8, "bf16", 7)
    assert len(rows) == len(LIMITS) * 6 and all(row["fits"] and row["shared_kb"] <= row["limit_kb"] for row in rows)
    assert {row["arch"] for row in rows} == {f"sm_{arch}" for arch in LIMITS} and "H100" in str(rows)
    assert rows == shared_memory.rows(128, 64, 64, "bf16", 1), "neither the group nor the steps enter"
    assert shared_memory.rows(96, 8, 8, "bf16", 3) == shared_memory.by_gpu([]) == []
    for gpu in shared_memory.by_gpu(rows):
        own = [row for row in rows if row["arch"] == gpu["arch"]]
        assert gpu["shared_kb"] == max(row["shared_kb"] for row in own) and gpu["fits"] and len(own) == 6
    least = min(row.shared for row in shared_memory.table() if row.kernel == "attention_dq" and row.head_dim == 128)
    monkeypatch.setattr(shared_memory, "LIMITS", {80: least / 1024 - 1})
    shown = {row["kernel"]: row["fits"] for row in shared_memory.rows(128, 8, 8, "bf16", 3)}
    assert [gpu["fits"] for gpu in shared_memory.by_gpu(shared_memory.rows(128, 8, 8, "bf16", 3))] == [False]
    assert not shown["attention_dq"] and shown["cross_entropy_rows"], "a kernel that fits nowhere is shown, not raised"
    for wrong in ((64, 9, 2, "bf16", 3), (64, 9, 3, "fp8", 3), (64, 9, 3, "bf16", 0)):
        with pytest.raises(UserError, match="multiple"):
            shared_memory.rows(*wrong)


def test_the_table_needs_no_triton():
    code = "import sys; from eagle3nb.drafter.kernels import shared_memory as s; s.rows(64, 9, 3, 'fp32', 3); " \
           "assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


@needs_triton
def test_what_makes_a_kernel_and_what_does_not():
    """T, N, D, heads and the own keys' number are run-time numbers: the table need not list them."""
    from eagle3nb.drafter.kernels import attention, cross_entropy

    for kernel in (attention.KERNELS | cross_entropy.KERNELS).values():
        fixed = {p.name for p in kernel.params if p.is_constexpr}
        assert fixed <= {"HEAD_DIM", "BLOCK_M", "BLOCK_N", "WANTS_GRAD"}
        free = {p.name for p in kernel.params if not p.is_constexpr and not p.name.endswith("_ptr")}
        assert free <= {"N", "T", "own", "heads", "kv_heads", "D"}
        assert all(p.do_not_specialize for p in kernel.params if p.name in free - {"D"})


@pytest.fixture
def kernel_table(monkeypatch):
    monkeypatch.syspath_prepend(str(project_root() / "tools"))
    import kernel_table

    return kernel_table


@needs_triton
@pytest.mark.parametrize(("dtype", "own"), [("fp32", 0), ("bf16", 1), ("fp16", 7)])
def test_a_launch_compiles_what_the_table_holds(kernel_table, monkeypatch, dtype, own):
    """Triton's own binding of a launch's arguments, up to the compiler: no 1 or multiple of 16 makes another kernel."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    from eagle3nb.drafter.kernels import attention, cross_entropy

    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    backend, launched, blocks = make_backend(GPUTarget("cuda", 90, 32)), {}, Blocks(64, 64, 8, 2)

    def bound(kernel):
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)

        def run(*arguments, grid, warmup, **options):
            values, specialised, _ = binder(*arguments, **options)
            _, signature, constants, attributes = kernel._pack_args(backend, options, values, specialised, None)
            launched[kernel.__name__] = signature, constants, {key: value for key, value in attributes.items() if value}

        return run

    for kernel in kernel_table.KERNELS.values():
        monkeypatch.setattr(kernel, "run", bound(kernel))
    T = N = 32
    q, *kv = (torch.zeros(shape, dtype=torch_dtype, requires_grad=True)
              for shape in ((N, 1, 64), *[(T, 1, 64)] * 2, *[(N, 1, 64)] * 2 * own))
    out = attention.ttt_attention(q, *kv[:2], kv[2:2 + own], kv[2 + own:], torch.arange(N), torch.zeros(T).long(),
                                  dict.fromkeys(attention.KERNELS, blocks))
    out.sum().backward()
    cross_entropy.rows(torch.zeros(16, 160, dtype=torch_dtype), torch.zeros(16, 160, dtype=torch_dtype),
                       torch.zeros(17).long()[1:], torch.zeros(17).long()[1:], True,
                       dict.fromkeys(cross_entropy.KERNELS, blocks))
    assert set(launched) == set(kernel_table.KERNELS) - (set() if own else {"attention_own"})
    for name, (signature, constants, attributes) in launched.items():
        known = kernel_table.source(name, 64, dtype, blocks)
        assert (signature, constants, attributes) == (known.signature, known.constants, known.attrs), name


@needs_triton
@pytest.mark.parametrize(("kernel", "arch", "head_dim", "dtype"), [
    ("attention_forward", 90, 64, "bf16"), ("attention_dkdv", 120, 64, "bf16"), ("attention_own", 80, 128, "fp32"),
    ("cross_entropy_rows", 100, 0, "fp32")])
def test_a_sample_compiled_again(kernel, arch, head_dim, dtype, tmp_path, monkeypatch, kernel_table):
    import triton

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    assert shared_memory.version() == triton.__version__, "another Triton: run tools/kernel_table.py"
    row = choose(kernel, arch, 1024 * LIMITS[arch], head_dim, dtype)
    assert kernel_table.compiled(kernel, arch, row.head_dim, dtype, row.blocks) == row
