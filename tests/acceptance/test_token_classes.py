"""Classes of tokens on texts put together from parts whose class is known, with tokens that are parts of characters."""

import numpy as np
import pytest
import tiny
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from eagle3nb.acceptance.benchmarks import Answer
from eagle3nb.acceptance.token_classes import CLASSES, classify, look, placed, thoughts

SPECIAL = ["<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|pad|>"]


def byte_level(merges=()) -> PreTrainedTokenizerFast:
    """256 tokens of one byte each, `merges` of them, six added tokens; <think> and the calls' marks are not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = alphabet + [a + b for a, b in merges]
    tokenizer = Tokenizer(BPE({word: i for i, word in enumerate(words)}, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(SPECIAL[0], special=True), AddedToken(SPECIAL[-1], special=True)])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in SPECIAL[1:-1]])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[0])


def metaspace() -> PreTrainedTokenizerFast:
    """As SentencePiece's: ▁ before a word, bytes where a character is unknown, the first blank dropped."""
    words = ["<unk>", "▁", *"abcdefgh,", "▁a", "▁b", "ab", "\n", *(f"<0x{i:02X}>" for i in range(256))]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b")]
    tokenizer = Tokenizer(BPE({word: i for i, word in enumerate(words)}, merges=merges, unk_token="<unk>",
                              byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


BYTES = byte_level()


def encode(tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def answer(ids, prompt=(), stopped=False) -> Answer:
    return Answer("a", "chat", tuple(prompt), tuple(ids), (), stopped, False)


def check(parts, prompt="", stopped=False):
    """parts: (text, class of all its tokens; None: each byte's by its looks)."""
    ids, wanted = [], []
    for text, name in parts:
        tokens = encode(BYTES, text)
        ids += tokens
        wanted += [name or look(BYTES.decode([token])) for token in tokens]
    assert classify(answer(ids, encode(BYTES, prompt), stopped), BYTES) == wanted


def test_looks():
    looks = {"words": (" the", "é", "x1", "Ж"), "digits": (" 42", "3.", "٣"), "whitespace": (" ", "\n\n", "\t", ""),
             "punctuation": ("...", " (", "🙂", "\ufffd", "，", "。"),
             "CJK": ("中", "中1", "かな", "カ", "한", "𠀀", "a中")}
    for name, text in ((name, text) for name, texts in looks.items() for text in texts):
        assert look(text) == name, text
    assert set(map(look, ["a", "1", " ", ".", "中"])) <= set(CLASSES)


def test_places_come_before_looks():
    check([("Sure 42!\n", None), ("```py\nx = 1 # 中\n```", "code"), ("\nDone 7.", None)])
    check([("a `b` 1\n", None), ("~~~\nlet 1\n", "code")])                               # cut inside the block
    check([("<think>", "thought"), ("12 ```x", "thought"), ("</think>", "thought"), ("12", "digits")])
    check([("<think>", "thought"), ("never closed 1\n```\n2\n```", "thought")])
    check([("Call: ", None), ('<tool_call>{"n": 1}</tool_call>', "tool call"), (" ok 2", None),
           ("<tool_call>{\n```\n", "tool call")])
    check([("a", "words"), ("<|pad|>", "special token"), ("b", "words")])
    check([("```\n<|pad|>\n```", "code"), ("\n", "whitespace")])
    check([("Yes 1", None), ("<|im_end|>", "end of turn")], stopped=True)
    check([("<think>", "thought"), ("hm", "thought"), ("<|im_end|>", "end of turn")], stopped=True)
    check([("Yes ``` no fence 1", None)])                                                # not at a line's beginning


def test_a_token_that_reaches_from_a_thought_into_a_call():
    tokenizer = byte_level(merges=[("]", "<")])
    ids = encode(tokenizer, "[THINK]a[/THINK]<|tool_call_argument_begin|>{}")
    assert tokenizer.decode([ids[15]]) == "]<"
    assert classify(answer(ids), tokenizer) == ["thought"] * 16 + ["tool call"] * (len(ids) - 16)


def test_a_thought_that_the_prompt_opened():
    check([("so 1", "thought"), ("</think>", "thought"), ("\n4", None)], prompt="<|im_end|>assistant\n<think>\n")
    check([("so 1, cut", "thought")], prompt="assistant\n<think>\n")
    check([("so 1", "thought"), ("</think>", "thought"), ("4", None)])
    check([("4", None)], prompt="<think>\n\n</think>\n\n")
    assert thoughts("ab") == [] and thoughts("◁think▷a◁/think▷b") == [(0, 16)]
    assert thoughts("a</think>b<think>c</think>d") == [(0, 9), (10, 26)]


def test_tokens_that_share_a_character():
    text = "a中文🙂é\n"
    ids = encode(BYTES, text)
    whole, spans = placed(ids, BYTES)
    assert len(ids) == len(text.encode()) and whole == text
    assert spans.tolist() == [[0, 1], *[[1, 2]] * 3, *[[2, 3]] * 3, *[[3, 4]] * 4, *[[4, 5]] * 2, [5, 6]]
    assert classify(answer(ids), BYTES) == ["words", *["CJK"] * 6, *["punctuation"] * 4, "words", "words", "whitespace"]
    for tokenizer in (byte_level(merges=[("ä", "¸")]), BYTES):  # two of a character's three bytes are a token
        ids = encode(tokenizer, "x中中 文")
        whole, spans = placed(ids, tokenizer)
        assert whole == "x中中 文" and all(whole[a:b] for a, b in spans.tolist())
        assert np.array_equal(np.unique(spans[:, 0]), [0, 1, 2, 3, 4])


def test_a_tokenizer_that_spaces_tokens_by_their_neighbours():
    tokenizer = metaspace()
    for text in ("a b ab", "a 中b\n, 文", "ab", "🙂"):
        ids = encode(tokenizer, text)
        whole, spans = placed(ids, tokenizer)
        assert whole == tokenizer.decode(ids) == text
        assert spans[0, 0] == 0 and spans[-1, 1] == len(text) and (spans[1:, 0] <= spans[:-1, 1]).all()
        assert "".join(whole[a:b] for a, b in dict.fromkeys(map(tuple, spans.tolist()))) == text


@pytest.mark.parametrize("seed", range(3))
def test_any_ids_have_classes(seed):
    """Random bytes: cut characters, bytes that are none, marks that never close. Places stay in order."""
    rng = np.random.default_rng(seed)
    for length in (1, 2, 5, 200):
        ids = rng.integers(0, len(BYTES), size=length)
        whole, spans = placed(ids, BYTES)
        assert (spans[:, 0] <= spans[:, 1]).all() and (np.diff(spans[:, 0]) >= 0).all() and spans[-1, 1] == len(whole)
        assert set(classify(answer(ids.tolist()), BYTES)) <= set(CLASSES)
    tokens = [rng.choice(list("a中1 .\n🙂é")) for _ in range(60)]
    assert placed(encode(BYTES, "".join(tokens)), BYTES)[0] == "".join(tokens)


def test_a_tokenizer_of_characters():
    tokenizer = tiny.make_tokenizer()
    ids = encode(tokenizer, "It is 42.<|im_end|>")
    names = classify(answer(ids, stopped=True), tokenizer)
    assert names == ["words", "words", "whitespace", "words", "words", "whitespace", "digits", "digits", "punctuation",
                     "end of turn"]
    assert classify(answer(ids), tokenizer)[-1] == "special token"
