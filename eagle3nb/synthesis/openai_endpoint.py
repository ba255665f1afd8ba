"""Answers from whatever speaks OpenAI's chat API: OpenRouter, SGLang, vLLM.

What comes back is text, through the server's own chat template and tokenizer: whoever makes a record of it renders and
tokenises it with the target's.
"""

import difflib
import json

from eagle3nb.errors import UserError
from eagle3nb.synthesis.endpoint import Answer, Ask, Endpoint, Sampling, texts
from eagle3nb.synthesis.faults import WORDS, Fault, readable

OUTCOMES = {"stop": "stop", "length": "length", "tool_calls": "tool_calls", "function_call": "tool_calls",
            "content_filter": "refused"}
ABSURD = 2**40  # tokens, or money, of one answer
# Fields of a request that parameters of the stage set, or that change what an answer is or costs: none for `extra`.
OWN = {"model", "messages", "tools", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "n",
       "stream"}


class OpenAIEndpoint(Endpoint):
    """POST <url>/chat/completions. `url` ends as the provider says, mostly in /v1; `model` "" is the only one served.

    `extra`: more of the request's fields, such as {"provider": {…}} of OpenRouter or {"chat_template_kwargs": {…}} of
    SGLang and vLLM. The rest: Endpoint.
    """

    path = "/chat/completions"

    def __init__(self, url: str, model: str = "", key_variable: str = "OPENAI_API_KEY", *, extra: dict | None = None,
                 **options):
        super().__init__(url, key_variable=key_variable, **options)
        self.model, self.extra = model, checked_extra(extra)

    def check(self) -> dict:
        """{"api", "model", "context" (tokens), "root" (the model's directory or name), "prices" (per million tokens)},
        the last three None where the server does not tell; sets `model` where it was "". UserError in one line where
        nothing answers, the key is refused, or the model is not served."""
        url = self.address.url
        try:
            cards = {card["id"] + "": card for card in self.address.get("/models", self.clock.wall())["data"]}
        except Fault as fault:
            if fault.reason in ("http 404", "http 405", "not json"):
                raise UserError(f"what answers at {url} is no OpenAI API ({fault.reason} from /models); give the "
                                "address with its path, mostly …/v1") from None
            raise UserError(self.unreached(fault)) from None
        except (KeyError, TypeError):
            raise UserError(f"what answers at {url} is no OpenAI API (its /models lists none); give the address with "
                            "its path, mostly …/v1") from None
        if not self.model and len(cards) == 1:
            self.model = next(iter(cards))
        if self.model not in cards:
            near = difflib.get_close_matches(self.model, cards, 3, 0.5) or sorted(cards)[:5]
            raise UserError(f"{url} serves {len(cards)} models, none of them {self.model!r}; set model to one of them, "
                            f"such as {', '.join(near)}")
        card = cards[self.model]
        lengths = [card.get(name) for name in ("max_model_len", "context_length")]
        context, root = next((n for n in lengths if type(n) is int and n), None), card.get("root")
        return {"api": "openai", "model": self.model, "context": context,
                "root": root if isinstance(root, str) else None, "prices": prices_of(card.get("pricing"))}

    def body(self, ask: Ask, sampling: Sampling) -> dict:
        tools = {"tools": list(ask.tools)} if ask.tools else {}
        return {"model": self.model, "messages": list(ask.messages), **tools, "max_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature, "top_p": sampling.top_p, "seed": ask.seed, **self.extra}

    def read(self, ask: Ask, sampling: Sampling, value: dict) -> Answer:
        """The first choice. Raises Fault where there is none, it is no message, or it ended in no way known."""
        try:
            choice = value["choices"][0]
            message, finish = choice["message"], str(choice.get("finish_reason"))
        except (KeyError, IndexError, TypeError, AttributeError):
            raise Fault("no choices", again=True, billed=True) from None
        try:
            content, reasoning, calls = content_of(message), reasoning_of(message), calls_of(message)
        except (KeyError, TypeError, AttributeError):
            raise Fault("malformed", again=True, billed=True) from None
        if choice.get("error") or finish not in OUTCOMES:
            raise Fault("broken off", readable(finish)[:WORDS], again=True, billed=True)
        usage = usage_of(value.get("usage"))
        outcome = "tool_calls" if calls and finish == "stop" else OUTCOMES[finish]
        reason = "content filter" if outcome == "refused" else ""
        if message.get("refusal"):
            outcome, reason = "refused", "refusal"
        if outcome == "stop" and not content.strip() and not reasoning.strip() or outcome == "tool_calls" and not calls:
            outcome, reason = "failed", "empty"
        if outcome == "length":
            content = content.rstrip("\ufffd")  # a server's word for the bytes of a character that the limit cut
        if outcome == "length" and usage[1] is not None and usage[1] < sampling.max_new_tokens:
            reason = "context"
        said = {"role": "assistant", "content": content}
        said |= {"reasoning_content": reasoning} if reasoning else {}
        said |= {"tool_calls": calls} if calls else {}
        if (text := json.dumps(said, ensure_ascii=False)) != readable(text):
            outcome, reason = "failed", "half a character"  # no tokenizer reads it and no file holds it
        return self.answered(ask, outcome, usage, readable("".join(texts(said))), reason=reason,
                             message=None if outcome in ("refused", "failed") else said,
                             model=readable(model_name(str(value.get("model") or self.model))))


def checked_extra(extra: dict | None) -> dict:
    """UserError where it sets what has a parameter of its own, by which records and budget go, or is no JSON."""
    extra = dict(extra or {})
    if taken := sorted(OWN & extra.keys()):
        raise UserError(f"extra sets {', '.join(taken)}; records and budget go by the stage's own parameters: leave it "
                        "out there")
    try:
        json.dumps(extra, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"extra is no JSON ({error}); give texts, numbers, lists and objects") from None
    return extra


def content_of(message: dict) -> str:
    """The text, of the list form too. TypeError for anything else."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if part.get("type") == "text")
    return content + ""


def reasoning_of(message: dict) -> str:
    """SGLang, DeepSeek and older vLLM say reasoning_content, OpenRouter and newer vLLM reasoning."""
    return (message.get("reasoning_content") or message.get("reasoning") or "") + ""


def calls_of(message: dict) -> list[dict]:
    """Tool calls in OpenAI's form, arguments as text, without whatever else a server puts beside. TypeError or KeyError
    for what is none."""
    found = []
    for number, call in enumerate(message.get("tool_calls") or ()):
        name, arguments = call["function"]["name"], call["function"].get("arguments") or "{}"
        arguments = json.dumps(arguments) if isinstance(arguments, dict) else arguments
        found.append({"id": str(call.get("id") or f"call_{number}"), "type": "function",
                      "function": {"name": name + "", "arguments": arguments + ""}})
    return found


def usage_of(usage) -> tuple[int | None, int | None, float | None]:
    """(prompt tokens, completion tokens, cost) as far as the server tells them; OpenRouter alone tells the cost."""
    usage = usage if isinstance(usage, dict) else {}
    tokens = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    cost = usage.get("cost")
    return (*(count if type(count) is int and 0 <= count < ABSURD else None for count in tokens),
            float(cost) if type(cost) in (int, float) and 0 <= cost < ABSURD else None)


def prices_of(pricing) -> dict | None:
    """OpenRouter's prices a token, as texts → {"prompt", "completion"} per million tokens."""
    try:
        return {name: round(float(pricing[name]) * 1e6, 6) for name in ("prompt", "completion")}
    except (KeyError, TypeError, ValueError):
        return None


def model_name(name: str) -> str:
    """As a record may show it: of a server's model directory the last part."""
    return name.rstrip("/").rsplit("/", 1)[-1] if name.startswith("/") else name
