"""Small random checkpoints of every shape in use, made by Transformers' own classes: each is read through its wrapper.

Facts, embedding, head, final norm, captured layers, decoding, extraction and the probe; the model that was saved is the
witness, in memory, and never loaded again.
"""

import io
import json
from contextlib import redirect_stderr

import numpy as np
import pytest
import tiny
import torch
import transformers as t
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eagle3nb.errors import UserError
from eagle3nb.states import reference as references
from eagle3nb.states import target as targets
from eagle3nb.states.extract import extract
from eagle3nb.states.hf import TransformersTarget
from eagle3nb.states.probe import probe
from eagle3nb.states.store import Store

H, V = 64, 256
IDS = [list(range(5, 40)), [1, 90, 7, 7, 7, 60, 33, 2, 11]]
TEXT = {"hidden_size": H, "intermediate_size": 2 * H, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": V, "max_position_embeddings": 512, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 2, "tie_word_embeddings": False, "initializer_range": 0.12}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
MLA = {key: value for key, value in TEXT.items() if key != "head_dim"} | {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_mtp_layers": 0,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 128,
                        "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "out_hidden_size": H, "num_heads": 2, "intermediate_size": 32}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
TOKENS = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253}


def wrapped(config, text, vision, **more):
    return config(text_config=text, vision_config=vision, tie_word_embeddings=False, **more)


MODELS = {
    "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**TEXT)),
    "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**TEXT | {"head_dim": 24})),
    "qwen3_moe": lambda: t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**TEXT, **EXPERTS, moe_intermediate_size=32)),
    "gpt_oss": lambda: t.GptOssForCausalLM(t.GptOssConfig(**TEXT, **EXPERTS, sliding_window=16)),
    "deepseek_v3": lambda: t.DeepseekV3ForCausalLM(t.DeepseekV3Config(**MLA)),
    "kimi_k25": lambda: t.Kimi_K25ForConditionalGeneration(wrapped(
        t.Kimi_K25Config, {"model_type": "kimi_k2", **MLA}, {k: v for k, v in VISION.items() if "size" not in k}
        | {"hidden_size": 32, "intermediate_size": 32, "pos_emb_height": 4, "pos_emb_width": 4},
        projection_hidden_size=32, **TOKENS)),
    "llava": lambda: t.LlavaForConditionalGeneration(wrapped(
        t.LlavaConfig, t.LlamaConfig(**TEXT), t.CLIPVisionConfig(**VISION), image_token_index=250)),
    "mistral3": lambda: t.Mistral3ForConditionalGeneration(wrapped(
        t.Mistral3Config, t.MistralConfig(**TEXT, sliding_window=16), t.PixtralVisionConfig(**VISION),
        image_token_index=250)),
    "qwen2_5_vl": lambda: t.Qwen2_5_VLForConditionalGeneration(wrapped(
        t.Qwen2_5_VLConfig, TEXT | MROPE, QWEN_VISION, **TOKENS)),
    "qwen3_vl": lambda: t.Qwen3VLForConditionalGeneration(wrapped(
        t.Qwen3VLConfig, TEXT | MROPE, QWEN_VISION | {"deepstack_visual_indexes": [0]}, **TOKENS)),
    "gemma3": lambda: t.Gemma3ForConditionalGeneration(t.Gemma3Config(
        text_config=TEXT | {"tie_word_embeddings": True, "sliding_window": 16}, vision_config=VISION,
        mm_tokens_per_image=4, image_token_index=250, boi_token_index=251, eoi_token_index=252)),
    "llama4": lambda: t.Llama4ForConditionalGeneration(wrapped(
        t.Llama4Config, TEXT | EXPERTS | {"intermediate_size_mlp": 2 * H, "num_experts_per_tok": 1},
        VISION | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32})),
}
STORED_UNDER = dict.fromkeys(("llava", "mistral3", "gemma3", "kimi_k25", "llama4"), "language_model.model.") | {
    "qwen3_vl": "model.language_model."}


def save(model, folder):
    """As a hub has it: files of some kilobytes with an index."""
    with redirect_stderr(io.StringIO()):
        model.save_pretrained(folder, max_shard_size="200KB")
    tiny.make_tokenizer().save_pretrained(folder)
    # Transformers 5.19 writes Kimi's decoder layers as its vision blocks; the hub's checkpoint has `layers`.
    index = folder / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    if any("language_model.model.blocks." in name for name in whole["weight_map"]):
        rename = lambda name: name.replace("language_model.model.blocks.", "language_model.model.layers.")  # noqa: E731
        for file in sorted(set(whole["weight_map"].values())):
            save_file({rename(n): v for n, v in load_file(folder / file).items()}, folder / file, {"format": "pt"})
        whole["weight_map"] = {rename(name): file for name, file in whole["weight_map"].items()}
        index.write_text(json.dumps(whole))
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["model_type"], config["architectures"] = "kimi_k2", ["KimiK25ForConditionalGeneration"]
        (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module", params=list(MODELS))
def checkpoint(request, tmp_path_factory):
    """(name, folder, the model that was saved)."""
    torch.manual_seed(0)
    model = MODELS[request.param]().eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if "norm" in name:  # else all ones, and a norm too many would not show
            weight.data = torch.exp(0.5 * torch.randn_like(weight))
    folder = tmp_path_factory.mktemp(request.param)
    save(model, folder)
    return request.param, folder, model


@pytest.fixture(scope="module")
def engine(checkpoint):
    return TransformersTarget(checkpoint[1], torch.float32, "cpu")


def naive(model, ids):
    """(hidden states of every layer, logits [T, V]) of the saved model's whole forward."""
    out = model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    return out.hidden_states, out.logits[0]


def test_facts(checkpoint):
    name, folder, model = checkpoint
    text, facts = model.config.get_text_config(), targets.facts_of(folder)
    assert (facts.hidden, facts.layers, facts.vocab, facts.heads) == (H, 8, V, 4) and facts.eos == (2,)
    assert facts.max_positions == 512 and facts.eps == text.rms_norm_eps
    assert facts.tie_embedding is (name == "gemma3")
    rope = text.rope_parameters
    rope = rope.get("full_attention", rope)
    assert facts.rope["theta"] == rope["rope_theta"]
    if name in ("deepseek_v3", "kimi_k25"):
        assert facts.rope["scaling"]["factor"] == 4.0 and facts.head_dim == 16
    assert facts.head_dim == (24 if name == "qwen3" else 16)


def test_weights_under_their_prefix(checkpoint):
    name, folder, model = checkpoint
    stored = targets.weight_files(folder)
    assert STORED_UNDER.get(name, "model.") + "embed_tokens.weight" in stored and len(set(stored.values())) > 1
    body = model.get_decoder()
    body = getattr(body, "model", body)
    assert torch.equal(targets.embedding(folder), model.get_input_embeddings().weight)
    assert torch.equal(targets.lm_head(folder), model.get_output_embeddings().weight)
    assert torch.equal(targets.final_norm(folder), body.norm.weight)
    assert any("q_" in key for key in targets.layer_weights(folder, 7))


def test_captured_layers_last_and_logits(checkpoint, engine):
    _, _, model = checkpoint
    for ids, (aux, last) in zip(IDS, engine.capture(IDS), strict=True):
        streams, logits = naive(model, ids)
        expected = torch.cat([streams[layer][0] for layer in (2, 4, 5)], -1)
        assert (aux - expected).norm() < 1e-5 * expected.norm()
        assert (last - streams[-1][0]).norm() < 1e-5 * streams[-1][0].norm()
        assert (engine.logits(last) - logits).norm() < 1e-5 * logits.norm()


def test_greedy_text_is_that_of_whole_forwards(checkpoint, engine):
    """24 tokens after 4 and after 20: beyond the window of 16 where there is one."""
    _, _, model = checkpoint
    prompts = [[1, 70, 80, 90], list(range(30, 50))]
    answers = engine.generate(prompts, max_new_tokens=24)
    for prompt, answer in zip(prompts, answers, strict=True):
        _, logits = naive(model, prompt + answer)
        own = logits[len(prompt) - 1 : -1]
        chosen = own.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert (own.amax(-1) - chosen <= 1e-4 * own.std(-1)).all()


def test_the_final_norm_and_the_first_layers_alone(checkpoint):
    _, folder, model = checkpoint
    streams, _ = naive(model, IDS[0])
    rest, sizes = references.parameter_counts(folder, 8)
    assert rest + sum(sizes) == sum(p.numel() for p in {id(p): p for p in model.parameters()}.values()) + buffers(model)
    part, what = references.load_reference(folder, (2, 4, 5), limit=4 * (rest + sum(sizes[:3])))
    assert part.depth == 3 and what.startswith("the first 3 of 8 layers")
    residual = part.streams(IDS[0]).residual
    assert (residual[:4] - torch.cat(streams[:4])).norm() < 1e-5 * torch.cat(streams[:4]).norm()
    whole, _ = references.load_reference(folder, (2, 4, 5))
    found = whole.streams(IDS[0])
    assert (references.final_norm(folder)(found.residual[-1]) - streams[-1][0]).norm() < 1e-5 * streams[-1][0].norm()


def buffers(model) -> int:
    """Elements that are stored and are no parameters: the routers' corrections."""
    return sum(b.numel() for name, b in model.named_buffers() if name in model.state_dict())


def test_extraction_and_the_probe(checkpoint, engine, corpus, tmp_path):
    name, _, model = checkpoint
    found = probe(engine, corpus, rows=6, new_tokens=10, policy_tokens=64)
    assert {row["result"] for row in found["checks"]} == {"holds"} and found["reference"].startswith("all 8 layers")
    assert all(row["nearest neighbour"] > 0.1 for row in found["layers"])
    extract(corpus, engine, tmp_path, dtype="fp32", batch_tokens=512, shard_tokens=900)
    store = Store.open(tmp_path)
    store.check_corpus(corpus)
    row = store.row(11)
    streams, logits = naive(model, row.ids.tolist())
    expected = torch.cat([streams[layer][0] for layer in (2, 4, 5)], -1)
    apart = (row.aux - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert (apart < 1e-4).float().mean() > (0.9 if "moe" in name or "oss" in name else 0.99)
    agree = logits.argmax(-1)[torch.from_numpy(row.last_positions).long()].numpy() == row.teacher_argmax
    assert agree.mean() > 0.95 and np.array_equal(row.ids, corpus.row(11)[0])


# ---------------------------------------------------------------------------------------------------- odd spellings


def test_sizes_that_a_wrapper_leaves_to_its_class(tmp_path):
    """LLaVA 1.5's text_config on the hub has its vocabulary and its eps, and no sizes."""
    config = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "vision_config": {
        "model_type": "clip_vision_model"}, "text_config": {"model_type": "llama", "vocab_size": 32064,
                                                            "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = targets.facts_of(tmp_path)
    assert (facts.hidden, facts.layers, facts.heads, facts.intermediate) == (4096, 32, 32, 11008)
    assert (facts.vocab, facts.eps, facts.max_positions) == (32064, 1e-5, 4096)


@pytest.mark.parametrize("key", ["language_config", "llm_config"])
def test_other_names_of_the_text_config(tmp_path, key):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"], key: TEXT}))
    assert targets.facts_of(tmp_path).hidden == H


@pytest.mark.parametrize("prefix, head", [("thinker.model.", "thinker.lm_head.weight"),
                                          ("language.model.", "language.lm_head.weight"),
                                          ("model.text_model.", "lm_head.weight")])
def test_any_prefix_that_holds_an_embedding_beside_a_norm(tmp_path, prefix, head):
    weights = {name: torch.randn(V, H) for name in ("embed", "head", "other")} | {"norm": torch.randn(H)}
    stored = {prefix + "embed_tokens.weight": weights["embed"], prefix + "norm.weight": weights["norm"],
              head: weights["head"], "audio_tower.embed_tokens.weight": weights["other"],
              prefix + "layers.8.embed_tokens.weight": torch.randn(V, H)}  # of multi-token prediction
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(TEXT | {"tie_word_embeddings": True}))
    assert torch.equal(targets.embedding(tmp_path), weights["embed"])
    assert torch.equal(targets.lm_head(tmp_path), weights["head"])  # stored, so it is no tied one whatever config says
    assert torch.equal(targets.final_norm(tmp_path), weights["norm"])
    assert not targets.facts_of(tmp_path).tie_embedding


def test_a_head_that_is_not_stored_is_the_embedding(tiny_target, tmp_path):
    """Gemma's config on the hub leaves tie_word_embeddings to its class."""
    weights = load_file(tiny_target / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tiny_target / "config.json").read_text())
    del config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert targets.facts_of(tmp_path).tie_embedding
    assert torch.equal(targets.lm_head(tmp_path), weights["model.embed_tokens.weight"])


def test_weights_that_are_missing_are_not_made_up(tiny_target, tmp_path):  # TS #38, #39
    weights = load_file(tiny_target / "model.safetensors")
    del weights["model.layers.3.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((tiny_target / "config.json").read_text())
    with pytest.raises(UserError, match="no weights for model.layers.3.mlp.up_proj.weight; copy the whole checkpoint"):
        TransformersTarget(tmp_path, torch.float32, "cpu")
    with safe_open(tiny_target / "model.safetensors", "pt") as handle:
        assert "model.layers.3.mlp.up_proj.weight" in handle.keys()  # noqa: SIM118 (no mapping)


def test_a_model_that_transformers_has_not(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TEXT | {"model_type": "of_tomorrow"}))
    with pytest.raises(UserError, match="Transformers cannot load the target"):
        TransformersTarget(tmp_path, torch.float32, "cpu")
