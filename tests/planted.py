"""A clean corpus of three sources as a chat template renders it, and the audit of it on the real path.

Masks come from the rendered text's offsets, not from the code under test.
"""

import gzip
import json
import random
import re
from pathlib import Path

from eagle3nb.corpus.audit import findings, ranked
from eagle3nb.corpus.decision import Rules
from eagle3nb.corpus.masks import find_markers
from eagle3nb.corpus.sample import look_closer
from eagle3nb.corpus.survey import survey

WINDOW = 1000  # max_seq_len; clean rows are shorter
SOURCES = ("A_one", "B_two", "C_three")
PLANTED = "B_two"
ANSWER = {  # what the target says, in the rendered text
    "chatml": re.compile(r"<\|im_start\|>assistant\n(.*?(?:<\|im_end\|>|\Z))", re.S),
    "kimi": re.compile(r"<\|im_assistant\|>assistant<\|im_middle\|>(?:<think></think>|<think>)"
                       r"(.*?(?:<\|im_end\|>|\Z))", re.S)}


class Maker:
    """Rows of one target. `kind`: chatml or kimi."""

    def __init__(self, kind: str, tokenizer, seed: int = 0):
        self.kind, self.tokenizer, self.rng = kind, tokenizer, random.Random(seed)
        self.vocab, self.eot = len(tokenizer), tokenizer.eos_token_id

    def words(self, least: int, most: int) -> str:
        """Random text: words, numbers, line breaks, letters of two and three bytes."""
        rng, parts = self.rng, []
        for _ in range(rng.randint(least, most)):
            word = "".join(rng.choice("abcdefghijklmnopqrstuvwxyzéß語") for _ in range(rng.randint(2, 7)))
            parts.append(rng.choice([word] * 6 + [word.title() + ".", str(rng.randrange(10_000)), word + ",\n" + word]))
        return " ".join(parts)

    def talk(self, turns: int = 0, system: bool | None = None) -> list[dict]:
        """A conversation; `turns` answers, or one to three."""
        wants_system = self.rng.random() < 0.3 if system is None else system
        messages = [{"role": "system", "content": self.words(3, 8)}] if wants_system else []
        for _ in range(turns or self.rng.randint(1, 3)):
            messages += [{"role": "user", "content": self.words(5, 15)},
                         {"role": "assistant", "content": self.words(12, 25)}]
            if self.kind == "kimi" and self.rng.random() < 0.4:
                messages[-1]["reasoning"] = self.words(3, 6)  # of the last turn alone is it rendered
        return messages

    def render(self, messages: list[dict]) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def tokenised(self, text: str) -> tuple[list[int], list[int]]:
        """(ids, mask) of a rendered text: a token is supervised if it lies in an answer."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = [found.span(1) for found in ANSWER[self.kind].finditer(text)]
        mask = [int(any(begin <= a and b <= end for begin, end in spans)) for a, b in encoded["offset_mapping"]]
        return encoded["input_ids"], mask

    def row(self, messages: list[dict] | None = None, bare: bool = False, text: str = "") -> dict:
        """A row of `messages` (default: random ones), or of a rendered `text`; `bare`: of ids and mask alone."""
        messages = messages or self.talk()
        ids, mask = self.tokenised(text or self.render(messages))
        row = {"id": f"{self.rng.randrange(1 << 40):x}", "input_ids": ids, "loss_mask": mask}
        return row if bare or text else row | {"messages": messages}

    def clean(self, count: int) -> list[dict]:
        """Rows of every kind that is accepted, each as it should be."""
        rows = []
        for i in range(count):
            row, kind = self.row(bare=i % 3 == 0), i % 8
            if kind == 5:
                names = {"user": "human", "assistant": "gpt"}
                row = {"conversations": [{"from": names[message["role"]], "value": message["content"]}
                                         for message in self.talk(system=False)]}
            elif kind == 4:
                row = {"prompt": self.words(5, 15), "response": self.words(12, 25)}
            elif kind == 6:
                row = self.row(self.talk(turns=1), bare=True)
                begin, end = row["loss_mask"].index(1), row["input_ids"].index(self.eot, row["loss_mask"].index(1)) + 1
                row = {"prompt_ids": row["input_ids"][:begin], "response_ids": row["input_ids"][begin:end]}
            elif kind == 7 and self.kind == "chatml":
                del row["loss_mask"]
            rows.append(row)
        return rows


def write(path: Path, rows: list) -> None:
    """Rows (dicts, or bytes as they are) as .jsonl or .jsonl.gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def build(root: Path, make: Maker, planted: list, suffix: str = "", count: int = 24) -> list[int]:
    """Three sources of clean rows, the planted ones at random places of B_two; returns their lines, ascending."""
    lines = []
    for name in SOURCES:
        rows = make.clean(count)
        if name == PLANTED:
            lines = sorted(make.rng.sample(range(1, count + len(planted) + 1), len(planted)))
            for line, row in zip(lines, planted, strict=True):
                rows.insert(line - 1, row)
        write(root / name / f"rows.jsonl{suffix}", rows)
    return lines


def audit(root: Path, make: Maker, processes: int = 1, size: int = 0, **options):
    """(survey, findings) with every row's text looked at, unless `size` says how many."""
    tokenizer = make.tokenizer
    rules = Rules(options.pop("max_seq_len", WINDOW), markers=find_markers(tokenizer), tokenizer=tokenizer)
    found = survey(root, rules=rules, vocab_size=make.vocab, processes=processes, **options)
    look_closer(found, size=size, seed=1, processes=processes)
    return found, ranked(findings(found))
