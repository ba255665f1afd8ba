"""The merged line of a row whose ids or mask are not those of its own line."""

import json
import re

import numpy as np
import orjson

TEXT_KEYS = ("messages", "conversations", "prompt", "response", "text", "tools")
FIRST = ("id", "source")
LONG_NUMBER = re.compile(rb"\d{19}")  # orjson makes a float of an integer beyond 64 bits
NEAR = 2048  # bytes around the place where a comma is expected


def line_of(raw: bytes, ids: np.ndarray, mask: np.ndarray, length: int, *, bare: bool, own: bool) -> bytes:
    """The row's line with `ids` int32[T'] and `mask` uint8[T'], cut from `length` tokens; its other keys stay.

    A row that is cut loses its text, which no longer says what its ids say; lists a token long are cut with it, but not
    an id or a source. The prompt's and the response's ids go, since they are the row's ids now.
    bare, own: as the batch has them. Most rows that are cut are bare, and then their bytes are cut, not written anew.
    """
    if bare and (cut := _cut(raw, mask, length, own)):
        return cut
    row = json.loads(raw) if LONG_NUMBER.search(raw) else orjson.loads(raw)
    rest = {key: value for key, value in row.items()
            if key not in (*FIRST, "input_ids", "loss_mask", "prompt_ids", "response_ids")}
    if len(ids) < length:
        rest = {key: value[:len(ids)] if isinstance(value, list) and len(value) == length else value
                for key, value in rest.items() if key not in TEXT_KEYS}
    made = {**{key: row[key] for key in FIRST if key in row}, "input_ids": ids, "loss_mask": mask, **rest}
    try:
        return orjson.dumps(made, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError:  # such an integer, or lists within lists 254 deep
        return json.dumps(made | {"input_ids": ids.tolist(), "loss_mask": mask.tolist()}, ensure_ascii=False).encode()


def _cut(raw: bytes, mask: np.ndarray, length: int, own: bool) -> bytes:
    """The line with its list of ids cut behind the mask's length, and the mask written anew; b"" where that is unsafe.

    The parser has found `input_ids`, and `loss_mask` where `own`, to be flat lists of integers. Without a backslash in
    the line a key can stand there in one spelling only, and where that stands there once, it is the key.
    """
    if b"\\" in raw:
        return b""
    ids = _list_after(raw, b'"input_ids"', 0, len(raw))
    key = b'"loss_mask"'
    old = (_list_after(raw, key, 0, ids[0]) or _list_after(raw, key, ids[1], len(raw))) if own else ids
    if not old:
        return b""
    (a, b), (c, d) = sorted((ids, old))
    rest = raw[:a] + raw[b:c] + raw[d:]  # all but the lists: a few bytes
    if rest.count(b'"input_ids"') != 1 or rest.count(b'"loss_mask"') != own:
        return b""
    stop = ids[1] - 1 if len(mask) == length else ids[0] + _comma(raw[ids[0]:ids[1]], len(mask), length)
    cut, spelled = raw[ids[0]:stop] + b"]", b"[" + _zeros_and_ones(mask) + b"]"
    if not own:
        return raw[:ids[0]] + cut + raw[ids[1]:-1].rstrip() + b', "loss_mask": ' + spelled + b"}"
    first, second = (cut, spelled) if ids < old else (spelled, cut)
    return raw[:a] + first + raw[b:c] + second + raw[d:]


def _comma(text: bytes, number: int, values: int) -> int:
    """Where comma `number` (from 1) stands in the text of a list of so many values; sought where it should be."""
    commas = np.frombuffer(text, np.uint8) == ord(",")
    low = max(len(text) * number // values - NEAR, 0)
    here = np.flatnonzero(commas[low:low + 2 * NEAR])
    place = number - 1 - np.count_nonzero(commas[:low])
    return low + int(here[place]) if 0 <= place < len(here) else int(np.flatnonzero(commas)[number - 1])


def _list_after(raw: bytes, key: bytes, begin: int, end: int) -> tuple[int, int] | None:
    """(first byte, byte after) of the list that follows the key's first place in raw[begin:end]."""
    place = raw.find(key, begin, end)
    if place < 0:
        return None
    opened = raw.index(b"[", place)
    return opened, raw.index(b"]", opened) + 1


def _zeros_and_ones(mask: np.ndarray) -> bytes:
    """`0, 1, 1` of a mask."""
    spelled = bytearray(b"0, " * len(mask))
    spelled[::3] = (mask + ord("0")).tobytes()
    return bytes(spelled[:-2])
