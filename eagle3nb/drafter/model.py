"""The EAGLE-3 draft layer (DESIGN section 4), written over gathered slots.

Every method takes rows, not sequences: N slots of one or many documents, at positions inside their documents. Training,
the offline chain and the real decode compose the same few methods and differ only in which keys they let a slot see.

Shapes: N slots, h hidden, V target vocabulary, D draft vocabulary, Hq/Hkv query/key heads, dh head_dim.
Parameter names equal those of the exported checkpoint. The embedding is the target's, frozen, and never saved here.
"""

from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3nb.errors import UserError
from eagle3nb.files import atomic_write, read_json, shown, write_json


@dataclass(frozen=True)
class DraftConfig:
    """Sizes of the draft layer. `rope` is in Transformers' form: rope_type, rope_theta and the type's own keys."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    draft_vocab: int
    eps: float
    rope: dict
    max_positions: int
    norm_output: bool = False
    fc_norm: bool = False

    @classmethod
    def from_target(cls, facts, draft_vocab_size: int, *, norm_output: bool = False, fc_norm: bool = False,
                    **changes) -> "DraftConfig":
        """The target's own shape, heads and RoPE; `changes` replaces single sizes (intermediate, heads, …)."""
        same = ("hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "eps", "max_positions")
        sizes = {name: getattr(facts, name) for name in same} | changes
        return cls(**sizes, rope=rope_parameters(facts.rope), draft_vocab=draft_vocab_size, norm_output=norm_output,
                   fc_norm=fc_norm)

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict) -> "DraftConfig":
        """Strict: an unknown or missing key raises UserError, since guessing a size gives a silently wrong drafter."""
        known = {field.name for field in fields(cls)}
        if unknown := set(values) - known:
            raise UserError(f"draft config has unknown keys {sorted(unknown)}; it is from another version: train again")
        if missing := {field.name for field in fields(cls) if field.default is MISSING} - set(values):
            raise UserError(f"draft config lacks {sorted(missing)}; train again")
        kinds = {"eps": (float, int), "rope": (dict,), "norm_output": (bool,), "fc_norm": (bool,)}
        for name, value in values.items():
            wanted = kinds.get(name, (int,))
            if type(value) not in wanted or (wanted == (int,) and value < 1):
                raise UserError(f"draft config: {name} is {value!r}, not a {wanted[0].__name__}"
                                f"{' of at least 1' if wanted == (int,) else ''}; the file is damaged: train again")
        return cls(**values)


def rope_parameters(rope: dict) -> dict:
    """The target's {"theta", "scaling"} → Transformers' one dict, its type under `rope_type`."""
    scaling = dict(rope.get("scaling") or {})
    kind = scaling.pop("type", None)
    return {"rope_type": kind or "default", "rope_theta": float(rope["theta"]), **scaling}


class RMSNorm(nn.RMSNorm):
    """x / √(mean x² + ε) · w. On a CPU with a gradient of its own: PyTorch's, made of single operations, takes 3 times
    as long to go back; on a GPU it has a kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x, self.weight, self.eps) if x.device.type == "cpu" else super().forward(x)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        kind = torch.promote_types(x.dtype, torch.float32)
        scale = x.to(kind).pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()           # [N, 1]
        normed = (x * scale).to(x.dtype)
        ctx.save_for_backward(normed, weight, scale)
        return normed * weight

    @staticmethod
    def backward(ctx, grad):
        normed, weight, scale = ctx.saved_tensors
        both, dx = grad * normed, None
        if ctx.needs_input_grad[0]:
            along = (both @ weight)[:, None] / grad.shape[-1]                         # of grad · w with normed
            dx = (grad * weight).addcmul_(normed, along, value=-1).mul_(scale.to(grad.dtype))
        return dx, both.sum(0), None


class Attention(nn.Module):
    def __init__(self, c: DraftConfig):
        super().__init__()
        self.q_proj = nn.Linear(2 * c.hidden, c.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.hidden, bias=False)


class MLP(nn.Module):
    def __init__(self, c: DraftConfig):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden, c.intermediate, bias=False)
        self.up_proj = nn.Linear(c.hidden, c.intermediate, bias=False)
        self.down_proj = nn.Linear(c.intermediate, c.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    def __init__(self, c: DraftConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden, eps=c.eps)           # of the embedding
        self.hidden_norm = RMSNorm(c.hidden, eps=c.eps)               # of the fused or own hidden state
        self.post_attention_layernorm = RMSNorm(c.hidden, eps=c.eps)
        self.self_attn = Attention(c)
        self.mlp = MLP(c)


class DraftModel(nn.Module):
    """One draft layer with its own head over D. `embedding` is the target's [V, h], any float dtype, kept as it is."""

    def __init__(self, config: DraftConfig, embedding: Tensor, vocabulary_ids: Tensor):
        super().__init__()
        c = self.config = config
        if tuple(embedding.shape) != (c.vocab, c.hidden):
            raise UserError(f"the target's embedding is {tuple(embedding.shape)}, the drafter expects "
                            f"{(c.vocab, c.hidden)}; it belongs to another target")
        self.fc_norm = nn.ModuleList(RMSNorm(c.hidden, eps=c.eps) for _ in range(3 if c.fc_norm else 0))
        self.fc = nn.Linear(3 * c.hidden, c.hidden, bias=False)
        self.midlayer = MidLayer(c)
        self.norm = RMSNorm(c.hidden, eps=c.eps)
        self.lm_head = nn.Linear(c.hidden, c.draft_vocab, bias=False)
        self.rotary = LlamaRotaryEmbedding(LlamaConfig(
            hidden_size=c.hidden, num_attention_heads=c.heads, head_dim=c.head_dim,
            max_position_embeddings=c.max_positions, rope_parameters=dict(c.rope)))
        ids = torch.as_tensor(vocabulary_ids, dtype=torch.int64)
        self.register_buffer("d2t", ids - torch.arange(len(ids)))
        self.register_buffer("t2d", torch.zeros(c.vocab, dtype=torch.bool).index_fill_(0, ids, True))
        self.register_buffer("embed_tokens", embedding, persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def vocabulary_ids(self) -> Tensor:
        """Target ids of D, ascending, int64 [D]."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def embed(self, tokens: Tensor) -> Tensor:
        """int [N] → [N, h]."""
        return F.embedding(tokens.long(), self.embed_tokens).to(self.dtype)

    def fuse(self, aux: Tensor) -> Tensor:
        """Three captured layers [N, 3h] → g [N, h]; step 0 only."""
        return self.fc(self.normed_chunks(aux.to(self.dtype)))

    def normed_chunks(self, aux: Tensor) -> Tensor:
        """fc's input [N, 3h]: aux as it is, or each layer's chunk normed (EAGLE-3.1, fc_norm)."""
        if not self.fc_norm:
            return aux
        return torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, aux.chunk(3, -1), strict=True)], -1)

    def qkv(self, e: Tensor, g: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Token embedding and hidden state [N, h] → q [N, Hq, dh], k, v [N, Hkv, dh]; RoPE on q and k."""
        u, angles = self.attention_input(e, g), self.angles(positions)
        return self.q(u, angles), *self.kv(u, angles)

    # The parts of qkv apart: at step 0 keys are needed at every slot, queries only where a slot counts.
    def attention_input(self, e: Tensor, g: Tensor) -> Tensor:
        return torch.cat([self.midlayer.input_layernorm(e), self.midlayer.hidden_norm(g)], -1)        # [N, 2h]

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [N, 1, dh] of RoPE positions [N]."""
        cos, sin = self.rotary(self.fc.weight, positions[None])
        return cos[0][:, None], sin[0][:, None]

    def q(self, u: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        c = self.config
        return rotate(self.midlayer.self_attn.q_proj(u).view(-1, c.heads, c.head_dim), *angles)

    def kv(self, u: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        c, layer = self.config, self.midlayer.self_attn
        k = rotate(layer.k_proj(u).view(-1, c.kv_heads, c.head_dim), *angles)
        return k, layer.v_proj(u).view(-1, c.kv_heads, c.head_dim)

    def block(self, g: Tensor, attn: Tensor) -> Tensor:
        """Residual g [N, h] and attention's output [N, Hq·dh] → h2 [N, h]. The residual is the raw g, not its norm."""
        h1 = g + self.midlayer.self_attn.o_proj(attn)
        return h1 + self.midlayer.mlp(self.midlayer.post_attention_layernorm(h1))

    def logits(self, h2: Tensor) -> Tensor:
        """[N, h] → [N, D]."""
        return self.lm_head(self.norm(h2))

    def next_hidden(self, h2: Tensor) -> Tensor:
        """The g of the next step: h2 as it is (EAGLE-3) or normed (EAGLE-3.1, norm_output)."""
        return self.norm(h2) if self.config.norm_output else h2

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Indices into D → target ids."""
        return draft_ids + self.d2t[draft_ids]

    def save(self, folder: str | Path, provenance: dict | None = None) -> None:
        """`folder`/model.safetensors, then config.json (each atomic); `provenance` is kept beside the sizes."""
        folder = Path(folder)
        with atomic_write(folder / "model.safetensors", "wb") as handle:
            handle.write(save({name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}))
        write_json(folder / "config.json", {"draft": self.config.to_json(), "provenance": provenance or {}})

    @classmethod
    def load(cls, folder: str | Path, embedding: Tensor) -> "DraftModel":
        """The saved drafter over the target's embedding [V, h]. Raises UserError where either does not fit."""
        folder = Path(folder)
        config = DraftConfig.from_json(read_json(folder / "config.json").get("draft", {}))
        try:
            tensors = load_file(folder / "model.safetensors")
            model = cls(config, embedding, tensors["d2t"] + torch.arange(len(tensors["d2t"])))
            model.load_state_dict(tensors)
        except (OSError, KeyError, RuntimeError, SafetensorError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{shown(folder)} holds no whole drafter ({reason}); train again") from error
        for parameter in model.parameters():      # not model.to: the embedding keeps its dtype, uncopied
            parameter.data = parameter.data.to(tensors["fc.weight"].dtype)
        return model


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE by halves, as Llama's: x [N, H, dh], cos and sin [N, 1, dh]."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin
