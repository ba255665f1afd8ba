"""Answers from SGLang's own /generate: prompts as ids, answers as the exact ids that the target generated.

Nothing is tokenised on the way, so these ids are what the target saw and wrote, and a record of them is on-policy to
the token. Measured on SGLang 0.5.23 (tests/sglang/test_synthesis.py): `output_ids` of an answer that stopped end with
the token that stopped it, whether the model's own end of turn or one of stop_token_ids; only `text` leaves it out.
"""

from eagle3nb.errors import UserError
from eagle3nb.synthesis.endpoint import Answer, Ask, Endpoint, Sampling
from eagle3nb.synthesis.faults import WORDS, Fault, readable
from eagle3nb.synthesis.openai_endpoint import model_name


class SGLangEndpoint(Endpoint):
    """POST <url>/generate; url without a path (a /v1 at its end is taken off). The rest: Endpoint.

    A server draws by an ask's seed only with --enable-deterministic-inference (check's "deterministic"); otherwise the
    same ask gives another text each time, unless it is greedy. SGLang refuses a request whose prompt and max_new_tokens
    together pass its context; after `check`, which tells that, an answer near its end is only given what room there is.
    """

    path = "/generate"

    def __init__(self, url: str, *, key_variable: str = "", **options):
        super().__init__(url.strip().rstrip("/").removesuffix("/v1"), key_variable=key_variable, **options)
        self.model, self.context = "", None

    def check(self) -> dict:
        """{"api", "model" (as the server was given it: a directory or a name), "context" (tokens that a prompt and its
        answer may have together), "version", "deterministic"}. UserError in one line where no SGLang answers."""
        url = self.address.url
        try:
            model, info = (self.address.get(path, self.clock.wall()) for path in ("/model_info", "/server_info"))
            room = info["max_req_input_len"] - (info.get("speculative_num_draft_tokens") or 0)  # reserved for a verify
            found = {"api": "sglang", "model": model["model_path"], "context": room, "version": info["version"],
                     "deterministic": bool(info.get("enable_deterministic_inference"))}
        except (Fault, KeyError, TypeError) as fault:
            if not isinstance(fault, Fault) or fault.reason in ("http 404", "http 405", "not json"):
                raise UserError(f"what answers at {url} is no SGLang 0.5.23 (/model_info, /server_info: {fault}); give "
                                "the address of its server, without a path, or set api to openai") from None
            raise UserError(self.unreached(fault)) from None
        self.model, self.context = found["model"], found["context"]
        return found

    def body(self, ask: Ask, sampling: Sampling) -> dict:
        """ValueError for an ask without ids."""
        if not ask.input_ids:
            raise ValueError(f"ask {ask.key} has no input_ids: render and tokenise it first")
        room, longest = (self.context or 0) - len(ask.input_ids), sampling.max_new_tokens
        longest = min(longest, room) if room > 0 else longest  # where there is none, the server says so
        drawn = {"max_new_tokens": longest, "temperature": sampling.temperature, "top_p": sampling.top_p,
                 "stop_token_ids": list(sampling.stop_ids), "sampling_seed": ask.seed, "skip_special_tokens": False}
        return {"input_ids": list(ask.input_ids), "sampling_params": drawn}

    def read(self, ask: Ask, sampling: Sampling, value: dict) -> Answer:
        """Raises Fault where there are no ids, or the server aborted."""
        try:
            ids, ended = tuple(value["output_ids"]), value["meta_info"]["finish_reason"]
            finish = ended["type"]
        except (KeyError, TypeError):
            raise Fault("no ids", again=True, billed=True) from None
        if any(type(token) is not int or not 0 <= token < 2**31 for token in ids):
            raise Fault("malformed", again=True, billed=True)
        if finish not in ("stop", "length"):
            raise Fault("broken off", readable(str(ended.get("message") or finish))[:WORDS], again=True, billed=True)
        reason = "context" if finish == "length" and len(ids) < sampling.max_new_tokens else ""
        return self.answered(ask, finish if ids else "failed", (len(ask.input_ids), len(ids), None),
                             reason=reason if ids else "empty", ids=ids, model=model_name(self.model))
