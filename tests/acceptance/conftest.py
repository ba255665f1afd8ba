"""A tiny target whose greedy text wanders, 32 prompts with its answers, and a drafter that learnt some of them.

A random drafter accepts about nothing and would pass any count; this one is right often enough that chains of every
length are accepted, past the end of an answer too.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3nb.acceptance.benchmarks import Prompt, answers
from eagle3nb.drafter import ttt
from eagle3nb.drafter.model import DraftConfig, DraftModel
from eagle3nb.states.hf import TransformersTarget
from eagle3nb.states.target import embedding, facts_of

V, K, LIMIT = 96, 7, 20
STOPS = (28, 35)  # frequent in its text, so about half the answers end before the limit
TARGET = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.3,
          "eos_token_id": 2, "bos_token_id": 1, "tie_word_embeddings": False}


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """target, answers (32), drafter; trained for some seconds on half the answers' own text, by cross-entropy."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(LlamaConfig(**TARGET)).save_pretrained(folder)
    target = TransformersTarget(folder, torch.float32, "cpu")
    rng = np.random.default_rng(0)
    prompts = [Prompt(f"p{i}", "even" if i % 2 == 0 else "odd", ids=tuple(rng.integers(3, V, size=2 + i % 13).tolist()))
               for i in range(32)]
    cache = tmp_path_factory.mktemp("answers")
    found = answers(target, prompts, max_new_tokens=LIMIT, beyond=K + 1, cache_dir=cache, stop_ids=STOPS)
    return SimpleNamespace(target=target, folder=folder, prompts=prompts, cache=cache, answers=found,
                           drafter=overfit(target, folder, found[::2]))


def overfit(target, folder, found, rounds: int = 50) -> DraftModel:
    """A drafter over 80 of the 96 tokens, trained on the answers packed into one text, five steps deep."""
    draftable = torch.cat([torch.arange(0, 40), torch.arange(56, 96)])
    config = DraftConfig.from_target(facts_of(folder), len(draftable))
    torch.manual_seed(1)
    drafter = DraftModel(config, embedding(folder), draftable)
    ids = torch.from_numpy(np.concatenate([a.sequence for a in found])).long()
    aux = torch.cat([state[0] for state in target.capture([a.sequence.tolist() for a in found])]).clone()
    lengths = torch.tensor([len(a.sequence) for a in found])
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    slots = torch.cat([torch.arange(s + a.start - 1, s + len(a.sequence) - K - 2)
                       for a, s in zip(found, starts.unique().tolist(), strict=True)])
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    to_draft = torch.cumsum(drafter.t2d, 0) - 1
    for _ in range(rounds):
        loss = 0
        for k, h2 in enumerate(ttt.steps(drafter, ids, aux, starts, [slots] * 5)):
            truth = ids[slots + 2 + k]
            loss = loss + torch.nn.functional.cross_entropy(
                drafter.logits(h2), torch.where(drafter.t2d[truth], to_draft[truth], -100))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return drafter.eval().requires_grad_(False)
