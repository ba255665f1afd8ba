"""Faults that users of other trainers met (RESEARCH 3.4 and 3.5), planted in a sound engine: the probe names each one.

Each is planted twice: with the independent forward of the checkpoint beside it, and without, where the probe must
either find it by what is true of any engine, or say that it has not looked.
"""

import json
import re
import shutil

import pytest
import torch
from faulty import Bare
from safetensors.torch import load_file, save_file

from eagle3nb.errors import UserError
from eagle3nb.states.hf import TransformersTarget
from eagle3nb.states.probe import probe

FEW = {"rows": 6, "new_tokens": 10, "policy_tokens": 0}


def caught(engine, corpus, **settings) -> str:
    """The probe's one line; empty where it passes."""
    try:
        probe(engine, corpus, **FEW | settings)
    except UserError as error:
        assert "\n" not in str(error) and "; " in str(error)  # one line: what, and what to do
        return str(error)
    return ""


def unseen(engine, corpus) -> set[str]:
    """What the probe says it has not compared where no forward of the checkpoint fits in memory."""
    found = probe(engine, corpus, **FEW, memory=0)
    return {row["check"].split(" is the")[0] for row in found["checks"] if row["result"].startswith("not run: not")}


LAYERS = {"layer 2", "layer 4", "layer 5"}


# ---------------------------------------------------------------------------------------------------- layers


def hooked(folder, places, dtype=torch.float32) -> TransformersTarget:
    """A target whose captured layers are the outputs of other layers than 1, 3 and 4."""
    engine = TransformersTarget(folder, dtype, "cpu")
    for layer in engine.layers:
        engine.body.layers[layer - 1]._forward_hooks.clear()
    for layer, place in zip(engine.layers, places, strict=True):
        engine.body.layers[place].register_forward_hook(engine.keep(layer))
    return engine


@pytest.mark.parametrize("places, message", [
    ((2, 4, 5), "captured as layer 2 is the residual stream after 3 layers, one layer too late"),  # TS #87, vllm #46788
    ((0, 2, 3), "captured as layer 2 is the residual stream after 1 layers, one layer too early"),
    ((1, 2, 4), "captured as layer 4 is the residual stream after 3 layers, one layer too early"),  # SF #240: n//2 - 1
    ((1, 3, 5), "captured as layer 5 is the residual stream after 6 layers, one layer too late"),  # TS #89
    ((1, 3, 7), "captured as layer 5 is the residual stream after 8 layers, another layer"),
])
def test_other_layers(tiny_target, corpus, places, message):
    engine = hooked(tiny_target, places)
    assert message in caught(engine, corpus)
    assert caught(engine, corpus, memory=0) == "" and unseen(engine, corpus) >= LAYERS


def test_one_layer_twice(tiny_target, corpus):
    engine = hooked(tiny_target, (1, 3, 3))
    for memory in (None, 0):
        assert "captured as layers 4 and 5 is one stream twice" in caught(engine, corpus, memory=memory)


@pytest.mark.parametrize("order, message", [
    ((1, 0, 2), "the captured layers come in the order 4, 2, 5 instead of 2, 4, 5"),
    ((2, 1, 0), "the captured layers come in the order 5, 4, 2 instead of 2, 4, 5")])
def test_layers_in_another_order(target, corpus, order, message):
    def change(i, ids, aux, last, every):
        return torch.cat([aux.chunk(3, -1)[place] for place in order], -1), last

    assert message in caught(Bare(target, change), corpus)
    assert unseen(Bare(target, change), corpus) >= LAYERS


def test_a_stream_without_its_residual(tiny_target, corpus):
    """vLLM's and SGLang's fused norms: the stream is hidden + residual, and hidden alone is junk (RESEARCH 1.3)."""
    engine = TransformersTarget(tiny_target, torch.float32, "cpu")
    for layer in engine.layers:
        engine.body.layers[layer - 1]._forward_hooks.clear()
        engine.body.layers[layer - 1].mlp.register_forward_hook(engine.keep(layer))
    assert re.search(r"captured as layer 2 differs from every layer of the checkpoint, by \d", caught(engine, corpus))


# ---------------------------------------------------------------------------------------------------- the last state


def before_norm(tiny_target):
    engine, raw = TransformersTarget(tiny_target, torch.float32, "cpu"), []
    engine.body.norm.register_forward_pre_hook(lambda module, inputs: raw.append(inputs[0]))
    return Bare(engine, lambda i, ids, aux, last, every: (aux, raw[-1][i, : len(ids)]))


def test_the_last_state_before_the_norm(tiny_target, corpus):  # SP #313, TS #65, #169
    engine = before_norm(tiny_target)
    assert "is the stream before the final norm (vLLM's convention)" in caught(engine, corpus)
    assert "100.0% through the final norm; the store needs states after that norm" in caught(engine, corpus, memory=0)


def test_the_norm_applied_twice(target, corpus):
    engine = Bare(target, lambda i, ids, aux, last, every: (aux, target.body.norm(last)))
    assert "has gone through the final norm twice" in caught(engine, corpus)
    assert "another head or another last state than these" in caught(engine, corpus, memory=0)


def test_a_norm_without_its_weight(target, corpus):
    weight = target.body.norm.weight
    engine = Bare(target, lambda i, ids, aux, last, every: (aux, last / weight))
    assert "the last hidden state differs by" in caught(engine, corpus)
    assert "through the final norm; the store needs states after that norm" in caught(engine, corpus, memory=0)


def test_a_last_state_of_another_scale(target, corpus):
    """The argmax is the same: only the root mean square tells, where no checkpoint is loaded."""
    engine = Bare(target, lambda i, ids, aux, last, every: (aux, 1.5 * last))
    assert "the last hidden state differs by 0.5 a token" in caught(engine, corpus)
    assert "root mean square 1.5, not 1: it has not gone through that norm" in caught(engine, corpus, memory=0)


def test_before_a_norm_whose_weights_are_all_one(tiny_target, tmp_path, corpus):
    """Such a norm only scales: both readings continue the text, and the state before it is wrong all the same."""
    folder = tmp_path / "ones"
    shutil.copytree(tiny_target, folder)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.norm.weight": torch.ones(64)}, folder / "model.safetensors", {"format": "pt"})
    assert caught(TransformersTarget(folder, torch.float32, "cpu"), corpus) == ""
    assert "before the final norm (vLLM's convention)" in caught(before_norm(folder), corpus)
    assert re.search(r"root mean square [\d.]+, not 1", caught(before_norm(folder), corpus, memory=0))


def test_a_norm_that_hardly_changes_what_it_has_normed(tiny_target, tmp_path, corpus, monkeypatch):
    """Both readings continue the text. The state is right: the root mean square says so, or the checkpoint; without
    either, nobody can."""
    folder = tmp_path / "near"
    shutil.copytree(tiny_target, folder)
    weights = load_file(folder / "model.safetensors")
    near = 1 + 0.01 * torch.randn(64, generator=torch.Generator().manual_seed(0))
    save_file(weights | {"model.norm.weight": near}, folder / "model.safetensors", {"format": "pt"})
    engine = TransformersTarget(folder, torch.float32, "cpu")
    assert caught(engine, corpus) == caught(engine, corpus, memory=0) == ""
    monkeypatch.setattr("eagle3nb.states.conformance.root_mean_square", lambda *_: None)
    assert caught(engine, corpus) == ""
    assert "which reading is right cannot be told" in caught(engine, corpus, memory=0)


# ---------------------------------------------------------------------------------------------------- tokens and rows


def moved(states, shift):
    """Shifted in time; what would come from outside the row is its own end."""
    return torch.cat([states[:1], states[:-1]] if shift == 1 else [states[1:], states[-1:]])


@pytest.mark.parametrize("part", ["aux", "last"])
@pytest.mark.parametrize("shift, word, without", [(1, "late", "stand behind their tokens"),
                                                  (-1, "early", "stand before their tokens")])
def test_positions_shifted_by_one(target, corpus, monkeypatch, part, shift, word, without):
    def change(i, ids, aux, last, every):
        return (moved(aux, shift), last) if part == "aux" else (aux, moved(last, shift))

    engine = Bare(target, change)
    for memory in (None, 0):  # found by changing a token: no checkpoint is needed
        message = caught(engine, corpus, memory=memory)
        assert without in message and ("captured as layer 2" if part == "aux" else "the last hidden state") in message
    # … and where that is not looked at, against the checkpoint.
    monkeypatch.setattr("eagle3nb.states.conformance.order_of_tokens", lambda *_: {"token": 1, "error": 1.0})
    assert f"one token too {word}" in caught(engine, corpus)


def test_tokens_that_see_what_comes_after(target, corpus):
    def change(i, ids, aux, last, every):
        return aux + 0.1 * aux.mean(0, keepdim=True), last

    for memory in (None, 0):
        assert "tokens see what comes after them" in caught(Bare(target, change), corpus, memory=memory)


def cut_like(states, length):
    """(aux, last) of another row, cut or filled with zeros to this row's length."""
    filled = [torch.cat([part, part.new_zeros(max(0, length - len(part)), part.shape[1])])[:length] for part in states]
    return tuple(filled)


def test_a_batch_given_back_in_the_order_of_lengths(target, corpus):  # SF 9ca23a3d
    def change(i, ids, aux, last, every):
        order = sorted(range(len(every)), key=lambda j: -len(every[j][1]))
        return cut_like(every[order[::-1][i]], len(ids))

    for memory in (None, 0):
        message = caught(Bare(target, change), corpus, memory=memory)
        assert re.search(r"in a batch of 8 rows, row \d+ of the corpus gets the states of row \d+", message)


def test_one_row_with_its_neighbours_states(target, corpus):
    def change(i, ids, aux, last, every):
        return cut_like(every[i + 1], len(ids)) if i == 2 and len(every) > 3 else (aux, last)

    for memory in (None, 0):
        message = caught(Bare(target, change), corpus, memory=memory)
        assert re.search(r"in a batch of 8 rows, row \d+ of the corpus gets the states of row \d+", message)


def test_the_rows_of_the_probe_itself_exchanged(target, corpus):
    """A batch that is sound on the rows of the corpus, and not on those that the target wrote."""
    def change(i, ids, aux, last, every):
        return cut_like(every[i ^ 1], len(ids)) if len(every) == 6 else (aux, last)

    assert re.search(r"captured as layer 2 of row 0 is that of row 1", caught(Bare(target, change), corpus))
    assert "another head or another last state" in caught(Bare(target, change), corpus, memory=0)


def test_padding_that_leaks_into_a_row(target, corpus):  # MoE capacity, left padding, positions of a batch
    def change(i, ids, aux, last, every):
        pads = max(len(row[1]) for row in every) - len(ids)
        return aux, last + 0.01 * pads * last.norm(dim=-1, keepdim=True) / last.shape[-1] ** 0.5

    for memory in (None, 0):
        message = caught(Bare(target, change), corpus, memory=memory)
        assert re.search(r"row \d+ of the corpus is not what it is alone: the last hidden state is off by 0\.\d+ at "
                         "token", message)


def test_a_prefix_cache_that_gives_the_rest_only(target, corpus):  # SF c7fc438e, SP #279, sglang #26163
    seen = []

    def change(i, ids, aux, last, every):
        known = max((shared(ids, other) for other in seen), default=0)
        seen.append(list(ids))
        return aux[known:], last[known:]

    for memory in (None, 0):
        message = caught(Bare(target, change), corpus, memory=memory)
        assert re.search(r"row 1 has \d+ tokens, the engine gave \d+ states \(aux\): a prefix cache or", message)
        seen.clear()


def shared(a, b) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_chunked_prefill_that_gives_the_last_chunk_only(target, corpus):
    def change(i, ids, aux, last, every):
        return aux, last[len(ids) // 32 * 32 :]

    assert re.search(r"row 0 has \d+ tokens, the engine gave \d+ states \(last\)", caught(Bare(target, change), corpus))


def test_shapes_that_are_not_three_layers(target, corpus):
    h = target.facts.hidden
    two = Bare(target, lambda i, ids, aux, last, every: (aux[:, : 2 * h], last))
    assert re.search(rf"aux of row 0 has shape \[\d+, {2 * h}\], not \[\d+, {3 * h}\]", caught(two, corpus))
    engine = Bare(target)
    capture = engine.capture
    engine.capture = lambda rows: capture(rows)[:-1]
    assert "6 rows went into the engine, the states of 5 came back" in caught(engine, corpus)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("channel, name", [(3, "layer 2"), (64 + 9, "layer 4"), (191, "layer 5"), (None, "the last")])
def test_a_value_that_is_no_number(target, corpus, value, channel, name):  # SP #994, #615
    def change(i, ids, aux, last, every):
        aux, last = aux.clone(), last.clone()
        if i == 2:
            (last if channel is None else aux)[7, channel or 5] = value
        return aux, last

    message = caught(Bare(target, change), corpus)
    assert f"row 2, token 7: {name}" in message and f"holds {value}" in message


def test_a_token_damaged_is_not_hidden_by_a_massive_one(target, corpus):
    def change(i, ids, aux, last, every):
        aux = aux.clone()
        if len(every) == 6 and i == 0:  # in the probe's own rows alone
            aux[0] *= 1 + 1e-4
            aux[9, :64] += 0.01 * aux[9, :64].norm()
        return aux, last

    message = caught(Bare(target, change), corpus)
    assert re.search(r"captured as layer 2 is that layer's, but off by 0\.08\d* at row 0, token 9", message)


# ---------------------------------------------------------------------------------------------------- the model


def variant(tiny_target, folder, **config):
    """An engine on a changed copy of the checkpoint; its `dir` is the true one."""
    shutil.copytree(tiny_target, folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | config))
    engine = TransformersTarget(folder, torch.float32, "cpu")
    engine.dir = tiny_target
    return engine


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1e6},  # TS #54, #101, sfllm #32
                                  {"rope_type": "default", "rope_theta": 5000.0},
                                  {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},  # SP #574: the reverse
                                  {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0,
                                   "original_max_position_embeddings": 128}])
def test_another_rope(tiny_target, corpus, tmp_path, rope):
    engine = Bare(variant(tiny_target, tmp_path / "x", rope_parameters=rope))
    assert re.search(r"captured as layer 2 agrees at the first token of each row and is off by .* compare the engine's "
                     r"RoPE", caught(engine, corpus))
    assert unseen(engine, corpus) >= LAYERS


def test_other_weights(corpus, tiny_target, tmp_path):
    import tiny

    engine = TransformersTarget(tiny.make_target(tmp_path / "other", seed=3), torch.float32, "cpu")
    engine.dir = tiny_target
    assert "the engine's embedding is not the checkpoint's" in caught(engine, corpus)
    assert "the engine's lm_head is not the checkpoint's" in caught(Bare(engine), corpus)
    engine.model.get_output_embeddings().weight.data = TransformersTarget(
        tiny_target, torch.float32, "cpu").model.get_output_embeddings().weight.data
    assert "captured as layer 2 differs from every layer" in caught(Bare(engine), corpus)


@pytest.mark.parametrize("name", ["embedding", "lm_head"])
def test_another_embedding_or_head_than_the_checkpoints(tiny_target, corpus, name):  # TS #38, #39: random ones
    engine = TransformersTarget(tiny_target, torch.float32, "cpu")
    module = engine.model.get_input_embeddings() if name == "embedding" else engine.head
    module.weight.data += 1e-3
    for memory in (None, 0):
        assert f"the engine's {name} is not the checkpoint's" in caught(engine, corpus, memory=memory)


def test_a_head_that_only_the_engines_text_shows(tiny_target, corpus):
    """An engine that serves another head, while `logits` are the checkpoint's: SGLang's target computes them itself."""
    sound = TransformersTarget(tiny_target, torch.float32, "cpu")
    other = TransformersTarget(tiny_target, torch.float32, "cpu")
    other.head.weight.data = other.head.weight.data.roll(1, 0)
    engine = Bare(sound)
    engine.generate = other.generate
    for memory in (None, 0):
        message = caught(engine, corpus, memory=memory)
        assert re.search(r"own greedy text in \d\.\d% of 60 tokens as it is.* another head or another last", message)


def test_a_fault_in_sixteen_bits_is_no_rounding(corpus, tmp_path):
    import tiny

    calm = tiny.make_target(tmp_path / "calm", initializer_range=0.06)
    sound = TransformersTarget(calm, torch.bfloat16, "cpu")
    assert caught(Bare(sound), corpus) == ""
    assert "one layer too early" in caught(hooked(calm, (0, 2, 3), torch.bfloat16), corpus)

    def change(i, ids, aux, last, every):
        return moved(aux, 1), last

    assert "stand behind their tokens" in caught(Bare(sound, change), corpus)
