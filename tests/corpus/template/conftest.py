"""Targets of many kinds of chat template, with the rows that they make and what the rules say of them."""

import copy

import numpy as np
import pytest

from eagle3nb.corpus.hits import Hits
from eagle3nb.corpus.masks import encode, find_markers, mask_from_markers, render
from eagle3nb.corpus.template import template_hits, template_of

LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}")
GEMMA = (
    "{{ '<bos>' }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}")
MISTRAL = (
    "{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% else %}{{ raise_exception('only user and assistant') }}"
    "{% endif %}{% endfor %}")
DEEPSEEK = (
    "{{ '<BOS>' }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end｜>"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}")
QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last %}<think>\n{{ m.reasoning or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
KINDS = {  # template, special tokens, its bos, the user's header
    "llama3": (LLAMA3, ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
               "<|begin_of_text|>", "<|start_header_id|>user<|end_header_id|>"),
    "gemma": (GEMMA, ["<bos>", "<start_of_turn>", "<end_of_turn>"], "<bos>", "<start_of_turn>user"),
    "mistral": (MISTRAL, ["<s>", "</s>", "[INST]", "[/INST]"], "<s>", "[INST]"),
    "deepseek": (DEEPSEEK, ["<BOS>", "<｜User｜>", "<｜Assistant｜>", "<｜end｜>", "<think>", "</think>"], "<BOS>",
                 "<｜User｜>"),
    "qwen3": (QWEN3, ["<|im_start|>", "<think>", "</think>"], None, "<|im_start|>user"),
}


def kind(base, name):
    """A tokenizer of this kind of template, on the merges of `base`."""
    template, special, bos, _ = KINDS[name]
    tokenizer = copy.deepcopy(base)
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"extra_special_tokens": special, **({"bos_token": bos} if bos else {})})
    return tokenizer


def said(*texts, system=None) -> list[dict]:
    """User and assistant in turn."""
    messages = [{"role": "system", "content": system}] if system else []
    return messages + [{"role": "user" if i % 2 == 0 else "assistant", "content": t} for i, t in enumerate(texts)]


class Rows:
    """Rows of one tokenizer, and what the rules say of them."""

    def __init__(self, tokenizer, user=""):
        self.tokenizer, self.markers, self.user = tokenizer, find_markers(tokenizer), user
        self.template = template_of(tokenizer, self.markers)

    def ids(self, text) -> list[int]:
        return encode(self.tokenizer, text)

    def row(self, *texts, **options) -> list[int]:
        return self.ids(render(self.tokenizer, said(*texts, **options)))

    def plain(self, text) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    def derive(self, ids) -> np.ndarray:
        return mask_from_markers(np.array(ids, np.int32), self.markers)

    def hits(self, rows, masks=None) -> Hits:
        """masks: one a row, None for a row without; by default every row has what the markers say."""
        derived = [self.derive(row) for row in rows]
        masks = derived if masks is None else masks
        starts = np.cumsum([0, *(len(row) for row in rows)])
        own = [np.zeros(len(row)) if mask is None else mask for row, mask in zip(rows, masks, strict=True)]
        flat = [np.concatenate([np.zeros(0), *values]).astype(dtype) for values, dtype in
                ((rows, np.int32), (own, np.uint8), (derived, np.uint8))]
        hits, brought = Hits(), np.array([mask is not None for mask in masks], bool)
        template_hits(flat[0], flat[1], brought, flat[2], starts, self.markers, self.template, hits)
        return hits

    def fault(self, row, mask=None) -> dict:
        """{rule: (at, detail)} of the row among clean ones, before and behind it."""
        clean = self.row("the user", "answers")
        masks = [self.derive(clean), self.derive(row) if mask is None else mask, self.derive(clean)]
        hits = self.hits([clean, row, clean], masks)
        assert all(count == 1 and hits.examples[rule][0][0] == 1 for rule, count in hits.counts.items())
        return {rule: example[0][1:] for rule, example in hits.examples.items()}


@pytest.fixture(scope="session")
def kinds(chatml, kimi):
    tokenizers = {"chatml": chatml, "kimi": kimi, **{name: kind(chatml, name) for name in KINDS}}
    return {name: Rows(tokenizer, KINDS.get(name, ("",) * 4)[3]) for name, tokenizer in tokenizers.items()}


@pytest.fixture(scope="session")
def target():
    """Rows of any tokenizer."""
    return Rows


@pytest.fixture(scope="session")
def chat(kinds):
    return kinds["chatml"]


@pytest.fixture(scope="session")
def thinker(kinds):
    return kinds["kimi"]


@pytest.fixture(scope="session")
def conversation():
    return said
