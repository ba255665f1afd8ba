"""Rules on messages, tool calls and rendering: each fires on its planted fault and is silent beside it."""

import copy
from dataclasses import dataclass

import numpy as np
import pytest

from eagle3nb.corpus.conversation import (
    conversation_faults,
    injected_token,
    prefix_disagreement,
    rendering_difference,
    role_fault,
    text_call_fault,
    thought_fault,
    tool_fault,
)
from eagle3nb.corpus.decision import Rules
from eagle3nb.corpus.masks import encode, find_markers, mask_from_markers, render
from eagle3nb.corpus.template import template_of
from eagle3nb.files import project_root
from eagle3nb.states import embedded

UNPACKED = (project_root() / ".cache" / embedded.NAME / embedded.MARK).exists()
LETTERS = {"s": "system", "u": "user", "a": "assistant", "t": "tool", "x": "critic"}


@dataclass
class Row:
    ids: np.ndarray
    mask: np.ndarray | None = None
    messages: list | None = None
    tools: list | None = None


class Target:
    """A tokenizer with its rules, and the rows that it makes."""

    def __init__(self, tokenizer):
        self.tokenizer, markers = tokenizer, find_markers(tokenizer)
        self.rules = Rules(1000, markers=markers, tokenizer=tokenizer)
        self.template = template_of(tokenizer, markers)

    def ids(self, text):
        return np.array(encode(self.tokenizer, text), np.int32)

    def row(self, messages, **changed):
        return Row(**{"ids": self.ids(render(self.tokenizer, messages)), "messages": messages, **changed})

    def faults(self, row):
        found = conversation_faults(row, self.rules, self.template)
        assert len({rule for rule, _ in found}) == len(found) and all(detail for _, detail in found)
        return dict(found)

    def difference(self, row):
        return rendering_difference(row, self.rules, self.template)


@pytest.fixture(scope="session")
def chat(chatml):
    return Target(chatml)


@pytest.fixture(scope="session")
def thinker(kimi):
    return Target(kimi)


def said(*texts):
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]


def answer(**fields):
    return [{"role": "user", "content": "x"}, {"role": "assistant", **fields}]


def test_clean_rows_of_both_kinds(chat, thinker):
    for target in (chat, thinker):
        for messages in (said("x", "owls"), said("the user", "answers", "93", "sing\n\nowls")):
            for mask in (None, target.row(messages).ids * 0):
                row = target.row(messages, mask=mask)
                row.mask = None if mask is None else mask_from_markers(row.ids, target.rules.markers)
                assert target.faults(row) == {}


@pytest.mark.skipif(not UNPACKED, reason="the embedded target is not unpacked yet (half a minute)")
def test_the_embedded_targets_own_template():
    from eagle3nb.states.target import load_tokenizer

    target = Target(load_tokenizer(embedded.embedded_dir()))
    messages = [{"role": "system", "content": "Be kind."}, *said("Why?", "Because.", "And you?", "2 + 2 = 4.")]
    assert target.faults(target.row(messages)) == target.faults(target.row(messages[1:])) == {}
    row = target.row(messages)
    row.ids[5] += 1
    assert set(target.faults(row)) == {"template_mismatch"}
    assert set(target.faults(target.row(said("say <|im_end|>", "no")))) == {"special_token_as_text"}
    none = target.row(messages)
    none.messages = [*messages[:-1], {"role": "assistant", "content": None}]
    assert set(target.faults(none)) == {"roles_malformed", "template_mismatch"}  # the template adds None to a text


# ---------------------------------------------------------------------------------------------------- roles


ROLES = {
    "ua": "", "sua": "", "ssua": "", "uaua": "", "uatta": "", "suatau": "last message is user's",
    "": "no message is the assistant's", "u": "no message is the assistant's", "su": "no message is the assistant's",
    "uxa": "message 1 has the unknown role 'critic'", "usa": "message 1 is a system message after user",
    "a": "message 0: the assistant speaks first", "sau": "message 1: the assistant speaks first",
    "uua": "messages 0 and 1 are both user's", "uaa": "messages 1 and 2 are both assistant's",
    "uat": "last message is tool's", "uauua": "messages 2 and 3 are both user's",
}


@pytest.mark.parametrize("letters", ROLES)
def test_roles(letters):
    found = role_fault([{"role": LETTERS[c], "content": "x"} for c in letters])
    assert ROLES[letters] in found and bool(found) == bool(ROLES[letters])


def test_an_answer_of_nothing():
    for content in (None, "", " \n", [], [{"type": "text", "text": ""}][:0]):
        assert "says nothing" in role_fault(answer(content=content))
        assert role_fault(answer(content=content, tool_calls=[{"function": {"name": "f"}}])) == ""
        assert role_fault(answer(content=content, reasoning_content="hm")) == ""
    assert role_fault(answer(content=[{"type": "text", "text": "x"}])) == ""
    assert "says nothing" in role_fault([{"role": "user", "content": "x"}, {"role": "assistant"}])


# ---------------------------------------------------------------------------------------------------- thoughts


@pytest.mark.parametrize(("text", "fault"), [
    ("no thought", ""), ("<think>x</think>y", ""), ("<think></think>y<think>x</think>", ""),
    ("say `<think>` or ```\n</think>\n```", ""), ("<think>an odd ``` fence</think> and ```x```", ""),
    ("[THINK]x[/THINK]y", ""), ("[THINK]x", "[THINK] is not closed"),
    ("x</think>y", "</think> without <think>"), ("<think>x", "<think> is not closed"),
    ("<think>x<think>y</think>", "<think> twice in a row"), ("<think>x</think>y</think>", "</think> twice in a row")])
def test_thoughts_in_text(text, fault):
    found = thought_fault(answer(content=text), opened=False, cut=False)
    assert found == (f"message 1: {fault}" if fault else "")
    assert thought_fault([{"role": "user", "content": text}, {"role": "assistant", "content": "x"}], False, False) == ""


def test_thoughts_that_the_header_opened_or_that_were_cut():
    lone = answer(content="x</think>y")
    assert thought_fault(lone, opened=True, cut=False) == "" != thought_fault(lone, opened=False, cut=False)
    assert "twice" in thought_fault(answer(content="x</think>y</think>"), opened=True, cut=False)
    unfinished = answer(content="<think>x")
    assert thought_fault(unfinished, opened=False, cut=True) == ""
    assert "message 1" in thought_fault([*unfinished, *answer(content="y")], opened=False, cut=True)


def test_a_row_cut_inside_its_thought(chat):
    messages = answer(content="<think>the assistant")
    whole = chat.row(messages)
    assert set(chat.faults(whole)) == {"think_unbalanced"}
    assert chat.faults(chat.row(messages, ids=whole.ids[:-2])) == {}


# ---------------------------------------------------------------------------------------------------- tools


def called(arguments, name="f"):
    return answer(content="", tool_calls=[{"id": "1", "type": "function",
                                           "function": {"name": name, "arguments": arguments}}])


@pytest.mark.parametrize(("messages", "fault"), [
    (called('{"a": 1}'), ""), (called({"a": 1}), ""), (called(None), ""),
    (answer(content="", tool_calls=[{"name": "f", "arguments": {}}]), ""),
    (called("{'a': 1}"), "arguments of f are no JSON object: \"{'a': 1}\""), (called("[1]"), "no JSON object"),
    (called(""), "no JSON object"), (called('{"a": 1'), "no JSON object"), (called([1]), "no JSON object"),
    (called({}, name=""), "without a function's name"), (answer(content="", tool_calls={"f": 1}), "not a list"),
    (answer(content="", tool_calls=["f"]), "without a function's name"),
    ([*called("{}"), {"role": "tool", "content": "9"}, {"role": "tool", "content": "8"}], ""),
    ([*answer(content='<tool_call>{"name": "f"}</tool_call>'), {"role": "tool", "content": "9"}], ""),
    ([*answer(content="owls"), {"role": "tool", "content": "9"}], "message 2: a tool's result without a call"),
    ([{"role": "user", "content": "call"}, {"role": "tool", "content": "9"}], "message 1: a tool's result"),
    ([{"role": "tool", "content": "9"}], "message 0: a tool's result")])
def test_tool_calls(messages, fault):
    found = tool_fault(messages, cut=False)
    assert fault in found and bool(found) == bool(fault)


KIMI_CALL = ("<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}"
             "<|tool_call_end|>")
CALLS = {
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>': "",
    '<tool_call>{"a": 1}</tool_call> and <tool_call>{"b": "</x>"}</tool_call>': "",
    "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>": "",
    "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>": "",
    "<tool_call>{'name': 'f'}</tool_call>": "<tool_call> holds no JSON object: \"{'name': 'f'}\"",
    '<tool_call>{"a": 1}</tool_call><tool_call>{"a": NaN}</tool_call>': "holds no JSON object",
    '<tool_call>["f"]</tool_call>': "holds no JSON object", "<tool_call></tool_call>": "holds no JSON object",
    '<tool_call>{"a": 1} <tool_call>{"b": 2}</tool_call>': "is not closed",
    KIMI_CALL.replace("{}", '{"a": "<b>"}'): "",
    KIMI_CALL.replace("{}", "a=1"): "argument_begin|> holds no JSON object",
    KIMI_CALL.replace("{}", '{"a": 1}') * 2: "", KIMI_CALL.replace("{}", "") * 2: "holds no JSON object",
    "nothing of the kind": "", "": "",
}


@pytest.mark.parametrize("text", CALLS)
def test_tool_calls_in_text(chat, text):
    found = text_call_fault(text)
    assert CALLS[text] in found and bool(found) == bool(CALLS[text])
    assert text_call_fault(text, cut=True) == found
    by_message = chat.faults(chat.row(answer(content=text or "x")))
    by_ids = chat.faults(Row(chat.ids(render(chat.tokenizer, answer(content=text or "x")))))
    assert list(by_message) == list(by_ids) == (["tool_json_invalid"] if found else [])
    assert not found or by_message["tool_json_invalid"] == f"message 1: {found}"


@pytest.mark.parametrize("text", ['x<tool_call>{"a"', KIMI_CALL.split("{}")[0] + '{"a"', "<tool_call>"])
def test_a_call_that_the_rows_end_cut(chat, text):
    row = chat.row(answer(content=text))
    assert "is not closed" in text_call_fault(text) and text_call_fault(text, cut=True) == ""
    assert set(chat.faults(row)) == {"tool_json_invalid"}
    assert chat.faults(chat.row(row.messages, ids=row.ids[:-2])) == {}
    assert set(chat.faults(Row(row.ids))) == {"tool_json_invalid"} and chat.faults(Row(row.ids[:-2])) == {}
    begin = int(np.argmax(mask_from_markers(row.ids, chat.rules.markers)))
    assert chat.faults(Row(row.ids))["tool_json_invalid"].startswith(f"answer at token {begin}: ")
    unsupervised = Row(row.ids, np.zeros(len(row.ids), np.uint8))
    assert chat.faults(unsupervised) == {}


def test_a_call_left_open_in_a_whole_row_is_no_cut(thinker):
    row = thinker.row(answer(content="<tool_call>{"))
    assert row.ids[-1] == thinker.rules.markers.end_of_turn  # nothing follows it in this template
    assert set(thinker.faults(row)) == {"tool_json_invalid"}
    assert thinker.faults(thinker.row(row.messages, ids=row.ids[:-1])) == {}


# ---------------------------------------------------------------------------------------------------- special tokens


def test_text_that_becomes_a_special_token(chat, thinker):
    assert injected_token(said("x", "owls"), chat.template) == ""
    for i, messages in enumerate((said("say <|im_end|>", "x"), said("x", "say <|im_end|>"))):
        assert injected_token(messages, chat.template) == (
            f"message {i} ({messages[i]['role']}) holds <|im_end|>, which becomes the special token")
    assert injected_token(said("<|endoftext|> is none of the template's", "x"), chat.template) == ""
    assert injected_token(said("<think> is markup", "x"), thinker.template) == ""
    parts = [{"role": "user", "content": [{"type": "text", "text": "<|im_middle|>"}, {"type": "image"}]}]
    assert "<|im_middle|>" in injected_token(parts, thinker.template)
    assert set(chat.faults(chat.row(said("say <|im_end|>", "x")))) == {"special_token_as_text"}


def test_a_special_token_that_holds_up_no_turn_is_the_targets_own_to_say(kimi):
    tokenizer = copy.deepcopy(kimi)
    tokenizer.chat_template += "{# for <|never|> #}"
    template = template_of(tokenizer, find_markers(tokenizer))
    assert injected_token(said("x", "<|never|>"), template) == ""
    assert "message 0 (user) holds <|never|>" in injected_token(said("<|never|>", "x"), template)


# ---------------------------------------------------------------------------------------------------- rendering


def test_rows_that_are_what_their_messages_render_to_up_to_a_cut_and_an_end(chat):
    messages = said("the user", "answers ☃", "93", "sing")
    whole = chat.row(messages).ids
    for length in range(1, len(whole) + 1):  # inside a character of three tokens too
        assert chat.difference(chat.row(messages, ids=whole[:length])) == ""
    for more in ("\n", "<|im_end|>", "\n\n<|im_end|>"):
        assert chat.difference(chat.row(messages, ids=np.concatenate([whole, chat.ids(more)]))) == ""
    more = chat.difference(chat.row(messages, ids=np.concatenate([whole, chat.ids("owls")])))
    assert f"at token {len(whole) - 1}:" in more and "'\\nowls' where the template writes ''" in more


def test_rows_that_are_not(chat):
    messages = said("the user", "answers")
    row = chat.row(messages)
    header = len(chat.ids("<|im_start|>system\nBe kind<|im_end|>\n"))
    without = chat.row(messages, ids=row.ids[header:])  # no default system prompt
    assert "template writes 'system" in chat.difference(without)
    assert set(chat.faults(without)) == {"template_mismatch"}
    other = chat.row(messages)
    other.messages = said("the user", "owls")
    start = int(np.argmax(mask_from_markers(row.ids, chat.rules.markers)))
    assert f"at token {start}: 'answers<|im_end|>' where the template writes 'owls" in chat.difference(other)
    twice = chat.row(messages, ids=np.concatenate([row.ids[:1], row.ids]))
    assert "at token 1:" in chat.difference(twice)


def test_another_tokenisation_of_the_same_text_is_no_difference(chat):
    messages = said("the user", "answers")
    start = int(np.argmax(mask_from_markers(chat.row(messages).ids, chat.rules.markers)))
    ids = chat.row(messages).ids
    letters = np.concatenate([chat.ids(letter) for letter in "answers"])
    sampled = np.concatenate([ids[:start], letters, ids[-2:]])
    assert len(sampled) > len(ids) and chat.difference(chat.row(messages, ids=sampled)) == ""
    messages = said("the user", "answers ☃")
    sampled = np.concatenate([sampled[:-2], chat.ids(" ☃")])
    for length in range(start, len(sampled) + 1):  # cut inside the snowman too
        assert chat.difference(chat.row(messages, ids=sampled[:length])) == ""


def test_thoughts_that_the_template_treats_by_turn_are_no_difference(thinker):
    messages = said("x", "answers", "93", "owls")
    row = thinker.row(messages)
    header = "<|im_assistant|>assistant<|im_middle|>"
    kept = "".join(f"<|im_user|>user<|im_middle|>{messages[i]['content']}<|im_end|>{header}<think>the{i}</think>\n\n"
                   f"{messages[i + 1]['content']}<|im_end|>" for i in (0, 2))
    whole = thinker.ids(kept)
    for length in range(1, len(whole) + 1):
        row.ids = whole[:length]
        assert thinker.difference(row) == ""
    row.ids = thinker.ids(kept.replace("owls", "ow"))
    assert ": '<|im_end|>' where the template writes 'ls<|im_end|>'" in thinker.difference(row)


def test_a_date_in_the_system_prompt_is_no_difference(chatml):
    tokenizer = copy.deepcopy(chatml)
    tokenizer.chat_template = chatml.chat_template.replace("Be kind", "{{ strftime_now('%Y') }}")
    target = Target(tokenizer)
    old = target.row(said("x", "owls"))
    old.ids = target.ids(tokenizer.decode(old.ids).replace("system\n2", "system\n31"))
    assert target.difference(old) == ""
    old.messages = said("x", "sing")
    at = int(np.argmax(mask_from_markers(old.ids, target.rules.markers)))
    assert f"at token {at}:" in target.difference(old)


def test_a_row_that_the_template_refuses(chatml):
    tokenizer = copy.deepcopy(chatml)
    tokenizer.chat_template = ("{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
                               "{{ raise_exception('only user and assistant, please') }}{% endif %}"
                               "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
                               "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    target = Target(tokenizer)
    row = target.row(said("x", "owls"))
    row.messages = [{"role": "system", "content": "Be kind"}, *row.messages]
    assert target.faults(row) == {
        "template_mismatch": "the chat template refuses the row: only user and assistant, please"}


# ---------------------------------------------------------------------------------------------------- prefixes


def test_prefix_rendering_against_the_mask(chat, thinker):
    row = chat.row(said("the user", "answers", "93", "sing"))
    assert prefix_disagreement(row, chat.rules) == ""  # by the derived mask
    row.mask = mask_from_markers(row.ids, chat.rules.markers)
    assert prefix_disagreement(row, chat.rules) == ""
    first = int(np.argmax(row.mask))
    row.mask[first:first + 2] = 0
    words = f"2 of {len(row.ids)} positions differ, first {first}: mask 0, by prefix rendering 1"
    assert prefix_disagreement(row, chat.rules) == words and chat.faults(row) == {"mask_disagrees": words}


def test_where_prefix_rendering_does_not_apply(chat, thinker):
    messages = said("the user", "answers")
    assert prefix_disagreement(thinker.row(messages), thinker.rules) is None  # not prefix-stable
    assert prefix_disagreement(Row(chat.row(messages).ids), chat.rules) is None  # no messages
    assert prefix_disagreement(chat.row(messages, ids=chat.row(messages).ids[:-1]), chat.rules) is None  # other tokens
    assert prefix_disagreement(chat.row(messages), Rules(1000)) is None  # no tokenizer


def test_without_a_tokenizer_only_the_messages_are_judged(chat):
    row = chat.row(said("x", "<think>owls"))
    row.messages.append({"role": "user", "content": "<|im_end|>"})
    found = dict(conversation_faults(row, Rules(1000), None))
    assert set(found) == {"roles_malformed", "think_unbalanced"}
    assert conversation_faults(Row(row.ids), Rules(1000), None) == []
