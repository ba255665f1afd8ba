"""The budget against a ledger that knows nothing of it: whatever is reserved and settled, no bound is passed."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leisure import AT_LEISURE

from eagle3nb.errors import UserError
from eagle3nb.synthesis.budget import Budget, Spent

COSTS = st.builds(Spent, st.just(1), st.integers(0, 40), st.integers(0, 40), st.integers(0, 100).map(lambda c: c / 100))
BOUNDS = st.tuples(st.integers(0, 300), st.integers(0, 12), st.integers(0, 500).map(lambda c: c / 100))


def cents(cost: Spent) -> tuple[int, int, int]:
    """(tokens, requests, hundredths): whole numbers, whose sums are exact."""
    return cost.prompt_tokens + cost.completion_tokens, cost.requests, round(cost.money * 100)


@settings(AT_LEISURE, max_examples=200)
@given(BOUNDS, st.lists(st.tuples(COSTS, st.sampled_from(["all", "half", "again", "later"])), max_size=25))
def test_a_ledger_of_whole_numbers_says_the_same(bounds, steps):
    tokens, requests, money = bounds
    limits = tokens, requests, round(money * 100)
    budget, spent, held = Budget(tokens, requests, money), [0, 0, 0], []
    for most, fate in steps:
        after = [have + sum(cents(h)[i] for h in held) + cents(most)[i] for i, have in enumerate(spent)]
        lacking = [f"budget {name}" for name, limit, sum_ in
                   zip(("tokens", "requests", "money"), limits, after, strict=True) if limit and sum_ > limit]
        assert budget.reserve(most) == (lacking[0] if lacking else "")
        if lacking:
            continue
        actual = most if fate != "half" else Spent(1, most.prompt_tokens // 2, most.completion_tokens // 2, 0.0)
        if fate == "later":
            held.append(most)
        elif fate == "again":  # a lost try, booked whole; what it held stays held, if there is room
            over = [limit and have + sum(cents(h)[i] for h in held) + 2 * cents(most)[i] > limit
                    for i, (have, limit) in enumerate(zip(spent, limits, strict=True))]
            assert bool(budget.again(most, most)) == any(over)
            held += [] if any(over) else [most]
        else:
            budget.settle(most, actual)
        if fate != "later":
            spent = [have + cents(actual)[i] for i, have in enumerate(spent)]
        assert list(cents(budget.spent)) == spent and budget.held.tokens == sum(cents(h)[0] for h in held)
        for have, limit, under_way in zip(spent, limits, cents(budget.held), strict=True):
            assert not limit or have + under_way <= limit


def test_sums_of_money_that_fit_exactly_fit():
    budget = Budget(money=0.3)
    assert [budget.reserve(Spent(1, 0, 0, 0.1)) for _ in range(4)] == ["", "", "", "budget money"]


def test_what_an_earlier_start_spent_counts():
    budget = Budget(tokens=100, requests=3, spent=Spent(2, 50, 30, 0.0))
    assert budget.left() == {"tokens": 20, "requests": 1}
    assert budget.reserve(Spent(1, 10, 11)) == "budget tokens"
    assert budget.reserve(Spent(1, 10, 10)) == "" and budget.reserve(Spent(1, 0, 0)) == "budget requests"
    budget.settle(Spent(1, 10, 10), Spent(1, 10, 40))  # the server counted more than was estimated
    assert budget.left() == {"tokens": 0, "requests": 0} and budget.spent == Spent(3, 60, 70)


def test_without_bounds_everything_goes_and_is_counted():
    budget = Budget()
    assert budget.reserve(Spent(1, 10**12, 10**12, 1e9)) == "" and budget.left() == {}
    assert sum([Spent(1, 2, 3, 0.25)] * 3, Spent()) == Spent(3, 6, 9, 0.75) and Spent(1, 2, 3).tokens == 5


def test_nothing_is_settled_that_is_not_held():
    with pytest.raises(ValueError):
        Budget().settle(Spent(1), Spent(1))


@pytest.mark.parametrize("name, bound", [("tokens", -1), ("requests", float("nan")), ("money", float("inf"))])
def test_bounds_that_are_none(name, bound):
    with pytest.raises(UserError, match=f"budget_{name} is {bound}"):
        Budget(**{name: bound})


def test_threads_that_share_it_pass_no_bound():
    budget, granted = Budget(requests=500), []

    def spend():
        for _ in range(100):
            if not budget.reserve(Spent(1, 1, 1)):
                budget.settle(Spent(1, 1, 1), Spent(1, 1, 1))
                granted.append(1)

    threads = [threading.Thread(target=spend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(granted) == 500 and budget.spent == Spent(500, 500, 500) and budget.held == Spent()
