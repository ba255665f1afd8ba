"""What synthesis asks of SGLang's real server on a CPU, with the embedded target: the ids and texts that come back.

In float32 and greedily both sides choose among the same logits up to rounding, some 1e-4, and a margin that small is
met once in some ten thousand tokens; these are a few hundred. So ids are compared with no tolerance.
"""

from types import SimpleNamespace

import pytest
import torch

from eagle3nb.acceptance import server
from eagle3nb.corpus.masks import encode, render
from eagle3nb.errors import UserError
from eagle3nb.states import target as targets
from eagle3nb.states.hf import TransformersTarget
from eagle3nb.synthesis.budget import Budget
from eagle3nb.synthesis.endpoint import Ask, Sampling
from eagle3nb.synthesis.openai_endpoint import OpenAIEndpoint
from eagle3nb.synthesis.sglang_endpoint import SGLangEndpoint

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="written for the CPU")
CONTEXT, TOKENS, NEWLINE = 300, 40, 198
QUESTIONS = ("What is the capital of France?", "Say hello.", "Name three colours, one a line.", "Is water wet?",
             "Count to five.", "Write one sentence about the sea.")


@pytest.fixture(scope="module")
def served(times):
    """The server, its target's tokenizer, the prompts as messages and as ids."""
    folder = targets.target_dir("embedded")
    tokenizer = targets.load_tokenizer(folder)
    messages = [({"role": "user", "content": text},) for text in QUESTIONS]
    prompts = [tuple(encode(tokenizer, render(tokenizer, list(talk), generation=True))) for talk in messages]
    with server.start(folder, text=True, engine_args=["sleep_on_idle=true", f"context_length={CONTEXT}"]) as running:
        times.append(f"SGLang {running.version}: {running.load_s:.0f} s until it chats")
        yield SimpleNamespace(url=running.url, folder=folder, tokenizer=tokenizer, messages=messages, prompts=prompts,
                              eos=running.facts.eos)


def asked(endpoint, asks, sampling):
    found = {}
    counts = endpoint.answer(asks, sampling, lambda ask, answer: found.update({ask.key: answer}))
    return [found[ask.key] for ask in asks], counts


@pytest.fixture(scope="module")
def native(served):
    """Greedy answers to each prompt, at most TOKENS long, that end at the target's end of turn or a newline."""
    asks = [Ask((f"q{i}", 0, 0), input_ids=ids) for i, ids in enumerate(served.prompts)]
    return asked(SGLangEndpoint(served.url, concurrency=3), asks, Sampling(TOKENS, stop_ids=(*served.eos, NEWLINE)))


def test_ids_are_transformers_own_and_end_with_the_token_that_stopped(served, native):
    answers, counts = native
    torch.set_num_threads(1)
    reference = TransformersTarget(served.folder, torch.float32, "cpu")
    stops = {*served.eos, NEWLINE}
    wanted = reference.generate([list(ids) for ids in served.prompts], max_new_tokens=TOKENS, stop_ids=stops)
    assert [list(answer.ids) for answer in answers] == [list(map(int, ids)) for ids in wanted]
    ends = {answer.ids[-1] for answer in answers if answer.outcome == "stop"}
    assert ends == stops, "both kinds of end are met, or this says less"
    assert all(not stops & set(answer.ids[:-1]) for answer in answers)
    assert {answer.outcome for answer in answers} == {"stop", "length"}
    assert counts.given == counts.succeeded == len(QUESTIONS) and not counts.retries
    assert counts.completion_tokens == sum(len(answer.ids) for answer in answers)
    assert all(answer.prompt_tokens == len(ids) for answer, ids in zip(answers, served.prompts, strict=True))


def test_a_chat_says_what_its_ids_say(served):
    """The server renders and tokenises as we do, and its text is the same ids', without the end of turn."""
    chat, native = OpenAIEndpoint(served.url + "/v1", concurrency=3), SGLangEndpoint(served.url, concurrency=3)
    assert chat.check()["root"] == str(served.folder) == chat.model
    sampling, some = Sampling(24, stop_ids=tuple(served.eos)), (0, 1, 4)
    said, counts = asked(chat, [Ask((str(i), 0, 0), served.messages[i]) for i in some], sampling)
    wrote, _ = asked(native, [Ask((str(i), 0, 0), input_ids=served.prompts[i]) for i in some], sampling)
    for text, ids in zip(said, wrote, strict=True):
        body = ids.ids[:-1] if ids.outcome == "stop" else ids.ids
        assert text.message == {"role": "assistant", "content": served.tokenizer.decode(body)}
        assert (text.outcome, text.prompt_tokens, text.completion_tokens, text.model) == (
            ids.outcome, ids.prompt_tokens, len(ids.ids), served.folder.name)
    assert {answer.outcome for answer in said} == {"stop", "length"} and counts.estimated == 0


def test_what_serves(served):
    found = SGLangEndpoint(served.url + "/v1").check()
    assert (found["api"], found["model"], found["version"]) == ("sglang", str(served.folder), "0.5.23")
    assert found["deterministic"] is False and CONTEXT - 20 <= found["context"] <= CONTEXT
    assert OpenAIEndpoint(served.url + "/v1", "", "").check()["context"] == CONTEXT
    with pytest.raises(UserError, match="is no OpenAI API .http 404 from /models.; give the address with its path"):
        OpenAIEndpoint(served.url, "", "").check()


def test_the_end_of_the_context(served):
    """A prompt beyond it is refused as such; an answer that meets it is short, and says why."""
    native, chat = SGLangEndpoint(served.url), OpenAIEndpoint(served.url + "/v1", str(served.folder), "")
    words = ({"role": "user", "content": "sea " * (CONTEXT + 100)},)
    for kind, ask in ((native, Ask(("long", 0, 0), input_ids=(5, 6) * CONTEXT)), (chat, Ask(("long", 0, 0), words))):
        (answer,), counts = asked(kind, [ask], Sampling(8))
        assert (answer.outcome, answer.reason) == ("failed", "longer than the context"), answer
        assert counts.spent.requests == 1 and counts.spent.tokens == 0
    room = native.check()["context"]
    text = tuple(served.tokenizer.encode("the sea and the sky and " * CONTEXT))  # which goes on as it began
    near, beyond = (Ask((str(n), 0, 0), input_ids=text[:n]) for n in (room - 6, CONTEXT - 4))
    answers, _ = asked(native, [near, beyond], Sampling(TOKENS))
    assert [(answer.outcome, answer.reason) for answer in answers] == [("length", "context"),
                                                                       ("failed", "longer than the context")]
    assert len(answers[0].ids) == 6


def test_a_budget_ends_it(served):
    budget = Budget(tokens=2 * (max(map(len, served.prompts)) + 8))
    asks = [Ask((f"q{i}", 0, 0), input_ids=ids) for i, ids in enumerate(served.prompts)]
    answers, counts = asked(SGLangEndpoint(served.url, budget=budget), asks, Sampling(8))
    assert counts.stopped == "budget tokens" and counts.succeeded == 2 and counts.skipped == len(asks) - 2
    assert budget.spent.tokens == sum(len(a.ids) + a.prompt_tokens for a in answers) <= budget.bounds["tokens"]
