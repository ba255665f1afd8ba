"""Batched decoding with continuous refill, on the model's own forward.

A finished row leaves the batch at once and a waiting prompt takes its place, so every step reads the weights for a
full batch: on a CPU that read is most of a step. Two more costs of the usual path are avoided: the KV cache is written
in place (growing it copies all of it each step), and grouped-query attention reads each key once (repeating them for
every query head copies the cache three times over for SmolLM2). A model with windows or recurrent layers is decoded
prompt by prompt on Transformers' own cache instead.

Each prompt samples from its own generator, seeded by the seed and the prompt's ids, so its text does not depend on
which prompts share its batch (up to floating-point ties).
"""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
import xxhash
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from eagle3nb.errors import UserError

ATTENTION = "eagle3nb_sdpa"
FEW = 16  # queries a row
TOP = 512  # top-p looks at this many tokens first; the full sort of 49,152 is the exception


def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """SDPA, except for a few queries a row under a mask (a batched decode step, a verify): there, a KV head's queries
    stand in one block [B, Hkv, G·n, dh], which reads its keys once."""
    B, Hq, n, dh = query.shape
    groups = Hq // key.shape[1]
    if n > FEW or attention_mask is None or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    mask = attention_mask if n == 1 else attention_mask.repeat(1, 1, groups, 1)  # a KV head's queries: head, then token
    out = F.scaled_dot_product_attention(query.reshape(B, key.shape[1], groups * n, dh), key, value, attn_mask=mask,
                                         scale=scaling)
    return out.view(B, Hq, n, value.shape[-1]).transpose(1, 2), None


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


class SlotCache(Cache):
    """Keys and values of B slots [B, Hkv, width, dh] a layer, written in place.

    `rows` says which slots a forward is about, `places` [b, n] where its tokens stand, `seen` how many positions its
    attention may look at. Slots in use are always the first ones, so reading them copies nothing.
    """

    def __init__(self, slots: int, width: int):
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.slots, self.width, self.buffers = slots, width, {}
        self.rows = self.places = None
        self.seen = 0

    def aim(self, rows: slice, places: torch.Tensor, seen: int) -> None:
        self.rows, self.places, self.seen = rows, places, seen

    def update(self, key, value, layer: int, *args, **kwargs):
        if layer not in self.buffers:
            self.buffers[layer] = [t.new_zeros(self.slots, t.shape[1], self.width, t.shape[3]) for t in (key, value)]
        at = torch.arange(self.places.shape[0], device=key.device)[:, None]
        out = []
        for buffer, fresh in zip(self.buffers[layer], (key, value), strict=True):
            mine = buffer[self.rows]
            mine[at, :, self.places] = fresh.transpose(1, 2)  # [b, n, Hkv, dh]
            out.append(mine[:, :, : self.seen])
        return out

    def move(self, source: int, target: int, length: int) -> None:
        """Slot `target` becomes a copy of slot `source`, which holds `length` positions."""
        for pair in self.buffers.values():
            for buffer in pair:
                buffer[target, :, :length] = buffer[source, :, :length]


class ChainCache(SlotCache):
    """One sequence of at most `width` tokens; `crop` as Transformers' own caches have it.

    What is cropped stays in the buffers, is never looked at, and the next tokens overwrite it.
    """

    def __init__(self, width: int):
        super().__init__(1, width)
        self.length = 0

    def grow(self, count: int, device) -> torch.Tensor:
        """Aim at the next `count` tokens; their attention mask bool [1, 1, count, length]."""
        places = torch.arange(self.length, self.length + count, device=device)
        self.length += count
        self.aim(slice(0, 1), places[None], self.length)
        return (torch.arange(self.length, device=device) <= places[:, None])[None, None]

    def update(self, key, value, layer: int, *args, **kwargs):
        """Keys and values [1, Hkv, n, dh] of the tokens aimed at → those of all tokens, views of the buffers."""
        if layer not in self.buffers:
            self.buffers[layer] = [t.new_empty(1, t.shape[1], self.width, t.shape[3]) for t in (key, value)]
        for buffer, fresh in zip(self.buffers[layer], (key, value), strict=True):
            buffer[:, :, self.length - fresh.shape[2]:self.length] = fresh
        return [buffer[:, :, :self.length] for buffer in self.buffers[layer]]

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens; a negative number removes as many."""
        self.length = self.length + length if length < 0 else min(length, self.length)


@dataclass
class Row:
    """One prompt on its way: what it has, how much is left, its own random numbers."""

    index: int
    prompt: list[int]
    random: np.random.Generator
    new: list[int] = field(default_factory=list)
    left: int = -1  # greedy tokens still wanted past the end; −1: the end is not reached

    @property
    def length(self) -> int:  # positions that the cache holds before the newest token goes in
        return len(self.prompt) + len(self.new) - 1


def generate(target, prompts, *, max_new_tokens: int, temperature: float, top_p: float, seed, stop_ids, beyond: int,
             batch: int, done) -> list[list[int]]:
    """Decode every prompt to its first stop id or `max_new_tokens`, then `beyond` greedy tokens more (included).

    `seed` is one int, or one for each prompt (several samples of one prompt need different ones). `done(index, ids)`
    is called as each prompt finishes, so that a caller can keep what it has. Raises UserError for an empty prompt and
    for one that would outgrow the target's positions.
    """
    if not prompts:
        return []
    check(target, prompts, max_new_tokens + beyond)
    seeds = [seed] * len(prompts) if isinstance(seed, int) else seed
    stops = frozenset(stop_ids)
    # Longest first: prompts of like length are prefilled together, and the short ones fill the tail.
    order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
    waiting = [Row(i, list(map(int, prompts[i])), own_random(seeds[i], prompts[i])) for i in order]
    width = max(map(len, prompts)) + max_new_tokens + beyond
    slots = min(batch, len(prompts))
    cache = SlotCache(slots, width)
    active, answers = [], [None] * len(prompts)

    def take(rows, last):
        """Sample a token for each of `rows` from `last` [b, h]; mark those that reached their end."""
        tokens = pick(target.logits(last), rows, temperature, top_p)
        for row, token in zip(rows, tokens, strict=True):
            row.new.append(token)
            if row.left >= 0:
                row.left -= 1
            elif token in stops or len(row.new) == max_new_tokens:
                row.left = beyond

    if not batched(target):
        for row in waiting:
            alone(target, row, take)
            answers[row.index] = row.new
            if done:
                done(row.index, row.new)
        return answers
    while waiting or active:
        free = slots - len(active)
        if waiting and (free >= max(1, slots // 8) or not active):
            fresh, waiting = waiting[:free], waiting[free:]
            take(fresh, prefill(target, cache, fresh, len(active)))
            active += fresh
        else:
            take(active, step(target, cache, active))
        for place in reversed([i for i, row in enumerate(active) if row.left == 0]):
            row, mover = active[place], active.pop()
            if mover is not row:  # the last slot's row moves into the hole
                cache.move(len(active), place, mover.length)
                active[place] = mover
            answers[row.index] = row.new
            if done:
                done(row.index, row.new)
    return answers


def check(target, prompts, room: int) -> None:
    limit = target.facts.max_positions
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise UserError(f"prompt {index} is empty; give it at least one token")
        if len(prompt) + room > limit:
            raise UserError(f"prompt {index} has {len(prompt)} tokens; with {room} new ones it passes the target's "
                            f"{limit} positions; shorten it or lower max_new_tokens")


def batched(target) -> bool:
    """Do the masks below say all that a layer may look at? Windows, chunks and recurrent layers need their own."""
    config = target.body.config
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    plain = set(kinds) == {"full_attention"} if kinds else not window or window >= target.facts.max_positions
    return plain and config._attn_implementation == ATTENTION


def alone(target, row: Row, take) -> None:
    """Decode one prompt on Transformers' own cache, which knows every kind of layer: slow, right for any model."""
    ids, cache = row.prompt, None
    while row.left:
        _, last, cache = target.forward(torch.tensor([ids]), cache)
        take([row], last[-1:])
        ids = row.new[-1:]


def own_random(seed: int, prompt) -> np.random.Generator:
    return np.random.default_rng(xxhash.xxh3_64_intdigest(np.asarray(prompt, np.int32).tobytes(), seed=seed))


def prefill(target, cache: SlotCache, rows: list[Row], first: int) -> torch.Tensor:
    """Run the rows' prompts into the slots from `first` on; the last hidden state of each [b, h]."""
    lengths = torch.tensor([len(row.prompt) for row in rows])
    width = int(lengths.max())
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    for row, line in zip(rows, ids, strict=True):
        line[: len(row.prompt)] = torch.tensor(row.prompt)
    places = torch.arange(width).expand(len(rows), width)
    cache.aim(slice(first, first + len(rows)), places.to(target.device), width)
    # An explicit mask, since the cache holds other rows too; the pads behind a prompt are overwritten as it grows.
    mask = torch.ones(width, width, dtype=torch.bool).tril().expand(len(rows), 1, width, width)
    last = run(target, cache, ids, mask)
    return last[torch.arange(len(rows)), lengths - 1]


def step(target, cache: SlotCache, rows: list[Row]) -> torch.Tensor:
    """One token of every active row; the last hidden states [b, h]."""
    places = torch.tensor([[row.length] for row in rows])  # [b, 1]
    seen = int(places.max()) + 1
    cache.aim(slice(0, len(rows)), places.to(target.device), seen)
    mask = (torch.arange(seen) <= places)[:, None, None, :]  # [b, 1, 1, seen]
    return run(target, cache, torch.tensor([[row.new[-1]] for row in rows]), mask)[:, 0]


def run(target, cache: SlotCache, ids, mask) -> torch.Tensor:
    out = target.body(input_ids=ids.to(target.device), attention_mask=mask.to(target.device),
                      position_ids=cache.places, past_key_values=cache, use_cache=True)
    target.kept.clear()
    return out.last_hidden_state


def pick(logits: torch.Tensor, rows: list[Row], temperature: float, top_p: float) -> list[int]:
    """A token for each row of logits [b, V]: the argmax past a row's end and at temperature 0, else a sample."""
    greedy = logits.argmax(-1).tolist()
    if temperature <= 0:
        return greedy
    return [greedy[i] if row.left >= 0 else sample(logits[i], temperature, top_p, row.random.random())
            for i, row in enumerate(rows)]


def sample(logits: torch.Tensor, temperature: float, top_p: float, u: float) -> int:
    """The token at quantile u of softmax(logits / temperature), cut to the smallest set that holds top_p."""
    scaled = logits.float() / temperature
    total, mass = scaled.logsumexp(-1), min(top_p, 1.0)
    for count in (min(TOP, scaled.numel()), scaled.numel()):
        values, tokens = scaled.topk(count)
        reached = (values - total).exp().double().cumsum(-1)  # mass of the i + 1 likeliest tokens
        if reached[-1] >= mass:
            break
    kept = min(int((reached < mass).sum()) + 1, count)  # rounding may leave the whole vocabulary just short of 1
    return int(tokens[min(int((reached[:kept] <= u * reached[kept - 1]).sum()), kept - 1)])
