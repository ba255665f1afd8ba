"""The model card of an export (its README.md), made from the run's records: what is not in them is not in it.

A figure stands with the setting that it was measured under. No path, host or user enters: only values that are chosen
here by name do, and what looks like a place of this machine all the same is refused.
"""

import json
import os
import re
import socket
from pathlib import Path

from eagle3nb.acceptance import speed
from eagle3nb.errors import UserError
from eagle3nb.files import atomic_write, read_json, xxh3_file
from eagle3nb.states.target import TargetFacts

EMBEDDED = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the embedded target's name on model hubs
FILES = ("config.json", "model.safetensors")
TRAINED = {  # parameter of the training record → how the card calls it
    "draft_vocab_size": "draft vocabulary asked for (0: all)", "ttt_steps": "steps of training-time test",
    "ttt_decay": "weight of a step against the one before", "epochs": "epochs",
    "minutes": "cut to end in minutes (0: no)", "learning_rate": "learning rate",
    "warmup_share": "warm-up", "weight_decay": "weight decay", "clip": "gradient clipped at",
    "pack_tokens": "tokens a pack (0: all)", "accumulate": "packs an optimiser step",
    "loss_average": "loss averaged over", "initialise": "initialised", "freeze_head": "head frozen", "seed": "seed",
    "max_seq_len": "longest row", "processes": "processes", "dtype": "computed in"}


def write(folder: str | Path, *, training: dict, evaluation: dict, merge: dict, target: TargetFacts, identity: dict,
          base_model: str = "", extraction: dict | None = None, served: dict[str, list[dict]] | None = None,
          parity: dict | None = None) -> Path:
    """`folder`/README.md, from the records of the stages (outputs/<run>/<n>_<stage>.json as dicts; of the evaluation,
    which may still be running, {"parameters", "result"} is enough).

    `identity`: states.target.target_identity; `base_model`: its name on a model hub, "owner/name", where it has one;
    `served`: caption → rows of what a server measured; `parity`: the report of drafter.engine_parity. Raises UserError
    where a value looks like a path or names this machine.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json")
    name = base_model or (EMBEDDED if training["parameters"].get("target") == "embedded" else "")
    check_base_model(name)
    parts = [front(name), what(name, config, target), acceptance(evaluation), at_work(served),
             serving(config, evaluation), data(merge), settings(training),
             limits(training, evaluation, merge, config, target),
             checked(evaluation, parity), identities(folder, config, identity, training, evaluation, merge, extraction)]
    text = "\n\n".join(part for part in parts if part) + "\n"
    refuse_places(text)
    with atomic_write(folder / "README.md") as handle:
        handle.write(text)
    return folder / "README.md"


def check_base_model(name: str) -> None:
    """UserError unless it is empty or owner/name."""
    if name and not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise UserError(f"base_model {name!r} is no name on a model hub; give owner/name, or leave it out")


# ------------------------------------------------------------------------------------------ the sections


def front(name: str) -> str:
    """YAML front matter as model hubs read it. A JSON string is a YAML string."""
    tags = "".join(f"\n- {tag}" for tag in ("eagle3", "speculative-decoding", "draft-model", "sglang", "vllm"))
    base = f"\nbase_model: {json.dumps(name)}" if name else ""
    return f"---\nlibrary_name: sglang\npipeline_tag: text-generation{base}\ntags:{tags}\n---"


def what(name: str, config: dict, target: TargetFacts) -> str:
    kind = "EAGLE-3.1" if config.get("norm_output") or config.get("fc_norm") else "EAGLE-3"
    layers = ", ".join(map(str, config["eagle3nb"]["captured_layers"]))
    return (f"# {kind} drafter for {name.split('/')[-1] or target.architecture}\n\n"
            f"A draft model for speculative decoding: it guesses the next tokens of {name or 'its target'} "
            f"({target.architecture}, {target.layers} layers, hidden size {target.hidden:,}, vocabulary "
            f"{target.vocab:,}), which verifies them, so the text stays the target's own. It works with this target "
            f"alone. One layer over the hidden states {layers} of the target and {config['draft_vocab_size']:,} "
            "draftable tokens, trained with eagle3nb.")


def acceptance(evaluation: dict) -> str:
    """τ in total by steps, and by source at the steps of the headline, with intervals; and under which setting."""
    rows, asked = evaluation["result"].get("acceptance", []), evaluation["parameters"]
    steps = asked.get("steps")
    total = [row for row in rows if row["source"] == "all"]
    if not total:
        return ""
    by_source = [row for row in rows if row["source"] != "all" and row["steps"] == steps and row["tau"] is not None]
    setting = ", ".join(filter(None, [
        "chains", "greedy", "the target in float32",
        f"answers of at most {asked['max_new_tokens']:,} tokens" if "max_new_tokens" in asked else "",
        f"{total[0]['prompts']:,} prompts"]))
    decode = evaluation["result"].get("decode") or {}
    real = (f" A real draft-and-verify decode of {decode['prompts']:,} of them gave the same text "
            f"{decode['same_text']:,} times, the same counts {decode['same_counts']:,} times."
            if {"prompts", "same_text", "same_counts"} <= decode.keys() and decode["prompts"] else "")
    text = ("## Acceptance length\n\nTokens that one verify of the target yields: 1 + accepted / verifies, summed over "
            f"prompts. Measured by eagle3nb's walk over the target's own answers ({setting}); intervals are 95 % "
            f"bootstraps over prompts.{real}\n\n")
    text += table([{"drafted tokens": row["steps"], "acceptance length": row["tau"], "95 %": between(row),
                    "verifies": row["verifies"], "accepted": row["accepted"]} for row in total])
    if len(by_source) > 1:
        text += f"\n\nBy source, {steps} drafted tokens:\n\n" + table(
            [{"source": row["source"], "acceptance length": row["tau"], "95 %": between(row), "prompts": row["prompts"],
              "verifies": row["verifies"]} for row in by_source])
    return text


def at_work(served: dict[str, list[dict]] | None) -> str:
    """What a server measured, as it was handed over."""
    tables = [f"{caption}\n\n{table(rows)}" for caption, rows in (served or {}).items() if rows]
    return "## Served\n\n" + "\n\n".join(tables) if tables else ""


def serving(config: dict, evaluation: dict) -> str:
    steps = evaluation["parameters"].get("steps", 3)
    sglang = speed.sglang_command("TARGET", "DRAFTER", steps)
    for flag in ("--speculative-draft-model-path", "--speculative-eagle-topk"):
        sglang = sglang.replace(f" {flag}", f" \\\n  {flag}")
    half = config["torch_dtype"]
    note = ("" if half != "float32" else " The weights are float32, of which SGLang makes float16 unless --dtype says "
            "otherwise.")
    return (f"""## Serve it

TARGET is the target's folder or name, DRAFTER this folder.{note}

```
{sglang}
```

```
{speed.vllm_command("TARGET", "DRAFTER", steps)}
```""")


def data(merge: dict) -> str:
    """Sources, records, tokens; the tokens that were trained on are the supervised ones."""
    report = merge["result"].get("merge", {})
    if not report.get("sources"):
        return ""
    keys = {"source": "name", "records": "records", "tokens": "tokens", "supervised tokens": "supervised"}
    rows = [{shown_as: source.get(key) for shown_as, key in keys.items()} for source in report["sources"]]
    rows.append({"source": "all", **{shown_as: report.get(key) for shown_as, key in list(keys.items())[1:]}})
    cut = report.get("truncated_records")
    notes = [f"Rows longer than {report['max_seq_len']:,} tokens were cut ({cut:,} of them)." if cut else
             f"No row was longer than {report['max_seq_len']:,} tokens." if cut == 0 else "",
             f"Left out: {', '.join(report['exclude'])}." if report.get("exclude") else ""]
    return "\n\n".join(filter(None, ["## Data", " ".join(filter(None, notes)), table(rows)]))


def settings(training: dict) -> str:
    given, result = training["parameters"], training["result"]
    rows = [{"setting": name, "value": given[key]} for key, name in TRAINED.items() if key in given]
    last, best = result.get("last") or {}, result.get("best") or {}
    lines = [f"{result['parameters_trained']:,} parameters trained" if result.get("parameters_trained") else "",
             f"{last['tokens']:,} tokens seen in {last['step']:,} optimiser steps" if last.get("step") else "",
             f"best on held-out rows at step {best['step']:,}: accuracy by step "
             f"{' / '.join(f'{a:.3f}' for a in best['accuracy'])}" if best.get("accuracy") else ""]
    said = "; ".join(filter(None, lines))
    if not rows and not said:
        return ""
    return "\n\n".join(filter(None, ["## Training", f"{said[:1].upper()}{said[1:]}." if said else "", table(rows)]))


def limits(training: dict, evaluation: dict, merge: dict, config: dict, target: TargetFacts) -> str:
    longest = merge["result"].get("merge", {}).get("max_seq_len") or training["parameters"].get("max_seq_len")
    coverage = training["result"].get("coverage")
    looping = sum(row.get("looping") or 0 for row in evaluation["result"].get("answers", []) if row["source"] == "all")
    sources = [row["source"] for row in evaluation["result"].get("acceptance", []) if row["source"] != "all"]
    lines = [
        f"Trained on rows of at most {longest:,} tokens; the target's context is {target.max_positions:,}. Beyond "
        "what was trained the acceptance length may fall; the text does not change." if longest else "",
        f"{config['draft_vocab_size']:,} of {target.vocab:,} tokens can be drafted"
        + (f"; they cover {100 * coverage:.1f} % of the generated tokens of the training data. Any other token ends "
           "the chain." if coverage else "."),
        f"Measured on {', '.join(dict.fromkeys(sources))} alone; text of another kind may yield less."
        if sources else "",
        f"{looping:,} of the answers measured end in a loop, which is easy to draft." if looping else "",
        "Measured greedily; at a temperature fewer drafts are accepted." if sources else "",
    ]
    return "## Limits\n\n" + "\n".join(f"- {line}" for line in lines if line)


def checked(evaluation: dict, parity: dict | None) -> str:
    """What was held against what before this card was written."""
    own, lines = evaluation["result"].get("export_parity"), []
    if own is not None:
        lines.append(f"Logits of the written files, by a second forward: within {own:.1e} of the drafter's largest.")
    if parity and parity.get("checked") and "max_relative" in parity:
        lines.append(f"Logits in SGLang {parity['version']}'s own class: within {parity['max_relative']:.1e} of the "
                     f"largest over {len(parity['by_step'])} steps, argmax equal at {parity['argmax_equal']:,} of "
                     f"{parity['compared']:,}.")
    elif parity and not parity.get("checked"):
        lines.append("Not loaded in SGLang where this was made.")
    return "## Checked\n\n" + "\n".join(f"- {line}" for line in lines) if lines else ""


def identities(folder: Path, config: dict, identity: dict, *records) -> str:
    """Hashes of the files, of the target and of the data; versions of what made them."""
    files = [{"file": name, "bytes": (folder / name).stat().st_size, "xxh3-128": xxh3_file(folder / name)}
             for name in FILES]
    kept = [record for record in records if record]
    hashes = [{"of": f"the target's {key}", "xxh3-128": value} for key, value in identity.items()]
    hashes += [{"of": name, "xxh3-128": value} for name, value in {
        "the merged corpus": at(kept, "result", "merge", "corpus_hash"),
        "the training run": at(kept, "result", "identity")}.items() if value]
    versions = {name: version for record in kept
                for name, version in record.get("provenance", {}).get("versions", {}).items()}
    commits = {}  # → whether files had been changed
    for origin in (record["provenance"] for record in kept if record.get("provenance", {}).get("commit")):
        commits[origin["commit"]] = commits.get(origin["commit"], False) or bool(origin.get("dirty"))
    made = ", ".join([*(f"{name} {version}" for name, version in versions.items()),
                      *(f"commit {commit[:12]}{' with changes' * dirty}" for commit, dirty in commits.items())])
    return "\n\n".join(filter(None, ["## Identity", table(files), table(hashes), f"Made with {made}." if made else ""]))


# ------------------------------------------------------------------------------------------ words


def table(rows: list[dict]) -> str:
    """Markdown; numbers to the right."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    right = {c: all(isinstance(row.get(c), (int, float)) or row.get(c) is None for row in rows) for c in columns}
    lines = [columns, ["---:" if right[c] else "---" for c in columns],
             *[[cell(row.get(c)) for c in columns] for row in rows]]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def cell(value) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.2f}" if 1 <= value < 1000 else f"{value:,.0f}" if value >= 1000 else f"{value:g}"
    return re.sub(r"[|\n]", " ", str(value))


def between(row: dict) -> str:
    """An interval; of one prompt there is none."""
    low, high = row.get("low"), row.get("high")
    return "–" if low is None or low != low else f"{low:.2f} to {high:.2f}"


def at(records: list[dict], *keys):
    """The first record's value under these keys; None where none has one."""
    for value in records:
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            return value
    return None


def refuse_places(text: str) -> None:
    """Raises UserError where the text has an absolute path, or the name of this machine or its user, unless that may be
    an ordinary word (no digit, hyphen or dot in it)."""
    found = re.findall(r"(?<![\w.:/~)-])(?:~/[\w./-]*|/[A-Za-z_.][\w.-]*(?:/[\w.-]*)*)", text)
    places = [path for path in found if path.count("/") > 1 or path[0] == "~" or Path(path).exists()]
    places += re.findall(r"\b[A-Za-z]:\\\S*", text)
    names = [socket.gethostname(), os.environ.get("USER", ""), os.environ.get("LOGNAME", "")]
    places += [name for name in names if re.search(r"[\d.-]", name)
               and re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)]
    if places:
        raise UserError(f"the model card would show {places[0]!r}, a place of this machine; rename what the records "
                        "call so")
