"""What is asked of a template, and that clean rows of many templates are clean."""

import copy
import gzip
import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3nb.corpus.hits import Hits
from eagle3nb.corpus.masks import render
from eagle3nb.corpus.patterns import find
from eagle3nb.corpus.template import BESIDE, mask_hits
from eagle3nb.files import project_root
from eagle3nb.states import embedded

UNPACKED = (project_root() / ".cache" / embedded.NAME / embedded.MARK).exists()
OTHERS = ["llama3", "gemma", "mistral", "deepseek", "qwen3"]
ALL = ["chatml", "kimi", *OTHERS]


def test_the_template_of_chatml(chat):
    assert chat.tokenizer.decode(chat.template.user) == "<|im_start|>user"
    assert chat.tokenizer.decode(chat.template.tail) == "\n"
    assert chat.template.think is None and set(chat.template.open_thoughts) == {0}
    assert chat.template.specials == (("<|im_start|>", True), ("<|im_end|>", True))
    assert "ChatML" not in {name for name, _ in chat.template.foreign}
    assert {"Kimi", "Llama 3", "DeepSeek"} <= {name for name, _ in chat.template.foreign}
    assert pickle.loads(pickle.dumps(chat.template)) == chat.template


def test_the_template_of_kimi(thinker):
    assert thinker.tokenizer.decode(thinker.template.user) == "<|im_user|>"  # by itself: a name may follow
    assert thinker.template.tail == () and thinker.tokenizer.decode(thinker.template.think) == "<think></think>"
    opened = {thinker.tokenizer.decode(ids): n for ids, n in
              zip(thinker.markers.opens, thinker.template.open_thoughts, strict=True)}
    header = "<|im_assistant|>assistant<|im_middle|>"
    assert opened == {header: 0, header + "<think>": 1, header + "<think></think>": 0}
    assert "Kimi" not in {name for name, _ in thinker.template.foreign}


@pytest.mark.parametrize("name", OTHERS)
def test_the_users_header_of_many_templates(kinds, name):
    rows = kinds[name]
    assert rows.tokenizer.decode(rows.template.user) == rows.user


def test_a_header_of_plain_words_is_none(chatml, target):
    tokenizer = copy.deepcopy(chatml)
    tokenizer.chat_template = ("{% for m in messages %}{{ 'the user: ' if m.role == 'user' else '<|im_start|>' }}"
                               "{{ m.content }}<|im_end|>\n{% endfor %}"
                               "{% if add_generation_prompt %}<|im_start|>{% endif %}")
    rows = target(tokenizer)
    assert rows.template.user == () and rows.fault(rows.row("x", "owls", "y", "sing")) == {}


def test_a_beginning_that_opens_every_users_turn_is_no_header_by_itself(chatml, target):
    tokenizer = copy.deepcopy(chatml)
    tokenizer.chat_template = ("{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
                               "{% else %} {{ m.content }} <|im_end|>{% endif %}{% endfor %}")
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    rows = target(tokenizer)
    assert tokenizer.decode(rows.template.user) == "<s>[INST]"
    row = rows.row("x", "owls", "y", "sing")
    assert rows.fault(row) == {} and rows.fault([row[0], *row]) == {}  # two beginnings are not two users
    assert set(rows.fault(rows.ids("<s>[INST] x<s>[INST] y [/INST] owls <|im_end|>"))) == {"roles_malformed"}


@pytest.mark.parametrize("name", ALL)
def test_special_tokens_spelled_as_text_are_found_whatever_stands_beside_them(kinds, name):
    rows = kinds[name]
    tokens = {token for token, _ in rows.template.spelled}
    assert tokens or name == "mistral"
    for token in tokens:
        patterns = [pattern for spelled, pattern in rows.template.spelled if spelled == token]
        for before in BESIDE:
            for after in BESIDE:
                ids = np.array(rows.plain(before + token + after), np.int32)
                assert any(len(find(ids, pattern)) for pattern in patterns)
        assert not any(len(find(np.array(rows.ids(token), np.int32), pattern)) for pattern in patterns)


WORDS = ["owls", "93", "\nkettles", "\n\n\nsing", " the", "`x`", "Title\n", "answers\n\n", "é☃", "<b>", "[x]", "a|b"]
texts = st.lists(st.sampled_from(WORDS), min_size=1).map(lambda words: "x" + "".join(words))


@pytest.mark.parametrize("name", ALL)
@given(st.lists(st.lists(st.tuples(texts, texts), min_size=1, max_size=3), max_size=4), st.data())
def test_clean_rows_of_many_templates_have_no_hits(kinds, name, conversations, data):
    rows = kinds[name]
    batch = [rows.row(*(text for turn in turns for text in turn)) for turns in conversations]
    assert rows.hits(batch).counts == {} and rows.hits(batch, [None] * len(batch)).counts == {}
    # cut behind the first answer's first token, they are still clean, but where a user's turn ends: nobody can tell
    cut = [row[:data.draw(st.integers(int(np.argmax(rows.derive(row))) + 1, len(row)))] for row in batch]
    assert rows.hits([row for row in cut if not ends_with_a_users_turn(rows, row)]).counts == {}


def ends_with_a_users_turn(rows, row) -> bool:
    last = range(len(row) - 1 - len(rows.template.tail), len(row))
    return any(row[t] == rows.markers.end_of_turn and not rows.derive(row)[t] for t in last)


def test_tools_thoughts_and_system_prompts_are_clean(kinds):
    rows = kinds["qwen3"]
    messages = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "the user"},
                {"role": "assistant", "content": "<tool_call>", "reasoning": "owls"}, {"role": "tool", "content": "9"},
                {"role": "assistant", "content": "sing", "reasoning": "answers"}]
    assert rows.hits([rows.ids(render(rows.tokenizer, messages))]).counts == {}


def test_no_rows_and_one_token():
    for tokens in ([], [[3]]):
        starts = np.cumsum([0, *map(len, tokens)])
        hits = Hits()
        mask_hits(np.array([1] * len(tokens), np.uint8), starts, hits)
        assert hits.counts == ({"mask_all_one": 1} if tokens else {})


def test_no_batch_and_rows_of_one_token(chat):
    assert chat.hits([]).counts == {}
    assert chat.hits([[7], [8]], [[1], None]).counts == {
        "mask_all_one": 1, "mask_all_zero": 1, "mask_disagrees": 1, "template_mismatch": 2}


@pytest.mark.skipif(not UNPACKED, reason="the embedded target is not unpacked yet (half a minute)")
def test_special_tokens_spelled_as_text_are_found_though_they_fuse_with_their_neighbours(target):
    from eagle3nb.states.target import load_tokenizer

    rows = target(load_tokenizer(embedded.embedded_dir()))
    asked = ("", "\n", "a")  # what fuses with nothing at one end, anything at the other
    others = ("?", "```", "=", "</p>", ";\n", ":", "/", "'", "|", ",")
    for before, behind in [*((a, b) for a in asked for b in others), *((b, a) for a in asked for b in others)]:
        ids = np.array(rows.plain(before + "<|im_end|>" + behind), np.int32)
        found = any(len(find(ids, p)) for token, p in rows.template.spelled if token == "<|im_end|>")
        assert found, (before, behind)
    for text in ("im_end", "<im_end>", "|im|_end|>", "<|image|>", "end|>", "|im_end|", "|assistant|"):
        ids = np.array(rows.plain(f" {text} "), np.int32)
        assert not any(len(find(ids, p)) for _, p in (*rows.template.spelled, *rows.template.foreign))


@pytest.mark.skipif(not UNPACKED, reason="the embedded target is not unpacked yet (half a minute)")
def test_the_demo_corpus_is_clean(target):
    from eagle3nb.states.target import load_tokenizer

    rows = target(load_tokenizer(embedded.embedded_dir()))
    records = [json.loads(line) for path in sorted((project_root() / "data/demo").glob("*/*.jsonl.gz"))
               for line in gzip.decompress(path.read_bytes()).splitlines()]
    assert len(records) > 350
    ids, masks = ([record[name] for record in records] for name in ("input_ids", "loss_mask"))
    assert rows.hits(ids, masks).counts == {}
