"""Fine-tuning from a checkpoint: the same logits to start with, its vocabulary kept, and everything else refused."""

from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3nb.drafter import finetune
from eagle3nb.drafter.curves import read_metrics
from eagle3nb.drafter.export import export, forward
from eagle3nb.drafter.model import DraftConfig, DraftModel
from eagle3nb.drafter.settings import Settings, run_identity
from eagle3nb.drafter.train import train
from eagle3nb.drafter.ttt import steps
from eagle3nb.errors import UserError
from eagle3nb.files import read_json, write_json

IDS = torch.tensor([0, 3, *range(10, 90, 2), 96])
YARN = {"theta": 50000.0, "scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32,
                                      "attention_factor": 1.7}}


@pytest.fixture
def facts(tiny_facts):
    def made(**changes):
        return tiny_facts(**{"layers": 8, "architecture": "LlamaForCausalLM"} | changes)

    return made


def drafter(facts, ids=IDS, **changes):
    torch.manual_seed(0)
    model = DraftModel(DraftConfig.from_target(facts, len(ids), **changes), torch.randn(97, 32), ids)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1)
    return model


def logits(model, K=3):
    """Of every step at every slot that has it, over random tokens and states."""
    generator = torch.Generator().manual_seed(1)
    ids, aux = torch.randint(97, (20,), generator=generator), torch.randn(20, 96, generator=generator)
    with torch.no_grad():
        outputs = steps(model, ids, aux, torch.zeros(20, dtype=torch.int64), [torch.arange(19 - k) for k in range(K)])
        return torch.cat([model.logits(h2) for h2 in outputs])


def loaded(folder, facts, embedding):
    found = finetune.read(folder, facts)
    model = DraftModel(found.config, embedding, torch.from_numpy(found.ids))
    finetune.load(model, found)
    return model


@pytest.mark.parametrize(("target", "changes"), [
    ({}, {}), ({"rope": YARN}, {}), ({}, {"fc_norm": True, "norm_output": True}),
    ({}, {"heads": 2, "kv_heads": 1, "head_dim": 12, "intermediate": 24, "eps": 1e-6}),
])
def test_an_exported_drafter_comes_back_exactly(tmp_path, facts, target, changes):
    """Equal, not close: the same weights in the same code. What the drafter has otherwise than the target, it keeps,
    and its next export is the same again, which no engine would read otherwise."""
    model = drafter(facts(**target), **changes)
    export(model, tmp_path / "first", target_layers=8)
    again = loaded(tmp_path / "first", facts(**target), model.embed_tokens)
    assert torch.equal(logits(again), logits(model))
    assert torch.equal(again.vocabulary_ids, IDS)
    export(again, tmp_path / "second", target_layers=8, target=facts(**target))
    assert read_json(tmp_path / "second/config.json") == read_json(tmp_path / "first/config.json")
    assert (tmp_path / "second/model.safetensors").read_bytes() == (tmp_path / "first/model.safetensors").read_bytes()
    again.midlayer.hidden_norm.weight.data[3] += 0.1
    assert not torch.equal(logits(again), logits(model))


def test_what_stage_4_keeps_comes_back_too(tmp_path, facts):
    model = drafter(facts(rope=YARN), norm_output=True)
    model.save(tmp_path)
    assert torch.equal(logits(loaded(tmp_path, facts(), model.embed_tokens)), logits(model))


def rewritten(folder, rename=lambda name: name, config=None, change=lambda tensors: tensors):
    """The checkpoint in `folder` with other names, config keys and tensors."""
    tensors = {rename(name): x.clone() for name, x in load_file(folder / "model.safetensors").items()}
    save_file(change(tensors), folder / "model.safetensors")
    given = {**read_json(folder / "config.json"), **(config or {})}
    write_json(folder / "config.json", {key: value for key, value in given.items() if value != "left out"})


@pytest.mark.parametrize("rename", [lambda name: f"model.{name}", lambda name: name.replace("midlayer.", "layers.0."),
                                    lambda name: "model." + name.replace("midlayer.", "layers.0.")])
def test_other_prefixes(tmp_path, facts, rename):
    model = drafter(facts())
    export(model, tmp_path, target_layers=8)
    rewritten(tmp_path, rename)
    assert torch.equal(logits(loaded(tmp_path, facts(), model.embed_tokens)), logits(model))


def test_a_nested_config_a_bf16_file_an_index_and_no_t2d(tmp_path, facts):
    """As others publish: bfloat16 weights, int32 d2t, shards behind an index, an inv_freq, 2048 positions; the logits
    are those of a forward written apart, over the reloaded weights."""
    model = drafter(facts(max_positions=4096))
    export(model, tmp_path, target_layers=8, dtype="bfloat16")
    given = read_json(tmp_path / "config.json")
    tensors = load_file(tmp_path / "model.safetensors")
    written = tensors | {"d2t": tensors["d2t"].int(), "midlayer.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    del written["t2d"]
    names = sorted(written)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: written[name].clone() for name in part}, tmp_path / file)
    (tmp_path / "model.safetensors").unlink()
    write_json(tmp_path / "model.safetensors.index.json",
               {"weight_map": {name: file for file, part in parts.items() for name in part}})
    outer = ("draft_vocab_size", "norm_output", "fc_norm", "norm_before_residual")
    nested = {key: value for key, value in given.items() if key not in (*outer, "eagle3nb")}
    write_json(tmp_path / "config.json", {key: given[key] for key in outer} | {
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "transformer_layer_config": nested | {"max_position_embeddings": 2048}})
    again = loaded(tmp_path, facts(max_positions=4096), model.embed_tokens)
    assert again.config.max_positions == 4096 and again.dtype == torch.float32
    aux, ids = torch.randn(9, 96), torch.arange(20, 30)
    with torch.no_grad():
        (ours,) = steps(again, ids, torch.cat([aux, aux[-1:]]), torch.zeros(10, dtype=torch.int64), [torch.arange(9)])
        theirs = forward(given, tensors, model.embed_tokens[ids[1:]], aux)
        np.testing.assert_allclose(again.logits(ours), theirs, atol=1e-5 * theirs.abs().max())  # float32's rounding


def set_d2t(values):
    """The mapping to these ids, t2d with it."""
    def change(tensors):
        ids = torch.tensor(values)
        return tensors | {"d2t": ids - torch.arange(len(ids)), "t2d": torch.zeros(97, dtype=torch.bool)}
    return change


def swapped(values):
    values[4], values[5] = values[5], values[4]
    return values


@pytest.mark.parametrize(("config", "change", "message"), [
    ({"vocab_size": 128}, None, "vocabulary .vocab_size.: 128, here 97"),
    ({"hidden_size": 64, "target_hidden_size": 64}, None, "hidden size .hidden_size.: 64, here 32"),
    ({"num_hidden_layers": 2}, None, "draft layers .num_hidden_layers.: 2, here 1"),
    ({"norm_before_residual": True}, None, "residual of the normed state .norm_before_residual.: yes, here no"),
    ({"norm_before_fc": True}, None, "norm of the joined states .norm_before_fc.: yes, here no"),
    ({"attention_bias": True}, None, "biases"), ({"hidden_act": "gelu"}, None, "activation"),
    ({"sliding_window": 2048}, None, "attention window"), ({"tie_word_embeddings": True}, None, "head"),
    ({"eagle3nb": {"captured_layers": [2, 15, 27]}}, None, "trained on the layers 2, 15, 27, the states hold 2, 4, 5"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}, None, "captured layers"),
    ({"rope_scaling": {"rope_type": "odd"}}, None, "RoPE of type 'odd' is unknown"),
    ({"num_attention_heads": 8}, None, "q_proj.weight is .32, 64., config.json makes it .64, 64."),
    ({"intermediate_size": "left out"}, None, "config.json has no intermediate_size"),
    ({"draft_vocab_size": None}, None, "config.json has no draft_vocab_size"),
    ({}, lambda t: {k: v for k, v in t.items() if k != "fc.weight"}, "fc.weight is missing"),
    ({}, lambda t: t | {"midlayer.self_attn.q_norm.weight": torch.ones(8)}, "q_norm.weight is not part"),
    ({}, lambda t: t | {"norm.weight": torch.full((32,), float("nan"))}, "not finite"),
    ({}, lambda t: t | {"model.norm.weight": torch.ones(32)}, "norm.weight stands there twice"),
    ({}, lambda t: {k: v for k, v in t.items() if k != "d2t"}, "no d2t"),
    ({}, lambda t: t | {"d2t": t["d2t"].float()}, "d2t is torch.float32"),
    ({}, lambda t: t | {"d2t": t["d2t"][:-1]}, "43 whole numbers"),
    ({}, lambda t: t | {"d2t": IDS}, "d2t maps to 99, outside the target's 97 ids"),
    ({}, set_d2t([-1, *range(1, 43)]), "d2t maps to -1"),
    ({}, set_d2t(swapped(list(range(43)))), "d2t does not ascend: 5 is followed by 4"),
    ({}, set_d2t([0, 0, *range(2, 43)]), "d2t does not ascend: 0 is followed by 0"),
    ({}, lambda t: t | {"t2d": t["t2d"].roll(1)}, "t2d and d2t disagree"),
])
def test_what_does_not_fit_is_refused(tmp_path, facts, config, change, message):
    export(drafter(facts()), tmp_path, target_layers=8)
    finetune.read(tmp_path, facts())
    rewritten(tmp_path, config=config, change=change or (lambda tensors: tensors))
    with pytest.raises(UserError, match=message) as error:
        finetune.read(tmp_path, facts())
    assert "\n" not in str(error.value)


def test_every_fault_is_named_in_one_line(tmp_path, facts):
    export(drafter(facts()), tmp_path, target_layers=8)
    with pytest.raises(UserError) as error:
        finetune.read(tmp_path, facts(vocab=98, hidden=16, layers=12))
    for part in ("vocabulary", "hidden size", "trained on the layers 2, 4, 5, the states hold 2, 6, 9"):
        assert part in str(error.value)


def test_files_that_are_none(tmp_path, facts):
    with pytest.raises(UserError, match="holds no config.json"):
        finetune.read(tmp_path / "nowhere", facts())
    export(drafter(facts()), tmp_path, target_layers=8)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, match="are torn"):
        finetune.read(tmp_path, facts())
    path.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"holds no safetensors.*pytorch_model\.bin"):
        finetune.read(tmp_path, facts())


def test_the_report_tells_coverage_and_differences(tmp_path, facts):
    export(drafter(facts(), intermediate=24, eps=1e-6), tmp_path, target_layers=8)
    counts = np.zeros(97, np.int64)
    counts[[0, 10, 11]] = 4, 3, 2
    rows = finetune.report(finetune.read(tmp_path, facts()), facts(), counts, {0: "<a>", 1: "<b>"})
    assert [tuple(row.values()) for row in rows] == [
        ("draft vocabulary (tokens)", "43", "of 97"), ("generated tokens in it", "77.8%", "of 9"),
        ("template's tokens missing", "<b>", "of 2"), ("MLP width", "24", "40"), ("eps of the norms", "1e-06", "1e-05")]
    assert finetune.read(tmp_path, facts()).vocabulary.ids.tolist() == IDS.tolist()


@pytest.fixture
def run(tmp_path, facts, synthetic_store):
    """run(name, initialise, **settings) trains on 40 rows; its metrics and folder."""
    store = synthetic_store(rows=40, seed=2)

    def start(name, initialise, ids=range(97), stop_after=None, **changes):
        folder = tmp_path / name
        write_json(folder / "vocabulary.json", {"ids": list(ids)})
        settings = Settings(**{"states": "", "drafter": str(folder), "target": "", "epochs": 3, "pack_tokens": 96,
                               "accumulate": 2, "learning_rate": 3e-3, "validation_share": 0.15,
                               "initialise": str(initialise), **changes})
        settings.check()
        calls = iter(range(1, 10_000))
        train(settings, store, facts(), lambda: {"norm.weight": torch.ones(32)}, stop=lambda: next(calls) == stop_after)
        return SimpleNamespace(folder=folder, metrics=read_metrics(folder / "metrics.jsonl"), settings=settings)

    start.store, start.facts = store, facts()
    return start


def losses(metrics, kind="validation"):
    return [line["loss"] for line in metrics if line["kind"] == kind]


def test_training_goes_on_from_there(run, tmp_path):
    """It begins at the exported drafter's own held-out loss, and is better than one from scratch after as many steps.

    The first figure to 1e-5: captured layers are divided by their columns' scale, fc is multiplied by it.
    """
    first = run("first", "random")
    model = DraftModel.load(first.folder, run.store.embedding())
    export(model, tmp_path / "export", target_layers=8)
    tuned = run("tuned", tmp_path / "export", learning_rate=1e-3)
    assert losses(tuned.metrics)[0] == pytest.approx(min(losses(first.metrics)), rel=1e-5)
    assert losses(tuned.metrics)[-1] < losses(tuned.metrics)[0]
    scratch = run("scratch", "random", learning_rate=1e-3)
    assert len(losses(scratch.metrics, "train")) == len(losses(tuned.metrics, "train"))
    assert losses(tuned.metrics)[-1] < 0.9 * losses(scratch.metrics)[-1]


def test_resuming_never_mixes_two_checkpoints(run, tmp_path, facts):
    """The content is the run's identity: a moved folder resumes to the same curve, other weights start anew."""
    model = drafter(facts(), ids=torch.arange(97))
    model.embed_tokens.copy_(run.store.embedding())
    export(model, tmp_path / "export", target_layers=8)
    whole = run("whole", tmp_path / "export", checkpoint_every=2)
    with pytest.raises(KeyboardInterrupt):
        run("halved", tmp_path / "export", checkpoint_every=2, stop_after=4)
    (tmp_path / "export").rename(tmp_path / "moved")
    resumed = run("halved", tmp_path / "moved", checkpoint_every=2)
    np.testing.assert_allclose(losses(resumed.metrics, "train"), losses(whole.metrics, "train"), rtol=1e-6)
    with pytest.raises(KeyboardInterrupt):
        run("mixed", tmp_path / "moved", checkpoint_every=2, stop_after=4)
    rewritten(tmp_path / "moved", change=lambda t: t | {"norm.weight": t["norm.weight"] * 1.1})
    anew = run("mixed", tmp_path / "moved", checkpoint_every=2)
    assert losses(anew.metrics, "train")[0] != losses(whole.metrics, "train")[0]
    assert run_identity(whole.settings, [1], {}, "a") != run_identity(whole.settings, [1], {}, "b")
    assert run_identity(whole.settings, [1], {}, "a") == run_identity(resumed.settings, [1], {}, "a")


@pytest.mark.parametrize(("changes", "message"), [
    ({"norm_output": False}, "its norm_output is true, the run's false"),
    ({"norm_output": True, "fc_norm": True}, "its fc_norm is false, the run's true"),
    ({"norm_output": True, "intermediate": 24}, "its intermediate is 40, the run's 24"),
    ({"norm_output": True, "ids": range(1, 44)}, "43 tokens is not the run's of 43"),
])
def test_settings_and_vocabulary_must_be_the_checkpoints(run, tmp_path, facts, changes, message):
    export(drafter(facts(), norm_output=True), tmp_path / "export", target_layers=8)
    with pytest.raises(UserError, match=message):
        run("refused", tmp_path / "export", **{"ids": IDS.tolist()} | changes)


def test_an_embedding_of_its_own_must_be_the_targets(tmp_path, facts):
    """A copy is dropped, in the target's dtype or a coarser one; another one is refused."""
    model = drafter(facts())
    export(model, tmp_path, target_layers=8)
    settings = Settings("", "", "", initialise=str(tmp_path))
    for copy in (model.embed_tokens, model.embed_tokens.bfloat16()):
        rewritten(tmp_path, change=lambda tensors, copy=copy: tensors | {"embed_tokens.weight": copy})
        found = finetune.start(settings, facts(), model.embed_tokens, IDS.tolist())
        assert "embed_tokens.weight" not in found.tensors
    for other in (model.embed_tokens + 0.1, model.embed_tokens[:-1]):
        with pytest.raises(UserError, match="embed_tokens.weight is not the target's"):
            finetune.start(settings, facts(), other, IDS.tolist())


def test_initialise_is_a_choice_or_a_checkpoint(tmp_path, facts):
    good = asdict(Settings("a", "b", "c"))
    with pytest.raises(UserError, match="fitted, target, head, random, or the folder of an EAGLE-3 checkpoint"):
        Settings.from_json(good | {"initialise": str(tmp_path)})
    export(drafter(facts()), tmp_path, target_layers=8)
    assert Settings.from_json(good | {"initialise": str(tmp_path)}).finetunes
    assert not Settings.from_json(good).finetunes
