"""What asking may cost: bounds on tokens, requests and money that no request starts beyond.

A request is booked at the most it can cost before it is sent and at what it did cost once that is known, so what is
under way cannot add up to more than is left. Only an estimate of a prompt that is too low passes a bound, by its error.
"""

import math
import threading
from dataclasses import dataclass

from eagle3nb.errors import UserError


@dataclass(frozen=True)
class Spent:
    """What requests cost, or may cost: a sum of them is one too. `money` in the currency of the price table."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    money: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.requests + other.requests, self.prompt_tokens + other.prompt_tokens,
                     self.completion_tokens + other.completion_tokens, self.money + other.money)


class Budget:
    """Bounds on `tokens` (prompts' and answers'), `requests` (every try, failed ones too) and `money`; 0: none.

    `spent`: what earlier starts cost, as their journal says; it counts against the bounds. One budget serves any number
    of endpoints and calls; threads may share it. UserError for a bound below 0.
    """

    def __init__(self, tokens: int = 0, requests: int = 0, money: float = 0.0, *, spent: Spent = Spent()):
        self.bounds = {"tokens": tokens, "requests": requests, "money": money}
        for name, bound in self.bounds.items():
            if not bound >= 0 or math.isinf(bound):
                raise UserError(f"budget_{name} is {bound}; give what may be spent, or 0 for no bound")
        self._spent, self._held, self._lock = spent, [], threading.Lock()

    @property
    def spent(self) -> Spent:
        """What is known to be spent, earlier starts included."""
        with self._lock:
            return self._spent

    @property
    def held(self) -> Spent:
        """What requests under way may still cost."""
        with self._lock:
            return sum(self._held, Spent())

    def reserve(self, most: Spent) -> str:
        """Hold `most` for a request about to be sent: "", or without holding anything "budget tokens" (requests, money)
        where that bound has no room for it beside what is spent and held."""
        with self._lock:
            lack = self._lack(most)
            if not lack:
                self._held.append(most)
            return lack

    def settle(self, most: Spent, actual: Spent) -> None:
        """The request that `most` was held for has cost `actual`. ValueError where nothing of the kind is held."""
        with self._lock:
            self._held.remove(most)
            self._spent += actual

    def again(self, most: Spent, actual: Spent) -> str:
        """The request that `most` was held for has cost `actual` and is to be sent once more: "", with `most` still
        held; or "budget …" where a bound has no room for that, and nothing is held any more."""
        with self._lock:
            self._spent += actual
            lack = self._lack(Spent())
            if lack:
                self._held.remove(most)
            return lack

    def _lack(self, more: Spent) -> str:
        after = sum([*self._held, more], self._spent)
        for name, bound in self.bounds.items():
            if bound and getattr(after, name) > bound * (1 + 1e-12):  # sums of money are rounded
                return f"budget {name}"
        return ""

    def left(self) -> dict[str, float]:
        """What may still be spent, for each bound that there is."""
        spent = self.spent
        return {name: max(bound - getattr(spent, name), 0) for name, bound in self.bounds.items() if bound}
