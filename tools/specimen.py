"""The demo's figures in README and docs, out of outputs/specimen-demo: tools/reference.py puts them in their places.

A region of a page stands between `<!-- made: NAME -->` and `<!-- end -->`; NAME is one of REGIONS, here or in
examples.py, a function that returns the text. So a new specimen changes every page by one command, and no figure is
typed.
"""

import re
import textwrap
from pathlib import Path

import examples

from eagle3nb.files import project_root, read_json
from eagle3nb.record.declared import USUAL, stem
from eagle3nb.record.tables import span

REGION = re.compile(r"(<!-- made: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
FOLDER = "outputs/specimen-demo"
WORDS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def filled(text: str) -> str:
    """The page with every region made anew. KeyError for a region that has no function."""
    return REGION.sub(lambda m: m[1] + REGIONS[m[2]]().rstrip("\n") + "\n" + m[4], text)


def twin(stage: str) -> dict:
    return read_json(project_root() / FOLDER / f"{stem(stage)}.json")


def result(stage: str) -> dict:
    return twin(stage)["result"]


def at(steps: int, source: str = "all") -> dict:
    return next(r for r in result("evaluation")["acceptance"] if (r["steps"], r["source"]) == (steps, source))


def headline() -> dict:
    return at(twin("evaluation")["parameters"]["steps"])


def seconds() -> float:
    return sum(twin(stage)["cost"]["total_s"] for stage in USUAL)


# ---------------------------------------------------------------------------------------------------- regions


def demo_table() -> str:
    rows = [(steps, at(steps)) for steps in (1, twin("evaluation")["parameters"]["steps"], 7)]
    lines = ["| draft steps | acceptance length | 95 % interval |", "|---|---|---|"]
    for steps, row in rows:
        tau = f"**{row['tau']:.2f}**" if row == headline() else f"{row['tau']:.2f}"
        lines.append(f"| {steps} | {tau} | {row['low']:.2f} – {row['high']:.2f} |")
    return "\n".join(lines)


def demo_sentences() -> str:
    """What stands under the table: prompts, sources, the real decode, what bounds it, speed."""
    r, p, head = result("evaluation"), twin("evaluation")["parameters"], headline()
    sources = sorted((row for row in r["acceptance"] if row["steps"] == p["steps"] and row["source"] != "all"),
                     key=lambda row: row["tau"])
    low, high = sources[0], sources[-1]
    loops = sum(row["looping"] for row in r["answers"] if row["source"] != "all")
    speed = {row["steps"]: row for row in r["speed"]}
    best = max(speed.values(), key=lambda row: row["speedup_measured"])
    last = speed[p["steps"]]
    verify = {row["width"]: row["seconds"] for row in r["costs"] if (row["what"], row["batch"]) == ("verify", 1)}
    return "\n\n".join(map(prose, [
        f"over {head['prompts']} held-out prompts, at most {p['max_new_tokens']} tokens each, "
        f"{WORDS[loops] if loops < 10 else loops} of which "
        f"{'loop' if loops > 1 else 'loops'}; at {p['steps']} steps from {low['tau']:.2f} ({topic(low)}) to "
        f"{high['tau']:.2f} ({topic(high)}). {decoded()}",
        f"{result('merge')['merge']['supervised']:,} generated tokens are little: {r['outside']['share']:.0%} of the "
        f"chains break at a token outside the draft vocabulary, most of the others at ordinary words. With "
        f"{WORDS[best['steps']]} drafts the decode is {best['speedup_measured']:.2f} times as fast as without "
        f"({best['measured']:.1f} against {speed[0]['measured']:.1f} tokens/s in plain PyTorch; predicted from timed "
        f"costs: {best['speedup_predicted']:.2f}), with {WORDS[p['steps']]} {last['speedup_measured']:.2f} times: here "
        f"a verify of {WORDS[p['steps'] + 1]} tokens costs {verify[p['steps'] + 1] / verify[1]:.1f} single ones."]))


def topic(row: dict) -> str:
    return row["source"].split("_", 1)[1]


def decoded() -> str:
    d = result("evaluation")["decode"]
    if d["equal"] == d["prompts"]:
        return f"A real draft-and-verify decode of {d['prompts']} of them gives the same text and the same counts."
    return f"A real draft-and-verify decode of {d['prompts']} of them gives the same text and counts for {d['equal']}."


def times() -> str:
    lines = ["| stage | time | verdict in the record |", "|---|---|---|"]
    for stage in USUAL:
        took, verdict = span(round(twin(stage)["cost"]["total_s"])), result(stage)["verdict"]
        lines.append(f"| `{stem(stage)}` | {took} | {verdict} |")
    lines.append(f"| all five | {span(round(seconds()))} | |")
    return "\n".join(lines)


def total_time() -> str:
    return prose(
        f"Measured for the specimen: {span(round(seconds()))} after set-up, on "
        f"{WORDS[twin('evaluation')['provenance']['cores']]} cores that now and then had other "
        "work; a slower machine trains fewer epochs, so that it stays near ten minutes.")


def merge_console() -> str:
    return console("merge")


def evaluation_console() -> str:
    return console("evaluation")


def console(stage: str) -> str:
    return "\n".join(["```text", *result(stage)["console"], "```"])


def audit() -> str:
    r = result("audit")
    rows, size, draft = r["forecast"], r["disk"]["bytes"], r["draft"]
    return prose(
        f"{rows['records']} rows, {rows['tokens']:,} tokens, {rows['supervised']:,} of them generated; {r['findings']} "
        f"findings, none red. The plan: {size['bf16'] / 1e6:,.0f} MB of hidden states in bf16 "
        f"({size['fp8_e4m3'] / 1e6:,.0f} MB in fp8), a drafter of {draft['trainable'] / 1e6:.1f} M trained parameters, "
        f"{draft['training_bytes'] / 1e9:.1f} GB of memory for training at its peak.")


def extraction() -> str:
    store, probe = result("extraction")["store"], result("extraction")["probe"]
    near, worst = (pick(row[name] for row in probe["layers"])
                   for pick, name in ((min, "nearest neighbour"), (max, "relative error")))
    norm = probe["norm"]
    return prose(
        f"{store['tokens']:,} tokens in {store['shards']} shards, {store['bytes'] / 1e9:.2f} GB, "
        f"{store['tokens_per_s']:,.0f} tokens/s. The captured layers differ from an independent forward of the "
        f"checkpoint by {worst:.1g} of a token's norm, from the neighbouring layers by {near:.2f} and more; the last "
        f"hidden state continues the text for {norm['as it is']:.0%} of {norm['tokens']} tokens as it is, for "
        f"{norm['through the final norm']:.0%} through one more norm.")


def training() -> str:
    r = result("training")
    best, last = r["best"], r["last"]
    first, *_, end = best["accuracy"]
    return prose(
        f"{last['step']} optimiser steps, {last['tokens']:,} tokens seen, {r['tokens_per_s']:,.0f} tokens/s; the best "
        f"checkpoint is that of step {best['step']}: held-out acceptance {best['acceptance']:.2f}, {first:.0%} of "
        f"first drafts right, {end:.0%} at step {len(best['accuracy'])}. The draft vocabulary of "
        f"{r['draft_vocab_size']:,} tokens covers {r['coverage']:.0%} of the generated text.")


def prose(text: str) -> str:
    """With a number and its sign on one line, the percent as the pages write it."""
    return textwrap.fill(re.sub(r"(\d)%", r"\1 %", text), 118, break_long_words=False, break_on_hyphens=False)


def speed() -> str:
    r = result("evaluation")
    measured = {row["steps"]: row for row in r["speed"]}
    lines = ["| drafts a verify | predicted tokens/s | measured | speed-up measured |", "|---|---|---|---|"]
    lines += [f"| {steps} | {row['predicted']:.1f} | {row['measured']:.1f} | {row['speedup_measured']:.2f} |"
              for steps, row in sorted(measured.items())]
    return "\n".join(lines)


def formulas() -> str:
    lines = ["| figure | value | who prints it |", "|---|---|---|"]
    return "\n".join(lines + [f"| {row['figure']} | {row['value']:.2f} | {row['who']} |"
                              for row in result("evaluation")["formulas"]])


REGIONS = {"demo-table": demo_table, "demo-sentences": demo_sentences, "times": times, "total-time": total_time,
           "merge-console": merge_console, "evaluation-console": evaluation_console, "audit": audit,
           "extraction": extraction, "training": training, "speed": speed, "formulas": formulas,
           **examples.REGIONS}


def pages() -> dict[str, str]:
    """{path from the project's root: text} of README and every page of docs that has a region."""
    found = [project_root() / "README.md", *sorted(Path(project_root() / "docs").rglob("*.md"))]
    texts = {path.relative_to(project_root()).as_posix(): path.read_text(encoding="utf-8") for path in found}
    return {name: filled(text) for name, text in texts.items() if REGION.search(text)}
