"""Asks and answers: what every endpoint has in common, and the loop that asks.

The loop has two sides. Requests run in an event loop of their own thread (a Jupyter kernel's own loop is busy running
the cell); the thread that called takes the answers one by one and hands each to `done`, so that tokenising, journals
and whatever else is done with an answer need no lock and hold up no request.
"""

import itertools
import json
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from eagle3nb.errors import UserError
from eagle3nb.interrupt import next_of
from eagle3nb.progress import progress
from eagle3nb.synthesis.budget import Budget, Spent
from eagle3nb.synthesis.faults import Fault
from eagle3nb.synthesis.transport import Address, Clock, beside, post

GOOD = ("stop", "length", "tool_calls")
MOST_AT_ONCE = 1000  # connections that the openai client holds
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds before a second try, drawn from (0, …), doubled each time up to …
LONGEST_PAUSE = 300.0  # seconds of a server's Retry-After that are honoured
AROUND = 8  # tokens that a chat template puts around a message, at most in the usual ones
HOPELESS = 10  # asks (as many as go at once, where that is more) that failed one after another: no more are sent


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
    tried. `reason` says why of the latter three: "refusal", "content filter", "moderation"; "longer than the context",
    "empty", "half a character", "http 500" (or another status), "rate limited", "time-out", "no connection", "dropped",
    "not json", "no choices", "no ids", "malformed", "broken off", "error in the answer", "no credit"; "budget tokens"
    (requests, money) or what else ended it all. Of "length" it says "context" where that was full before max_new_tokens
    were reached.
    `detail`: the server's own words, one line.
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

    `outcomes`: how many by "outcome" or "outcome: reason"; `retries`: tries that were repeated, by reason; tokens: of
    what came back, `estimated` times without the server's word on them; `spent`: all tries' cost, lost ones at the most
    they can have cost; `seconds` of asking; `stopped`: why something was skipped ("budget tokens", "http 401", …).
    """

    given: int = 0
    succeeded: int = 0
    failed: int = 0
    skipped: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    retries: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    estimated: int = 0
    spent: Spent = Spent()
    seconds: float = 0.0
    stopped: str = ""

    def take(self, answer: Answer) -> None:
        """Count one more."""
        self.given += 1
        self.succeeded += answer.outcome in GOOD
        self.failed += answer.outcome in ("refused", "failed")
        self.skipped += answer.outcome == "skipped"
        self.stopped = self.stopped or (answer.reason if answer.outcome == "skipped" else "")
        name = f"{answer.outcome}: {answer.reason}" if answer.reason else answer.outcome
        self.outcomes[name] = self.outcomes.get(name, 0) + 1
        for reason in answer.retries:
            self.retries[reason] = self.retries.get(reason, 0) + 1
        self.prompt_tokens += answer.prompt_tokens
        self.completion_tokens += answer.completion_tokens
        self.estimated += answer.estimated
        self.spent += answer.spent

    def __add__(self, other: "Counts") -> "Counts":
        """Of two calls, one after the other."""
        def merged(a: dict, b: dict) -> dict:
            return {key: a.get(key, 0) + b.get(key, 0) for key in [*a, *(key for key in b if key not in a)]}

        return Counts(self.given + other.given, self.succeeded + other.succeeded, self.failed + other.failed,
                      self.skipped + other.skipped, merged(self.outcomes, other.outcomes),
                      merged(self.retries, other.retries), self.prompt_tokens + other.prompt_tokens,
                      self.completion_tokens + other.completion_tokens, self.estimated + other.estimated,
                      self.spent + other.spent, self.seconds + other.seconds, other.stopped or self.stopped)

    @property
    def tokens_per_s(self) -> float:
        """Answered tokens a second, over all that was under way at once."""
        return self.completion_tokens / self.seconds if self.seconds else 0.0


class Endpoint:
    """What OpenAIEndpoint and SGLangEndpoint share: tries, budget, and the loop that asks.

    A kind has the `path` that is posted to, what is posted there (`body`), and how the JSON that comes back is read
    (`read`, which raises Fault). url: the API's base address. key_variable: the environment variable with its key.
    concurrency: requests at once. timeout_s: for one answer, from the first byte sent to the last received. retries:
    further tries of a request that failed in a way that may pass. prices: {"prompt": per million tokens, "completion":
    …}. count_tokens(text): for estimates, where ids are not at hand; called in two threads; default: a third of the
    bytes. UserError for what cannot be.
    """

    path = ""

    def __init__(self, url: str, *, key_variable: str = "", concurrency: int = 8, timeout_s: float = 600,
                 retries: int = 8, prices: dict | None = None, budget: Budget | None = None,
                 count_tokens: Callable[[str], int] | None = None, clock: Clock | None = None):
        self.address = Address(url, key_variable)
        if not 1 <= concurrency <= MOST_AT_ONCE:
            raise UserError(f"concurrency is {concurrency}; choose 1 to {MOST_AT_ONCE}")
        if not timeout_s > 0 or retries < 0:
            raise UserError(f"timeout_s is {timeout_s} and retries {retries}; choose more than 0, and 0 or more")
        self.concurrency, self.timeout_s, self.retries = concurrency, timeout_s, retries
        self.prices, self.budget = checked_prices(prices), budget or Budget()
        if self.budget.bounds["money"] and not any(self.prices.values()):
            raise UserError('budget_money needs prices, {"prompt": per million tokens, "completion": …}: without them '
                            "nobody knows beforehand what an answer may cost")
        self.count_tokens, self.clock = count_tokens or a_third_of_bytes, clock or Clock()
        self._open_at = -math.inf  # by clock.now: when the server wants to be asked again

    def answer(self, asks, sampling: Sampling, done, *, what: str = "asked", expected: int = 0) -> Counts:
        """Ask everything; Counts of it. `done(ask, answer)` is called in this thread, once an ask, as answers come, and
        returns the asks that follow from it (or None): they go first, so that talks end rather than all begin. `asks`
        may be a generator: one is taken when it can be sent.

        A budget that is out ends it: nothing more is sent, what is under way is finished, the rest is skipped, and
        Counts.stopped says so. UserError, after `done` has had everything, where nothing more can come of asking: key,
        credit, address or model are wrong, or HOPELESS asks in a row failed with all their tries. An interrupt cancels
        what is under way; what has arrived is handed to `done` first. `what` and `expected` (answers): for the bar.
        """
        expected = expected or (len(asks) if hasattr(asks, "__len__") else 0)
        fresh, under_way, counts = iter(asks), {}, Counts()
        todo = deque(itertools.islice(fresh, 1))
        if not todo:
            return counts
        end, failures, handing, began = None, 0, False, time.perf_counter()

        def following() -> Ask | None:
            return todo.popleft() if todo else next(fresh, None)

        key = self.address.key()
        client = self.address.client(key)
        try:
            with beside(client) as (start, arrived), progress(expected, what, "answers") as bar:
                while True:
                    while not end and len(under_way) < self.concurrency and (ask := following()):
                        most = self.most(ask, sampling)
                        if lack := self.budget.reserve(most):
                            todo.appendleft(ask)
                            end = None if under_way else Fault(lack)  # what is under way may leave what it holds
                            break
                        under_way[start(self._one(client, key, ask, sampling, most))] = ask, most
                    if under_way:
                        future = next_of(arrived)
                        answer, fault = future.result()
                        ask, _ = under_way[future]
                    elif ask := following():
                        future, answer, fault = None, Answer(ask.key, "skipped", end.reason), None
                    else:
                        break
                    counts.take(answer)
                    failures = failed_in_a_row(failures, answer, fault)
                    if fault and (fault.fatal or failures >= max(HOPELESS, self.concurrency)):
                        end = end or fault
                    handing = True
                    todo.extendleft(reversed(list(done(ask, answer) or ())))
                    under_way.pop(future, None)
                    handing = False
                    counts.seconds = time.perf_counter() - began
                    bar.expect([max(expected, counts.given + len(under_way) + len(todo))])
                    bar.advance(1, told(counts))
        except BaseException as error:
            for future, (ask, most) in under_way.items():
                if future.cancelled():
                    self.budget.settle(most, most)  # sent or not, answered or not: nobody knows
                elif isinstance(error, KeyboardInterrupt) and not handing and not future.exception():
                    done(ask, future.result()[0])
            raise
        counts.stopped = end.reason if end else counts.stopped
        if end and not end.reason.startswith("budget"):
            raise UserError(self._why(end, failures, counts))
        return counts

    def close(self) -> None:
        """Nothing is held between calls; here so that an endpoint ends as a target does."""

    def most(self, ask: Ask, sampling: Sampling) -> Spent:
        """What one try may cost: the prompt, estimated where its ids are not given, and the longest answer."""
        prompt = len(ask.input_ids) or self.estimate(ask)
        return Spent(1, prompt, sampling.max_new_tokens, self.price(prompt, sampling.max_new_tokens))

    def estimate(self, ask: Ask) -> int:
        """Tokens of a prompt whose ids are not given: its texts, and what a template puts around a message."""
        parts = [text for message in ask.messages for text in texts(message)] + [json.dumps(tool) for tool in ask.tools]
        return sum(map(self.count_tokens, parts)) + AROUND * (len(ask.messages) + len(ask.tools) + 1)

    def price(self, prompt_tokens: int, completion_tokens: int) -> float:
        return (prompt_tokens * self.prices["prompt"] + completion_tokens * self.prices["completion"]) / 1e6

    def answered(self, ask: Ask, outcome: str, usage: tuple, text: str = "", **fields) -> Answer:
        """An Answer with its cost. usage: (prompt tokens, completion tokens, cost), each None where the server does not
        say; the tokens are then estimated, of `text` for the answer's, and the cost follows from the prices."""
        prompt, completion, cost = usage
        estimated = prompt is None or completion is None
        prompt = (len(ask.input_ids) or self.estimate(ask)) if prompt is None else prompt
        completion = self.count_tokens(text) if completion is None else completion
        cost = self.price(prompt, completion) if cost is None else cost
        return Answer(ask.key, outcome, prompt_tokens=prompt, completion_tokens=completion, cost=cost,
                      estimated=estimated, spent=Spent(1, prompt, completion, cost), **fields)

    # ------------------------------------------------------------------------------------- in the other thread

    async def _one(self, client, key: str, ask: Ask, sampling: Sampling, most: Spent) -> tuple[Answer, Fault | None]:
        """An ask with all its tries; `most` is held for the one that comes next, and by the end no more."""
        body, tries, spent = self.body(ask, sampling), [], Spent()
        while True:
            while (wait := self._open_at - self.clock.now()) > 0:
                await self.clock.sleep(wait + self.clock.draw(0, FIRST_WAIT))  # not all in the same moment
            began = time.perf_counter()
            try:
                value = await post(client, self.path, body, key, self.timeout_s, self.clock)
                answer = self.read(ask, sampling, value)
            except Fault as error:
                fault = error
            else:
                self.budget.settle(most, answer.spent)
                return replace(answer, seconds=time.perf_counter() - began, retries=tuple(tries),
                               spent=spent + answer.spent), None
            if fault.after is not None:  # what the server asks for is asked of all
                self._open_at = max(self._open_at, self.clock.now() + min(fault.after, LONGEST_PAUSE))
            cost = most if fault.billed else Spent(requests=1)
            spent += cost
            if not fault.again or len(tries) == self.retries:
                self.budget.settle(most, cost)
                return Answer(ask.key, "refused" if fault.refused else "failed", fault.reason, fault.detail,
                              seconds=time.perf_counter() - began, retries=tuple(tries), spent=spent), fault
            tries.append(fault.reason)
            if lack := self.budget.again(most, cost):
                return Answer(ask.key, "skipped", lack, str(fault), retries=tuple(tries), spent=spent), None
            if fault.after is None:  # full jitter: those who failed together do not come back together
                await self.clock.sleep(self.clock.draw(0, min(FIRST_WAIT * 2.0 ** (len(tries) - 1), LONGEST_WAIT)))

    # ------------------------------------------------------------------------------------- what the user is told

    def _why(self, fault: Fault, failures: int, counts: Counts) -> str:
        """One line for the user on an end that no budget made."""
        kept = f"{counts.succeeded} answers came before, {counts.skipped} asks were not sent"
        if fault.fatal:
            return f"{self.refusal(fault)}; {kept}"
        return (f"{failures} asks in a row failed at {self.address.url}, the last one by {fault}; {kept}: start again "
                "when the server answers, or correct what it complains of")

    def unreached(self, fault: Fault) -> str:
        """One line on a check that came to nothing."""
        if fault.fatal:
            return self.refusal(fault)
        return f"no server answers at {self.address.url} ({fault}); start it, or correct endpoint"

    def refusal(self, fault: Fault) -> str:
        """One line on a fault that asking again does not mend."""
        variable = self.address.key_variable
        advice = {"http 401": "check its key", "http 403": "check what its key may do", "no credit": "add credit",
                  "http 404": "check the address and the model"}.get(fault.reason, "check the address")
        named = f", the environment variable {variable}" if variable and "key" in advice else ""
        return f"the server at {self.address.url} says {fault}; {advice}{named}"


def failed_in_a_row(before: int, answer: Answer, fault: Fault | None) -> int:
    if answer.outcome == "failed" and not (fault and fault.alone):
        return before + 1
    return before if answer.outcome == "skipped" else 0


def told(counts: Counts) -> str:
    """For the bar."""
    money = f", {counts.spent.money:.2f} spent" if counts.spent.money else ""
    return f"{counts.tokens_per_s:,.0f} tokens/s{money}"


def texts(message: dict):
    """Whatever of a message is text that a model reads or wrote."""
    for name in ("content", "reasoning_content", "tool_calls"):
        if value := message.get(name):
            yield value if isinstance(value, str) else json.dumps(value)


def a_third_of_bytes(text: str) -> int:
    """More tokens than a byte-level tokenizer makes of most text: a stand-in for it, on the safe side of a budget."""
    return -(-len(text.encode()) // 3)


def checked_prices(prices: dict | None) -> dict:
    """{"prompt", "completion"}, zeros for None or {}. UserError where they are not two prices."""
    if not prices:
        return {"prompt": 0.0, "completion": 0.0}
    good = set(prices) == {"prompt", "completion"} and all(
        isinstance(price, int | float) and 0 <= price < math.inf for price in prices.values())
    if not good:
        raise UserError(f'prices are {prices}; give {{"prompt": per million tokens, "completion": per million tokens}}')
    return {name: float(price) for name, price in prices.items()}
