"""Who answers: the target itself in this process, or a server, and whether that server serves the target.

Answers of another model are off-policy: its records say so, and the drafter learns from them what the target would not
have said. What decides is the name under which the server was given its model: SGLang's model path, of an OpenAI API
the model's `root` or its name. Where its last part is that of the target's folder, it is taken for the target. A server
that gives its model another name is told by the parameter `on_policy`.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

from eagle3nb.errors import UserError
from eagle3nb.progress import progress
from eagle3nb.states import open_target
from eagle3nb.states.target import facts_of
from eagle3nb.synthesis.budget import Budget
from eagle3nb.synthesis.endpoint import Answer, Counts, Sampling
from eagle3nb.synthesis.openai_endpoint import OpenAIEndpoint, model_name
from eagle3nb.synthesis.sglang_endpoint import SGLangEndpoint

BATCH = 32


@dataclass(frozen=True)
class Answerer:
    """`endpoint` has `answer` and `close`. `model`: its name in every record; "" of the target itself, here.

    `exact`: answers come as ids. `room`: tokens that a prompt and its answer may have together; 0: the endpoint knows.
    `extra`: further fields of each request, on which its answer depends.
    """

    endpoint: object
    model: str
    on_policy: bool
    exact: bool
    room: int = 0
    found: dict | None = None  # what the server told of itself
    extra: dict = field(default_factory=dict)

    @property
    def here(self) -> bool:
        return not self.model


class TargetHere:
    """The target in this process, with an endpoint's `answer`: loaded when the first answer is wanted, and kept."""

    def __init__(self, folder: str | Path, engine: str = "transformers", target=None):
        self.folder, self.engine, self.target = folder, engine, target

    def answer(self, asks, sampling: Sampling, done, *, what: str = "answered", expected: int = 0) -> Counts:
        """All asks in one batch that is refilled, then what follows from them, until nothing does."""
        asks, counts, began = list(asks), Counts(), time.perf_counter()
        if not asks:
            return counts
        if self.target is None:
            self.target = open_target(self.engine, self.folder)
        with progress(max(expected, len(asks)), what, "answers") as bar:
            while asks:
                following, of_round = [], counts.given + len(asks)

                def take(index: int, ids, asks=asks, following=following, of_round=of_round) -> None:
                    ask, ids = asks[index], tuple(map(int, ids))
                    answer = Answer(ask.key, "stop" if ids[-1] in sampling.stop_ids else "length", ids=ids,
                                    prompt_tokens=len(ask.input_ids), completion_tokens=len(ids))
                    counts.take(answer)
                    counts.seconds = time.perf_counter() - began
                    following.extend(done(ask, answer) or ())
                    bar.expect([max(expected, of_round + len(following))])
                    bar.advance(1, f"{counts.tokens_per_s:,.0f} tokens/s")

                self.target.generate([list(ask.input_ids) for ask in asks], max_new_tokens=sampling.max_new_tokens,
                                     temperature=sampling.temperature, top_p=sampling.top_p, done=take, batch=BATCH,
                                     stop_ids=sampling.stop_ids, seed=[ask.seed for ask in asks])
                asks = following
        return counts

    def close(self) -> None:
        if self.target is not None:
            self.target.close()
            self.target = None


def connect(folder: Path, *, engine: str = "transformers", endpoint: str = "", api: str = "openai", model: str = "",
            key_variable: str = "OPENAI_API_KEY", extra: dict | None = None, on_policy: bool | None = None,
            concurrency: int = 16, timeout_s: float = 600.0, retries: int = 8, prices: dict | None = None,
            budget: Budget | None = None, tokenizer=None) -> Answerer:
    """The Answerer: the target in `folder` by `engine`, or the server at `endpoint`, which is asked what it serves.

    extra: further fields of a chat request. tokenizer: counts prompts' tokens for the budget. UserError where the
    server does not answer, or not as `api` says.
    """
    if not endpoint:
        if engine not in ("transformers", "sglang"):
            raise UserError(f"engine {engine!r} is unknown; choose transformers or sglang")
        return Answerer(TargetHere(folder, engine), "", True, True, facts_of(folder).max_positions)
    options = {"key_variable": key_variable, "concurrency": concurrency, "timeout_s": timeout_s, "retries": retries,
               "prices": prices, "budget": budget}
    if tokenizer is not None:
        options["count_tokens"] = lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])
    made = endpoint_of(endpoint, api, model, extra, **options)
    found = made.check()
    served = [name for name in (found.get("root"), found["model"]) if name]
    if model and api == "sglang" and last(model) not in map(last, served):
        raise UserError(f"the server at {endpoint} serves {model_name(found['model'])}, not {model}; leave model "
                        "empty, or start it with that model")
    ours = last(str(folder)) in map(last, served)
    return Answerer(made, model_name(found["model"]), ours if on_policy is None else on_policy, api == "sglang",
                    found=found, extra=dict(extra or {}))


def endpoint_of(endpoint: str, api: str, model: str, extra: dict | None, **options):
    """The endpoint of these settings, which is not asked yet. UserError for what cannot be."""
    if api not in ("openai", "sglang"):
        raise UserError(f"api {api!r} is unknown; choose openai (a chat API) or sglang (its own /generate)")
    if extra and api != "openai":
        raise UserError("extra is for api openai; leave it empty")
    if api == "sglang":
        return SGLangEndpoint(endpoint, **options)
    return OpenAIEndpoint(endpoint, model, extra=extra, **options)


def last(name: str) -> str:
    """Of a path or of owner/name the last part, in small letters."""
    return name.rstrip("/").rsplit("/", 1)[-1].lower()
