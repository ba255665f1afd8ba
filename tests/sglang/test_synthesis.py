"""What synthesis asks of SGLang's real server on a CPU, with the embedded target: the ids and texts that come back.

In float32 and greedily both sides choose among the same logits up to rounding, some 1e-4, and a margin that small is met
once in some ten thousand tokens; these are a few hundred. So ids are compared with no tolerance.
"""

import json
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
