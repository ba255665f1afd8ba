"""Tokenizers of the tests in which every byte is a token, with chat templates of the kinds that matter, and models that
answer over them. A naive rendering of each template, in pieces, says what a record must be."""

import json
from types import SimpleNamespace

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle3nb.synthesis.answerer import Answerer
from eagle3nb.synthesis.endpoint import Answer, Counts

SPECIAL = ("<|im_end|>", "<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
END = 0
# ChatML with tools; a thought is kept wherever it stands. TOOLS takes a call's arguments as text, OBJECTS as an object.
TOOLS = (
    "{% if tools %}<|im_start|>tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
OBJECTS = TOOLS.replace("{{ c.function.arguments }}", "{{ c.function.arguments.items() | list | tojson }}")
# As Kimi's and Qwen's thinking models: the prompt opens a thought, and those of earlier turns are emptied.
FORGETS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>"
    "{{ m.reasoning_content if loop.index0 == ns.last and loop.last and m.reasoning_content else '' }}</think>"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}")
PLAIN = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
         "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([*SPECIAL, *letters])}, merges=[]))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", chat_template=template,
                                   additional_special_tokens=list(SPECIAL[1:]))


def naive(pieces: list[tuple[str, int]]) -> tuple[list[int], list[int]]:
    """(ids, mask) of texts, supervised or not: special tokens by their place in SPECIAL, else a token a byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte = {b: len(SPECIAL) + letters.index(c) for b, c in bytes_to_letters().items()}
    ids, mask = [], []
    for text, own in pieces:
        while text:
            token = next((s for s in SPECIAL if text.startswith(s)), None)
            new = [SPECIAL.index(token)] if token else [byte[b] for b in text[0].encode()]
            ids, mask, text = ids + new, mask + [own] * len(new), text[len(token or "x"):]
    return ids, mask


def bytes_to_letters() -> dict[int, str]:
    """GPT-2's table: printable bytes stand for themselves, the others follow from 256 on."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return {b: chr(b) for b in own} | {b: chr(256 + n) for n, b in enumerate(b for b in range(256) if b not in own)}


def call(name: str, number: int, **arguments) -> dict:
    return {"id": f"call_{number}", "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, separators=(",", ":"))}}


class Says:
    """An endpoint that answers at once: `say(ask)` gives a message or ids, a whole Answer, or an exception to raise."""

    def __init__(self, say, exact: bool = False, on_policy: bool = True, model: str = "other/model"):
        self.say, self.asked = say, []
        self.answerer = Answerer(self, model, on_policy, exact)

    def answer(self, asks, sampling, done, **_) -> Counts:
        todo, counts = list(asks), Counts()
        while todo:
            ask = todo.pop(0)
            self.asked.append(ask)
            said = self.say(ask)
            if isinstance(said, BaseException):
                raise said
            if isinstance(said, dict):
                said = Answer(ask.key, "tool_calls" if said.get("tool_calls") else "stop", message=said, model="m-1")
            elif isinstance(said, list):
                said = Answer(ask.key, "stop" if said[-1] == END else "length", ids=tuple(said), model="m-1")
            counts.take(said)
            todo += done(ask, said)
        return counts

    def close(self):
        pass


def facts():
    return SimpleNamespace(eos=(END,), vocab=300)
