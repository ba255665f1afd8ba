"""The evaluation's parameters, before anything runs: hours of answers must not end at a misspelt dtype."""

from eagle3nb.acceptance import offline
from eagle3nb.acceptance.card import check_base_model
from eagle3nb.drafter.export import DTYPES
from eagle3nb.errors import UserError


def check(parameters: dict) -> None:
    """Raises UserError for the first value that cannot be."""
    p = parameters
    offline.check_steps(p["steps"], p["steps_max"])
    wrong = [(p["max_new_tokens"] >= 2, "max_new_tokens", "2 or more: the first token is the prefill's"),
             (p["bootstrap"] >= 1, "bootstrap", "1 or more"), (p["seed"] >= 0, "seed", "0 or more"),
             (p["limit"] >= 0, "limit", "0 or more"), (p["decode_prompts"] >= 0, "decode_prompts", "0 or more"),
             (p["cost_seconds"] >= 0, "cost_seconds", "0 or more"),
             (p["temperature"] >= 0, "temperature", "0, or above for sampled answers"),
             (1 in p["batches"] and min(p["batches"]) >= 1, "batches", "numbers of sequences, 1 among them"),
             (p["serve_at_once"] >= 1, "serve_at_once", "1 or more"),
             (p["export_dtype"] in DTYPES, "export_dtype", f"one of {', '.join(DTYPES)}"),
             (not p["server"] or p["engine"] == "sglang", "server", "empty unless engine is sglang"),
             (not p["server"] or p["server"].startswith(("http://", "https://")), "server", "http://HOST:PORT")]
    for right, name, wanted in wrong:
        if not right:
            raise UserError(f"{name} is {p[name]!r}; it must be {wanted}")
    check_base_model(p["base_model"])
