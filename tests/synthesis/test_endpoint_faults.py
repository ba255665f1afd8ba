"""Endpoints against a server that misbehaves at random: whatever it does, the counts add up and nothing is paid twice.

The witness is `expected`, which knows from a table alone what must come of a list of deeds.
"""

import json
import signal
import threading
from collections import Counter
from dataclasses import asdict
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leisure import AT_LEISURE
from synthesis.faulty_server import CALL, FaultyServer
from synthesis.patience import Patience
from waiting import PATIENCE, until

from eagle3nb.errors import UserError
from eagle3nb.synthesis import endpoint as module
from eagle3nb.synthesis import faults
from eagle3nb.synthesis.budget import Budget, Spent
from eagle3nb.synthesis.endpoint import Ask, Sampling
from eagle3nb.synthesis.openai_endpoint import OpenAIEndpoint
from eagle3nb.synthesis.sglang_endpoint import SGLangEndpoint

SAMPLING = Sampling(max_new_tokens=20, temperature=0.7, top_p=0.9, stop_ids=(2,))
RETRIES = 2
AGAIN = {"drop": "dropped", "half": "dropped", "slow": "time-out", "not json": "not json", "a list": "not json",
         "http 408": "http 408", "http 409": "http 409", "http 429": "rate limited", "http 429 after 7": "rate limited",
         "http 500": "http 500", "http 503": "http 503", "http 529": "http 529", "error with 200": "http 502",
         "odd error with 200": "error in the answer"}
LOST = {"drop", "half", "slow", "not json", "a list", "error with 200", "odd error with 200", "no choices",
        "null choices", "broken off", "abort"}  # may have been billed
FINAL = {"http 400": ("failed", "http 400"), "http 422": ("failed", "http 422"),
         "too long": ("failed", "longer than the context"), "moderated": ("refused", "moderation")}
GOOD = {"good": ("stop", ""), "empty": ("failed", "empty")}
CHAT = AGAIN | {"no choices": "no choices", "null choices": "no choices", "broken off": "broken off"}
CHAT_FINAL = FINAL | GOOD | {"tools": ("tool_calls", ""), "length": ("length", ""), "context": ("length", "context"),
                             "refusal": ("refused", "refusal"), "filter": ("refused", "content filter")}
NATIVE = AGAIN | {"no choices": "no ids", "abort": "broken off"}
NATIVE_FINAL = FINAL | GOOD | {"length": ("length", "context")}
KINDS = {"openai": (CHAT, CHAT_FINAL), "sglang": (NATIVE, NATIVE_FINAL)}


def made(api: str, server, patience: Patience, **options):
    options = {"concurrency": 3, "retries": RETRIES, "clock": patience.clock} | options
    kind = OpenAIEndpoint(server.url + "/v1", "m", "", **options) if api == "openai" else SGLangEndpoint(server.url,
                                                                                                       **options)
    return patience.watch(kind)


def ask_of(seed: int) -> Ask:
    """21 tokens as estimated: "Hi?" is one, and a message has 8 around it, twice."""
    return Ask((f"p{seed}", 0, 0), ({"role": "user", "content": "Hi?"},), input_ids=(5,) * 21, seed=seed)


def expected(api: str, deeds: list[str]) -> tuple[str, str, list[str]]:
    """(outcome, reason, why each but the last try failed)."""
    again, final = KINDS[api]
    retries = []
    for deed in [*deeds, *["good"] * (RETRIES + 1)][:RETRIES + 1]:
        if deed in final:
            return *final[deed], retries
        retries.append(again[deed])
    return "failed", retries[-1], retries[:-1]


def scripts(api: str):
    again, final = KINDS[api]
    deeds = st.lists(st.sampled_from(sorted(again)), max_size=RETRIES + 1)
    return st.lists(st.tuples(deeds, st.sampled_from(sorted(final))).map(lambda pair: [*pair[0], pair[1]]), min_size=1,
                    max_size=8)


def check_sums(counts, answers, server, budget) -> None:
    """What must hold of any run: sums, no request too many, the budget's books."""
    kinds = Counter({"stop": "succeeded", "length": "succeeded", "tool_calls": "succeeded", "skipped": "skipped"}
                    .get(answer.outcome, "failed") for answer in answers)
    assert counts.given == len(answers) == counts.succeeded + counts.failed + counts.skipped
    assert [counts.succeeded, counts.failed, counts.skipped] == [kinds[k] for k in ("succeeded", "failed", "skipped")]
    assert sum(counts.outcomes.values()) == counts.given
    assert counts.retries == Counter(reason for answer in answers for reason in answer.retries)
    assert counts.spent.requests == len(server.seen) == sum(answer.spent.requests for answer in answers)
    assert counts.spent.tokens == sum(answer.spent.tokens for answer in answers)
    assert counts.completion_tokens == sum(answer.completion_tokens for answer in answers)
    assert budget.spent == counts.spent and budget.held == Spent()


@pytest.mark.parametrize("api", KINDS)
@settings(AT_LEISURE, max_examples=25)
@given(data=st.data())
def test_any_faults(api, data):
    """Each ask comes to what the table says; a talk's next turn and a failed ask's next attempt are asked too."""
    plans = data.draw(scripts(api))
    patience, budget, found = Patience(), Budget(), []
    script = dict(enumerate(plans))
    with FaultyServer(script, on_slow=patience.out_of_time) as server:
        def done(ask, answer):
            found.append((ask, answer))
            if ask.seed < len(plans) and ask.seed % 3 == 0:
                return [ask_of(100 + ask.seed), ask_of(200 + ask.seed)]

        kind = made(api, server, patience, budget=budget, concurrency=data.draw(st.integers(1, 5), label="at once"))
        counts = kind.answer(map(ask_of, script), SAMPLING, done)
    answers = [answer for _, answer in found]
    check_sums(counts, answers, server, budget)
    assert sorted(ask.seed for ask, _ in found) == sorted(
        [*script, *(more + seed for seed in script if seed % 3 == 0 for more in (100, 200))])
    for ask, answer in found:
        outcome, reason, retries = expected(api, script.get(ask.seed, []))
        assert (answer.key, answer.outcome, answer.reason, list(answer.retries)) == (ask.key, outcome, reason, retries)
        assert len(server.asked(ask.seed)) == len(retries) + 1
        lost = sum(seen.deed in LOST for seen in server.asked(ask.seed))
        assert answer.spent == Spent(len(retries) + 1, 21 * lost + answer.prompt_tokens,
                                     20 * lost + answer.completion_tokens)
    assert counts.stopped == ""


@pytest.mark.parametrize("api", KINDS)
@settings(AT_LEISURE, max_examples=25)
@given(data=st.data())
def test_any_faults_on_any_budget(api, data):
    """No bound is passed; what was skipped would not have fitted; with more, the next start asks only for that."""
    plans = data.draw(scripts(api))
    tokens, requests, money = (data.draw(st.one_of(st.just(0), st.integers(1, most)), label=name)
                               for name, most in (("tokens", 400), ("requests", 12), ("1/64", 64)))
    prices = {"prompt": 1e6 / 1024, "completion": 1e6 / 512}  # so that sums of money are exact
    most, money = Spent(1, 21, 20, 61 / 1024), money / 64
    patience, found, budget = Patience(), {}, Budget(tokens, requests, money)
    script = dict(enumerate(plans))

    def done(ask, answer):
        assert ask.seed not in found or found[ask.seed].outcome == "skipped"
        found[ask.seed] = answer

    with FaultyServer(script, on_slow=patience.out_of_time) as server:
        counts = made(api, server, patience, budget=budget, prices=prices).answer(map(ask_of, script), SAMPLING, done)
        check_sums(counts, list(found.values()), server, budget)
        for bound, spent in ((tokens, budget.spent.tokens), (requests, budget.spent.requests),
                             (money, budget.spent.money)):
            assert not bound or spent <= bound
        skipped = [seed for seed, answer in found.items() if answer.outcome == "skipped"]
        assert bool(counts.stopped) == bool(skipped)
        assert all(found[seed].reason.startswith("budget ") for seed in skipped)
        if any(not found[seed].retries for seed in skipped):  # not even tried, and so with nothing under way
            assert Budget(tokens, requests, money, spent=budget.spent).reserve(most) == counts.stopped
        before = {seed: len(server.asked(seed)) for seed in script}
        again = made(api, server, patience, budget=Budget(spent=budget.spent), prices=prices)
        later = again.answer(map(ask_of, skipped), SAMPLING, done)
    assert later.given == len(skipped) and later.skipped == 0 and again.budget.spent.requests == len(server.seen)
    assert all(len(server.asked(seed)) == before[seed] for seed in script if seed not in skipped)


LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(("", "stop", "text")))
JSON = st.recursive(LEAVES, lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(
    st.sampled_from(("content", "type", "text", "name", "code")), inner, max_size=2)), max_leaves=5)
WHOLE = {"openai": {"model": "m", "usage": {"prompt_tokens": 3, "completion_tokens": 4, "cost": 0.5}, "error": None,
                    "choices": [{"finish_reason": "stop", "error": None, "message": {
                        "content": "words", "reasoning": "thought", "refusal": None, "tool_calls": [CALL]}}]},
         "sglang": {"output_ids": [5, 2], "meta_info": {"finish_reason": {"type": "stop", "matched": 2}}}}


def places(value, path=()):
    """Every path into a JSON value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, entry in inner:
        yield from places(entry, (*path, name))


def bent(value, path: tuple, new):
    """The value with `new` at the path."""
    if not path:
        return new
    value = value.copy()
    value[path[0]] = bent(value[path[0]], path[1:], new)
    return value


@pytest.mark.parametrize("api", KINDS)
@settings(AT_LEISURE, max_examples=300)
@given(data=st.data())
def test_whatever_json_comes_is_an_answer_or_a_fault(api, data):
    """Nothing else is raised, and what is made of it can be written down."""
    value = WHOLE[api]
    for _ in range(data.draw(st.integers(1, 2))):
        value = bent(value, data.draw(st.sampled_from(list(places(value)))), data.draw(JSON))
    kind = OpenAIEndpoint("http://127.0.0.1/v1", "m", "") if api == "openai" else SGLangEndpoint("http://127.0.0.1")
    try:
        answer = kind.read(ask_of(1), SAMPLING, faults.parsed(json.dumps(value), 0.0))
    except faults.Fault as fault:
        assert fault.reason and len(fault.detail) <= faults.WORDS
        return
    json.dumps(asdict(answer), allow_nan=False)
    assert answer.outcome in ("stop", "length", "tool_calls", "failed", "refused") and answer.spent.tokens >= 0
    assert all(type(token) is int for token in answer.ids) and isinstance(answer.model, str)
    if answer.message:
        assert all(isinstance(answer.message.get(name, ""), str) for name in ("content", "reasoning_content"))
        for call in answer.message.get("tool_calls", []):
            assert all(isinstance(text, str) for text in (call["id"], *call["function"].values()))


@given(st.text(max_size=300), st.sampled_from((200, 400, 403, 429, 500)))
@settings(AT_LEISURE, max_examples=100)
def test_whatever_text_comes_is_told_in_a_line(text, status):
    fault = faults.of_status(status, text, {"retry-after": text}, 0.0, "a-key-of-ours")
    assert len(fault.detail) <= faults.WORDS and "\n" not in fault.detail and (fault.after is None or fault.after >= 0)


@pytest.mark.parametrize("text", [
    "This model's maximum context length is 4097 tokens. However, you requested 5000 tokens",
    "The input (400 tokens) is longer than the model's context length (300 tokens).",
    "prompt is too long: 200001 tokens > 200000 maximum", '{"error": {"code": "context_length_exceeded"}}',
    "The input token count (9) exceeds the maximum number of tokens allowed (8).",
    "Requested token count exceeds the model's maximum context length of 300 tokens.", "Request too large",
    "Please reduce the length of the input prompt: max_model_len is 300"])
def test_prompts_that_are_too_long(text):
    assert faults.of_status(400, text, {}, 0.0).reason == "longer than the context"


@pytest.mark.parametrize("text", ["temperature is no number", "unknown model", "tool_choice wants tools", ""])
def test_other_bad_requests(text):
    found = faults.of_status(400, text, {}, 0.0)
    assert (found.reason, found.again, found.fatal, found.alone) == ("http 400", False, False, False)


def test_words_of_errors():
    for text, words in ((" a\n b ", "a b"), ('{"error": {"message": "m", "type": "t"}}', "m"),
                        ('{"message": "m"}', "m"), ('{"detail": "d"}', "d"), ('{"detail": [1]}', '{"detail": [1]}'),
                        ("x" * 999, "x" * 200)):
        assert faults.words(text) == words
    assert str(faults.Fault("a", "b")) == "a (b)" and str(faults.Fault("a")) == "a"


@pytest.mark.parametrize("api", KINDS)
@pytest.mark.parametrize("deed, says", [
    ("http 401", r"says http 401 \(Incorrect API key provided\); check its key"), ("http 402", "no credit"),
    ("http 403", "http 403"), ("http 404", "http 404"), ("quota", r"no credit \(You exceeded your quota\); add")])
def test_no_use_in_asking_on(api, deed, says):
    """One clear line; what came before, and what was under way, was handed over; nothing more is sent."""
    patience, found, budget = Patience(), [], Budget()
    with FaultyServer({3: [deed] * 9}) as server:
        kind = made(api, server, patience, concurrency=1, budget=budget)
        with pytest.raises(UserError, match=says + ".*; 3 answers came before, 6 asks were not sent"):
            kind.answer(map(ask_of, range(10)), SAMPLING, lambda ask, answer: found.append(answer))
    assert [answer.outcome for answer in found] == ["stop"] * 3 + ["failed"] + ["skipped"] * 6
    assert {answer.reason for answer in found[4:]} == {found[3].reason} and len(server.seen) == 4
    assert budget.held == Spent()


@pytest.mark.parametrize("deed, stops", [("http 500", True), ("http 400", True), ("drop", True), ("too long", False)])
def test_a_server_that_only_fails_is_left_alone(deed, stops):
    patience, found = Patience(), []
    with FaultyServer({seed: [deed] * 9 for seed in range(3, 40)}) as server:
        kind = made("openai", server, patience, concurrency=1, retries=1)
        if stops:
            says = f"{module.HOPELESS} asks in a row failed at .*; 3 answers came before, 27 asks were not sent"
            with pytest.raises(UserError, match=says):
                kind.answer(map(ask_of, range(40)), SAMPLING, lambda ask, answer: found.append(answer))
        else:
            kind.answer(map(ask_of, range(40)), SAMPLING, lambda ask, answer: found.append(answer))
    failed = [answer for answer in found if answer.outcome == "failed"]
    assert len(found) == 40 and len(failed) == (module.HOPELESS if stops else 37)


def test_an_interrupt_loses_nothing_that_has_arrived():
    """Two have arrived and one is held by the server when the interrupt comes, between two answers."""
    patience, found, budget = Patience(), [], Budget()
    held, arrived = [], []
    with FaultyServer({2: ["slow"]}, on_slow=held.append) as server:
        kind = made("openai", server, patience, budget=budget)
        one = kind._one

        async def noted(client, key, ask, sampling, most):
            result = await one(client, key, ask, sampling, most)
            arrived.append(ask.seed)
            return result

        def interrupt(counts):
            until(lambda: len(arrived) == 2 and held)
            raise KeyboardInterrupt

        kind._one = noted
        with patch.object(module, "told", interrupt), pytest.raises(KeyboardInterrupt):
            kind.answer(map(ask_of, range(9)), SAMPLING, lambda ask, answer: found.append(ask.seed))
    assert sorted(found) == [0, 1] and len(server.seen) == 3
    assert budget.held == Spent() and budget.spent.requests == 3  # the held one is booked, at the most


def test_a_signal_ends_the_wait_for_an_answer():
    """As a notebook's stop button does: the one answer that has come stays, the one that is held is given up."""
    patience, found, budget, came = Patience(), [], Budget(), threading.Event()

    def stop(seed):
        came.wait(PATIENCE)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def done(ask, answer):
        found.append(ask.seed)
        came.set()

    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with FaultyServer({1: ["slow"]}, on_slow=stop) as server, pytest.raises(KeyboardInterrupt):
            made("openai", server, patience, budget=budget).answer(map(ask_of, range(2)), SAMPLING, done)
    finally:
        signal.signal(signal.SIGINT, usual)
    assert found == [0] and budget.held == Spent() and budget.spent.requests == 2
    assert not [thread for thread in threading.enumerate() if thread.name == "asks"]
