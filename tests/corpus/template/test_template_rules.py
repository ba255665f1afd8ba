"""Each rule on ids and masks fires on its planted fault, among clean rows, and on nothing else."""

import copy

import numpy as np
import pytest

from eagle3nb.corpus.masks import render


def test_masks_of_nothing_and_of_everything(chat):
    row = chat.row("the user", "answers")
    assert chat.fault(row, [0] * len(row))["mask_all_zero"] == (None, f"none of {len(row)} tokens is supervised")
    found = chat.fault(row, [1] * len(row))
    assert found["mask_all_one"] == (None, f"all {len(row)} tokens are supervised, the prompt too")
    assert set(found) == {"mask_all_one", "mask_disagrees"}


def test_a_mask_that_differs_from_the_template(chat):
    row = chat.row("the user", "answers")
    first = int(np.argmax(chat.derive(row)))
    mask = chat.derive(row)
    mask[first] = 0
    assert chat.fault(row, mask) == {"mask_disagrees": (
        first, f"1 of {len(row)} positions differ, first {first}: mask 0, by the template's markers 1")}


@pytest.mark.parametrize("name", ["chatml", "kimi", "llama3", "deepseek"])
def test_an_end_of_turn_that_is_not_supervised(kinds, name):
    rows = kinds[name]
    row = rows.row("the user", "answers", "93", "sing")
    mask = rows.derive(row)
    ends = [t for t in np.flatnonzero(mask) if row[t] == rows.markers.end_of_turn]
    assert len(ends) == 2
    mask[ends] = 0
    found = rows.fault(row, mask)
    assert set(found) == {"eot_unsupervised", "mask_disagrees"} and found["eot_unsupervised"][0] == ends[0]
    only_last = [t if i > ends[0] else 0 for i, t in enumerate(rows.derive(row))]
    assert set(rows.fault(row, only_last)) == {"mask_disagrees"}


def test_supervised_tokens_outside_the_answers(chat):
    row = chat.row("the user", "answers", "93", "sing")
    mask, header = chat.derive(row), len(chat.ids("<|im_start|>assistant\n"))
    first, end = int(np.argmax(mask)), int(np.flatnonzero(mask[:-1] > mask[1:])[0])

    def extended(places):
        longer = mask.copy()
        longer[places] = 1
        found = chat.fault(row, longer)
        assert set(found) == {"supervised_prompt", "mask_disagrees"}
        return found["supervised_prompt"]

    assert row[end] == chat.markers.end_of_turn
    assert extended([end + 1]) == (end + 1, f"1 tokens outside the answers are supervised, first {end + 1} "
                                            f"(after the end of turn, id {row[end + 1]})")
    assert "in the assistant's header" in extended(slice(first - header, first))[1]
    assert f"{first} tokens" in extended(slice(0, first))[1] and "in the prompt" in extended(slice(0, first))[1]
    # a row of another format has no answers to be outside of
    assert "supervised_prompt" not in chat.fault(chat.plain("the user asks"), [0, *[1] * (len(chat.plain(
        "the user asks")) - 1)])


# ---------------------------------------------------------------------------------------------------- rules on text


def test_rows_of_another_format(chat):
    text = "<|start_header_id|>user<|end_header_id|>\n\nx<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n9"
    at, detail = chat.fault(chat.plain(text))["template_mismatch"]
    assert "no assistant header of the target's, but one of Llama 3" in detail
    assert chat.tokenizer.decode(chat.plain(text)[at:]).startswith("<|start_header_id|>assistant")
    assert chat.fault(chat.ids("owls sing"))["template_mismatch"] == (
        0, "the target's assistant header never occurs, token 0")
    quoted = chat.row("[INST] x [/INST]", "owls")
    assert set(chat.fault(quoted)) == {"template_mismatch"}
    assert "a header of Llama 2 or Mistral" in chat.fault(quoted)["template_mismatch"][1]


def test_a_special_token_that_only_another_format_uses(kimi, target):
    tokenizer = copy.deepcopy(kimi)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>"]})
    rows = target(tokenizer)
    row = rows.row("x", "owls")
    at = 3
    row.insert(at, tokenizer.convert_tokens_to_ids("<|im_start|>"))
    assert rows.fault(row) == {"template_mismatch": (at, f"a header of ChatML, token {at}")}


def test_a_row_that_ends_behind_its_header_is_of_the_format(chat, conversation):
    row = chat.ids(render(chat.tokenizer, conversation("the user"), generation=True))
    assert "template_mismatch" not in chat.fault(row)


def test_own_special_tokens_spelled_as_text(chat, conversation):
    whole = chat.plain(render(chat.tokenizer, conversation("x", "owls")))
    found = chat.fault(whole)
    assert set(found) == {"special_token_as_text", "template_mismatch", "mask_all_zero"}
    assert found["special_token_as_text"][1].startswith("<|im_start|> spelled out as text, token ")
    header = chat.ids("<|im_start|>user\n")
    inside = [*chat.row("x", "owls"), *header, *chat.plain("say <|im_end|>"), *chat.row("y", "sing")[len(header) + 9:]]
    at, detail = chat.fault(inside)["special_token_as_text"]
    assert detail == f"<|im_end|> spelled out as text, token {at}"


THOUGHTS = {
    "<think>owls</think>sing<|im_end|>": None, "sing<|im_end|>": None, "<think></think>sing<|im_end|>": None,
    "<think>owls</think>x<think>owls</think>sing<|im_end|>": None,
    "<think>owls": None,  # cut
    "owls</think>sing<|im_end|>": "a thought is closed that was not open",
    "<think>owls</think>sing</think><|im_end|>": "a thought is closed that was not open",
    "<think>owls<think>sing</think><|im_end|>": "a thought is opened inside another",
    "<think>owls<|im_end|>": "the turn ends inside a thought",
    "<think></think>owls<think><|im_end|>": "the turn ends inside a thought",
}


@pytest.mark.parametrize("text", THOUGHTS)
def test_thoughts_that_do_not_pair(thinker, text):
    head, answer = thinker.ids("<|im_user|>user<|im_middle|>x<|im_end|><|im_assistant|>assistant<|im_middle|>"), (
        thinker.ids(text))
    found = thinker.fault([*head, *answer])
    if THOUGHTS[text] is None:
        assert found == {}
    else:
        assert set(found) == {"think_unbalanced"} and THOUGHTS[text] in found["think_unbalanced"][1]
        assert found["think_unbalanced"][0] >= len(head)


def test_thoughts_that_a_user_speaks_of_are_no_fault(thinker):
    assert thinker.fault(thinker.row("say <think>", "owls")) == {}


TURNS = {  # user, assistant, system, empty answer: rows by letters
    "ua": None, "sua": None, "uaua": None, "usa": None,
    "a": "speaks before any user", "sa": "speaks before any user", "aua": "speaks before any user",
    "uua": "two user turns in a row", "uauua": "two user turns in a row", "usua": "two user turns in a row",
    "uau": "last turn is not the assistant's", "uas": "last turn is not the assistant's",
    "uaue": "an assistant turn without content", "ueua": "an assistant turn without content",
    "uoua": "whose end is missing",
}
PIECES = {"u": ("user", "the user"), "a": ("assistant", "answers"), "s": ("system", "Be kind"), "e": ("assistant", "")}


def written(rows, letters):
    """The turns as ids, whatever the template would refuse. o: an answer whose end of turn is missing."""
    text = "".join("<|im_start|>assistant\nowls\n" if c == "o" else "<|im_start|>{}\n{}<|im_end|>\n".format(*PIECES[c])
                   for c in letters)
    return rows.ids(text)


@pytest.mark.parametrize("letters", TURNS)
def test_turns_that_cannot_follow_one_another(chat, letters):
    found = chat.fault(written(chat, letters))
    if TURNS[letters] is None:
        assert found == {}
    else:
        assert set(found) == {"roles_malformed"} and TURNS[letters] in found["roles_malformed"][1]


def test_a_row_that_was_cut_in_or_behind_its_next_turn_is_no_fault(chat):
    row = written(chat, "uau")
    end = len(row) - 2
    assert row[end] == chat.markers.end_of_turn and "roles_malformed" in chat.fault(row[:end + 1])
    assert chat.fault(row[:end]) == {}
    assert chat.fault([*row, chat.ids("<|im_start|>")[0]]) == {}
    longer = [*chat.ids("<|im_start|>system\n"), *chat.ids("x") * (256 - len(row) - len(written(chat, "s")) + len(
        chat.ids("Be kind"))), *chat.ids("<|im_end|>\n"), *row]
    assert len(longer) == 256 and chat.fault(longer) == {}
    longer.insert(5, longer[4])
    assert set(chat.fault(longer)) == {"roles_malformed"}


# ---------------------------------------------------------------------------------------------------- rows side by side


def test_nothing_is_found_across_rows(chat):
    header, spelled, user = chat.markers.opens[0], chat.plain("<|im_end|>"), chat.ids("<|im_start|>user\n")
    clean = chat.row("x", "owls")
    for before, behind in ((header[:-1], header[-1:]), (header[:1], header[1:])):
        hits = chat.hits([[*clean, *before], [*behind], clean])
        assert hits.counts["template_mismatch"] == 1 and hits.examples["template_mismatch"][0][0] == 1
    for cut in range(1, len(spelled)):
        hits = chat.hits([[*clean, *spelled[:cut]], [*spelled[cut:], *clean]])
        assert not hits.counts["special_token_as_text"]
    assert chat.hits([[*clean, *user[:1]], [*user[1:], *clean]]).counts == {}
    ends = [chat.markers.end_of_turn, *clean]  # as if the row before were supervised up to it
    assert not chat.hits([clean[:-2], ends], [chat.derive(clean[:-2]), chat.derive(ends)]).counts["eot_unsupervised"]
