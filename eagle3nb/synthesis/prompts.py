"""Prompts: hand-written ones and seeded templates, one YAML file a dataset.

    about: everyday conversation             # required, for the reader
    count: 44                                # conversations; hand-written ones first, then templates in turn
    max_new_tokens: 192                      # of one answer
    temperature: 0.7
    top_p: 0.95
    system: You are a friendly assistant.    # optional; the target's chat template may have its own default
    prompts: [..., [first turn, second turn, ...]]
    templates: ["What makes {hobby} fun?"]
    slots: {hobby: [chess, hiking]}
    turns: [0.5, 0.35, 0.15]                 # optional: shares of template conversations with 1, 2, 3 user turns
    follow_ups: [Can you say more?, {tool: '{{"ok": true}}'}]   # later turns; by the tool instead of the user
    held_out: {count, prompts, templates, slots}     # evaluation only: prompts whole, templates for the remainder

The same file and seed give the same prompts, and a larger `count` only adds some at the end, so a corpus can grow.
"""

import itertools
import json
import math
import random
import string
from dataclasses import dataclass
from pathlib import Path

import yaml

from eagle3nb.errors import UserError
from eagle3nb.files import atomic_write, resolve, shown

REQUIRED = {"about": str, "count": int, "max_new_tokens": int, "temperature": float, "top_p": float}
OPTIONAL = {"system": str, "prompts": list, "templates": list, "slots": dict, "turns": list, "follow_ups": list,
            "held_out": dict}
HELD_OUT = {"count": int, "prompts": list, "templates": list, "slots": dict}


@dataclass(frozen=True)
class Prompt:
    """One conversation without its answers: the messages before the first one, then those before each other.

    `opening`: the system message, if any, the user's first turn, and whatever was said before by others. `later`: of
    each further answer the messages that go before it, one of the user's, or the tools' results together.
    """

    id: str
    source: str
    opening: tuple[dict, ...]  # {"role", "content"}
    later: tuple[tuple[dict, ...], ...] = ()
    tools: tuple[dict, ...] = ()  # as OpenAI's API has them


@dataclass(frozen=True)
class Recipe:
    """One YAML file, checked."""

    name: str
    about: str
    count: int
    max_new_tokens: int
    temperature: float
    top_p: float
    system: str | None = None
    prompts: tuple = ()
    templates: tuple[str, ...] = ()
    slots: dict | None = None
    turns: tuple[float, ...] = (1.0,)
    follow_ups: tuple = ()
    held_out: dict | None = None


def load_recipes(folder: str | Path, only: list[str] = ()) -> list[Recipe]:
    """The recipes of `folder`, by name; all, or those named. UserError for anything unknown, missing or ill-typed."""
    folder = resolve(folder)
    files = {path.stem: path for path in sorted(folder.glob("*.yml"))}
    if not files:
        raise UserError(f"{shown(folder)} holds no .yml file; each one there describes a dataset's prompts")
    for name in only:
        if name not in files:
            raise UserError(f"{shown(folder)} has no {name}.yml; there are {', '.join(files)}")
    return [load_recipe(path) for name, path in files.items() if not only or name in only]


def load_recipe(path: Path) -> Recipe:
    """One YAML file. Raises UserError that names the file and the key."""
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{shown(path)}: not readable as YAML ({reason}); correct the file") from None
    value = check_keys(value, REQUIRED | OPTIONAL, set(REQUIRED), shown(path))
    held_out = value.pop("held_out", None)
    if held_out is not None:
        where = f"{shown(path)}: held_out"
        held_out = check_keys(held_out, HELD_OUT, {"count"}, where)
        check_texts(held_out, where)
    check_texts(value, shown(path))
    frozen = {key: tuple(entry) if isinstance(entry, list) else entry for key, entry in value.items()}
    recipe = Recipe(name=path.stem, held_out=held_out, **frozen)
    check_figures(recipe, shown(path))
    return recipe


def check_keys(value, types: dict, required: set, where: str) -> dict:
    """`value` if it is a mapping with the required keys and no unknown or ill-typed ones."""
    if not isinstance(value, dict):
        raise UserError(f"{where}: wants a mapping of keys; see eagle3nb/synthesis/prompts.py")
    for key in value:
        if key not in types:
            raise UserError(f"{where}: unknown key {key!r}; the keys are {', '.join(types)}")
        wanted = (int, float) if types[key] is float else types[key]
        if not isinstance(value[key], wanted) or isinstance(value[key], bool):
            raise UserError(f"{where}: {key} wants a {types[key].__name__}, not {value[key]!r}")
    missing = sorted(required - set(value))
    if missing:
        raise UserError(f"{where}: {missing[0]} is missing; add it")
    return dict(value)


def check_texts(value: dict, where: str) -> None:
    """Prompts, follow-ups and templates are text, and every slot that a template uses has values."""
    for key in ("prompts", "follow_ups"):
        for entry in value.get(key, ()):
            for turn in entry if isinstance(entry, list) else [entry]:
                text = turn.get("tool") if isinstance(turn, dict) and set(turn) == {"tool"} else turn
                if not isinstance(text, str) or not text.strip():
                    raise UserError(f"{where}: {key} wants texts (or tool: text), not {turn!r}; quote it")
    slots = value.get("slots", {})
    for name, values in slots.items():
        if not isinstance(values, list) or not values or len(set(map(str, values))) < len(values):
            raise UserError(f"{where}: slot {name} wants a list of distinct values")
    follow_ups = [turn["tool"] if isinstance(turn, dict) else turn for turn in value.get("follow_ups", ())]
    for template in [*value.get("templates", ()), *follow_ups]:
        if not isinstance(template, str):
            raise UserError(f"{where}: a template is text, not {template!r}; quote it")
        for name in used_slots(template, where):
            if name not in slots:
                raise UserError(f"{where}: the template {template!r} wants the slot {name}, which has no values")


def used_slots(template: str, where: str = "template") -> list[str]:
    """Names of the slots in their order, each once."""
    try:
        return list(dict.fromkeys(name for _, name, _, _ in string.Formatter().parse(template) if name is not None))
    except ValueError as error:
        raise UserError(f"{where}: the template {template!r} has a fault ({error}); "
                        "write a brace as {{ or }}") from None


def check_figures(recipe: Recipe, where: str) -> None:
    if recipe.count < 1 or recipe.max_new_tokens < 1 or recipe.temperature < 0 or not 0 < recipe.top_p <= 1:
        raise UserError(f"{where}: count and max_new_tokens want 1 or more, temperature 0 or more, top_p within (0, 1]")
    shares = recipe.turns
    if not all(isinstance(share, (int, float)) and share >= 0 for share in shares) or abs(math.fsum(shares) - 1) > 1e-6:
        raise UserError(f"{where}: turns wants shares that sum to 1, such as [0.6, 0.4]")
    if len(shares) > 1 and len(recipe.follow_ups) < len(shares) - 1:
        raise UserError(f"{where}: turns asks for {len(shares) - 1} later turns, so follow_ups wants as many texts")


def expand(recipe: Recipe, seed: int) -> list[Prompt]:
    """The recipe's training prompts: `count` of them, all distinct. UserError where the templates yield too few."""
    rows = [as_turns(entry) for entry in recipe.prompts][:recipe.count]
    seen = {row[0]["content"] for row in rows}
    fillings = filled(recipe.templates, recipe.slots or {}, f"{seed}:{recipe.name}")
    for number in itertools.count(len(rows)):
        if len(rows) == recipe.count:
            break
        text, values = next(((t, v) for t, v in fillings if t not in seen), (None, None))
        if text is None:
            raise UserError(f"prompts {recipe.name}: {len(rows)} distinct prompts for a count of {recipe.count}; "
                            "add slot values or lower count")
        seen.add(text)
        rows.append([user(text), *draw_later(recipe, values, random.Random(f"{seed}:{recipe.name}:{number}"))])
    return [as_prompt(recipe, f"{recipe.name}-{i:04d}", row) for i, row in enumerate(rows)]


def expand_held_out(recipe: Recipe, seed: int) -> list[Prompt]:
    """The recipe's evaluation prompts, single-turn: hand-written ones, and `count` from templates of their own."""
    if not recipe.held_out:
        return []
    texts = list(recipe.held_out.get("prompts", ()))
    templates, slots = recipe.held_out.get("templates", ()), recipe.held_out.get("slots", {})
    fillings = filled(templates, slots, f"{seed}:{recipe.name}:held")
    texts += [text for text, _ in itertools.islice(fillings, recipe.held_out["count"])]
    return [as_prompt(recipe, f"held-{recipe.name}-{i:02d}", [user(text)]) for i, text in enumerate(texts)]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def as_turns(entry) -> list[dict]:
    """Messages of a hand-written prompt: a text, or a list of texts and {tool: text}."""
    return [{"role": "tool", "content": turn["tool"]} if isinstance(turn, dict) else user(turn)
            for turn in (entry if isinstance(entry, list) else [entry])]


def as_prompt(recipe: Recipe, name: str, row: list[dict]) -> Prompt:
    system = ({"role": "system", "content": recipe.system.strip()},) if recipe.system else ()
    return Prompt(name, recipe.name, (*system, row[0]), tuple((message,) for message in row[1:]))


def filled(templates, slots: dict, seed: str):
    """(text, slot values) from each template in turn, its fillings in a seeded order, until all are used up."""
    def one(number: int, template: str):
        names = used_slots(template)
        choices = list(itertools.product(*(slots[name] for name in names)))
        random.Random(f"{seed}:{number}").shuffle(choices)
        for choice in choices:
            values = dict(zip(names, choice, strict=True))
            yield template.format(**values), values

    queues = [one(number, template) for number, template in enumerate(templates)]
    for layer in itertools.zip_longest(*queues):
        yield from (filling for filling in layer if filling is not None)


def draw_later(recipe: Recipe, values: dict, rng: random.Random) -> list[dict]:
    """Later turns of a template conversation: how many by the shares of `turns`, which ones at random, in file order.

    A follow-up may use slots of its own template's filling; one whose slots are not filled is not eligible.
    """
    wanted = rng.choices(range(len(recipe.turns)), weights=recipe.turns)[0]
    eligible = []
    for entry in recipe.follow_ups:
        message = as_turns(entry)[0]
        if set(used_slots(message["content"])) <= set(values):
            eligible.append({**message, "content": message["content"].format(**values)})
    return rng.sample(eligible, min(wanted, len(eligible)))


def write_held_out(prompts_dir: str | Path, path: str | Path, seed: int) -> int:
    """Write the evaluation prompts as JSONL {"id", "source", "messages"}; how many."""
    rows = [prompt for recipe in load_recipes(prompts_dir) for prompt in expand_held_out(recipe, seed)]
    with atomic_write(resolve(path)) as handle:
        for prompt in rows:
            row = {"id": prompt.id, "source": prompt.source, "messages": list(prompt.opening)}
            handle.write(json.dumps(row, ensure_ascii=False) + "\n")
    return len(rows)
