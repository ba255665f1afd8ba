"""Tiny tokenizers with chat templates of the two kinds that matter, and a writer of dataset directories."""

import gzip
import json
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import zstandard
from hypothesis import settings
from leisure import AT_LEISURE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

settings.register_profile("eagle3nb", AT_LEISURE, max_examples=50)
settings.load_profile("eagle3nb")

CHATML = (
    "{% for m in messages %}"
    "{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe kind<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
KIMI = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>"
    "{% if m.role == 'assistant' %}<think>{{ m.reasoning if loop.index0 == ns.last and m.reasoning else '' }}</think>"
    "{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|><think>{% endif %}")
PLAIN = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
TEXT = ["the user asks\n\nthe assistant answers",
        "assistant\nuser\nsystem\nBe kind", "Violet kettles, 93 owls\n\n\nsing",
        "def code(x):\n    return x\n\n# Title"] * 8


def tokenizer_of(template: str, special: list[str]) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.train_from_iterator(TEXT, trainers.BpeTrainer(
        vocab_size=400, min_frequency=2, special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", chat_template=template)


@pytest.fixture(scope="session")
def chatml():
    return tokenizer_of(CHATML, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])


@pytest.fixture(scope="session")
def kimi():
    return tokenizer_of(KIMI, ["<|im_end|>", "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>",
                               "<think>", "</think>", "<|never|>"])


@pytest.fixture(scope="session")
def markless():
    return tokenizer_of(PLAIN, ["<|im_end|>"])


def write_rows(path, rows) -> None:
    """Rows (dicts, or bytes as they are) as .jsonl, .jsonl.gz or .jsonl.zst."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)
    pack = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}.get(path.suffix, bytes)
    path.write_bytes(pack(data))


@pytest.fixture
def write():
    return write_rows
