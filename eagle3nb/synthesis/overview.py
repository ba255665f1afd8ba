"""What the notebook shows: what will be asked and may cost, what came of it by dataset and reason, money and speed."""

import gzip
import random
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import orjson

from eagle3nb.corpus.masks import encode, render, spans
from eagle3nb.synthesis.answerer import Answerer
from eagle3nb.synthesis.answers import Part, file_of, known_turns, report_of
from eagle3nb.synthesis.budget import Budget, Spent
from eagle3nb.synthesis.endpoint import GOOD, Counts, texts
from eagle3nb.synthesis.sources import Dataset
from eagle3nb.synthesis.talks import ALONE, DROPPED, Language, begun

WORDS = {ALONE: ("an answer was kept", "the mask checked by the template's markers alone"),
         DROPPED: ("an answer was kept", "without its thought, for which the template has no place")}


def who_answers(who: Answerer, engine: str, api: str, budget: Budget) -> list[dict]:
    """A row a fact: who, whether on-policy, and what may still be spent."""
    found = who.found or {}
    server = {"openai": "a server's chat API: text, rendered and tokenised here by the target's template",
              "sglang": "SGLang's /generate: ids in, the exact ids out"}[api]
    rows = {"who answers": f"the target itself, here ({engine})" if who.here else f"{who.model}, by {server}",
            "on-policy": "yes: the answers are the target's" if who.on_policy else
            "no: another model's answers, and every record says so"}
    if found.get("context"):
        rows["context (tokens)"] = f"{found['context']:,}"
    if "deterministic" in found:
        rows["the same seed, the same text"] = "yes" if found["deterministic"] else "no, unless greedy"
    for name, bound in budget.bounds.items() if not who.here else ():
        used = getattr(budget.spent, name)
        rows[f"budget: {name}"] = f"{f'{bound:,} in all' if bound else 'no bound'}, {used:,} spent before"
    return [{"what": what, "answer": answer} for what, answer in rows.items()]


def plan(wanted: list[Dataset], parts: int, who: Answerer, language: Language, out_dir: Path, seed: int,
         prices: dict) -> list[dict]:
    """A row a dataset: what is asked, how much of it is known, and what the rest may cost at most: every answer as long
    as it may be, none sampled again; a later turn's prompt holds the answers before it."""
    rows, glue = [], glue_of(language)
    for dataset in wanted:
        talks = [begun(dataset.prompts(seed + part), language.tokenizer, dataset.name) for part in range(parts)]
        known = sum(known_turns(dataset, part, some, who, language, out_dir, seed + part)
                    for part, some in enumerate(talks))
        prompts = [talk.prompt for some in talks for talk in some]
        turns = [1 + len(prompt.later) for prompt in prompts]
        opening = [len(talk.asked) for some in talks for talk in some]
        read = 0
        for prompt, tokens in zip(prompts, opening, strict=True):
            for block in ((), *prompt.later):  # a later turn reads all that came before it once more
                words = [len(encode(language.tokenizer, text_of(message))) + glue for message in block]
                tokens += sum(words) + (dataset.max_new_tokens if block else 0)
                read += tokens
        most = Spent(sum(turns), read, sum(turns) * dataset.max_new_tokens)
        row = {"dataset": dataset.name, "prompts from": dataset.origin, "prompts": len(prompts), "answers": sum(turns),
               "known": known, "prompt tokens": sum(opening), "longest answer": dataset.max_new_tokens,
               "temperature": dataset.temperature, "top_p": dataset.top_p, "tokens at most": most.tokens}
        if prices and not who.here:
            row["cost at most"] = (most.prompt_tokens * prices["prompt"]
                                   + most.completion_tokens * prices["completion"]) / 1e6
        rows.append(row)
    return rows


def text_of(message: dict) -> str:
    return "".join(texts(message))


def glue_of(language: Language) -> int:
    """Tokens that the template writes around a further message and the answer before it."""
    hi, well = ({"role": role, "content": text} for role, text in (("user", "Hi"), ("assistant", "Well")))
    lengths = [len(encode(language.tokenizer, render(language.tokenizer, talk, generation=True)))
               for talk in ([hi], [hi, well, hi])]
    return lengths[1] - lengths[0] - sum(len(encode(language.tokenizer, text)) for text in ("Well", "Hi"))


def by_dataset(made: list[Part], measured: list[tuple], max_seq_len: int) -> list[dict]:
    """A row a dataset, over its parts: what was made of it, and what was not. `measured`: of `lengths`."""
    rows = {}
    for part, (_, lengths_of_rows) in zip(made, measured, strict=True):
        row = rows.setdefault(part.dataset.name, Counter())
        report, answers = part.report, part.report["answers"]
        for name in ("prompts", "records", "tokens", "supervised"):
            row[name] += report[name]
        row["cut at the limit"] += report["cut_at_limit"]
        row["refused"] += answers.get("refused", 0)
        row["given up"] += answers.get("given up", 0)
        row["failed"] += sum(n for why, n in report.get("lost", {}).items() if why.startswith("failed"))
        row["skipped"] += sum(n for why, n in report.get("lost", {}).items() if why.startswith("skipped"))
        row["left out"] += sum(report.get("left_out", {}).values())
        row[f"over {max_seq_len:,} tokens"] += sum(n > max_seq_len for n in lengths_of_rows)
    states = {name: Counter(part.state for part in made if part.dataset.name == name) for name in rows}
    return [{"dataset": name, **row, "state": ", ".join(states[name])} for name, row in rows.items()]


def accounts(made: list[Part]) -> list[dict]:
    """A row a dataset of an endpoint's: asks given = succeeded + failed + skipped, over all starts."""
    rows = {}
    for part in made:
        if "asks" in part.report:
            rows.setdefault(part.dataset.name, Counter()).update(part.report["asks"])
    return [{"dataset": name, **row} for name, row in rows.items()]


def reasons(made: list[Part]) -> list[dict]:
    """A row a dataset and reason: answers that made no record, or less of one, and what became of their talks."""
    rows = Counter()
    for part in made:
        for why, count in part.report["answers"].items():
            if why not in (*GOOD, "given up") and count:
                rows[part.dataset.name, *WORDS.get(why, ("an answer was not kept", why))] += count
        for kind, words in (("ended_early", "a talk ended before its last turn"), ("left_out", "a row was left out")):
            for why, count in part.report.get(kind, {}).items():
                rows[part.dataset.name, words, why] += count
    return [{"dataset": name, "what": what, "why": why, "times": count} for (name, what, why), count in rows.items()]


def lengths(made: list[Part], out_dir: Path) -> list[tuple[list[int], list[int]]]:
    """`lengths_of` each part, for what shows them: the files, of up to a hundred million tokens, are read once."""
    return [lengths_of(part, out_dir) for part in made]


def lengths_of(part: Part, out_dir: Path) -> tuple[list[int], list[int]]:
    """(tokens of each answer, tokens of each row) of a part's file; empty where there is none."""
    answers, rows = [], []
    for record in rows_of(part, out_dir):
        rows.append(len(record["input_ids"]))
        answers += [end - begin for begin, end in spans(np.array(record["loss_mask"], np.uint8)).tolist()]
    return answers, rows


def answer_lengths(made: list[Part], measured: list[tuple]) -> dict[str, list[int]]:
    """{dataset: tokens of each of its answers}, over its parts. `measured`: of `lengths`."""
    found = {}
    for part, (answers, _) in zip(made, measured, strict=True):
        found.setdefault(part.dataset.name, []).extend(answers)
    return found


def examples(made: list[Part], out_dir: Path, seed: int, most: int = 3) -> list[tuple[str, list[int], list[int]]]:
    """(title, ids, mask) of `most` rows from as many parts as there are, chosen by seed."""
    draw, chosen = random.Random(seed), []
    for part in draw.sample(made, len(made)) * most:
        if len(chosen) < most and (rows := rows_of(part, out_dir, 200)):
            row = draw.choice(rows)
            title = (f"{part.dataset.name}, {row['id']}: {len(row['input_ids']):,} tokens, "
                     f"{sum(row['loss_mask']):,} supervised, ended by {row['finish']}")
            chosen.append((title, row["input_ids"], row["loss_mask"]))
    return chosen


def rows_of(part: Part, out_dir: Path, most: int = 0) -> list[dict]:
    """The records of a part's file; the first `most` where it is not 0."""
    path = file_of(out_dir, part.dataset.name, part.number)
    if not path.is_file():
        return []
    with gzip.open(path, "rb") as handle:
        return [orjson.loads(line) for line, _ in zip(handle, range(most or 1 << 60), strict=False)]


def this_start(made: list[Part], budget: Budget) -> dict:
    """What this start did, and what all of them spent."""
    now = sum((part.now for part in made), Counts())
    row = {"answers": now.succeeded, "generated tokens": now.completion_tokens, "seconds": round(now.seconds, 1),
           "tokens_per_s": round(now.tokens_per_s, 1), "tries repeated": sum(now.retries.values())}
    spent = budget.spent
    row |= {"requests of all starts": spent.requests, "tokens of all starts": spent.tokens} if spent.requests else {}
    return row | ({"cost of all starts": round(spent.money, 4)} if spent.money else {})


def verdict(made: list[Part], who: Answerer) -> str:
    """One sentence; `amber` where something is still to be asked."""
    reports = [part.report for part in made]
    tokens, records = sum(r["tokens"] for r in reports), sum(r["records"] for r in reports)
    names = {part.dataset.name for part in made}
    asked = f"{records:,} records, {tokens:,} tokens in {f'{len(names)} datasets' if len(names) > 1 else min(names)}"
    others = other_models(made, who)
    policy = f"off-policy: {', '.join(others)} answered" if others else "on-policy"
    mine = {part.dataset.name for part in made} - {name for answered in others.values() for name in answered}
    if others and mine:
        policy += f" all but {', '.join(sorted(mine))}"
    left = sum((Counter(part.report.get("lost", {})) for part in made if part.incomplete), Counter())
    if not left:
        return f"{asked}, {policy}"
    why = ", ".join(f"{count:,} {reason}" for reason, count in left.most_common(3))
    older = "; an earlier whole file was kept" if any(part.state == "older kept" for part in made) else ""
    return f"amber: incomplete ({why}){older}: the next start goes on; {asked} so far, {policy}"


def other_models(made: list[Part], who: Answerer) -> dict[str, set[str]]:
    """{model: datasets} of what another model than the target wrote, in this start or an earlier one; a part tells by
    its report. Empty where all is the target's own."""
    found: dict[str, set[str]] = {}
    for part in made:
        if not part.report.get("on_policy", True):
            found.setdefault(part.report.get("model", who.model), set()).add(part.dataset.name)
    return found


def files(made: list[Part], out_dir: Path) -> list[Path]:
    """What the stage wrote, or found standing."""
    every = [place(out_dir, part.dataset.name, part.number) for part in made for place in (file_of, report_of)]
    return [path for path in every if path.is_file()]


def result(made: list[Part], who: Answerer, budget: Budget, rows: list[dict]) -> dict:
    """For the stage's JSON twin."""
    reports = [part.report for part in made]
    return {"records": sum(r["records"] for r in reports), "tokens": sum(r["tokens"] for r in reports),
            "supervised": sum(r["supervised"] for r in reports), "model": who.model,
            "on_policy": not other_models(made, who), "incomplete": any(part.incomplete for part in made),
            "datasets": rows, "accounts": accounts(made),
            "reasons": reasons(made), "this_start": this_start(made, budget), "spent": asdict(budget.spent)}
