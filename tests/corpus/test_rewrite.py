"""The line of a row that is cut or masked anew, held to a definition that knows nothing of bytes."""

import json
import re

import numpy as np
import orjson
import pytest
import simdjson
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3nb.corpus import rewrite
from eagle3nb.corpus.batch import _fast
from eagle3nb.corpus.records import tokens
from eagle3nb.corpus.rewrite import _cut, line_of

V = 50
NAMES = ["id", "source", "input_ids", "loss_mask", "messages", "text", "x"]
TEXT = {"messages", "conversations", "prompt", "response", "text", "tools"}


def defined(raw: bytes, ids: list, mask: list, length: int) -> dict:
    """The row as it must stand in merged.jsonl."""
    made = {"input_ids": ids, "loss_mask": mask}
    for key, value in json.loads(raw).items():
        if key in ("input_ids", "loss_mask", "prompt_ids", "response_ids") or len(ids) < length and key in TEXT:
            continue
        per_token = type(value) is list and len(value) == length and key not in ("id", "source")
        made[key] = value[:len(ids)] if len(ids) < length and per_token else value
    return made


def spelled(value, blank) -> str:
    """JSON with blanks wherever the grammar has them; a string that begins with "\\\\" is JSON already."""
    if isinstance(value, dict):
        items = (f"{blank()}{spelled(key, blank)}{blank()}:{blank()}{spelled(item, blank)}{blank()}"
                 for key, item in value.items())
        return "{" + (",".join(items) or blank()) + "}"
    if isinstance(value, list):
        return "[" + (",".join(f"{blank()}{spelled(item, blank)}{blank()}" for item in value) or blank()) + "]"
    if isinstance(value, str) and value.startswith("\\"):
        return value[1:]
    return json.dumps(value, ensure_ascii=False)


names = st.sampled_from(NAMES)
texts = st.text(max_size=4).filter(lambda text: not text.startswith("\\"))
words = st.one_of(names, texts, st.sampled_from(
    ["]", "[", "},{", "a,b", '"input_ids"', '"loss_mask": [1', "é", "\\" + '"\\u0041"', "\\" + '"input\\u005fids"',
     "input_ids\": [1]", " "]))
numbers = st.one_of(st.integers(-5, 2**64 - 1), st.sampled_from([2**64, -2**63 - 1, 10**30, 0.1, 1e300, -0.0]),
                    st.sampled_from(["\\1e3", "\\0.10", "\\1E-2", "\\12345678901234567890.5"]))
leaves = st.one_of(st.none(), st.booleans(), numbers, words)
values = st.recursive(leaves, lambda inner: st.one_of(
    st.lists(inner, max_size=4), st.dictionaries(st.one_of(names, texts), inner, max_size=3)),
    max_leaves=6)


@st.composite
def rows(draw, keys=("id", "source")):
    """(line, is there a mask) of a row as the corpus may hold it."""
    length, own = draw(st.integers(1, 7)), draw(st.booleans())
    row = {"input_ids": draw(st.lists(st.integers(0, V - 1), min_size=length, max_size=length))}
    if own:
        row["loss_mask"] = draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
    for key in draw(st.lists(st.sampled_from(keys), unique=True)):
        row[key] = draw(st.one_of(values, st.lists(st.integers(0, 9), min_size=length, max_size=length)))
    order = draw(st.permutations(list(row)))
    blanks = draw(st.sampled_from([[""], ["", " "], [" ", "\t", "  "]]))
    rng = draw(st.randoms(use_true_random=False))
    return spelled({key: row[key] for key in order}, lambda: rng.choice(blanks)).encode(), own


def read(raw: bytes) -> tuple:
    """(ids, own mask or None, bare) as a batch has them."""
    ids, mask, _, bare = _fast(simdjson.Parser(), raw, V) or tokens(raw, V)
    return np.asarray(ids, np.int32), mask, bare


def check(raw: bytes, own: bool, n: int, anew: np.ndarray) -> bytes:
    ids, mask, bare = read(raw)
    assert (mask is not None) == own
    line = line_of(raw, ids[:n], anew, len(ids), bare=bare, own=own)
    assert b"\n" not in line
    made, must = json.loads(line), defined(raw, ids[:n].tolist(), anew.tolist(), len(ids))
    assert made == must and repr(sorted(made.items())) == repr(sorted(must.items()))  # 1 is not 1.0, nor 0.0 −0.0
    orjson.loads(line)
    return line


def parts(line: bytes) -> list[bytes]:
    """What stands around the two lists."""
    return re.split(rb'(?<="input_ids")(\s*:\s*)\[[^]]*\]|(?<="loss_mask")(\s*:\s*)\[[^]]*\]', line)


@settings(max_examples=400)
@given(rows(), st.data())
def test_bare_rows_hold_what_the_definition_says(row, data):
    raw, own = row
    length = len(read(raw)[0])
    n = data.draw(st.integers(1, length))
    anew = np.array(data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)), np.uint8)
    line = check(raw, own, n, anew)
    ids, _, bare = read(raw)
    cut = _cut(raw, anew, length, own) if bare else b""
    assert cut in (b"", line)
    if cut and own:
        assert parts(cut) == parts(raw)  # not a byte beside the lists is another
    if cut and not own:
        assert cut.startswith(raw[:raw.index(b"[", raw.index(b'"input_ids"'))]) and cut.endswith(b"]}")


OTHER = ["id", "source", "messages", "tools", "text", "prompt_ids", "response_ids", "x", "loss_masks", "é"]


@settings(max_examples=300)
@given(rows(OTHER), st.data())
def test_other_rows_hold_what_the_definition_says(row, data):
    raw, own = row
    length = len(read(raw)[0])
    n = data.draw(st.integers(1, length))
    check(raw, own, n, np.array(data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)), np.uint8))


@pytest.mark.parametrize("raw", [
    b'{"id": "a", "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}',
    b'{"loss_mask":[0,1,1],"input_ids":[1,2,3]}',
    b'{"id": {"a": [1, 2]}, "input_ids" : [ 1 , 2 , 3 ] , "loss_mask":[0,1,1], "source": "x]"}',
    b'{"input_ids": [1, 2, 3], "id": "no mask"}',
    '{"id": "\u00e9", "input_ids": [1, 2, 3]}'.encode()])
def test_ordinary_bare_rows_are_cut_as_bytes(raw):
    ids, mask, bare = read(raw)
    assert bare and _cut(raw, np.array([0, 1], np.uint8), 3, mask is not None)
    check(raw, mask is not None, 2, np.array([0, 1], np.uint8))
    check(raw, mask is not None, 3, np.array([1, 0, 1], np.uint8))


@pytest.mark.parametrize("raw", [
    b'{"id": "input_ids", "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}',
    b'{"id": "loss_mask", "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}',
    b'{"id": {"loss_mask": [0, 1, 1]}, "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}',
    b'{"input_ids": [1, 2, 3], "source": {"input_ids": [4, 5, 6], "loss_mask": []}, "loss_mask": [0, 1, 1]}',
    b'{"input_ids": [1, 2, 3], "source": ["loss_mask", [1, 2]]}',
    rb'{"input\u005fids": [1, 2, 3], "id": "input_ids", "source": [7], "loss_mask": [0, 1, 1]}',
    rb'{"id": "a\\", "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}',
    rb'{"id": "\"input_ids\": [7]", "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}'])
def test_rows_in_which_the_keys_could_be_mistaken_are_written_anew(raw):
    ids, mask, bare = read(raw)
    assert bare and not _cut(raw, np.array([0, 1], np.uint8), 3, mask is not None)
    check(raw, mask is not None, 2, np.array([0, 1], np.uint8))


def test_what_is_too_large_or_too_deep_for_the_fast_writer_stays_what_it_is():
    deep = b"[" * 300 + b"]" * 300
    for extra in (b'"id": %d' % 10**25, b'"x": {"uuid": [%d]}' % 2**100, b'"x": ' + deep):
        raw = b'{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], %b}' % extra
        ids, _, bare = read(raw)
        line = line_of(raw, ids[:2], np.array([1, 1], np.uint8), 3, bare=bare, own=True)
        assert json.loads(line) == json.loads(raw) | {"input_ids": [1, 2], "loss_mask": [1, 1]}


@pytest.mark.parametrize("near", [1, 3, 2048])
def test_long_lists_are_cut_at_the_right_comma_however_uneven_their_numbers(near, monkeypatch):
    monkeypatch.setattr(rewrite, "NEAR", near)
    rng = np.random.default_rng(near)
    for blanks in (["", ""], ["", " ", " " * 40]):
        ids = np.where(np.arange(900) < 450, rng.integers(0, 9, 900), rng.integers(10**5, 2 * 10**5, 900))
        text = ",".join(rng.choice(blanks) + str(token) + rng.choice(blanks) for token in ids.tolist())
        raw = f'{{"input_ids":[{text}], "loss_mask": {[1] * 900}}}'.encode()
        for n in (1, 2, 449, 450, 451, 899, 900, int(rng.integers(1, 900))):
            line = json.loads(_cut(raw, np.ones(n, np.uint8), 900, True))
            assert line == {"input_ids": ids[:n].tolist(), "loss_mask": [1] * n}
