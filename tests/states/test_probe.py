"""The probe lets a sound engine pass, whatever it is, and says of every check what it found or why it did not run."""

import json

import numpy as np
import pytest
import torch
from faulty import Bare

from eagle3nb.corpus.merged import vocabulary_hash
from eagle3nb.errors import UserError
from eagle3nb.states import compare, conformance, policy
from eagle3nb.states import reference as references
from eagle3nb.states.extract import extract
from eagle3nb.states.hf import TransformersTarget
from eagle3nb.states.probe import massive, on_policy, probe, prompts_of
from eagle3nb.states.store import Store


@pytest.fixture(scope="module")
def found(target, corpus):
    return probe(target, corpus)


def results(found):
    return {row["check"]: row["result"] for row in found["checks"]}


def test_a_sound_engine_passes_with_its_figures(found):
    assert found["rows"] == 16 and found["new_tokens"] == 16 * 24
    assert found["norm"]["as it is"] == 1.0 and found["norm"]["through the final norm"] < 0.9
    assert abs(found["norm"]["rms over the norm's weight"] - 1) < 1e-4
    assert [row["layer"] for row in found["layers"]] == [2, 4, 5] == [row["layer"] for row in found["residual"]]
    assert all(row["relative error"] < 1e-4 and row["nearest neighbour"] > 0.1 for row in found["layers"])
    assert all(row["one layer earlier"] > 0.1 and row["one layer later"] > 0.1 for row in found["layers"])
    assert [row["median"] < 1e-4 for row in found["last"]] == [True, False, False]
    assert set(results(found).values()) == {"holds"} and len(found["checks"]) == 13
    assert massive(found).startswith("After layer")
    json.dumps(found, allow_nan=False)


def test_rows_of_a_batch_are_of_unlike_length_and_named(found, corpus):
    assert len(found["batch"]) == 8 and len({row["tokens"] for row in found["batch"]}) > 4
    assert all(row["captured layers"] < 1e-4 and row["last"] < 1e-4 for row in found["batch"])
    assert all(row["tokens"] <= corpus.lengths[row["row"]] for row in found["batch"])


def test_an_engine_that_shows_no_weights(target, corpus, found):
    bare = probe(Bare(target), corpus)
    told = results(bare)
    assert told.pop("embedding: 256 rows").startswith("not run: the engine shows no weights; the layers above")
    assert set(told.values()) == {"holds"}
    assert bare["weights"]["lm_head"]["error"] < 1e-5 and found["weights"]["lm_head"]["error"] == 0
    assert bare["layers"] == found["layers"]


def parts(target, layers: int) -> int:
    """Bytes of the target's first layers in float32, and of what lies beside them."""
    rest, sizes = references.parameter_counts(target.dir, target.facts.layers)
    return 4 * (rest + sum(sizes[:layers]))


def test_a_target_too_large_is_compared_as_far_as_memory_goes(target, corpus):
    for limit, depth, seen in ((parts(target, 6) - 1, 5, [2, 4, 5]), (parts(target, 3), 3, [2]), (1000, 0, [])):
        found = probe(Bare(target), corpus, rows=4, new_tokens=8, policy_tokens=0, memory=limit)
        told = found["checks"]
        assert [row["figure"] is not None for row in told[4:7]] == [layer in seen for layer in (2, 4, 5)]
        assert [row["result"] == "not run: not loaded that far" for row in told[4:7]] == [
            layer not in seen for layer in (2, 4, 5)]
        assert {row["result"] for row in told[7:9]} == {"not run: not loaded to the end"}
        assert found["reference"].startswith(f"the first {depth} of 8 layers" if depth else "its first 3 layers take")
        assert found["norm"]["as it is"] == 1 and found["last"] == [] and found["on_policy"] == []
        assert [row["layer"] for row in found["layers"]] == ([2, 4, 5] if depth else [])
        json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_engine_in_sixteen_bits(corpus, tmp_path, dtype):
    import tiny

    calm = tiny.make_target(tmp_path / "calm", initializer_range=0.06)  # a random model of std 0.15 blows rounding up
    found = probe(TransformersTarget(calm, dtype, "cpu"), corpus, rows=8, policy_tokens=0)
    assert set(results(found).values()) == {"holds"} and found["norm"]["as it is"] >= 0.97
    assert all(1e-5 < row["median"] < 0.03 for row in found["layers"])


def test_the_reference_is_another_forward_than_the_engines(target, witness):
    reference, _ = references.load_reference(target.dir, target.layers)
    ids = list(range(5, 28))
    streams, last = witness.residuals(ids)
    found = reference.streams(ids)
    assert found.residual.shape == (9, 23, 64) and reference.model is not target.model
    assert np.abs(found.residual.numpy() - streams).max() < 1e-5 * np.abs(streams).max()
    assert np.abs(found.last.numpy() - last).max() < 1e-5 * np.abs(last).max()
    norm = references.final_norm(target.dir)
    assert (norm(found.residual[-1]) - found.last).abs().max() < 1e-5
    logits = last @ witness.head.T
    assert np.abs(found.logits.numpy() - logits).max() < 1e-5 * np.abs(logits).max()


def test_a_reference_that_cannot_be_says_why(target, tmp_path):
    config = json.loads((target.dir / "config.json").read_text())
    for name, change, why in (("a", {"model_type": "of_tomorrow"}, "cannot load the checkpoint"),
                              ("b", {"quantization_config": {"quant_method": "fp8"}}, "quantised")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | change))
        (folder / "model.safetensors").symlink_to(target.dir / "model.safetensors")
        reference, told = references.load_reference(folder, (2, 4, 5))
        assert reference is None and why in told
    # Such a target's norm is then the plain RMSNorm of its config.
    states = torch.randn(3, 64)
    assert torch.allclose(references.final_norm(tmp_path / "a")(states), references.final_norm(target.dir)(states))


def test_what_lies_behind_the_head_is_told(target, corpus, tmp_path):
    config = json.loads((target.dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"final_logit_softcapping": 30.0, "logit_scale": 1.0}))
    assert references.logit_changes(tmp_path) == ["final_logit_softcapping 30.0"]
    for file in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).symlink_to(target.dir / file)
    capped = Bare(target)
    capped.dir = tmp_path
    told = results(probe(capped, corpus, rows=4, new_tokens=8, policy_tokens=0))
    assert [text for text in told.values() if "left out of the teacher" in text]


def test_prompts_are_the_beginnings_of_rows(corpus, target):
    found = prompts_of(corpus, 6, 24, target.facts, seed=0)
    starts = {tuple(ids[: mask.argmax()].tolist()) for ids, mask in (corpus.row(i) for i in range(len(corpus)))}
    assert len(found) == 6 and all(tuple(prompt) in starts for prompt in found)
    assert found == prompts_of(corpus, 6, 24, target.facts, seed=0)


def test_tolerance_is_exact_only_where_nothing_can_flip(target, tmp_path):
    assert compare.tolerance(torch.float32, target.dir) == compare.Tolerance(2e-3, 2e-3, 1.0)
    assert compare.tolerance(torch.bfloat16, target.dir).share == 0.9
    config = json.loads((target.dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_local_experts": 8, "num_experts_per_tok": 2}))
    assert compare.tolerance(torch.float32, tmp_path) == compare.Tolerance(2e-3, 2e-3, 0.9)
    errors = torch.full((100,), 1e-4)
    errors[:5] = 0.5
    assert compare.Tolerance(2e-3, 2e-3, 0.95).fits(errors) and not compare.Tolerance(2e-3, 2e-3, 1.0).fits(errors)
    assert not compare.Tolerance(2e-3, 5e-5, 0.95).fits(errors)
    assert not compare.Tolerance(2e-3, 2e-3, 0.95).fits(torch.empty(0))


def test_two_layers_that_are_near_are_told_apart_by_the_nearer(target):
    """Deep models in sixteen bits: the next layer is within the tolerance, and the states are nearer to it."""
    torch.manual_seed(0)
    streams, step = [torch.randn(40, 64)], 0.04
    for _ in range(8):
        streams.append(streams[-1] + step * torch.randn(40, 64))
    truth = [references.Streams(torch.stack(streams), None, None)]
    allowed = compare.Tolerance(2e-1, 5e-2, 0.9)

    def states(*layers):
        return [(torch.cat([streams[layer] for layer in layers], -1), None)]

    assert len(compare.layers_match(states(2, 4, 5), truth, (2, 4, 5), allowed)) == 3
    assert allowed.fits(compare.errors(streams[3], streams[4]))
    with pytest.raises(UserError, match="layer 4 is the residual stream after 3 layers, one layer too early"):
        compare.layers_match(states(2, 3, 5), truth, (2, 4, 5), allowed)


# ---------------------------------------------------------------------------------------------------- on-policy


def naive_policy(target, corpus, rows, top_p):
    """Token by token: the argmax, and the smallest set of likeliest tokens that holds top_p."""
    hits = within = count = 0
    for ids, mask in rows:
        p = torch.softmax(target.logits(target.capture([ids])[0][1]).double(), -1).numpy()
        for t in range(1, len(ids)):
            if mask[t]:
                order = np.argsort(-p[t - 1])
                kept = order[: int(np.searchsorted(np.cumsum(p[t - 1][order]), top_p)) + 1]
                hits, within, count = hits + (order[0] == ids[t]), within + (ids[t] in kept), count + 1
    return hits / count, within / count, count


@pytest.mark.parametrize("top_p", [0.9, 0.5])
def test_the_share_within_top_p_is_that_of_a_sort(corpus, target, top_p):
    table = policy.policy(target, corpus, tokens=10**6, top_p=top_p)
    sources = corpus.index["source"].to_numpy()
    for row in table:
        rows = [corpus.row(i) for i in np.flatnonzero(sources == row["source"])]
        argmax, within, count = naive_policy(target, corpus, rows, top_p)
        assert (row["argmax share"], row[f"share within top {top_p:g}"]) == pytest.approx((argmax, within))
        assert row["supervised tokens"] == count and row["rows"] == len(rows)
    assert policy.off_policy(table) == ["A2_chat", "B1_tools"]  # random characters
    assert policy.policy_finding(table) == "A2_chat, B1_tools read as another model's text"


class Rows:
    """A corpus of rows in memory: what policy() asks of one."""

    def __init__(self, rows, sources):
        import pandas as pd

        self.rows, self.index = rows, pd.DataFrame({"source": sources})

    def row(self, i):
        return self.rows[i]


def test_text_that_the_target_sampled_is_its_own_and_another_models_is_not(target, tmp_path):
    import tiny

    other = TransformersTarget(tiny.make_target(tmp_path / "other", seed=5), torch.float32, "cpu")
    prompts = [[1, 5 + i, 9, 30 + i] for i in range(12)]
    rows, sources = [], []
    for name, model, temperature in (("sampled", target, 1.0), ("cool", target, 0.6), ("other", other, 0.6)):
        for prompt, answer in zip(prompts, model.generate(prompts, max_new_tokens=40, temperature=temperature, seed=7),
                                  strict=True):
            rows.append((np.array(prompt + answer, np.int32), np.array([0] * 4 + [1] * 40, np.uint8)))
            sources.append(name)
    table = {row["source"]: row for row in policy.policy(target, Rows(rows, sources))}
    assert [table[name]["off-policy"] for name in ("sampled", "cool", "other")] == [False, False, True]
    assert table["cool"]["share within top 0.9"] >= table["sampled"]["share within top 0.9"] > 0.85
    assert table["other"]["share within top 0.9"] < 0.6 and table["sampled"]["supervised tokens"] > 300
    assert policy.policy_finding(list(table.values())) == "other reads as another model's text"
    assert policy.policy_finding([table["cool"]]) == "Every source reads as the target's own text"


def test_a_source_without_a_supervised_token_has_no_share(target):
    rows = [(np.array([4, 5, 6], np.int32), np.zeros(3, np.uint8))]
    [row] = policy.policy(target, Rows(rows, ["A"]))
    assert row["supervised tokens"] == 0 and row["argmax share"] is None and row["off-policy"] is False
    json.dumps(row, allow_nan=False)


def test_policy_reads_no_more_than_it_is_given(target, corpus, monkeypatch):
    seen = []
    capture = target.capture
    monkeypatch.setattr(target, "capture", lambda rows: seen.extend(map(len, rows)) or capture(rows))
    policy.policy(target, corpus, tokens=100)
    assert sum(seen) <= 2 * 100


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


def test_a_corpus_of_another_vocabulary_is_refused_before_anything_runs(corpus, target, monkeypatch):
    import tiny

    monkeypatch.setattr(conformance, "captured", lambda *_: pytest.fail("ran"))
    monkeypatch.setattr(corpus, "vocab_size", 300)
    with pytest.raises(UserError, match="merged for a vocabulary of 300, the target's is 256"):
        probe(target, corpus)
    monkeypatch.setattr(corpus, "vocab_size", 256)
    tokenizer = tiny.make_tokenizer()
    monkeypatch.setattr(corpus, "tokenizer", vocabulary_hash(tokenizer))
    conformance.same_vocabulary(corpus, target)
    tokenizer.add_tokens(["more"])
    monkeypatch.setattr(corpus, "tokenizer", vocabulary_hash(tokenizer))
    with pytest.raises(UserError, match="merged with another tokenizer"):
        probe(target, corpus)
