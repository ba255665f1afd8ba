"""A drafter is read only together with the target that it was trained for."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3nb.acceptance.pair import check_export, load_drafter, load_target
from eagle3nb.drafter import export
from eagle3nb.errors import UserError
from eagle3nb.states.target import target_identity


@pytest.fixture
def saved(world, tmp_path):
    identity = target_identity(world.folder)
    store = {"target config": identity["config"], "target weights": identity["weights"],
             "tokenizer": identity["tokenizer"], "dtype": "bf16"}
    world.drafter.save(tmp_path / "drafter", {"store": store})
    return tmp_path / "drafter"


def change(folder, edit):
    config = json.loads((folder / "config.json").read_text())
    edit(config["provenance"])
    (folder / "config.json").write_text(json.dumps(config))


def test_its_own_target(world, saved):
    drafter = load_drafter(saved, world.folder)
    assert torch.equal(drafter.fc.weight, world.drafter.fc.weight) and not drafter.fc.weight.requires_grad
    assert torch.equal(drafter.embed_tokens, world.drafter.embed_tokens)


@pytest.mark.parametrize("name", ["target config", "target weights", "tokenizer"])
def test_another_target_is_refused(world, saved, name):
    change(saved, lambda provenance: provenance["store"].update({name: "0" * 32}))
    with pytest.raises(UserError, match=f"another target .*differs in: {name}"):
        load_drafter(saved, world.folder)


def test_engines(world, monkeypatch):
    """SGLang is asked for float32 too, whatever the checkpoint's dtype; tests/sglang runs it."""
    target = load_target(world.folder, "transformers")
    assert (target.dtype, target.engine) == (torch.float32, "transformers")
    monkeypatch.setattr("eagle3nb.states.sglang.SGLangTarget", lambda *given, **options: (given, options))
    assert load_target(world.folder, "sglang", tensor_parallel=2) == ((world.folder,),
                                                                      {"tensor_parallel": 2})
    with pytest.raises(UserError, match="engine 'vllm' is unknown; choose transformers or sglang"):
        load_target(world.folder, "vllm")


def test_an_export_is_reloaded_and_compared(world, tmp_path):
    export.export(world.drafter, tmp_path, target_layers=8)
    assert check_export(world.drafter, tmp_path) <= 1e-5
    changed = load_file(tmp_path / "model.safetensors")
    changed["fc.weight"][0, 0] += 0.01
    save_file(changed, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="do not serve it"):
        check_export(world.drafter, tmp_path)


def test_weights_that_are_no_numbers_are_not_walked(world, saved):
    changed = load_file(saved / "model.safetensors")
    changed["midlayer.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(changed, saved / "model.safetensors")
    with pytest.raises(UserError, match="midlayer.mlp.up_proj.weight holds NaN"):
        load_drafter(saved, world.folder)


def test_no_drafter_and_one_without_origin(world, saved, tmp_path):
    with pytest.raises(UserError, match="run the training stage first"):
        load_drafter(tmp_path / "nowhere", world.folder)
    change(saved, lambda provenance: provenance.clear())
    with pytest.raises(UserError, match="does not say which target"):
        load_drafter(saved, world.folder)
