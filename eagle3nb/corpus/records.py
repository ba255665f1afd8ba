"""Reading dataset directories: `<data_root>/<dataset>/**/*.jsonl[.gz|.zst]`, one JSON object a line.

    {"id": "…", "input_ids": [1, 5, …], "loss_mask": [0, 1, …], "messages": […]}

Also accepted: `prompt_ids` + `response_ids`, and as text `prompt` + `response` or `messages`/`conversations`, which the
target's chat template renders. What is wrong with a line is told by rule; whoever reads decides what a fault costs.
"""

import difflib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
from jinja2 import TemplateError

from eagle3nb.corpus.lines import SUFFIXES
from eagle3nb.corpus.masks import encode, render
from eagle3nb.errors import UserError
from eagle3nb.files import resolve, shown

ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "observation": "tool"}


@dataclass(frozen=True)
class Source:
    """One dataset directory. `files` may be empty: the audit says so."""

    name: str
    path: Path
    files: tuple[Path, ...]

    @property
    def bytes(self) -> int:
        """On disk, as they lie."""
        return sum(path.stat().st_size for path in self.files)


@dataclass(frozen=True)
class Record:
    """One usable line. `mask` is the record's own, None where it brought none."""

    ids: np.ndarray  # int32[T]
    mask: np.ndarray | None  # uint8[T]
    messages: list[dict] | None
    tools: list | None
    raw: bytes  # the line's bytes, without the line break
    source: str
    file: str  # as a record may show it
    line: int  # 1-based
    offset: int | None  # where they begin in an uncompressed file; None otherwise
    plain: bool  # the line holds `input_ids` and `loss_mask` as they are: its bytes can be kept


@dataclass(frozen=True)
class Fault:
    """One unusable line. rule: json_invalid, schema, length_mismatch, mask_values, empty_row or token_out_of_range."""

    source: str
    file: str
    line: int
    rule: str
    detail: str


class Unusable(Exception):  # noqa: N818 (not an error to the reader: it becomes a Fault)
    """Raised while one line is read: (rule, detail)."""


def find_sources(data_root: str | Path, exclude=(), include=()) -> list[Source]:
    """Dataset directories below `data_root`, by name: those included (all, if `include` is empty), less those excluded.

    An entry is a directory's name or, where none has that name, what stands before the first "_": "A1" matches
    A1_longform. Raises UserError where the root is missing or holds no dataset, where an entry matches nothing or
    stands in both lists.
    """
    root = resolve(data_root)
    if not root.is_dir():
        raise UserError(f"data_root {shown(root)} does not exist; give the folder that holds the dataset directories")
    folders = [path for path in sorted(root.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    if not folders:
        raise UserError(f"data_root {shown(root)} holds no dataset directory; expected <data_root>/<dataset>/*.jsonl")
    names = [path.name for path in folders]
    for what, entries in (("exclude", exclude), ("include", include)):
        _all_match(what, entries, names, root)
    if both := [entry for entry in include if entry in exclude]:
        raise UserError(f"{both[0]!r} stands in include and in exclude; take it out of one")
    kept = [path for path in folders if not is_excluded(path.name, exclude, names) and (
        not include or is_excluded(path.name, include, names))]
    if not kept:
        lists = "include and exclude leave" if include else "exclude leaves"
        raise UserError(f"{lists} no dataset of {shown(root)}; shorten the list")
    return [Source(path.name, path, _files(path)) for path in kept]


def _all_match(what: str, entries, names: list[str], root: Path) -> None:
    """UserError for a list that is none, or for an entry that is no dataset."""
    if isinstance(entries, str):
        raise UserError(f"{what} is {entries!r}; give a list, as in [{entries}]")
    for entry in entries:
        if not any(is_excluded(name, [entry]) for name in names):
            near = difflib.get_close_matches(str(entry), names, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
            raise UserError(f"{what}: {entry!r} matches no dataset in {shown(root)}; {hint}")


def is_excluded(name: str, exclude, names=()) -> bool:
    """True if an entry is the name, or its part before the first underscore and none of `names`, all datasets there
    are: where a dataset is called `chat`, that entry does not mean `chat_on_policy` too."""
    return any(entry == name or entry == name.split("_", 1)[0] and entry not in names for entry in exclude)


def _files(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(path for path in folder.rglob("*") if path.is_file() and path.name.endswith(SUFFIXES)
                        and not path.name.startswith(".")))


def tokens(raw: bytes, vocab_size: int, tokenizer=None) -> tuple:
    """(ids int32[T], mask uint8[T] or None, plain, False) of one line; Unusable (rule, what is wrong) otherwise.

    plain: the line holds `input_ids`, and `loss_mask` where there is a mask, as they are returned (the last value is
    batch.py's `bare`). `tokenizer` is a function without arguments that returns it, called for rows of text alone.
    """
    try:
        row = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Unusable("json_invalid", str(error)) from None
    if not isinstance(row, dict):
        raise Unusable("schema", "the line is not a JSON object")
    ids, mask = _tokens(row, vocab_size, tokenizer)
    if not len(ids):
        raise Unusable("empty_row", "no tokens")
    plain = "input_ids" in row and (mask is None or not isinstance(row["loss_mask"][0], bool))
    return ids, mask, plain and ("loss_mask" in row) == (mask is not None), False


def _tokens(row, vocab_size, tokenizer) -> tuple[np.ndarray, np.ndarray | None]:
    if "input_ids" in row:
        ids = _ids(row["input_ids"], "input_ids", vocab_size)
        return ids, None if row.get("loss_mask") is None else _mask(row["loss_mask"], len(ids))
    if "prompt_ids" in row and "response_ids" in row:
        prompt = _ids(row["prompt_ids"], "prompt_ids", vocab_size)
        response = _ids(row["response_ids"], "response_ids", vocab_size)
        mask = np.repeat(np.array([0, 1], np.uint8), [len(prompt), len(response)])
        return np.concatenate([prompt, response]), mask
    if messages := conversation(row):
        return _rendered(messages, row.get("tools"), vocab_size, tokenizer), None
    raise Unusable("schema", f"no input_ids, prompt_ids + response_ids or text; keys: {', '.join(list(row)[:8])}")


def _array(values, name: str) -> np.ndarray:
    """A flat array of a JSON list, of whatever dtype its numbers have."""
    if not isinstance(values, list):
        raise Unusable("schema", f"{name} is not a list")
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        raise Unusable("schema", f"{name} is not a flat list of numbers") from None
    if array.ndim != 1 or array.dtype.kind not in "iubf":
        raise Unusable("schema", f"{name} is not a flat list of numbers")
    return array


def _ids(values, name: str, vocab_size: int) -> np.ndarray:
    array = _array(values, name)
    if not len(array):
        return array.astype(np.int32)
    if array.dtype.kind not in "iu":
        raise Unusable("schema", f"{name} holds numbers that are not integers")
    wrong = np.flatnonzero((array < 0) | (array >= vocab_size))
    if len(wrong):
        at, more = int(wrong[0]), f" ({len(wrong)} such tokens in the row)" if len(wrong) > 1 else ""
        detail = f"{name}[{at}] = {array[at]}, the vocabulary has {vocab_size} tokens{more}"
        raise Unusable("token_out_of_range", detail)
    return array.astype(np.int32)


def _mask(values, length: int) -> np.ndarray:
    array = _array(values, "loss_mask")
    if len(array) != length:
        raise Unusable("length_mismatch", f"loss_mask has {len(array)} values for {length} tokens")
    wrong = np.flatnonzero((array != 0) & (array != 1))
    if len(wrong) or (length and array.dtype.kind == "f"):
        at = int(wrong[0]) if len(wrong) else 0
        raise Unusable("mask_values", f"loss_mask[{at}] = {array[at]}, allowed are the integers 0 and 1")
    return array.astype(np.uint8)


def conversation(row: dict) -> list[dict] | None:
    """The conversation as role/content messages, whatever dialect it came in; None where the row has none.

    Raises Unusable for what is no conversation.
    """
    turns = row.get("messages") or row.get("conversations")
    if turns is None and "prompt" in row and "response" in row:
        prompt = row["prompt"]
        turns = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        turns = [*turns, {"role": "assistant", "content": row["response"]}]
    if turns is None:
        return None
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise Unusable("schema", "messages is not a list of objects")
    return [_message(turn) for turn in turns]


def _message(turn: dict) -> dict:
    if "from" in turn and "role" not in turn:
        turn = {"role": turn["from"], "content": turn.get("value")}
    role = turn.get("role")
    if not isinstance(role, str):
        raise Unusable("schema", "a message has no role")
    return {**turn, "role": ROLES.get(role, role)}


def _rendered(messages, tools, vocab_size: int, tokenizer) -> np.ndarray:
    if tokenizer is None:
        raise Unusable("schema", "the row is text, and no tokenizer was given")
    try:
        text = render(tokenizer(), messages, tools=tools)
        return _ids(encode(tokenizer(), text), "the rendered text", vocab_size)
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise Unusable("schema", f"the chat template refuses the row: {error}") from None
