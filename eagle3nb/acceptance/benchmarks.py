"""Prompts, and the target's greedy answers to them.

An answer is taken some tokens beyond its end-of-turn or length limit: a drafted chain may run past the end, and engines
count what it gets right there. Answers are kept by content, so that a second drafter costs no second decoding.
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from eagle3nb.corpus.loops import ends_in_circles as looping  # an answer without its end-of-turn token
from eagle3nb.errors import UserError
from eagle3nb.files import resolve, shown, write_json
from eagle3nb.progress import progress
from eagle3nb.states.target import digest, target_identity

KEYS = {"id", "source", "messages"}
CACHE = ".cache/answers"  # shared by all runs of the project: a second drafter finds them there


@dataclass(frozen=True)
class Prompt:
    """One conversation that waits for the assistant's turn; `ids` after rendering through the chat template."""

    id: str
    source: str
    messages: tuple[dict, ...] = ()
    ids: tuple[int, ...] = ()
    later: tuple[str, ...] = ()  # what the user says once it is answered; `answers` does not ask it


@dataclass(frozen=True)
class Answer:
    """The target's greedy answer. `ids` up to and with its end (end-of-turn, or the limit), `beyond` what follows."""

    id: str
    source: str
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    beyond: tuple[int, ...]
    stopped: bool  # by an end-of-turn token, not by the limit
    looping: bool

    @property
    def start(self) -> int:
        """Position of the answer's first token."""
        return len(self.prompt)

    @property
    def end(self) -> int:
        """Position after the answer's last token."""
        return len(self.prompt) + len(self.ids)

    @property
    def sequence(self) -> np.ndarray:
        """int32 [T]: prompt, answer and what lies beyond it."""
        return np.array(self.prompt + self.ids + self.beyond, dtype=np.int32)


def load_prompts(path: str | Path, limit: int = 0) -> list[Prompt]:
    """Prompts of a JSONL file {"id", "source", "messages": [{"role", "content"}]}; `limit` a source, 0 for all.

    Raises UserError at the first fault, with its line.
    """
    path = resolve(path)
    if not path.is_file():
        raise UserError(f"prompts: {shown(path)} does not exist; name a JSONL file of held-out prompts")
    prompts = prompts_of(path, path.read_bytes(), lambda line, _: _parse(line), "id, source, messages")
    return [prompt for prompt, place in zip(prompts, _places(prompts), strict=True) if place < limit or not limit]


def prompts_of(path: Path, data: bytes, parse: Callable, wanted: str) -> list[Prompt]:
    """The prompts of a file's lines by `parse(line, number) -> (fault, prompt)`; blank lines are none.

    Raises UserError at the first fault, at an id that stands there twice, and where there is no prompt (`wanted`: what
    a line should be an object with).
    """
    prompts, seen = [], {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        fault, prompt = parse(line, number)
        if prompt and prompt.id in seen:
            fault = f"id {prompt.id!r} stands on line {seen[prompt.id]} already"
        if fault:
            raise UserError(f"prompts: {shown(path)} line {number}: {fault}; correct or remove the line")
        seen[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise UserError(f"prompts: {shown(path)} holds no prompt; a line is an object with {wanted}")
    return prompts


def _places(prompts: list[Prompt]) -> list[int]:
    """Each prompt's place among those of its source."""
    seen = Counter()
    places = []
    for prompt in prompts:
        places.append(seen[prompt.source])
        seen[prompt.source] += 1
    return places


def spread(items: list, count: int) -> list:
    """`count` of the items at equal distances, so that every source has its share; all where there are fewer."""
    if count >= len(items):
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


def _parse(line: bytes) -> tuple[str, Prompt | None]:
    """(fault, prompt): exactly one of them holds something."""
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        return f"not valid JSON ({error})", None
    if not isinstance(row, dict) or set(row) != KEYS:
        return f"wants an object with exactly the keys {', '.join(sorted(KEYS))}", None
    return checked(row)


def checked(row: dict, later: tuple[str, ...] = ()) -> tuple[str, Prompt | None]:
    """(fault, prompt) of {"id", "source", "messages"}: exactly one of them holds something."""
    if not all(isinstance(row[key], str) and row[key] for key in ("id", "source")):
        return "id and source want text that is not empty", None
    if row["source"] == "all":
        return "source \"all\" names the total; choose another name", None
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        return "messages wants a list that is not empty", None
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            return "each message wants a role and a content of text", None
    if messages[-1]["role"] == "assistant":
        return "the last message is the assistant's, so nothing is left to answer", None
    return "", Prompt(row["id"], row["source"], tuple(messages), later=later)


def render(prompts: list[Prompt], tokenizer) -> list[Prompt]:
    """The prompts with `ids`: the chat template's tokens up to where the assistant begins."""
    def tokens(prompt: Prompt) -> tuple[int, ...]:
        ids = tokenizer.apply_chat_template(list(prompt.messages), add_generation_prompt=True, return_dict=False)
        return tuple(int(token) for token in ids)
    return [replace(prompt, ids=tokens(prompt)) for prompt in prompts]


def answers(target, prompts: list[Prompt], *, max_new_tokens: int, beyond: int, cache_dir: str | Path,
            stop_ids=None, batch: int = 16, generate: Callable | None = None, made: dict | None = None) -> list[Answer]:
    """The target's greedy answers to rendered prompts, in their order; decoded once, then read from `cache_dir`.

    `stop_ids` end a turn (default: the target's). `generate` decodes them otherwise, and `made` tells the cache how
    (sampled.answers). One JSON file an answer, named by the hash of the target's identity, the prompt's ids and the
    settings, so that a cache can never be that of another target or template.
    """
    stop_ids = tuple(sorted(target.facts.eos if stop_ids is None else stop_ids))
    settings = {"max_new_tokens": max_new_tokens, "beyond": beyond, "stop_ids": list(stop_ids)} | (made or {})
    generate = generate or partial(target.generate, temperature=0.0)
    _check_lengths(target, prompts, max_new_tokens + beyond)
    identity = target_identity(target.dir)
    files = [resolve(cache_dir) / f"{_key(identity, prompt, settings)}.json" for prompt in prompts]
    kept = [_read(file, prompt) for file, prompt in zip(files, prompts, strict=True)]
    missing = [i for i, ids in enumerate(kept) if ids is None]
    if missing:
        with progress(len(missing), "answers", "prompts") as bar:
            def keep(index: int, ids) -> None:  # at once, so that a run that dies loses only what was under way
                i = missing[index]
                kept[i] = [int(token) for token in ids]
                write_json(files[i], {"prompt": list(prompts[i].ids), **settings, "ids": kept[i]})
                bar.advance(1)
            generate([list(prompts[i].ids) for i in missing], max_new_tokens=max_new_tokens, stop_ids=stop_ids,
                     beyond=beyond, batch=batch, done=keep)
    return [_answer(prompt, ids, settings) for prompt, ids in zip(prompts, kept, strict=True)]


def _check_lengths(target, prompts: list[Prompt], room: int) -> None:
    """Every prompt rendered, and short enough for the target's context with the answer behind it."""
    for prompt in prompts:
        if not prompt.ids:
            raise ValueError(f"prompt {prompt.id} is not rendered: call render first")
        if len(prompt.ids) + room > target.facts.max_positions:
            raise UserError(f"prompt {prompt.id}: {len(prompt.ids)} tokens and {room} to answer pass the target's "
                            f"{target.facts.max_positions} positions; shorten it or lower max_new_tokens")


def _key(identity: dict, prompt: Prompt, settings: dict) -> str:
    return digest([identity, list(prompt.ids), settings])


def _read(file: Path, prompt: Prompt) -> list[int] | None:
    """The kept answer; None where there is none. A damaged file is no answer: it is decoded again."""
    try:
        row = json.loads(file.read_text(encoding="utf-8"))
        return row["ids"] if row["prompt"] == list(prompt.ids) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _answer(prompt: Prompt, ids: list[int], settings: dict) -> Answer:
    """Cuts the decoded ids at the first stop token, or at the limit."""
    limit, stops = settings["max_new_tokens"], set(settings["stop_ids"])
    stop = next((i for i, token in enumerate(ids[:limit]) if token in stops), None)
    length = limit if stop is None else stop + 1
    if len(ids) < length + settings["beyond"]:
        raise ValueError(f"prompt {prompt.id}: {len(ids)} ids decoded, {length + settings['beyond']} asked")
    beyond = tuple(ids[length:length + settings["beyond"]])
    loops = looping(ids[:length if stop is None else stop])
    return Answer(prompt.id, prompt.source, prompt.ids, tuple(ids[:length]), beyond, stop is not None, loops)


def overview(answers: list[Answer]) -> pd.DataFrame:
    """A row a source and the total: prompts, prompt and answer tokens, stopped by end-of-turn, looping."""
    table = pd.DataFrame({"source": [a.source for a in answers], "prompts": 1,
                          "prompt tokens": [len(a.prompt) for a in answers],
                          "answer tokens": [len(a.ids) for a in answers],
                          "stopped": [int(a.stopped) for a in answers], "looping": [int(a.looping) for a in answers]})
    by_source = table.groupby("source", as_index=False).sum()
    total = table.drop(columns="source").sum().to_frame().T.assign(source="all")
    return pd.concat([by_source, total[by_source.columns]], ignore_index=True)


def examples(prompts: list[Prompt], answers: list[Answer], tokenizer, width: int = 240) -> list[dict]:
    """The first answer of each source, to look at: rows {source, prompt, answer}, shortened to `width` characters."""
    shown_sources, rows = set(), []
    for prompt, answer in zip(prompts, answers, strict=True):
        if answer.source not in shown_sources:
            shown_sources.add(answer.source)
            rows.append({"source": answer.source, "prompt": prompt.messages[-1]["content"][:width],
                         "answer": tokenizer.decode(list(answer.ids))[:width]})
    return rows
