"""An independent forward of a Llama: one token, one head, one key at a time, float64, from the files alone."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from eagle3nb.corpus.merged import Corpus
from eagle3nb.states.hf import TransformersTarget


class Witness:
    """Shares no code with the package or Transformers; knows only the checkpoint's files and the paper's formulas."""

    def __init__(self, folder):
        self.config = json.loads((folder / "config.json").read_text())
        self.w = {name: value.astype(np.float64) for name, value in load_file(folder / "model.safetensors").items()}
        self.head = self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"])

    def norm(self, x, name):
        return x / math.sqrt(np.mean(x * x) + self.config["rms_norm_eps"]) * self.w[name]

    def rope(self, x, position):
        half = len(x) // 2
        angles = position * self.config["rope_parameters"]["rope_theta"] ** (-np.arange(half) / half)
        a, b = x[:half], x[half:]
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)])

    def residuals(self, ids):
        """The residual stream after 0, 1, … n layers [n + 1, T, h], and the last after the final norm [T, h]."""
        c = self.config
        dh, groups = c["head_dim"], c["num_attention_heads"] // c["num_key_value_heads"]
        streams = [[self.w["model.embed_tokens.weight"][i] for i in ids]]
        for layer in range(c["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            x = [self.norm(v, at + "input_layernorm.weight") for v in streams[-1]]
            project = {n: [(self.w[f"{at}self_attn.{n}_proj.weight"] @ v).reshape(-1, dh) for v in x] for n in "qkv"}
            out = []
            for t, stream in enumerate(streams[-1]):
                heads = []
                for head in range(c["num_attention_heads"]):
                    q = self.rope(project["q"][t][head], t)
                    scores = [q @ self.rope(project["k"][j][head // groups], j) / math.sqrt(dh) for j in range(t + 1)]
                    p = np.exp(np.array(scores) - max(scores))
                    p /= p.sum()
                    heads.append(sum(p[j] * project["v"][j][head // groups] for j in range(t + 1)))
                y = stream + self.w[at + "self_attn.o_proj.weight"] @ np.concatenate(heads)
                z = self.norm(y, at + "post_attention_layernorm.weight")
                gate = self.w[at + "mlp.gate_proj.weight"] @ z
                up = self.w[at + "mlp.up_proj.weight"] @ z
                out.append(y + self.w[at + "mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up))
            streams.append(out)
        return np.array(streams), np.array([self.norm(v, "model.norm.weight") for v in streams[-1]])


@pytest.fixture(scope="session")
def witness(tiny_target):
    return Witness(tiny_target)


@pytest.fixture(scope="session")
def target(tiny_target):
    torch.set_num_threads(1)
    return TransformersTarget(tiny_target, torch.float32, "cpu")


@pytest.fixture(scope="session")
def corpus(tiny_corpus):
    return Corpus.open(tiny_corpus)
