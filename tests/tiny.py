"""A tiny target and a tiny merged corpus: real files through the real code paths, in a second or two.

Tests get them as the fixtures `tiny_target` (a model directory) and `tiny_corpus` (a merged corpus directory) of
conftest.py, made once a session. Build others with `make_target` and `make_corpus`.
"""

import io
import json
from contextlib import redirect_stderr
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

UNKNOWN, START, END = 0, 1, 2  # <unk>, <|im_start|>, <|im_end|>
CHATML = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' "
          "+ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def make_target(folder: Path, *, layers: int = 8, hidden: int = 64, vocab: int = 256, tie: bool = False, seed: int = 0,
                **config) -> Path:
    """A random Llama with a ChatML tokenizer of single characters. Weights of std 0.15: its text is not one token."""
    torch.manual_seed(seed)
    settings = LlamaConfig(**{
        "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": hidden // 4, "vocab_size": vocab, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": tie, "initializer_range": 0.15, "bos_token_id": START, "eos_token_id": END,
        "pad_token_id": END, **config})
    model = LlamaForCausalLM(settings)
    for name, weight in model.named_parameters():
        if "norm" in name:  # as a trained model's: a norm too many, or one without its weight, must show
            weight.data = torch.exp(0.7 * torch.randn_like(weight))
    with redirect_stderr(io.StringIO()):  # its progress bar
        model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return Path(folder)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Newline and printable ASCII, a token a character (ids from 3 on), and three special tokens."""
    characters = ["\n", *(chr(c) for c in range(32, 127))]
    vocab = {"<unk>": UNKNOWN, "<|im_start|>": START, "<|im_end|>": END} | {c: 3 + i for i, c in enumerate(characters)}
    tokenizer = Tokenizer(BPE(vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<|im_start|>", "<|im_end|>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<|im_start|>",
                                   eos_token="<|im_end|>", pad_token="<|im_end|>", chat_template=CHATML)


def random_row(rng: np.random.Generator, turns: int, longest: int = 40) -> dict:
    """{"input_ids", "loss_mask"} of a ChatML conversation of random characters; markers and turns as a real one."""
    tokenizer = make_tokenizer()
    ids, mask = [], []
    for _ in range(turns):
        for role in ("user", "assistant"):
            text = "".join(chr(c) for c in rng.integers(97, 123, int(rng.integers(4, longest))))
            head = tokenizer.encode(f"<|im_start|>{role}\n", add_special_tokens=False)
            body = [*tokenizer.encode(text, add_special_tokens=False), END]
            tail = tokenizer.encode("\n", add_special_tokens=False)
            ids += head + body + tail
            mask += [0] * len(head) + [int(role == "assistant")] * len(body) + [0] * len(tail)
    return {"input_ids": ids, "loss_mask": mask}


def make_corpus(folder: Path, *, rows: int = 24, vocab: int = 256, max_seq_len: int = 128, seed: int = 0) -> Path:
    """Two datasets of `rows` rows in all, merged by the project's own merge; returns the corpus directory."""
    from eagle3nb.corpus.masks import find_markers
    from eagle3nb.corpus.merge import merge
    from eagle3nb.corpus.records import find_sources

    rng = np.random.default_rng(seed)
    for name, count in (("A2_chat", rows // 2), ("B1_tools", rows - rows // 2)):
        path = Path(folder) / "data" / name / "part-000.jsonl"
        path.parent.mkdir(parents=True)
        lines = [json.dumps(random_row(rng, int(rng.integers(1, 4)))) for _ in range(count)]
        path.write_text("\n".join(lines) + "\n")
    merge(find_sources(Path(folder) / "data"), Path(folder) / "corpus", max_seq_len=max_seq_len, seed=seed,
          vocab_size=vocab, markers=find_markers(make_tokenizer()))
    return Path(folder) / "corpus"
