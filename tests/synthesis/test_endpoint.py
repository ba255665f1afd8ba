"""What endpoints send, what they make of what comes back, when they try again, and what they never show."""

import asyncio
import json
import subprocess
import sys
import threading

import pytest
from synthesis.faulty_server import CALL, FOLDER, MODEL, FaultyServer, nobody
from synthesis.patience import Patience
from waiting import PATIENCE

from eagle3nb.errors import UserError
from eagle3nb.synthesis import faults
from eagle3nb.synthesis.budget import Budget, Spent
from eagle3nb.synthesis.endpoint import Answer, Ask, Counts, Sampling
from eagle3nb.synthesis.openai_endpoint import OpenAIEndpoint, usage_of
from eagle3nb.synthesis.sglang_endpoint import SGLangEndpoint
from eagle3nb.synthesis.transport import Address

SAMPLING = Sampling(20, 0.7, 0.9, (2, 198))
SECRET = "sk-or-v1-0123456789abcdef"
LENGTHS = (280, 281, 299, 300)
TOOLS = ({"type": "function", "function": {"name": "weather", "parameters": {}}},)


def asked(kind, asks, sampling=SAMPLING):
    """(answers by seed, counts)"""
    found = {}
    counts = kind.answer(asks, sampling, lambda ask, answer: found.update({ask.seed: answer}))
    return found, counts


def chat(seed: int, text: str = "Hi?", **fields) -> Ask:
    return Ask((f"p{seed}", 0, 0), ({"role": "user", "content": text},), seed=seed, **fields)


def openai(server, **options):
    options = {"clock": Patience().clock, "key_variable": "", "model": MODEL} | options
    return OpenAIEndpoint(server.url + "/v1", **options)


# ------------------------------------------------------------------------------------------------ what is sent


def test_what_a_chat_endpoint_is_sent():
    talk = ({"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"})
    with FaultyServer() as server:
        asked(openai(server, extra={"provider": {"order": ["x"]}}), [Ask(("p", 1, 0), talk, TOOLS, seed=9)])
    seen, = server.seen
    assert (seen.path, seen.key) == ("/v1/chat/completions", "none")
    assert seen.body == {"model": MODEL, "messages": list(talk), "tools": list(TOOLS), "max_tokens": 20,
                         "temperature": 0.7, "top_p": 0.9, "seed": 9, "provider": {"order": ["x"]}}


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_what_sglang_is_sent(end):
    with FaultyServer() as server:
        found, _ = asked(SGLangEndpoint(server.url + end), [Ask(("p", 0, 0), input_ids=(5, 6, 7), seed=9)])
    seen, = server.seen
    assert seen.path == "/generate" and seen.body == {"input_ids": [5, 6, 7], "sampling_params": {
        "max_new_tokens": 20, "temperature": 0.7, "top_p": 0.9, "stop_token_ids": [2, 198], "sampling_seed": 9,
        "skip_special_tokens": False}}
    assert (found[9].ids, found[9].prompt_tokens, found[9].completion_tokens) == ((19, 11, 2), 3, 3)


def test_sglang_is_given_what_room_there_is():
    """It refuses more than its context, which `check` tells: 300. What has none is left to it."""
    with FaultyServer({3: ["length"]}) as server:
        kind = SGLangEndpoint(server.url, clock=Patience().clock)
        kind.check()
        found, _ = asked(kind, [Ask(("p", 0, 0), input_ids=(5,) * length, seed=length) for length in LENGTHS])
        found |= asked(kind, [Ask(("p", 0, 0), input_ids=(5,), seed=3)])[0]
    wanted = {seen.seed: seen.body["sampling_params"]["max_new_tokens"] for seen in server.seen}
    assert wanted == {280: 20, 281: 19, 299: 1, 300: 20, 3: 20}
    assert (found[3].outcome, found[3].reason) == ("length", "context")  # 3 tokens, of 20


def test_an_ask_without_ids_is_none_for_sglang():
    with FaultyServer() as server, pytest.raises(ValueError, match="has no input_ids"):
        asked(SGLangEndpoint(server.url), [chat(1)])
    assert not server.seen


# ------------------------------------------------------------------------------------------------ what comes back


@pytest.mark.parametrize("deed, outcome, message", [
    ("good", "stop", {"content": "answer 1"}), ("parts", "stop", {"content": "in two"}),
    ("reasoning", "stop", {"content": "answer 1", "reasoning_content": "let me think"}),
    ("other reasoning", "stop", {"content": "answer 1", "reasoning_content": "let me think"}),
    ("tools", "tool_calls", {"content": "", "tool_calls": [CALL]}),
    ("tools that stop", "tool_calls", {"content": "", "tool_calls": [CALL]}),
    ("length", "length", {"content": "answer 1"}), ("context", "length", {"content": "answer 1"}),
    ("refusal", "refused", None), ("filter", "refused", None), ("empty", "failed", None)])
def test_messages(deed, outcome, message):
    with FaultyServer({1: [deed]}) as server:
        found, counts = asked(openai(server), [chat(1)])
    assert found[1].outcome == outcome and found[1].model == MODEL and len(server.seen) == 1
    assert found[1].message == (message and {"role": "assistant"} | message)
    tokens = (11, 20) if deed == "length" else (11, 6)
    assert (found[1].prompt_tokens, found[1].completion_tokens) == tokens and not found[1].estimated
    assert counts.spent == found[1].spent == Spent(1, *tokens)  # a refusal is billed too


def test_usage_that_is_not_told_is_estimated_and_said_so():
    """"Hi?" is one third of three bytes, and 8 around the message and the answer's beginning; or what a tokenizer says;
    or the ids that are given."""
    with FaultyServer({seed: ["no usage"] for seed in range(3)}, say=lambda body: "seven!!") as server:
        found, counts = asked(openai(server, prices={"prompt": 1e6, "completion": 2e6}), [chat(0)])
        assert (found[0].prompt_tokens, found[0].completion_tokens, found[0].cost) == (17, 3, 23.0)
        assert found[0].estimated and counts.estimated == 1
        found, _ = asked(openai(server, count_tokens=len), [chat(1), chat(2, input_ids=(5,) * 9), chat(3)])
    assert [(answer.prompt_tokens, answer.completion_tokens, answer.estimated) for answer in
            (found[1], found[2], found[3])] == [(19, 7, True), (9, 7, True), (13, 8, False)]


def test_costs_are_the_servers_where_it_tells_them():
    with FaultyServer({1: ["cost"]}) as server:
        found, counts = asked(openai(server, prices={"prompt": 1e6, "completion": 2e6}), [chat(1), chat(2)])
    assert (found[1].cost, found[2].cost, counts.spent.money) == (0.25, 12 + 2 * 7, 26.25)


@pytest.mark.parametrize("odd", [-1, True, "3", None, float("inf"), float("nan"), 10**400, [3]])
def test_usage_that_is_none(odd):
    assert usage_of({"prompt_tokens": odd, "completion_tokens": 3, "cost": odd}) == (None, 3, None)
    assert usage_of(odd) == (None, None, None)


def test_seconds_and_rate_are_counted():
    with FaultyServer() as server:
        found, counts = asked(openai(server), [chat(1)])
    assert 0 < found[1].seconds <= counts.seconds and counts.tokens_per_s == 6 / counts.seconds


def test_counts_of_two_calls_add_up():
    first, second = Counts(), Counts()
    first.take(Answer(("a", 0, 0), "stop", completion_tokens=3, retries=("dropped",), spent=Spent(2, 1, 4, 0.5)))
    second.take(Answer(("b", 0, 0), "refused", "refusal", spent=Spent(1, 1, 0, 0.25)))
    second.take(Answer(("c", 0, 0), "skipped", "budget money", retries=("dropped",)))
    second.stopped, second.seconds = "budget money", 2.0
    both = first + second
    assert (both.given, both.succeeded, both.failed, both.skipped) == (3, 1, 1, 1)
    assert both.outcomes == {"stop": 1, "refused: refusal": 1, "skipped: budget money": 1}
    assert both.retries == {"dropped": 2} and both.spent == Spent(3, 2, 4, 0.75)
    assert (both.stopped, both.tokens_per_s) == ("budget money", 1.5)


# ------------------------------------------------------------------------------------------------ waiting


def test_waits_double_up_to_a_limit():
    patience = Patience()  # draws the most that it may
    with FaultyServer({1: ["http 500"] * 9}) as server:
        asked(openai(server, clock=patience.clock, retries=8), [chat(1)])
    assert patience.slept == [1, 2, 4, 8, 16, 32, 60, 60] and len(server.seen) == 9


def test_waits_are_drawn_from_nothing_to_the_limit():
    drawn = []
    patience = Patience(draw=lambda low, high: drawn.append((low, high)) or 0.5)
    with FaultyServer({1: ["drop"] * 2}) as server:
        asked(openai(server, clock=patience.clock), [chat(1)])
    assert drawn == [(0, 1), (0, 2)] and patience.slept == [0.5, 0.5]


@pytest.mark.parametrize("after, waits", [("7", 7), ("1.5", 1.5), ("86400", 300), ("0", 0),
                                          ("Wed, 21 Oct 2015 07:28:00 GMT", 40), ("Wed, 21 Oct 2015 07:00:00 GMT", 0)])
def test_retry_after_is_kept_by_all(after, waits):
    """The next ask, which nothing went wrong with, waits as long."""
    patience = Patience(draw=lambda low, high: low, wall=1445412440.0)  # 40 s before the first of the dates
    with FaultyServer({1: [f"http 429 after {after}"]}) as server:
        kind = openai(server, clock=patience.clock, retries=0)
        asked(kind, [chat(1)])
        _, counts = asked(kind, [chat(2)])
    assert patience.slept == [waits] * (waits > 0) and counts.succeeded == 1


@pytest.mark.parametrize("after", ["soon", "-3", "Wed, 99 Oct", "1e9", ""])
def test_a_retry_after_that_says_nothing(after):
    assert faults.retry_after({"retry-after": after}, 0.0) is None


def test_a_time_out_is_for_the_whole_answer():
    """By the real clock: a server that sends a byte now and then keeps no one waiting. A stall changes nothing."""
    with FaultyServer({1: ["drip"]}) as server:
        found, counts = asked(openai(server, clock=None, timeout_s=0.3, retries=0), [chat(1)])
    assert (found[1].outcome, found[1].reason) == ("failed", "time-out") and counts.spent == Spent(1, 17, 20)


def test_no_more_at_once_than_wished():
    """Each of the first three answers waits until three are asked for; there are never more."""
    gate, active, most, lock = threading.Barrier(3), [0], [0], threading.Lock()

    def say(body):
        with lock:
            active[0] += 1
            most[0] = max(most[0], active[0])
        gate.wait(PATIENCE)
        with lock:
            active[0] -= 1
        return "hello"

    with FaultyServer(say=say) as server:
        _, counts = asked(openai(server, concurrency=3), [chat(seed) for seed in range(12)])
    assert counts.succeeded == 12 and most == [3]


def test_a_talk_that_goes_on_comes_before_one_that_begins():
    order = []

    def done(ask, answer):
        order.append(ask.key)
        name, turn, _ = ask.key
        return [Ask((name, turn + 1, 0), ask.messages, seed=ask.seed + 1)] if turn < 2 else None

    with FaultyServer() as server:
        counts = openai(server, concurrency=1).answer([chat(0), chat(10)], SAMPLING, done)
    assert order == [(name, turn, 0) for name in ("p0", "p10") for turn in range(3)] and counts.given == 6


def test_asks_are_taken_as_they_can_be_sent():
    taken, seen = [], []

    def asks():
        for seed in range(9):
            taken.append(seed)
            yield chat(seed)

    with FaultyServer() as server:
        openai(server, concurrency=2).answer(asks(), SAMPLING, lambda ask, answer: seen.append(len(taken)))
    assert seen == [2, 3, 4, 5, 6, 7, 8, 9, 9]


def test_nothing_to_ask_needs_no_key(monkeypatch):
    monkeypatch.delenv("OUR_KEY", raising=False)
    assert OpenAIEndpoint("https://example.invalid/v1", "m", "OUR_KEY").answer([], SAMPLING, None) == Counts()


def test_in_a_kernel_whose_event_loop_runs():
    async def cell():
        with FaultyServer() as server:
            kind = openai(server)
            return kind.check()["model"], asked(kind, [chat(1)])[1].succeeded

    assert asyncio.run(cell()) == (MODEL, 1)
    assert not [thread for thread in threading.enumerate() if thread.name == "asks"]


def test_a_fault_in_done_is_raised_and_nothing_goes_on():
    def done(ask, answer):
        raise OSError("no space left")

    budget = Budget()
    with FaultyServer({seed: ["slow"] for seed in range(1, 9)}) as server:
        with pytest.raises(OSError, match="no space left"):
            openai(server, budget=budget, concurrency=3).answer([chat(seed) for seed in range(9)], SAMPLING, done)
    assert budget.held == Spent() and not [thread for thread in threading.enumerate() if thread.name == "asks"]


# ------------------------------------------------------------------------------------------------ the key


@pytest.mark.parametrize("deed, outcome", [("echo", "stop"), ("echo in an error", None), ("good", "stop")])
def test_the_key_is_sent_and_never_shown(deed, outcome, monkeypatch, capsys, caplog):
    monkeypatch.setenv("OUR_KEY", SECRET + "\n")  # as `export KEY=$(cat file)` may leave it
    said, found = "", {}
    with caplog.at_level(0), FaultyServer({1: [deed] * 9}) as server:
        kind = openai(server, key_variable="OUR_KEY")
        try:
            kind.answer([chat(1)], SAMPLING, lambda ask, answer: found.update({1: answer}))
        except UserError as error:
            said = f"{error!r} {error.__cause__!r}"
            assert "environment variable OUR_KEY" in said and outcome is None
        kind.check()
    assert server.seen[0].key == SECRET and found[1].outcome == (outcome or "failed")
    shown = [repr(kind), str(vars(kind)), str(vars(kind.address)), repr(found), said, *capsys.readouterr(), caplog.text]
    assert not [text for text in shown if SECRET[:12] in text]
    if deed == "echo":
        assert found[1].message["content"] == "your key is [key], is it not?"


def test_a_short_key_protects_nothing_and_changes_no_text(monkeypatch):
    monkeypatch.setenv("OUR_KEY", "EMPTY")
    with FaultyServer(say=lambda body: "EMPTY it") as server:
        found, _ = asked(openai(server, key_variable="OUR_KEY"), [chat(1)])
    assert server.seen[0].key == "EMPTY" and found[1].message["content"] == "EMPTY it"


def test_keys_inside_json_and_in_names():
    value = faults.parsed(json.dumps({f"a{SECRET}": [{"b": SECRET.replace("-", "\\u002d")}, SECRET, 3, None]}).replace(
        "\\\\u", "\\u"), 0.0, SECRET)
    assert value == {"a[key]": [{"b": "[key]"}, "[key]", 3, None]}


def test_a_key_that_is_missing_or_is_none(monkeypatch):
    monkeypatch.delenv("OUR_KEY", raising=False)
    far = OpenAIEndpoint("https://example.invalid/v1", "m", "OUR_KEY")
    for work in (far.check, lambda: asked(far, [chat(1)])):
        with pytest.raises(UserError, match="variable OUR_KEY is not set, and https://example.invalid/v1 may want"):
            work()
    monkeypatch.setenv("OUR_KEY", "schlüssel-0123456789")
    with pytest.raises(UserError, match="variable OUR_KEY holds characters that no key has; set it anew") as error:
        far.check()
    assert "0123" not in str(error.value)
    assert Address("https://example.invalid/v1").key() == ""


def test_a_server_here_is_asked_past_a_proxy(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with FaultyServer() as server:
        kind = openai(server, retries=0)
        assert kind.check()["model"] == MODEL and asked(kind, [chat(1)])[1].succeeded == 1


# ------------------------------------------------------------------------------------------------ checks


def test_what_serves():
    with FaultyServer() as server:
        kind = openai(server, model="")
        assert kind.check() == {"api": "openai", "model": MODEL, "context": 300, "root": FOLDER, "prices": None}
        assert kind.model == MODEL
        kind = SGLangEndpoint(server.url)
        assert kind.check() == {"api": "sglang", "model": FOLDER, "context": 300, "version": "0.5.23",
                                "deterministic": False}
        assert asked(kind, [Ask(("p", 0, 0), input_ids=(5,), seed=1)])[0][1].model == MODEL  # without its place


def test_openrouters_cards():
    pricing = {"prompt": "0.0000006", "completion": "0.0000025", "image": "0"}
    with FaultyServer(models=[{"id": "a/b", "context_length": 9, "pricing": pricing}, {"id": "a/c"}]) as server:
        found = openai(server, model="a/b").check()
        assert (found["context"], found["prices"]) == (9, {"prompt": 0.6, "completion": 2.5})
        assert openai(server, model="a/c").check()["context"] is None
        with pytest.raises(UserError, match="serves 2 models, none of them 'a/d'; set model to one of them, such as"):
            openai(server, model="a/d").check()
        with pytest.raises(UserError, match="serves 2 models, none of them ''"):
            openai(server, model="").check()


@pytest.mark.parametrize("end, says", [("", "is no OpenAI API .http 404 from /models.; give the address with its path"),
                                       ("/v2", "mostly …/v1")])
def test_an_address_without_its_path(end, says):
    with FaultyServer() as server, pytest.raises(UserError, match=says):
        OpenAIEndpoint(server.url + end, MODEL, "").check()


def test_what_is_no_sglang_and_nobody_at_all():
    with FaultyServer() as server:
        with pytest.raises(UserError, match="is no SGLang 0.5.23 .*http 404"):
            SGLangEndpoint(server.url + "/x").check()
    with nobody() as server:
        for kind in (SGLangEndpoint(server.url), OpenAIEndpoint(server.url + "/v1", "m", "")):
            with pytest.raises(UserError, match=f"no server answers at {server.url}.* .no connection .*; start it"):
                kind.check()


def test_nobody_there_is_a_fault_that_costs_nothing():
    with nobody() as server:
        found, counts = asked(openai(server, retries=2), [chat(1)])
    assert (found[1].reason, found[1].retries) == ("no connection", ("no connection",) * 2)
    assert counts.spent == Spent(requests=3)


@pytest.mark.parametrize("url, says", [
    ("", "'' is no address"), ("127.0.0.1:30000", "is no address"), ("ftp://a/b", "is no address"),
    ("http://h:99999/v1", "is no address"), ("http://[::1/v1", "is no address"), ("http:///v1", "is no address"),
    ("https://user:word@h/v1", "has a user, a password or a query"), ("https://h/v1?key=abc", "or a query")])
def test_addresses_that_are_none(url, says):
    with pytest.raises(UserError, match=says) as error:
        OpenAIEndpoint(url, "m")
    assert "word@" not in str(error.value) and "key=abc" not in str(error.value)


@pytest.mark.parametrize("options, says", [
    ({"concurrency": 0}, "concurrency is 0; choose 1 to 1000"), ({"concurrency": 1001}, "concurrency is 1001"),
    ({"timeout_s": 0}, "timeout_s is 0 and"), ({"retries": -1}, "retries -1"),
    ({"prices": {"prompt": 1.0}}, "prices are"), ({"prices": {"prompt": -1.0, "completion": 1.0}}, "prices are"),
    ({"prices": {"prompt": "1", "completion": 1.0}}, "prices are"),
    ({"budget": Budget(money=1.0)}, "budget_money needs prices"),
    ({"budget": Budget(money=1.0), "prices": {"prompt": 0, "completion": 0}}, "budget_money needs prices")])
def test_options_that_cannot_be(options, says):
    with pytest.raises(UserError, match=says):
        OpenAIEndpoint("http://127.0.0.1:1/v1", "m", **options)


def test_the_client_is_imported_when_something_is_asked():
    """It takes seconds, which no other command should."""
    said = subprocess.run([sys.executable, "-c", "import sys, eagle3nb.synthesis.openai_endpoint, "
                           "eagle3nb.synthesis.sglang_endpoint; print('openai' in sys.modules)"], capture_output=True)
    assert said.stdout == b"False\n"
