"""The parameters a notebook declares: typed literals with a comment each, in the cell tagged `parameters`.

    learning_rate: float = 1.0e-4  # peak of the schedule, per optimiser step

The annotation is the type; what does not fit is refused. The cell holds literals only, since papermill puts its
overrides after it and a derived default would not see them.
"""

import ast
import io
import json
import re
import tokenize
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash
import yaml

from eagle3nb.errors import UserError
from eagle3nb.files import read_json, resolve, shown

STAGES = ("synthesis", "audit", "merge", "extraction", "training", "evaluation")
USUAL = STAGES[1:]  # what runs where no stage is named: synthesis may cost money and hours, and so wants to be named


@dataclass(frozen=True)
class Parameter:
    """One line of the parameters cell."""

    name: str
    kind: str  # the annotation as written: "int", "list[str]", "float | None"
    default: object
    meaning: str  # the line's comment


class Loader(yaml.SafeLoader):
    """Reads what papermill reads: a date stays text. Refuses a key given twice (YAML would silently take the last)."""

    yaml_implicit_resolvers = {first: [(tag, match) for tag, match in resolvers if not tag.endswith(":timestamp")]
                               for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()}

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        twice = sorted({k for k in keys if keys.count(k) > 1})
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"key {twice[0]} stands there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def stem(stage: str) -> str:
    """`audit` → `1_audit`: the name of the notebook and of its records."""
    return f"{STAGES.index(stage)}_{stage}"


def notebook_of(stage: str) -> Path:
    return resolve(f"notebooks/{stem(stage)}.ipynb")


def source_of(cell: dict) -> str:
    return cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])


def notebook_hash(path: Path) -> str:
    """xxh3-128 of what the notebook says (cell types, sources, tags), whatever outputs or ids it carries."""
    cells = [(c["cell_type"], source_of(c), c.get("metadata", {}).get("tags", [])) for c in read_json(path)["cells"]]
    return xxhash.xxh3_128_hexdigest(json.dumps(cells).encode())


def declared(path: Path) -> dict[str, Parameter]:
    """The parameters by name, in the order of the cell. UserError where it is missing or holds no literals."""
    tagged = [c for c in read_json(path)["cells"] if "parameters" in c.get("metadata", {}).get("tags", [])]
    if len(tagged) != 1:
        raise UserError(f"{shown(path)} has {len(tagged)} cells tagged `parameters`; exactly one is needed")
    source = source_of(tagged[0])
    comments = comments_by_line(source)
    found = {}
    for node in ast.parse(source).body:
        if not isinstance(node, (ast.AnnAssign, ast.Assign)) or node.value is None:
            continue
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        try:
            default = ast.literal_eval(node.value)
        except ValueError:
            raise UserError(f"{shown(path)}: the default of {target.id} must be a literal, "
                            "since papermill's overrides would not reach it") from None
        kind = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else type(default).__name__
        parameter = Parameter(target.id, kind, default, comments.get(node.end_lineno, ""))
        found[target.id] = replace(parameter, default=check(parameter, default))
    return found


def comments_by_line(source: str) -> dict[int, str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {t.start[0]: t.string.lstrip("# ").rstrip() for t in tokens if t.type == tokenize.COMMENT}


def check(parameter: Parameter, value):
    """The value, where it has the declared type (an int will do for a float); UserError otherwise."""
    if parameter.name == "limit" and isinstance(value, int) and value < 0:
        raise UserError(f"parameter limit must be 0 (all rows) or more, not {value}")
    for kind in parameter.kind.split("|"):
        try:
            return strict(kind.strip(), value)
        except ValueError:
            continue
    hint = f"; write {spelled(value)}" if spelled(value) else ""
    raise UserError(f"parameter {parameter.name} must be {parameter.kind}, not {type(value).__name__} {value!r}{hint}")


def spelled(value) -> str:
    """How to write a number that YAML 1.1 took for text: 1e-4 → 1.0e-4."""
    if not isinstance(value, str) or not re.fullmatch(r"[+-]?[\d.]+[eE][+-]?\d+", value):
        return ""
    mantissa, exponent = value.lower().split("e")
    return mantissa + ("" if "." in mantissa else ".0") + "e" + ("" if exponent[0] in "+-" else "+") + exponent


def strict(kind: str, value):
    """ValueError unless `value` is a `kind`; list[...] is checked by element."""
    if kind.startswith("list[") and isinstance(value, (list, tuple)):
        return [strict(kind[5:-1], item) for item in value]
    if kind == "float" and type(value) in (int, float) and abs(value) < float("inf"):
        return float(value)
    types = {"bool": bool, "int": int, "str": str, "list": list, "dict": dict, "None": type(None)}
    if type(value) is types.get(kind.split("[")[0]) and not kind.startswith("list["):
        return value
    raise ValueError(f"not a {kind}")


def coerce(parameter: Parameter, value):
    """The value as the annotation wants it: text that spells a number, a truth value or a list becomes one.

    YAML 1.1 reads `1e-4` as text, and a command line has nothing but text. UserError where nothing fits.
    """
    try:
        return check(parameter, value)
    except UserError:
        for kind in parameter.kind.split("|"):
            try:
                fitting = lenient(kind.strip(), value)
            except ValueError:
                continue
            except yaml.YAMLError as error:
                why = " ".join(str(getattr(error, "problem", None) or error).split())
                raise UserError(f"parameter {parameter.name} must be {parameter.kind}, and {value!r} is not valid YAML "
                                f"({why})") from None
            return check(parameter, fitting)
        raise


def lenient(kind: str, value):
    if isinstance(value, float) and kind == "int" and value.is_integer():
        return int(value)
    if not isinstance(value, str):
        raise ValueError(f"not a {kind}")
    text = value.strip()
    if kind == "float":
        return strict("float", float(text))
    if kind == "int":
        number = float(text)
        if text.lstrip("+-").isdigit():
            return int(text)
        return strict("int", int(number) if number.is_integer() else number)
    if kind == "bool" and text.lower() in ("true", "yes", "on", "false", "no", "off"):
        return text.lower() in ("true", "yes", "on")
    if kind == "None" and text.lower() in ("none", "null", "~"):
        return None
    if kind.startswith("list"):
        items = yaml.load(text, Loader) if text.startswith("[") else [t.strip() for t in text.split(",") if t.strip()]
        inner = kind[5:-1]
        return [str(i) if inner == "str" else lenient(inner, str(i)) if inner else i for i in items]
    if kind.startswith("dict") and text.startswith("{"):
        return strict("dict", yaml.load(text, Loader))
    raise ValueError(f"not a {kind}")
