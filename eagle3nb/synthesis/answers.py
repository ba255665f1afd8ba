"""Answers: prompts → tokenised records, answered by the target itself.

A record's ids are exactly what the target saw and wrote: the prompt through its chat template, the ids it sampled, and
for a further turn the template's glue. Two derivations of the loss mask must agree with that before a row is written.

Every answer goes to a journal as soon as it is there, so a killed run goes on where it stopped; a dataset's file
appears whole. What came of each answer is counted by reason. A text depends on its own prompt, seed and attempt only.
"""

import gzip
import itertools
import json
import os
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from eagle3nb.corpus.loops import ends_in_circles
from eagle3nb.corpus.masks import Markers, encode, find_markers, mask_from_markers, mask_from_prefixes, render
from eagle3nb.errors import UserError
from eagle3nb.files import atomic_write, read_json, resolve, shown, write_json, xxh3_file
from eagle3nb.progress import progress
from eagle3nb.synthesis.prompts import Prompt, Recipe, expand, load_recipes

FORMAT = 1  # raise it when the same recipe would give other rows
ATTEMPTS = 3  # samples of one answer before it is given up
BATCH = 32
LOOP_GRAM, LOOP_SHARE, LOOP_TAIL = 8, 0.35, 24
SEED_STEP = 1_000_003  # between the attempts' seeds; prime, so that neighbouring seeds do not share samples


@dataclass
class Talk:
    """One conversation on its way: ids and mask so far, and the messages they stand for."""

    prompt: Prompt
    ids: list[int]
    mask: list[int]
    messages: list[dict]
    turn: int = 0  # the answer that is wanted next
    attempt: int = 0
    finish: str = ""  # "stop" or "length" of the last answer kept
    over: bool = False

    @property
    def key(self) -> tuple[str, int, int]:
        return self.prompt.id, self.turn, self.attempt


def main(prompts_dir: str, out_dir: str, only: list[str], seed: int, parts: int = 1) -> None:
    """Make the datasets of `prompts_dir` (all, or those named) in `out_dir`, answered by the embedded target.

    Each part of a dataset is a file made with a seed of its own, `seed` and those after it: templates filled otherwise,
    hand-written prompts answered anew. What stands there already and is still right is not made again. A line a part
    tells what came of it.
    """
    if parts < 1:
        raise UserError(f"parts is {parts}; choose 1 or more")
    from eagle3nb.states.hf import TransformersTarget  # torch and the weights only when there is work to answer
    from eagle3nb.states.target import load_tokenizer, target_dir, target_identity
    recipes, out_dir = load_recipes(prompts_dir, only), resolve(out_dir)
    folder = target_dir("embedded")
    identity, tokenizer = target_identity(folder), load_tokenizer(folder)
    target = None
    for part, recipe in itertools.product(range(parts), recipes):
        own = seed + part
        mark = fingerprint(recipe, [begin(prompt, tokenizer) for prompt in expand(recipe, own)], own, identity)
        report = standing(out_dir, recipe.name, mark, part)
        if report is None:
            target = target or TransformersTarget(folder)
            try:
                report = synthesise(recipe, target, tokenizer, out_dir, own, mark, part)
            except OSError as error:
                raise UserError(f"cannot write {shown(out_dir / recipe.name)}: {error.strerror or error}; what was "
                                "answered is kept, so free space or allow writing, and start again") from error
        print(line(numbered(recipe.name, part), report), flush=True)


def fingerprint(recipe: Recipe, talks: list["Talk"], seed: int, identity: dict) -> str:
    """What a dataset's rows depend on, as a hash: the prompts' ids, how they are sampled, the seed, the target."""
    prompts = [[talk.prompt.id, talk.ids, talk.prompt.later] for talk in talks]
    sampling = [recipe.max_new_tokens, recipe.temperature, recipe.top_p, ATTEMPTS, seed]
    parts = [FORMAT, prompts, sampling, identity["config"], identity["weights"]]
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode())


def numbered(name: str, part: int) -> str:
    """A dataset's name, or a row's: of a later part with the part's number, so that it stands once."""
    return f"{name}.{part}" if part else name


def standing(out_dir: Path, name: str, mark: str, part: int = 0) -> dict | None:
    """The report of a part that stands finished under this fingerprint, its file unharmed; None otherwise."""
    report, file = out_dir / f"{numbered(name, part)}.json", out_dir / name / f"part-{part:03d}.jsonl.gz"
    if not report.is_file() or not file.is_file():
        return None
    report = read_json(report)
    return report if report["fingerprint"] == mark and report["xxh3"] == xxh3_file(file) else None


def synthesise(recipe: Recipe, target, tokenizer, out_dir: Path, seed: int, mark: str, part: int = 0) -> dict:
    """Answer one recipe's prompts and write `out_dir/<name>/part-<part>.jsonl.gz`; its report, also in
    `out_dir/<name>.json` (of a later part <name>.<part>.json).

    `target` needs `generate` and `facts` (eos, vocab) of TransformersTarget. Raises UserError where no row is left.
    """
    folder, counts = out_dir / recipe.name, Counter()
    folder.mkdir(parents=True, exist_ok=True)
    markers = find_markers(tokenizer)
    talks = [begin(prompt, tokenizer) for prompt in expand(recipe, seed)]
    expected = sum(1 + len(talk.prompt.later) for talk in talks)
    path = folder / f"part-{part:03d}.jsonl.gz"
    notes = folder / f".part-{part:03d}.journal.partial"
    with journal(notes, mark) as (known, note), progress(expected, numbered(recipe.name, part), "answers") as bar:
        bar.advance(sum(attempt == 0 for _, _, attempt in known))
        while waiting := [talk for talk in talks if not talk.over]:
            answer_missing([talk for talk in waiting if talk.key not in known], recipe, target, seed, note, bar)
            for talk in waiting:
                take(talk, known[talk.key], recipe, target, tokenizer, markers, counts)
    rows = [as_row(talk, tokenizer, part) for talk in talks if talk.turn]
    if not rows:
        raise UserError(f"synthesis {recipe.name}: no answer was usable ({dict(counts)}); "
                        "change its prompts or its temperature")
    report = write(recipe, rows, counts, path, mark)
    write_json(out_dir / f"{numbered(recipe.name, part)}.json", report)
    notes.unlink()
    return report


@contextmanager
def journal(path: Path, mark: str):
    """(answers known so far {(id, turn, attempt): ids}, a function that notes one more, durably).

    A journal of another fingerprint is thrown away; a last line that a kill cut off is not counted.
    """
    lines = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    fresh = lines[0] != mark.encode()
    known = {} if fresh else {(row[0], row[1], row[2]): row[3] for row in map(json.loads, lines[1:-1])}
    whole = mark.encode() + b"\n" if fresh else b"\n".join(lines[:-1]) + b"\n"
    path.write_bytes(whole)
    with open(path, "ab") as handle:
        def note(key: tuple, ids: list[int]) -> None:
            handle.write(json.dumps([*key, ids], separators=(",", ":")).encode() + b"\n")
            handle.flush()
            os.fsync(handle.fileno())
            known[key] = ids
        yield known, note


def answer_missing(talks: list[Talk], recipe: Recipe, target, seed: int, note, bar) -> None:
    """Let the target answer each of these talks once, noting every answer as it comes."""
    def done(index: int, ids: list[int]) -> None:
        note(talks[index].key, list(map(int, ids)))
        bar.advance(1 if talks[index].attempt == 0 else 0)

    if talks:
        target.generate([talk.ids for talk in talks], max_new_tokens=recipe.max_new_tokens, done=done, batch=BATCH,
                        temperature=recipe.temperature, top_p=recipe.top_p, stop_ids=target.facts.eos,
                        seed=[seed + SEED_STEP * talk.attempt for talk in talks])


def begin(prompt: Prompt, tokenizer) -> Talk:
    """A talk that waits for its first answer."""
    ids = encode(tokenizer, render(tokenizer, list(prompt.opening), generation=True))
    return Talk(prompt, ids, [0] * len(ids), list(prompt.opening))


def take(talk: Talk, new: list[int], recipe: Recipe, target, tokenizer, markers: Markers, counts: Counter) -> None:
    """Judge an answer and move its talk on: the next turn, another attempt, or the end."""
    ended = new[-1] in target.facts.eos
    fault = fault_of(new[:-1] if ended else new, ended, markers)
    message = {"role": "assistant", "content": tokenizer.decode(new[:-1] if ended else new)}
    messages, ids, mask = [*talk.messages, message], talk.ids + new, talk.mask + [1] * len(new)
    if not fault and not agree(ids, mask, messages, tokenizer, markers):
        fault = "retokenises"  # the text's own tokens are not those that were sampled: a server would see others
    if fault:
        counts[fault] += 1
        talk.attempt += 1
        talk.over = talk.attempt == ATTEMPTS
        counts["given up"] += talk.over
        return
    talk.ids, talk.mask, talk.messages, talk.finish = ids, mask, messages, "stop" if ended else "length"
    counts[talk.finish] += 1
    talk.turn, talk.attempt = talk.turn + 1, 0
    talk.over = not ended or talk.turn > len(talk.prompt.later)
    if not talk.over:
        ask(talk, tokenizer)


def ask(talk: Talk, tokenizer) -> None:
    """Put the next message of the prompt and the assistant's header behind the answer."""
    following = [*talk.messages, talk.prompt.later[talk.turn - 1]]
    ids = encode(tokenizer, render(tokenizer, following, generation=True))
    if ids[:len(talk.ids)] != talk.ids:  # `agree` has seen to it, except for a template that rewrites earlier turns
        talk.over = True
        return
    talk.messages = following
    talk.mask += [0] * (len(ids) - len(talk.ids))
    talk.ids = ids


def fault_of(body: list[int], ended: bool, markers: Markers) -> str:
    """Why an answer's tokens (without the end of turn) make no record; empty if they do."""
    if len(body) < 2:
        return "empty"
    if set(body) & set(markers.special_ids):
        return "special token"
    return "looping" if looping(body) else ""


def looping(ids) -> bool:
    """Whether a text goes round in circles: over a third of its 8-grams stood there before, or its last 24 tokens or
    more repeat a block of at most half their length."""
    ids = np.asarray(ids)
    grams = [tuple(ids[i:i + LOOP_GRAM].tolist()) for i in range(len(ids) - LOOP_GRAM + 1)]
    if len(grams) >= LOOP_TAIL and 1 - len(set(grams)) / len(grams) > LOOP_SHARE:
        return True
    return ends_in_circles(ids)


def agree(ids: list[int], mask: list[int], messages: list[dict], tokenizer, markers: Markers) -> bool:
    """Whether ids and mask equal both derivations: from the markers, and from the text's own rendering.

    An answer cut at its limit lacks the end of turn that its rendering has: there the ids must begin the rendering.
    """
    derived = mask_from_prefixes(messages, tokenizer)
    if derived is None or not np.array_equal(mask_from_markers(np.asarray(ids), markers), mask):
        return False
    whole_ids, whole_mask = derived
    return whole_ids[:len(ids)].tolist() == ids and whole_mask[:len(ids)].tolist() == mask


def as_row(talk: Talk, tokenizer, part: int = 0) -> dict:
    """The record of DESIGN section 3. An unanswered last turn is cut off. A cut answer's text would not give its ids
    back, so such a row has no `messages`; any other equals its messages' rendering, to the line break at the end."""
    end = max(i for i, value in enumerate(talk.mask) if value) + 1
    row = {"id": numbered(talk.prompt.id, part), "input_ids": talk.ids[:end], "loss_mask": talk.mask[:end],
           "finish": talk.finish}
    if talk.finish == "stop":
        last = max(i for i, message in enumerate(talk.messages) if message["role"] == "assistant")
        row["messages"] = talk.messages[:last + 1]
        row["input_ids"] = encode(tokenizer, render(tokenizer, row["messages"]))  # begins with them: see `agree`
        row["loss_mask"] = row["loss_mask"] + [0] * (len(row["input_ids"]) - end)
    return row


def write(recipe: Recipe, rows: list[dict], counts: Counter, path: Path, mark: str) -> dict:
    """The part's file, the same bytes for the same rows, and its report."""
    with atomic_write(path, "wb") as handle, gzip.GzipFile("", "wb", 9, handle, mtime=0) as packed:
        for row in rows:
            packed.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
    finishes = Counter(row["finish"] for row in rows)
    return {"prompts": recipe.count, "records": len(rows), "tokens": sum(len(row["input_ids"]) for row in rows),
            "supervised": sum(sum(row["loss_mask"]) for row in rows), "cut_at_limit": finishes["length"],
            "answers": dict(sorted(counts.items())), "fingerprint": mark, "xxh3": xxh3_file(path)}


def line(name: str, report: dict) -> str:
    """What came of a dataset, in one line."""
    kept = {"stop", "length", "given up"}
    faults = ", ".join(f"{count} {reason}" for reason, count in report["answers"].items() if reason not in kept)
    return (f"  {name:<14} {report['records']:>4} records of {report['prompts']} prompts, "
            f"{report['tokens']:>6,} tokens, {report['supervised']:>6,} supervised; "
            f"{report['cut_at_limit']} cut at the limit; sampled again: {faults or 'none'}")
