"""Asks and answers: what every endpoint has in common, and the loop that asks.

The loop has two sides. Requests run in an event loop of their own thread (a Jupyter kernel's own loop is busy running
the cell); the thread that called takes the answers one by one and hands each to `done`, so that tokenising, journals
and whatever else is done with an answer need no lock and hold up no request.
"""

from dataclasses import dataclass, field

from eagle3nb.synthesis.budget import Spent

GOOD = ("stop", "length", "tool_calls")


@dataclass(frozen=True)
class Ask:
    """One answer that is wanted. `key`: (prompt's id, turn, attempt)."""

    key: tuple
    messages: tuple[dict, ...] = ()  # OpenAI's form: role, content, tool_calls, tool_call_id, reasoning_content
    tools: tuple[dict, ...] = ()
    input_ids: tuple[int, ...] = ()  # the rendered prompt: what SGLang's /generate is given; elsewhere only counted
    seed: int = 0


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn. temperature 0: greedily. `stop_ids`: only an endpoint that speaks ids takes them; a chat
    endpoint ends answers where its model's template does."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What came of an ask.

    `outcome`: "stop", "length" and "tool_calls" are answers; "refused" and "failed" are none; "skipped" was not (fully)
    tried. `reason`, a few words from a short list, says why of the latter three, and of "length" whether the "context"
    was full rather than max_new_tokens reached. `detail`: the server's own words, one line.
    `message`: {"role", "content"[, "reasoning_content"][, "tool_calls"]}; None where ids came instead, or nothing.
    `ids`: the exact tokens of an answer, the one that ended it included; empty from a chat endpoint.
    `prompt_tokens`, `completion_tokens`, `cost` are this answer's, `estimated` where the server did not say; `spent` is
    what all its tries are booked at, `retries` why each but the last one failed. `seconds`: of the last try.
    """

    key: tuple
    outcome: str
    reason: str = ""
    detail: str = ""
    message: dict | None = None
    ids: tuple[int, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    estimated: bool = False
    model: str = ""
    seconds: float = 0.0
    retries: tuple[str, ...] = ()
    spent: Spent = Spent()


@dataclass
class Counts:
    """A sum over answers: given = succeeded + failed + skipped, whatever happened (refused ones count as failed).

    `outcomes`: how many by "outcome" or "outcome: reason"; `retries`: tries that were repeated, by reason; `spent`:
    all tries' cost, lost ones at the most they can have cost; `estimated`: answers whose tokens the server did not
    tell; `seconds` of asking; `stopped`: why not everything was asked ("budget tokens", "http 401", …), else "".
    """

    given: int = 0
    succeeded: int = 0
    failed: int = 0
    skipped: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    retries: dict[str, int] = field(default_factory=dict)
    spent: Spent = Spent()
    estimated: int = 0
    seconds: float = 0.0
    stopped: str = ""

    def take(self, answer: Answer) -> None:
        """Count one more."""
        self.given += 1
        self.succeeded += answer.outcome in GOOD
        self.failed += answer.outcome in ("refused", "failed")
        self.skipped += answer.outcome == "skipped"
        name = f"{answer.outcome}: {answer.reason}" if answer.reason else answer.outcome
        self.outcomes[name] = self.outcomes.get(name, 0) + 1
        for reason in answer.retries:
            self.retries[reason] = self.retries.get(reason, 0) + 1
        self.spent += answer.spent
        self.estimated += answer.estimated

    def __add__(self, other: "Counts") -> "Counts":
        """Of two calls, one after the other."""
        def merged(a: dict, b: dict) -> dict:
            return {key: a.get(key, 0) + b.get(key, 0) for key in [*a, *(key for key in b if key not in a)]}

        return Counts(self.given + other.given, self.succeeded + other.succeeded, self.failed + other.failed,
                      self.skipped + other.skipped, merged(self.outcomes, other.outcomes),
                      merged(self.retries, other.retries), self.spent + other.spent,
                      self.estimated + other.estimated, self.seconds + other.seconds, other.stopped or self.stopped)

    @property
    def tokens_per_s(self) -> float:
        """Answered tokens a second, over all that was under way at once."""
        return self.spent.completion_tokens / self.seconds if self.seconds else 0.0
