"""What kind of token each token of an answer is, so that acceptance can be told apart by it.

One class a token, the first of CLASSES that applies. Places come before looks: a digit inside a code block is code, a
code block inside a thought is thought. Looks are those of the text that the token adds to its answer.
"""

import re
from functools import lru_cache

import numpy as np

from eagle3nb.corpus.conversation import HERMES, KIMI
from eagle3nb.corpus.template import THINKING

CLASSES = (
    "end of turn",   # the token that ended the answer
    "thought",       # from <think> (or where the prompt opened it) to </think>, both included
    "tool call",     # from the call's opening mark to its closing one
    "code",          # a fenced block, its fences included
    "special token",  # any other that the tokenizer calls special
    "CJK",           # text with a Chinese, Japanese or Korean letter
    "digits",        # a digit and no letter
    "whitespace",    # nothing else
    "words",         # a letter
    "punctuation")   # what remains: signs, emoji, characters that cannot be decoded
PAST = "past the end"  # no token of the answer: a draft behind its end, which engines count where it is right
INSIDE = CLASSES[1:4]
FENCED = re.compile(r"^[ \t]*(```|~~~).*?(?:^[ \t]*\1|\Z)", re.S | re.M)
CJK = re.compile("[\u2e80-\u2fdf\u3005-\u3007\u3040-\u318f\u31a0-\u31bf\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
                 "\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\uff66-\uffdc\U00020000-\U0003ffff]")
TAIL = 8        # tokens at a prompt's end that may open a thought
CHARACTER = 4   # tokens of which the longest character of a byte-level vocabulary consists


def classify(answer, tokenizer) -> list[str]:
    """The class of each token of `answer.ids` (a benchmarks.Answer)."""
    text, spans = placed(answer.ids, tokenizer)
    marks = np.zeros(len(text) + 1, dtype=np.int8)  # index into INSIDE + 1 of each character
    opened = _decoded(tokenizer, answer.prompt[-TAIL:]).rstrip()
    places = (thoughts(text, opened), [m.span() for rule in (HERMES, KIMI) for m in rule.finditer(text)],
              [m.span() for m in FENCED.finditer(text)])
    for i in reversed(range(len(INSIDE))):
        for begin, end in places[i]:
            marks[begin:end] = i + 1
    special = special_ids(tokenizer)
    names = []
    for token, (begin, end) in zip(answer.ids, spans.tolist(), strict=True):
        touched = marks[begin:max(end, begin + 1)]
        if (touched > 0).any():
            names.append(INSIDE[touched[touched > 0].min() - 1])
        else:
            names.append("special token" if token in special else look(text[begin:end]))
    if answer.stopped:
        names[-1] = "end of turn"
    return names


@lru_cache(maxsize=65536)
def look(text: str) -> str:
    """The class of a text by its characters alone."""
    if CJK.search(text):
        return "CJK"
    if any(c.isalpha() for c in text):
        return "words"
    if any(c.isdigit() for c in text):
        return "digits"
    return "punctuation" if text.strip() else "whitespace"


def thoughts(text: str, prompt: str = "") -> list[tuple[int, int]]:
    """Where an answer reasons: (begin, end) in its text, marks included, to the end where a thought is not closed.

    A thought that the prompt opened begins with the answer: `prompt` ends in the mark, or a mark that closes comes
    before any that opens.
    """
    found = []
    for opener, closer in THINKING:
        at, first = 0, text.find(closer)
        if prompt.endswith(opener) or (first >= 0 and opener not in text[:first]):
            at = len(text) if first < 0 else first + len(closer)
            found.append((0, at))
        rule = re.compile(f"{re.escape(opener)}.*?(?:{re.escape(closer)}|\\Z)", re.S)
        found += [m.span() for m in rule.finditer(text, at)]
    return found


def special_ids(tokenizer) -> set[int]:
    added = tokenizer.added_tokens_decoder
    return {*tokenizer.all_special_ids, *(i for i, token in added.items() if getattr(token, "special", True))}


def placed(ids, tokenizer) -> tuple[str, np.ndarray]:
    """The text of some ids and int64 [n, 2], each token's (begin, end) in it.

    Tokens that make up a character together have its place, all of them. What decodes to no character (a cut one, bytes
    that are none) stands as U+FFFD.
    """
    ids = list(map(int, ids))
    alone = {token: _decoded(tokenizer, [token]) for token in set(ids)}
    pieces, text = [alone[token] for token in ids], _decoded(tokenizer, ids)
    if "".join(pieces) != text:  # characters of several tokens, or a tokenizer that spaces a token by its neighbours
        pieces = _grown(ids, tokenizer)
        text = "".join(piece or "" for piece in pieces)
    lengths = np.array([len(piece or "") for piece in pieces], dtype=np.int64)
    ends = np.cumsum(lengths)
    begins = ends - lengths
    for i in reversed(range(len(pieces) - 1)):
        if pieces[i] is None:
            ends[i] = ends[i + 1]
    return text, np.stack([begins, ends], axis=1)


def _grown(ids: list[int], tokenizer) -> list[str | None]:
    """The text that each token adds to those before it; None where its character comes to its end in a later one.

    Decodes a few tokens at a time: those right before tell how a token is spaced, the rest of the text does not matter.
    """
    pieces, before, read = [], 0, 0  # text is told up to token `read`; decoding begins at token `before`
    for i in range(len(ids)):
        known, more = (_decoded(tokenizer, ids[before:end]) for end in (read, i + 1))
        if more.endswith("\ufffd") and i + 1 - read < CHARACTER and i + 1 < len(ids):
            pieces.append(None)
            continue
        pieces.append(more[len(known):])
        before, read = read, i + 1
    return pieces


def _decoded(tokenizer, ids) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
