"""How fast would drafts make it? Measured acceptance and measured costs, put together; nothing else is assumed.

A round is: the drafter catches up with the tokens that the last one brought, drafts K, the target verifies K + 1 tokens
of each sequence. It yields τ tokens on average, so tokens a second = batch · τ / seconds a round. Engine-neutral: costs
come from this machine (costs.py) or from a server's own figures. What was not measured gets no row. Sequences at once
catch up with unlike numbers of tokens: the mean of the costs of like numbers stands for it, which is exact where every
token adds the same.
"""

import json
import shlex
from dataclasses import dataclass, field

from eagle3nb.acceptance import offline
from eagle3nb.errors import UserError


@dataclass(frozen=True)
class Costs:
    """Seconds of a round's parts, by batch (sequences at once). `verify` needs width 1: the target alone."""

    verify: dict[tuple[int, int], float]  # (batch, width): one pass of the target over width tokens a sequence
    draft_step: dict[int, float]  # batch: one drafted token a sequence
    catch_up: dict[tuple[int, int], float] = field(default_factory=dict)  # (batch, tokens): if it costs a pass apart
    overhead: dict[int, float] = field(default_factory=dict)  # batch: the host's part of a round

    def alone(self, batch: int) -> float:
        """A round without drafts."""
        return self.verify[batch, 1] + self.overhead.get(batch, 0.0)

    def round(self, batch: int, accepted: "Accepted") -> float | None:
        """A round with chains of accepted.steps; None where a part of it was not measured."""
        steps = accepted.steps
        if (batch, steps + 1) not in self.verify or batch not in self.draft_step:
            return None
        caught_up = {tokens: s for (b, tokens), s in self.catch_up.items() if b == batch}
        if caught_up and not set(range(1, steps + 2)) <= set(caught_up):
            return None
        mean = sum(share * caught_up.get(n + 1, 0.0) for n, share in enumerate(accepted.lengths))
        return self.verify[batch, steps + 1] + steps * self.draft_step[batch] + mean + self.overhead.get(batch, 0.0)


@dataclass(frozen=True)
class Accepted:
    """What chains of `steps` drafts yield. joint[j]: the share of verifies that accept more than j drafts."""

    joint: tuple[float, ...]
    delivered: float | None = None  # tokens that the user gets a verify; less than τ, by what runs past an answer's end

    @property
    def steps(self) -> int:
        return len(self.joint)

    @property
    def tau(self) -> float:
        return 1 + sum(self.joint)

    @property
    def lengths(self) -> list[float]:
        """Shares of the verifies that accept exactly 0..steps drafts."""
        edges = [1.0, *self.joint, 0.0]
        return [a - b for a, b in zip(edges[:-1], edges[1:], strict=True)]


def accepted(found, steps_max: int) -> dict[int, Accepted]:
    """By number of steps 1..steps_max, from offline.chains: each number's own walk. UserError without any verify."""
    by_steps = {}
    for steps in range(1, steps_max + 1):
        walks = [chain.walk(steps) for chain in found]
        verifies = sum(walk.verifies for walk in walks)
        if not verifies:
            raise UserError("no answer is longer than one token, so nothing is verified; raise max_new_tokens")
        joint = tuple(row["joint"] for row in offline.by_position(found, steps))
        by_steps[steps] = Accepted(joint, sum(walk.delivered for walk in walks) / verifies)
    return by_steps


def prefixes(positions: list[dict]) -> dict[int, Accepted]:
    """The same from offline.by_position's rows of the longest chain alone.

    Shorter chains stand at other places of the text, so this is near and not exact; a server's histogram gives no more.
    """
    joint = tuple(row["joint"] for row in positions)
    if None in joint or any(a < b for a, b in zip((1.0, *joint), joint, strict=False)):
        raise UserError(f"joint acceptance by position must fall from 1 on, not {joint}; evaluate again")
    return {steps: Accepted(joint[:steps]) for steps in range(1, len(joint) + 1)}


def predict(by_steps: dict[int, Accepted], costs: Costs) -> list[dict]:
    """Rows {batch, steps, tokens, seconds, tokens_per_s, speedup}, a row a batch and number of steps; 0 is the target
    alone. `tokens` a round and sequence: delivered ones where known, else τ. `tokens_per_s`: of the whole batch.
    """
    rows = []
    for batch in sorted({batch for batch, width in costs.verify if width == 1}):
        alone = costs.alone(batch)
        rounds = [(0, 1.0, alone)]
        for steps, one in sorted(by_steps.items()):
            seconds = costs.round(batch, one)
            if seconds is not None:
                rounds.append((steps, one.tau if one.delivered is None else one.delivered, seconds))
        rows += [{"batch": batch, "steps": steps, "tokens": tokens, "seconds": seconds,
                  "tokens_per_s": batch * tokens / seconds, "speedup": tokens / (seconds / alone)}
                 for steps, tokens, seconds in rounds]
    return rows


def best(rows: list[dict], batch: int = 1) -> dict:
    """The fastest row of a batch; the fewer drafts of two that are equal. UserError where it was not measured."""
    mine = [row for row in rows if row["batch"] == batch]
    if not mine:
        raise UserError(f"nothing was measured with {batch} sequences at once; measure it, or ask for one of "
                        f"{sorted({row['batch'] for row in rows})}")
    return max(mine, key=lambda row: (row["tokens_per_s"], -row["steps"]))


def best_by_batch(rows: list[dict]) -> list[dict]:
    """The fastest number of steps of every batch: rows {batch, steps, tokens_per_s, speedup}."""
    found = [best(rows, batch) for batch in sorted({row["batch"] for row in rows})]
    return [{name: row[name] for name in ("batch", "steps", "tokens_per_s", "speedup")} for row in found]


@dataclass(frozen=True)
class Recommendation:
    """Ready command lines; without speculation where no number of steps beats none."""

    batch: int
    steps: int
    speedup: float
    reason: str
    sglang: str
    vllm: str


def recommend(rows: list[dict], costs: Costs, target_dir: str, drafter_dir: str, batch: int = 1) -> Recommendation:
    """What to serve with, from `predict`'s rows. The directories stand in the commands as they are given."""
    found = best(rows, batch)
    steps, each = found["steps"], "" if batch == 1 else " a sequence"
    drafted = [row for row in rows if row["batch"] == batch and row["steps"]]
    if steps:
        reason = (f"{_drafts(steps)} a round, {_at(batch)}: a round costs {found['seconds'] / costs.alone(batch):.2f} "
                  f"single passes of the target and yields {found['tokens']:.2f} tokens{each}, "
                  f"{found['speedup']:.2f} times the target alone")
    elif not drafted:
        reason = f"no drafts, {_at(batch)}: no round with drafts was measured there"
    else:
        near = max(drafted, key=lambda row: row["speedup"])
        k, alone = near["steps"], costs.alone(batch)
        reason = (f"no number of drafted tokens beats none, {_at(batch)}: with {k}, the nearest, a verify of {k + 1} "
                  f"tokens costs {costs.verify[batch, k + 1] / costs.verify[batch, 1]:.2f} single ones here and a "
                  f"whole round {near['seconds'] / alone:.2f}, for {near['tokens']:.2f} tokens{each} "
                  f"({near['speedup']:.2f} times the target alone); break-even is {near['seconds'] / alone:.2f} tokens "
                  "a round")
    return Recommendation(batch, steps, found["speedup"], reason, sglang_command(target_dir, drafter_dir, steps),
                          vllm_command(target_dir, drafter_dir, steps))


def sglang_command(target_dir: str, drafter_dir: str, steps: int) -> str:
    """SGLang 0.5.23; a chain of N drafts is topk 1 and N + 1 draft tokens, the verified one among them."""
    command = f"python -m sglang.launch_server --model-path {shlex.quote(str(target_dir))}"
    if not steps:
        return command
    return (f"{command} --speculative-algorithm EAGLE3 --speculative-draft-model-path {shlex.quote(str(drafter_dir))} "
            f"--speculative-num-steps {steps} --speculative-eagle-topk 1 --speculative-num-draft-tokens {steps + 1}")


def vllm_command(target_dir: str, drafter_dir: str, steps: int) -> str:
    """vLLM 0.32.0."""
    command = f"vllm serve {shlex.quote(str(target_dir))}"
    if not steps:
        return command
    config = {"method": "eagle3", "model": str(drafter_dir), "num_speculative_tokens": steps}
    return f"{command} --speculative-config {shlex.quote(json.dumps(config))}"


def check(rows: list[dict], runs: dict, batch: int = 1) -> list[dict]:
    """Predicted against measured: rows {steps, predicted, measured, difference, speedup_predicted, speedup_measured}.

    `runs`: by number of steps the decodes (decode.Decode) of the same prompts. Tokens a second after the prefill;
    difference = predicted / measured − 1.
    """
    predicted = {row["steps"]: row for row in rows if row["batch"] == batch}
    rates = {steps: sum(len(d.ids) - 1 for d in decodes) / max(sum(d.decode_s for d in decodes), 1e-9)
             for steps, decodes in runs.items()}
    return [{"steps": steps, "predicted": predicted[steps]["tokens_per_s"], "measured": rate,
             "difference": predicted[steps]["tokens_per_s"] / rate - 1 if rate else None,
             "speedup_predicted": predicted[steps]["speedup"],
             "speedup_measured": rate / rates[0] if rates.get(0) else None}
            for steps, rate in rates.items() if steps in predicted]


def _drafts(steps: int) -> str:
    return "1 drafted token" if steps == 1 else f"{steps} drafted tokens"


def _at(batch: int) -> str:
    return "one sequence at a time" if batch == 1 else f"{batch} sequences at once"
