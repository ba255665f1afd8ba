"""Degenerate text: answers that go round in circles."""

import numpy as np

from eagle3nb.corpus.ngrams import ngram_hashes, whole_ngrams

GRAM, LEAST = 8, 24  # tokens of an n-gram, and of a circle at an answer's end; as in synthesis.talks.looping
INNER = 96  # tokens of a circle inside: twenty zeros of a list are none
MOSTLY = 0.8  # of a run's 8-grams from itself: files of settings come to 0.75
PLACES = np.uint64((1 << 24) - 1)  # bits of an n-gram's key that tell its place in its run


def ends_in_circles(ids) -> bool:
    """Whether a text's end is a block that stands there at least twice, over 24 tokens or more.

    A block of p tokens circles when the longest tail with x[i] = x[i − p] spans max(2 p, 24) tokens or more, the first
    block included: a shorter tail is ordinary text, a ruler of dashes, three equal table cells. Quadratic in the
    length, at worst; `loops` is for many rows.
    """
    ids = np.asarray(ids)
    for period in 1 + np.flatnonzero(ids[::-1][1:len(ids) // 2 + 1] == ids[-1:]):  # else the last token itself is new
        differs = np.flatnonzero(ids[period:] != ids[:-period])
        tail = len(ids) - (int(differs[-1]) + 1 if len(differs) else 0)  # includes the first block
        if tail >= max(2 * period, LEAST):
            return True
    return False


def loops(ids: np.ndarray, mask: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows in which a supervised run goes round in circles: (rows int64[K], at int64[K], share float64[K]).

    `at` is about where in the row the first circle begins; `share` is the part of the row's supervised 8-grams that
    stood in the same run before. A run circles where it

    * ends in a block that stands there at least twice in succession, over 24 tokens or more (as `answers.looping`);
    * anywhere repeats itself closely: a stretch of 96 tokens or more in at least four rounds of what came right before;
    * has more than four of five of its 8-grams from itself.

    `looping`, for short fresh answers, stops at one of three; here that is what lists and tables in JSON come to (0.7
    and more in files of settings), while what circles without a new word comes to nearly 1.
    """
    text, edges, origin = _answers(ids, mask, starts)
    position, gap = _repeats(text, edges)
    run = np.searchsorted(edges, position, side="right") - 1
    counts, grams = np.bincount(run, minlength=len(origin)), np.diff(edges) - GRAM + 1
    found = [_end_circles(position, gap, edges[run + 1]), _inner_circles(position, gap)]
    mostly = np.flatnonzero(counts > MOSTLY * grams)
    first = np.searchsorted(run, mostly)
    found.append(position[first] - gap[first])
    found = np.concatenate(found)
    inside = np.searchsorted(edges, found, side="right") - 1
    flat = np.sort(found - edges[inside] + origin[inside])
    rows, first = np.unique(np.searchsorted(starts, flat, side="right") - 1, return_index=True)
    row_of_run = np.searchsorted(starts, origin, side="right") - 1
    repeated, total = (np.bincount(row_of_run, values, len(starts) - 1) for values in (counts, grams))
    return rows, flat[first] - starts[rows], repeated[rows] / total[rows]


def _answers(ids, mask, starts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Supervised runs long enough to circle, laid end to end: (text, edges int64[runs+1], where each began)."""
    opens = mask != 0
    closes = opens.copy()
    opens[1:] &= mask[:-1] == 0
    closes[:-1] &= mask[1:] == 0
    opens[starts[:-1]] = mask[starts[:-1]] != 0
    closes[starts[1:] - 1] = mask[starts[1:] - 1] != 0
    first, lengths = np.flatnonzero(opens), np.flatnonzero(closes) + 1 - np.flatnonzero(opens)
    first, lengths = first[lengths >= LEAST], lengths[lengths >= LEAST]
    edges = np.concatenate([[0], np.cumsum(lengths)])
    return ids[np.arange(edges[-1]) + np.repeat(first - edges[:-1], lengths)], edges, first


def _repeats(text, edges) -> tuple[np.ndarray, np.ndarray]:
    """(position int64[K] ascending, gap int64[K]): an 8-gram that stood `gap` tokens before in the same run, last."""
    keys = ngram_hashes(text, GRAM) & ~PLACES
    keys |= np.arange(len(text)).view(np.uint64) & PLACES
    for begin, end in zip(edges[:-1].tolist(), (edges[1:] - GRAM + 1).tolist(), strict=True):
        keys[begin:end].sort()  # run by run: in the first cache, and equal grams of two runs never meet
    whole = whole_ngrams(edges, GRAM)
    equal = np.flatnonzero((keys[1:] ^ keys[:-1]) <= PLACES)
    equal = equal[whole[equal] & whole[equal + 1]]
    begin = edges[np.searchsorted(edges, equal, side="right") - 1]
    before, after = (begin + ((keys[at] - begin.view(np.uint64)) & PLACES).view(np.int64) for at in (equal, equal + 1))
    order = np.argsort(after)
    return after[order], (after - before)[order]


def _end_circles(position, gap, end) -> np.ndarray:
    """Where blocks begin that repeat at one distance up to a run's `end`, its end-of-turn token aside."""
    if not len(position):
        return position
    opens = np.flatnonzero(np.concatenate([[True], (np.diff(position) != 1) | (np.diff(gap) != 0)]))
    lasts = np.concatenate([opens[1:], [len(position)]]) - 1
    spans = position[lasts] + GRAM - position[opens] + gap[opens]  # with the first block
    least = np.maximum(2 * gap[opens], LEAST)
    circles = opens[(spans >= least) & (position[lasts] + GRAM + 1 >= end[lasts])]
    return position[circles] - gap[circles]


def _inner_circles(position, gap) -> np.ndarray:
    """Where stretches begin whose every 8-gram stood close before: mostly at a third of the stretch's length or less.

    The distances may vary (a block that holds a repetition of its own), and the first round may have come from afar.
    """
    if not len(position):
        return position
    opens = np.concatenate([[True], np.diff(position) != 1])
    stretch = np.cumsum(opens) - 1
    spans = np.bincount(stretch)
    near = 3 * gap <= spans[stretch]
    close = np.bincount(stretch, near)
    circles = (close + GRAM >= INNER) & (4 * close >= 3 * spans)
    first = np.flatnonzero(near & circles[stretch])
    first = first[np.unique(stretch[first], return_index=True)[1]]
    return position[first] - gap[first]
