"""The probe lets a sound engine pass and names each fault that has been planted."""

import pytest
import torch

from eagle3nb.errors import UserError
from eagle3nb.states.extract import extract
from eagle3nb.states.hf import TransformersTarget
from eagle3nb.states.probe import on_policy, probe, prompts_of
from eagle3nb.states.store import Store


@pytest.fixture
def engine(tiny_target):
    """A target of the test's own, to be spoilt."""
    return TransformersTarget(tiny_target, torch.float32, "cpu")


def spoil(engine, change):
    """Pass every captured row (aux, last) through `change(i, aux, last, all)`."""
    capture = engine.capture

    def spoilt(rows):
        states = capture(rows)
        return [change(i, aux, last, states) for i, (aux, last) in enumerate(states)]

    engine.capture = spoilt


def test_a_sound_engine_passes_with_its_figures(target, corpus):
    found = probe(target, corpus)
    assert found["rows"] == 16 and found["new_tokens"] == 16 * 24
    assert found["norm"]["as it is"] == 1.0 and found["norm"]["through the final norm"] < 0.9
    assert [row["layer"] for row in found["layers"]] == [2, 4, 5]
    assert all(row["relative error"] < 1e-4 and row["nearest neighbour"] > 0.1 for row in found["layers"])
    assert [row["layer"] for row in found["residual"]] == [2, 4, 5]


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_layer_too_early_or_too_late(engine, corpus, shift):
    for layer in engine.layers:
        engine.body.layers[layer - 1]._forward_hooks.clear()
    for layer in engine.layers:
        engine.body.layers[layer - 1 + shift].register_forward_hook(engine.keep(layer))
    with pytest.raises(UserError, match="captured as layer 2 differs"):
        probe(engine, corpus)


def test_states_before_the_final_norm(engine, corpus):
    """As vLLM hands them out: the last layer's output, the norm not yet applied."""
    raw = []
    engine.body.norm.register_forward_pre_hook(lambda module, inputs: raw.append(inputs[0]))

    def change(i, aux, last, every):
        return aux, raw[-1][i, : len(last)]

    spoil(engine, change)
    with pytest.raises(UserError, match="through the final norm; the store needs states after that norm"):
        probe(engine, corpus)


def test_the_norm_applied_twice(engine, corpus):
    spoil(engine, lambda i, aux, last, every: (aux, engine.body.norm(last)))
    with pytest.raises(UserError, match="probe: lm_head"):
        probe(engine, corpus)


def test_rows_swapped_in_the_batch(engine, corpus):  # each gets its neighbour's, which is no shorter
    spoil(engine, lambda i, aux, last, every: (every[min(i + 1, 15)][0][: len(aux)], last))
    with pytest.raises(UserError, match="layer ids or the batching"):
        probe(engine, corpus)


def test_positions_shifted_by_one(engine, corpus):
    spoil(engine, lambda i, aux, last, every: (aux.roll(1, 0), last))
    with pytest.raises(UserError, match="captured as layer"):
        probe(engine, corpus)


def test_one_token_damaged_is_not_hidden_by_a_large_one(engine, corpus):
    def change(i, aux, last, every):
        aux = aux.clone()
        aux[0] *= 1.0 if i else 1e4  # a massive first token …
        aux[1, :64] += 0.01 * aux[1, :64].norm()  # … and a small error elsewhere
        return aux, last

    spoil(engine, change)
    with pytest.raises(UserError, match="captured as layer 2"):
        probe(engine, corpus)


@pytest.mark.parametrize("name", ["embedding", "lm_head"])
def test_another_embedding_or_head_than_the_checkpoints(engine, corpus, name):
    module = engine.model.get_input_embeddings() if name == "embedding" else engine.head
    module.weight.data += 1e-3
    with pytest.raises(UserError, match=f"the engine's {name} is not the checkpoint's"):
        probe(engine, corpus)


def test_prompts_are_the_beginnings_of_rows(corpus, target):
    found = prompts_of(corpus, 6, 24, target.facts, seed=0)
    starts = {tuple(ids[: mask.argmax()].tolist()) for ids, mask in (corpus.row(i) for i in range(len(corpus)))}
    assert len(found) == 6 and all(tuple(prompt) in starts for prompt in found)
    assert found == prompts_of(corpus, 6, 24, target.facts, seed=0)


def test_the_on_policy_share_counts_the_targets_own_tokens(corpus, target, tmp_path):
    extract(corpus, target, tmp_path, dtype="fp32", batch_tokens=512, shard_tokens=600)
    counts = {name: [0, 0] for name in corpus.index["source"].unique()}
    for i, name in enumerate(corpus.index["source"]):
        ids, mask = corpus.row(i)
        predicted = target.logits(target.capture([ids])[0][1]).argmax(-1).tolist()
        for p in range(len(ids) - 1):
            if mask[p] and mask[p + 1]:
                counts[name][0] += predicted[p] == ids[p + 1]
                counts[name][1] += 1
    table = on_policy(Store.open(tmp_path), corpus)
    found = {row["source"]: (row["on-policy share"], row["teacher positions"]) for row in table}
    assert found == {name: (hits / n, n) for name, (hits, n) in counts.items()}
