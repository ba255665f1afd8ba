"""Contamination: rows of the corpus that hold an evaluation prompt, by its n-grams or as a whole user turn."""

import re
from dataclasses import dataclass
from os.path import commonprefix

import numpy as np
from jinja2 import TemplateError

from eagle3nb.corpus.masks import encode, render
from eagle3nb.corpus.ngrams import BASE, hash_blocks, mixed, ngram_hashes, whole_ngrams
from eagle3nb.errors import UserError

GRAM = 13  # tokens of an n-gram that is no accident
ENOUGH = 10  # n-grams that tell a prompt of 20 to 40; half of fewer, a quarter of more (see `overlaps`)
COMMON = 8  # an n-gram of more prompts than these is their instruction, and tells none of them
FILTER = 1 << 20  # bytes of the filter: with 150,000 n-grams one in a thousand others passes both its bits
SECOND = np.uint64(23)  # how far a hash is shifted for its second bit
SAMPLES = 16  # tokens of a turn that its key is made of, at equal distances
TURNS = 1 << 11  # places of user turns compared with the turns' lengths at a time
SENTINELS, PADDED = ("Zebra quilts", "17 blue jars"), "  Zebra quilts\n\n"


@dataclass(frozen=True)
class Needles:
    """The evaluation prompts as what is looked for. P prompts, G distinct n-grams, pickled once for each worker."""

    benchmarks: tuple[str, ...]  # of each prompt
    names: tuple[str, ...]  # the prompts' ids
    hashes: np.ndarray  # uint64[G] ascending
    tokens: np.ndarray  # int32, the prompts' contents end to end
    places: np.ndarray  # int64[G]: n-gram g is tokens[places[g]:places[g]+13]
    owner_edges: np.ndarray  # int64[G+1]: the prompts that have n-gram g are owners[owner_edges[g]:owner_edges[g+1]]
    owners: np.ndarray  # int64
    distinct: np.ndarray  # int64[P] n-grams of each prompt
    enough: np.ndarray  # int64[P] of them that tell it
    filter: np.ndarray  # uint8[FILTER], two bits for each hash
    turns: tuple[np.ndarray, ...]  # int32 each: the prompt as a user turn, header and end included; may be empty
    header: np.ndarray  # int32: what all turns that are not empty begin with
    turn_keys: np.ndarray  # uint64, ascending, of those turns
    turn_prompts: np.ndarray  # int64, whose they are

    def __len__(self) -> int:
        return len(self.names)


def needles(prompts: list[tuple]) -> Needles:
    """Needles of prompts (benchmark, id, content ids, turn ids)."""
    contents = [np.asarray(content, np.int32) for _, _, content, _ in prompts]
    turns = tuple(np.asarray(turn, np.int32) for *_, turn in prompts)
    edges = np.cumsum([0, *map(len, contents)])
    tokens = np.concatenate([*contents, np.zeros(0, np.int32)])
    at = np.flatnonzero(whole_ngrams(edges, GRAM))
    hashes, first, gram = np.unique(ngram_hashes(tokens, GRAM)[at], return_index=True, return_inverse=True)
    owned = np.unique(np.stack([gram, np.searchsorted(edges, at, side="right") - 1], axis=1), axis=0)
    owned = owned[np.bincount(owned[:, 0], minlength=len(hashes))[owned[:, 0]] <= COMMON]  # [(n-gram, prompt), …]
    kept, owners = np.unique(owned[:, 0], return_counts=True)
    bits = np.zeros(FILTER, np.uint8)
    for word in (hashes[kept], hashes[kept] << SECOND):
        np.bitwise_or.at(bits, *_bits(word))
    distinct = np.bincount(owned[:, 1], minlength=len(prompts))
    enough = np.minimum((distinct + 1) // 2, np.maximum(ENOUGH, (distinct + 3) // 4))
    asked = np.array([p for p, turn in enumerate(turns) if len(turn)], np.int64)
    lengths = np.array([len(turns[p]) for p in asked], np.int64)
    keys = _turn_keys(np.concatenate([*turns, np.zeros(0, np.int32)]), np.cumsum(lengths) - lengths, lengths)
    order = np.argsort(keys, kind="stable")
    return Needles(
        benchmarks=tuple(prompt[0] for prompt in prompts), names=tuple(prompt[1] for prompt in prompts),
        hashes=hashes[kept], tokens=tokens, places=at[first[kept]], owner_edges=np.cumsum([0, *owners]),
        owners=owned[:, 1], distinct=distinct, enough=enough, filter=bits,
        turns=turns, header=np.array(list(commonprefix([turns[p].tolist() for p in asked])), np.int32),
        turn_keys=keys[order], turn_prompts=asked[order])


def needles_of(prompts: list[tuple[str, str, str]], tokenizer) -> Needles:
    """Needles of prompts (benchmark, id, text). Raises UserError where the chat template renders no user turn."""
    header, end, strips = _frame(tokenizer)
    found = []
    for benchmark, name, text in prompts:
        turn = encode(tokenizer, header + (text.strip() if strips else text) + end)
        first, last = _shared(turn, encode(tokenizer, header)), _shared(turn[::-1], encode(tokenizer, end)[::-1])
        content = turn[first:max(first, len(turn) - last)]  # as it is tokenised where it stands
        found.append((benchmark, name, content, turn if header or end else []))
    return needles(found)


def _frame(tokenizer) -> tuple[str, str, bool]:
    """(header, end of turn) around a user's text, and whether the template strips that text.

    A first turn may follow a system prompt, a later one follows an answer: the header is what both have before them,
    without the end of the turn before. Where nothing ends a user's turn, the answer's header does.
    """
    ask = [{"role": "user", "content": SENTINELS[0]}]
    earlier = [{"role": "user", "content": SENTINELS[1]}, {"role": "assistant", "content": "Yes"}]
    try:
        first, later, prompt = render(tokenizer, ask), render(tokenizer, earlier + ask), render(
            tokenizer, ask, generation=True)
        padded = render(tokenizer, [{"role": "user", "content": PADDED}])
    except (TemplateError, ValueError) as error:
        raise UserError(f"the target's chat template renders no conversation ({error}); use a chat model") from None
    if SENTINELS[0] not in first:
        raise UserError("the target's chat template leaves out what a user says; use a chat model's tokenizer")
    special = {*map(str, tokenizer.added_tokens_decoder.values()), *tokenizer.all_special_tokens}
    before, before_later = (_pieces(text.partition(SENTINELS[0])[0], special) for text in (first, later))
    end = first.partition(SENTINELS[0])[2].rstrip()
    end = end or "".join(_pieces(prompt.partition(SENTINELS[0])[2], special)[:1]).rstrip()
    header = ""
    for one, other in zip(before[::-1], before_later[::-1], strict=False):
        same = _shared(one[::-1], other[::-1]) if one == other or not special & {one, other} else 0
        header = one[len(one) - same:] + header
        if one != other:
            break
    header = header[header.rfind(end) + len(end):].lstrip() if end and end in header else header
    return header, end, PADDED not in padded


def _pieces(text: str, special: set[str]) -> list[str]:
    """The text cut at its special tokens, which are pieces of their own."""
    names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
    return [piece for piece in (re.split(f"({names})", text) if names else [text]) if piece]


def _shared(one, other) -> int:
    """Length of the common prefix."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def overlaps(ids: np.ndarray, starts: np.ndarray,
             needles: Needles) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows that hold an evaluation prompt: (rows int64[K], at int64[K], prompt int64[K], share float64[K]).

    A row holds a prompt as an exact user turn (share 1), or as enough of its distinct 13-grams: a quarter, though 10 at
    least, or half of them if that is less. (Ten of a long prompt's hundred are a list of the first twenty numbers.)
    `share` is then the part of them that stand in the row and `at` the first one's position. A prompt of less than 13
    tokens is found as a turn only. 13-grams that more than 8 prompts have are their instruction and do not count. A row
    is told once, by the prompt of the highest share (of equals the first).
    """
    row, prompt, at, share = (np.concatenate(parts) for parts in zip(
        _by_ngrams(ids, starts, needles), _by_turns(ids, starts, needles), strict=True))
    order = np.lexsort((at, prompt, -share, row))
    rows, first = np.unique(row[order], return_index=True)
    best = order[first]
    return rows, at[best] - starts[rows], prompt[best], share[best]


def _bits(hashes) -> tuple[np.ndarray, np.ndarray]:
    """(byte int64, bit uint8) of each hash in the filter."""
    byte = (hashes >> np.uint64(44)).view(np.int64)
    return byte, np.left_shift(np.uint8(1), (hashes >> np.uint64(41)).astype(np.uint8) & np.uint8(7))


def _passes(needles, words) -> np.ndarray:
    byte, bit = _bits(words)
    return (needles.filter.take(byte) & bit) != 0


def _by_ngrams(ids, starts, needles) -> tuple:
    """(row, prompt, flat position, share) of every prompt that enough of its n-grams tell."""
    positions, grams = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for begin, hashes in hash_blocks(ids, GRAM) if len(needles.hashes) else ():
        passed = np.flatnonzero(_passes(needles, hashes))
        passed = passed[_passes(needles, hashes[passed] << SECOND)]
        gram = np.searchsorted(needles.hashes, hashes[passed])
        gram[gram == len(needles.hashes)] = 0
        equal = needles.hashes[gram] == hashes[passed]
        positions.append(begin + passed[equal])
        grams.append(gram[equal])
    position, gram = np.concatenate(positions), np.concatenate(grams)
    row = np.searchsorted(starts, position, side="right") - 1
    true = position + GRAM <= starts[row + 1]
    here, there = position[true][:, None] + np.arange(GRAM), needles.places[gram[true]][:, None] + np.arange(GRAM)
    true[true] = (ids[here] == needles.tokens[there]).all(axis=1)
    position, gram, row = position[true], gram[true], row[true]
    _, first = np.unique(row * np.int64(len(needles.hashes) + 1) + gram, return_index=True)  # each n-gram once a row
    position, gram, row = position[first], gram[first], row[first]
    many = np.diff(needles.owner_edges)[gram]
    owner = needles.owners[np.repeat(needles.owner_edges[gram] - np.cumsum(many) + many, many) + np.arange(many.sum())]
    pair, place, count = np.unique(np.repeat(row, many) * len(needles) + owner, return_inverse=True, return_counts=True)
    at = np.full(len(pair), len(ids))
    np.minimum.at(at, place, np.repeat(position, many))
    row, prompt = np.divmod(pair, max(len(needles), 1))
    told = count >= needles.enough[prompt]
    return row[told], prompt[told], at[told], count[told] / needles.distinct[prompt[told]]


def _by_turns(ids, starts, needles) -> tuple:
    """(row, prompt, flat position, 1.0) of every prompt that is a user turn of a row, token for token."""
    turns = [needles.turns[p] for p in needles.turn_prompts]
    opens, ends = ({int(turn[at]) for turn in turns} for at in (0, -1))
    lengths = np.array(sorted({len(turn) for turn in turns}), np.int64)
    begins, hits = np.flatnonzero(_among(ids, opens)), []
    for back, token in enumerate(needles.header.tolist()):
        begins = begins[ids.take(begins + back, mode="clip") == token]
    for some in (begins[at:at + TURNS] for at in range(0, len(begins), TURNS)):
        stops = starts[np.searchsorted(starts, some, side="right")]
        last = some[:, None] + lengths - 1
        place, length = np.nonzero(_among(ids.take(last, mode="clip"), ends) & (last < stops[:, None]))
        at, length = some[place], lengths[length]
        keys = _turn_keys(ids, at, length)
        first = np.searchsorted(needles.turn_keys, keys)
        for i in np.flatnonzero(needles.turn_keys.take(first, mode="clip") == keys).tolist():
            equal = needles.turn_prompts[first[i]:np.searchsorted(needles.turn_keys, keys[i], side="right")]
            hits += [(p, at[i]) for p in equal.tolist()
                     if np.array_equal(needles.turns[p], ids[at[i]:at[i] + length[i]])]
    prompt, at = np.array(hits, np.int64).reshape(-1, 2).T
    return np.searchsorted(starts, at, side="right") - 1, prompt, at, np.ones(len(at))


def _among(tokens: np.ndarray, values: set[int]) -> np.ndarray:
    """bool: is the token one of a few values?"""
    among = np.zeros(tokens.shape, bool)
    for value in values:
        among |= tokens == value
    return among


def _turn_keys(ids, begins, lengths) -> np.ndarray:
    """uint64: a hash of each span's length and of 16 of its tokens, the first and the last among them."""
    samples = begins[:, None] + (lengths[:, None] - 1) * np.arange(SAMPLES) // (SAMPLES - 1)
    keys = lengths.astype(np.uint64)
    for column in ids[samples].astype(np.uint64).T:
        keys = mixed(keys * np.uint64(BASE) + column)
    return keys
