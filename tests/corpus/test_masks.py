import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3nb.corpus.masks import (
    counted_slots,
    encode,
    find_markers,
    mask_from_markers,
    mask_from_prefixes,
    render,
    teacher_positions,
)
from eagle3nb.errors import UserError

WORDS = ["owls", "93", "\nkettles", "\n\n\nsing", " the", "`x`", "Title\n", "answers\n\n", "é☃"]
texts = st.lists(st.sampled_from(WORDS), min_size=1).map("".join)


def conversation(turns):
    roles = "user", "assistant"
    return [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]


def spans(tokenizer, ids, mask):
    """The supervised stretches, as text."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return [tokenizer.decode(ids[a:b]) for a, b in edges.reshape(-1, 2)]


def fuses(tokenizer, answer):
    """Does the header's last token merge with the answer's first characters?"""
    header = encode(tokenizer, "<|im_start|>assistant\n")
    return encode(tokenizer, "<|im_start|>assistant\n" + answer)[:len(header)] != header


def test_chatml_markers_are_the_header_and_the_end_of_turn(chatml):
    markers = find_markers(chatml)
    assert markers.end_of_turn == chatml.convert_tokens_to_ids("<|im_end|>")
    assert tuple(encode(chatml, "<|im_start|>assistant\n")) in markers.opens
    assert all(chatml.decode(ids).strip() == "<|im_start|>assistant" for ids in markers.opens)
    assert markers.stable
    # <|endoftext|> is special too, but the template never writes it
    assert [chatml.convert_ids_to_tokens(i) for i in markers.special_ids] == ["<|im_start|>", "<|im_end|>"]


def test_chatml_mask_is_the_answers_with_their_end_of_turn_and_no_newline(chatml):
    messages = conversation([("the question", "answers"), ("93", "owls sing")])
    ids = np.array(encode(chatml, render(chatml, messages)), np.int32)
    mask = mask_from_markers(ids, find_markers(chatml))
    assert spans(chatml, ids, mask) == ["answers<|im_end|>", "owls sing<|im_end|>"]


def test_an_answer_whose_line_break_fuses_with_the_header_keeps_the_rest(chatml):
    assert fuses(chatml, "\n\nowls")
    ids = np.array(encode(chatml, render(chatml, conversation([("x", "\n\nowls sing")]))), np.int32)
    assert spans(chatml, ids, mask_from_markers(ids, find_markers(chatml))) == ["\nowls sing<|im_end|>"]


def test_a_row_cut_inside_an_answer_is_supervised_to_its_end(chatml):
    ids = np.array(encode(chatml, render(chatml, conversation([("x", "owls sing and sing")]))), np.int32)[:-5]
    mask = mask_from_markers(ids, find_markers(chatml))
    assert mask[-1] == 1 and chatml.decode(ids[mask == 1]).startswith("owls")


def test_a_header_quoted_inside_an_answer_opens_nothing_new(chatml):
    text = "<|im_start|>assistant\nsay <|im_start|>assistant\nowls<|im_end|>\n<|im_start|>user\nx<|im_end|>\n"
    ids = np.array(encode(chatml, text), np.int32)
    expected = len(encode(chatml, "<|im_start|>assistant\n")), len(encode(chatml, text.split("<|im_end|>")[0])) + 1
    assert np.flatnonzero(mask_from_markers(ids, find_markers(chatml))).tolist() == list(range(*expected))


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=4))
def test_both_derivations_agree_where_both_apply(chatml, turns):
    messages = conversation(turns)
    found = mask_from_prefixes(messages, chatml)
    if any(fuses(chatml, answer) for _, answer in turns):
        assert found is None  # ids are not prefix-stable
        return
    ids, mask = found
    assert ids.tolist() == encode(chatml, render(chatml, messages)) and ids.dtype == np.int32
    assert (mask == mask_from_markers(ids, find_markers(chatml))).all()


def test_prefix_rendering_takes_a_system_message_and_refuses_what_it_cannot_render(chatml):
    system = [{"role": "system", "content": "sing"}, *conversation([("x", "owls")])]
    ids, mask = mask_from_prefixes(system, chatml)
    assert spans(chatml, ids, mask) == ["owls<|im_end|>"]
    assert mask_from_prefixes([{"role": "assistant", "content": "owls"}], chatml) is None


def test_kimi_markers_leave_out_what_the_prompt_opens(kimi):
    markers = find_markers(kimi)
    header = "<|im_assistant|>assistant<|im_middle|>"
    assert {kimi.decode(ids) for ids in markers.opens} == {header, header + "<think>", header + "<think></think>"}
    assert not markers.stable
    names = {kimi.convert_ids_to_tokens(i) for i in markers.special_ids}
    assert {"<think>", "</think>", "<|im_middle|>", "<|im_end|>"} <= names and "<|never|>" not in names


def test_kimi_mask_of_an_emptied_and_of_a_thinking_turn(kimi):
    messages = conversation([("x", "answers"), ("93", "owls")])
    messages[-1]["reasoning"] = "the assistant"
    ids = np.array(encode(kimi, render(kimi, messages)), np.int32)
    mask = mask_from_markers(ids, find_markers(kimi))
    assert spans(kimi, ids, mask) == ["answers<|im_end|>", "the assistant</think>owls<|im_end|>"]
    messages[1]["reasoning"] = "the user"
    assert mask_from_prefixes(messages, kimi) is None  # the earlier turn is emptied later: not prefix-stable


def test_kimi_bare_header_is_found_too(kimi):
    ids = np.array(encode(kimi, "<|im_assistant|>assistant<|im_middle|>owls<|im_end|>"), np.int32)
    assert spans(kimi, ids, mask_from_markers(ids, find_markers(kimi))) == ["owls<|im_end|>"]


def test_a_template_without_markers_or_no_template_is_one_clear_line(markless):
    with pytest.raises(UserError, match="end-of-turn|assistant marker"):
        find_markers(markless)
    bare = type(markless)(tokenizer_object=markless.backend_tokenizer, eos_token="<|im_end|>")
    with pytest.raises(UserError, match="chat template"):
        find_markers(bare)


masks = st.lists(st.integers(0, 1), max_size=14)


@given(masks)
def test_teacher_positions_are_those_that_predict_a_supervised_token_from_one(mask):
    expected = [p for p in range(len(mask) - 1) if mask[p] * mask[p + 1] == 1]
    found = teacher_positions(np.array(mask, np.uint8))
    assert found.tolist() == expected and found.dtype == np.int32


def test_teacher_positions_of_the_designs_example():
    assert teacher_positions(np.array([0, 0, 1, 1, 1, 0], np.uint8)).tolist() == [2, 3]


@given(masks, st.randoms(), st.integers(1, 6))
def test_counted_slots_against_the_definition(mask, random, K):
    T, in_draft = len(mask), np.array([random.random() < 0.7 for _ in mask], bool)
    counted = counted_slots(np.array(mask, np.uint8), in_draft, K)
    assert counted.shape == (K, T) and counted.dtype == bool
    for k in range(K):
        for t in range(T):
            inside = t + 2 + k < T
            supervised = inside and all(mask[t + j] == 1 for j in range(1, k + 3))
            drafted = all(in_draft[t + j] for j in range(2, k + 2)) if inside else False
            assert counted[k, t] == (supervised and drafted), (k, t)


@given(masks, st.integers(1, 5))
def test_every_counted_slot_has_its_teacher(mask, K):
    mask = np.array(mask, np.uint8)
    counted, teachers = counted_slots(mask, np.ones(len(mask), bool), K), set(teacher_positions(mask).tolist())
    assert {t + 1 + k for k, t in zip(*np.nonzero(counted), strict=True)} <= teachers
