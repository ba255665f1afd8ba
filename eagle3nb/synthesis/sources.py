"""Where prompts come from: recipes, JSONL files, sets that packages carry, and datasets to be answered anew.

A JSONL file makes one dataset, named as the file. A line is one conversation without its answers:

    {"id": "…", "messages": [{"role": "user", "content": "…"}, …], "tools": […]}      or {"prompt": "text"}

An answer is asked for wherever a user's or a tool's word is not followed by one: [user, user] is two turns, [user,
tool, tool, user] is two calls at once, an answer to both results and one more turn. {"role": "assistant"} alone says
that an answer goes there, which only results of calls one after another need: [user, tool, assistant, tool]. An
assistant's message with a content is given: it is context, and not supervised.

(`humaneval`, `mtbench`, `gsm8k` are read by acceptance.prompts, which knows nothing of synthesis.)
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import orjson

from eagle3nb.acceptance.prompts import IDS, PACKAGES, prompt_sets
from eagle3nb.corpus.lines import Chunk, read
from eagle3nb.corpus.masks import Markers, mask_from_markers, spans
from eagle3nb.corpus.records import Unusable, conversation, find_sources, is_excluded
from eagle3nb.errors import UserError
from eagle3nb.files import resolve, shown
from eagle3nb.synthesis.prompts import Prompt, Recipe, expand, load_recipes

ROLES = ("system", "developer", "user", "assistant", "tool")
ANEW = "_on_policy"  # behind the name of a dataset whose prompts the target answers anew


@dataclass(frozen=True)
class Dataset:
    """One dataset to be made. `origin`: what its prompts come from, as a record may show it. `file`: what was read.

    `left_out`: rows that cannot be asked anew, by reason. `limit`: a rehearsal with so many prompts; 0: none.
    """

    name: str
    origin: str
    file: Path | None
    max_new_tokens: int
    temperature: float
    top_p: float
    recipe: Recipe | None = None
    asked: tuple[Prompt, ...] = ()  # of all but recipes, whose prompts depend on the seed
    left_out: dict = field(default_factory=dict)
    limit: int = 0
    anew: bool = False  # another model's answers are replaced by the target's

    def prompts(self, seed: int) -> list[Prompt]:
        """Of the part with this seed."""
        found = expand(self.recipe, seed) if self.recipe else list(self.asked)
        return found[:self.limit] if self.limit else found


def datasets(prompts: list[str], *, regenerate: list[str] = (), data_root: str | Path, only: list[str] = (),
             exclude: list[str] = (), max_new_tokens: int, temperature: float, top_p: float, limit: int = 0,
             markers: Markers | None = None) -> list[Dataset]:
    """What `prompts` and `regenerate` make: those named in `only` (all, where it is empty), less those excluded.

    max_new_tokens, temperature, top_p: where there is no recipe. markers: of the target's template, for `regenerate`.
    Raises UserError for what cannot be read, a line that is no prompt, a dataset that two entries make, or a name in
    `only` that none makes. An entry of `exclude` that matches nothing here may well match another stage's.
    """
    if max_new_tokens < 1 or temperature < 0 or not 0 < top_p <= 1:
        raise UserError(f"max_new_tokens {max_new_tokens}, temperature {temperature} and top_p {top_p}: they want 1 or "
                        "more, 0 or more, and a number within (0, 1]")
    sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "limit": limit}
    found = [dataset for entry in prompts for dataset in of_entry(entry, sampling)]
    found += [anew(name, data_root, markers, sampling) for name in regenerate]
    if twice := [name for name, count in Counter(dataset.name for dataset in found).items() if count > 1]:
        raise UserError(f"dataset {twice[0]} would be made by two entries of prompts; rename a file")
    names = [dataset.name for dataset in found]
    for name in only:
        if name not in names:
            raise UserError(f"datasets: nothing in prompts makes {name!r}; there are {', '.join(names) or 'none'}")
    left_out = [] if only else exclude
    kept = [d for d in found if (not only or d.name in only) and not is_excluded(d.name, left_out, names)]
    if not kept:
        raise UserError("there is nothing to make: name prompts, or take a dataset out of exclude")
    return kept


def of_entry(entry: str, sampling: dict) -> list[Dataset]:
    """The datasets of one entry of `prompts`."""
    if entry in PACKAGES:
        sets, missing = prompt_sets([entry])
        if missing:
            raise UserError(f"prompts: {entry} is not installed: {missing[entry]} (--no-deps is enough)")
        asked = tuple(Prompt(p.id, entry, p.messages, tuple(({"role": "user", "content": text},) for text in p.later))
                      for p in sets[entry])
        return [Dataset(entry, f"the set {entry}", None, **sampling, asked=asked)]
    path = resolve(entry)
    if path.is_dir():
        return [Dataset(recipe.name, shown(path / f"{recipe.name}.yml"), path / f"{recipe.name}.yml",
                        recipe.max_new_tokens, recipe.temperature, recipe.top_p, recipe=recipe,
                        limit=sampling["limit"]) for recipe in load_recipes(path)]
    if path.is_file():
        name = path.name.split(".")[0]
        if not name:
            raise UserError(f"prompts: {entry!r} names no dataset; rename the file, as A_chat.jsonl")
        return [Dataset(name, shown(path), path, **sampling, asked=tuple(of_file(path, name)))]
    raise UserError(f"prompts: {entry!r} is no folder of recipes, no file, and none of the sets {', '.join(PACKAGES)}")


def of_file(path: Path, name: str) -> list[Prompt]:
    """The prompts of a JSONL file. UserError at the first line that is none."""
    found, seen = [], {}
    for number, raw in lines_of(path):
        where = f"{shown(path)} line {number}"
        try:
            row = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise UserError(f"{where}: not valid JSON ({error}); correct or remove the line") from None
        messages, tools, fault = asked_by(row)
        if fault:
            raise UserError(f"{where}: {fault}; correct or remove the line")
        key = next((str(row[key]) for key in IDS if row.get(key) not in (None, "")), f"{name}-{number:06d}")
        if key in seen:
            raise UserError(f"{where}: the id {key!r} stands on line {seen[key]} already; give it another")
        seen[key] = number
        found.append(prompt_of(key, name, messages, tools))
    if not found:
        raise UserError(f"{shown(path)} holds no prompt; a line is an object with messages or prompt")
    return found


def lines_of(path: Path):
    """(1-based number, line) of a plain or packed JSONL file, without blank lines. UserError where it is damaged."""
    before = 0
    try:
        for part in read(Chunk(0, 0, path, 0, path.stat().st_size)):
            if part.damage:
                raise UserError(f"{shown(path)} cannot be read on ({part.damage}); replace the file")
            yield from ((before + n + 1, raw) for n, raw in zip(part.numbers, part.raws, strict=True))
    except OSError as error:
        raise UserError(f"{shown(path)} cannot be read ({error.strerror or error}); replace the file") from None


def asked_by(row) -> tuple[list[dict], list[dict], str]:
    """(messages, tools, what is wrong) of a parsed line."""
    if not isinstance(row, dict):
        return [], [], "wants an object"
    texts = row.get("turns", [row.get("prompt", row.get("question"))])
    messages = row.get("messages")
    if messages is None and isinstance(texts, list) and all(isinstance(t, str) and t.strip() for t in texts):
        messages = [{"role": "user", "content": text} for text in texts]
    tools = row.get("tools") or []
    return messages or [], tools, fault_of(messages, tools)


def fault_of(messages, tools) -> str:
    """Why these are no prompt, in words; "" where they are one."""
    if not isinstance(messages, list) or not messages:
        return "wants messages, a list, or prompt, a text"
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        return "tools wants a list of objects"
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            return f"message {i} wants a role, one of {', '.join(ROLES)}"
        if not isinstance(message.get("content"), str) and message["role"] != "assistant":
            return f"message {i} wants a content of text"
    asked = [message for message in messages if not is_place(message)]
    if not asked or asked[-1]["role"] not in ("user", "tool") or is_place(messages[0]):
        return "the conversation wants to begin with, and to be left to answer after, a user's or a tool's message"
    return ""


def is_place(message: dict) -> bool:
    """An assistant's message that says nothing: an answer goes there."""
    return message["role"] == "assistant" and not message.get("content") and not message.get("tool_calls")


def prompt_of(key: str, source: str, messages: list[dict], tools=()) -> Prompt:
    """A Prompt of checked messages: cut wherever an answer is wanted, as this module's head says."""
    blocks, block = [], []
    for message in messages:
        before = block[-1]["role"] if block else ""
        together = message["role"] == "assistant" or before not in ("user", "tool") or (
            before == message["role"] == "tool")
        if is_place(message) or not together:
            blocks.append(tuple(block))
            block = []
        block += [] if is_place(message) else [message]
    opening, *later = filter(None, [*blocks, tuple(block)])
    return Prompt(key, source, opening, tuple(later), tuple(tools))


# ---------------------------------------------------------------------------------------------------- anew


def check_policy(wanted: list[Dataset], on_policy: bool) -> None:
    """UserError where a dataset is to be answered anew, and not by the target."""
    for dataset in wanted:
        if dataset.anew and not on_policy:
            raise UserError(f"{dataset.name} is for the target's own answers, and another model answers; set endpoint "
                            "to a server of the target, or to '' for the target itself, here")


def anew(name: str, data_root: str | Path, markers: Markers | None, sampling: dict) -> Dataset:
    """The prompts of a dataset that another model answered. Its turns and tools stay; of its answers those that its
    masks do not supervise stay too, as context. A row without messages, or whose answers cannot be told apart, is left
    out and counted."""
    source = find_sources(data_root, include=[name])
    if len(source) != 1:
        raise UserError(f"regenerate: {name!r} matches {len(source)} datasets; give one's whole name")
    asked, left_out, seen = [], Counter(), Counter()
    for path in source[0].files:
        for _, raw in lines_of(path):
            prompt, why = asked_anew(raw, source[0].name + ANEW, len(asked), markers)
            if why:
                left_out[why] += 1
                continue
            seen[prompt.id] += 1
            asked.append(prompt if seen[prompt.id] == 1 else replace(prompt, id=f"{prompt.id}~{seen[prompt.id]}"))
    if not asked:
        raise UserError(f"regenerate: no row of {shown(source[0].path)} can be asked anew ({dict(left_out)})")
    return Dataset(source[0].name + ANEW, f"{shown(source[0].path)}, answered anew", source[0].path, **sampling,
                   asked=tuple(asked), left_out=dict(left_out), anew=True)


def asked_anew(raw: bytes, source: str, number: int, markers: Markers | None) -> tuple[Prompt | None, str]:
    """(the prompt of a record, why there is none)."""
    try:
        row = orjson.loads(raw)
        whole = conversation(row)
        messages = whole or row.get("prompt")  # of a cut answer: what stood before it
    except (orjson.JSONDecodeError, Unusable, AttributeError):
        return None, "no record"
    if not isinstance(messages, list):
        return None, "no messages"
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    taught = supervised(row, len(answers), markers)
    if taught is None:
        return None, "answers not told apart"
    dropped = {i for i, own in zip(answers, taught, strict=True) if own}
    if whole and not dropped:
        return None, "nothing supervised"
    end = max(dropped) if whole else len(messages)
    left = [{"role": "assistant"} if i in dropped else message for i, message in enumerate(messages[:end])]
    tools = row.get("tools") or []
    if fault_of(left, tools):
        return None, "no prompt"
    return prompt_of(str(row.get("id") or f"{source}-{number:06d}"), source, left, tools), ""


def supervised(row: dict, answers: int, markers: Markers | None) -> list[bool] | None:
    """Of each answer whether the row's mask supervises any of it; all where it has none. None: it cannot be told."""
    if "input_ids" not in row or row.get("loss_mask") is None or markers is None:
        return [True] * answers
    derived = mask_from_markers(np.asarray(row["input_ids"], np.int64), markers)
    edges = spans(derived)
    if "messages" not in row and len(edges) == answers + 1:  # cut in its last answer: `prompt` ends before that
        edges = edges[:answers]
    if len(edges) != answers or len(row["loss_mask"]) != len(derived):
        return None
    return [any(row["loss_mask"][begin:end]) for begin, end in edges.tolist()]
