"""One fault a function: rows that have it, and what the audit must say of them.

Each takes a `planted.Maker` and returns (rows, {rule: (severity, where)}); `where` is the token in the row, a range of
them, None, or a list of one for each row. What fires beside the fault's own rule stands there with it.
"""

import numpy as np
from planted import WINDOW


def first(values: list, wanted=1) -> int:
    return values.index(wanted)


# ------------------------------------------------------------------------------------------------------- form


def no_json(make):
    return [b'{"input_ids": [1, 2', b"\xff", b"not json"], {"json_invalid": ("red", None)}


def no_record(make):
    return [{"text": "hello"}, [1, 2], {"input_ids": "1 2"}, {"messages": "hi"}], {"schema": ("red", None)}


def mask_of_another_length(make):
    row = make.row()
    return [{**row, "loss_mask": row["loss_mask"][1:]}], {"length_mismatch": ("red", None)}


def mask_of_other_values(make):
    row, other = make.row(), make.row()
    return [{**row, "loss_mask": [2, *row["loss_mask"][1:]]},
            {**other, "loss_mask": [0.5 * m for m in other["loss_mask"]]}], {"mask_values": ("red", None)}


def no_tokens(make):
    return [{"input_ids": [], "loss_mask": []}, {"prompt_ids": [], "response_ids": []}], {"empty_row": ("red", None)}


def beyond_the_vocabulary(make):
    row = make.row()
    return [{**row, "input_ids": [*row["input_ids"][:-1], make.vocab]}], {"token_out_of_range": ("red", None)}


# ------------------------------------------------------------------------------------------------------ masks


def all_zero(make):
    row = make.row()
    at = first(row["loss_mask"])
    return [{**row, "loss_mask": [0] * len(row["loss_mask"])}], {
        "mask_all_zero": ("amber", None), "mask_disagrees": ("amber", at)}


def all_one(make):
    """Not supervised_prompt besides: it would say the same again."""
    row = make.row()
    return [{**row, "loss_mask": [1] * len(row["loss_mask"])}], {
        "mask_all_one": ("amber", None), "mask_disagrees": ("amber", 0)}


def shifted_right(make):
    """What follows the end of turn is supervised: with Kimi, whose template ends there, only of rows of two turns."""
    row = make.row(make.talk(turns=2))
    mask = row["loss_mask"]
    return [{**row, "loss_mask": [0, *mask[:-1]]}], {
        "mask_disagrees": ("amber", first(mask)),
        "supervised_prompt": ("amber", first(mask) + first(mask[first(mask):], 0))}


def shifted_left(make):
    """The last token of the header is supervised, the end of turn is not."""
    row = make.row()
    mask = row["loss_mask"]
    begin = first(mask)
    end = begin + mask[begin:].index(0) if 0 in mask[begin:] else len(mask)
    return [{**row, "loss_mask": [*mask[1:], 0]}], {
        "mask_disagrees": ("amber", begin - 1), "supervised_prompt": ("amber", begin - 1),
        "eot_unsupervised": ("amber", end - 1)}


def inverted(make):
    row = make.row()
    return [{**row, "loss_mask": [1 - m for m in row["loss_mask"]]}], {
        "mask_disagrees": ("amber", 0), "supervised_prompt": ("amber", 0)}


def end_of_turn_left_out(make):
    row = make.row(bare=True)
    mask = [m * (token != make.eot) for m, token in zip(row["loss_mask"], row["input_ids"], strict=True)]
    at = next(i for i, m in enumerate(mask) if m != row["loss_mask"][i])
    return [{**row, "loss_mask": mask}], {"eot_unsupervised": ("amber", at), "mask_disagrees": ("amber", at)}


def prompt_supervised(make):
    row = make.row(make.talk(system=False))
    begin = row["input_ids"].index(make.eot) - 4
    mask = list(row["loss_mask"])
    mask[begin:begin + 3] = [1] * 3
    return [{**row, "loss_mask": mask}], {"supervised_prompt": ("amber", begin), "mask_disagrees": ("amber", begin)}


def last_turn_alone_supervised(make):
    """A habit of some trainers, and a choice: that it differs from the template is all that is said."""
    row = make.row(make.talk(turns=3))
    mask = row["loss_mask"]
    last = max(i for i in range(1, len(mask)) if mask[i] > mask[i - 1])
    return [{**row, "loss_mask": [0] * last + mask[last:]}], {"mask_disagrees": ("amber", first(mask))}


# --------------------------------------------------------------------------------------------------- template


def llama_headers(make):
    """The target's own headers never occur; the first of Llama 3's is told. One row with messages, one without."""
    rows, places, halves = [], [], []
    for keys in ((), ("messages",)):
        messages = make.talk(system=True)
        text = "<|begin_of_text|>" + "".join(
            f"<|start_header_id|>{m['role']}<|end_header_id|>\n\n{m['content']}<|eot_id|>" for m in messages)
        ids = make.ids(text)
        half = len(ids) // 2
        mask = [0] * half + [1] * (len(ids) - half)
        rows.append({"input_ids": ids, "loss_mask": mask} | dict.fromkeys(keys, messages))
        places.append(len(make.ids(text[:text.index("<|start_header_id|>assistant")])))
        halves.append(half)
    return rows, {"template_mismatch": ("amber", places), "mask_disagrees": ("amber", halves)}


def another_tokenizers_ids(make):
    """The same text under other numbers."""
    numbers = np.random.default_rng(0).permutation(make.vocab).tolist()
    rows = [make.row(), make.row(bare=True)]
    return [{**row, "input_ids": [numbers[token] for token in row["input_ids"]]} for row in rows], {
        "template_mismatch": ("amber", 0), "mask_disagrees": ("amber", [first(row["loss_mask"]) for row in rows])}


def messages_of_another_row(make):
    row, other = make.row(), make.row()
    return [{**row, "messages": other["messages"]}], {"template_mismatch": ("amber", None)}


def special_token_typed_by_a_user(make):
    """Seen in messages alone: in ids the user's turn just ends early."""
    messages = make.talk(turns=2)
    messages[-2]["content"] = "what does <|im_end|> mean"
    return [make.row(messages)], {"special_token_as_text": ("amber", None)}


def end_of_turn_tokenised_as_characters(make):
    """The answer never ends, so what follows counts as its own, the user's header in it."""
    row = make.row(make.talk(turns=2), bare=True)
    begin = first(row["loss_mask"])
    end, spelled = begin + first(row["input_ids"][begin:], make.eot), plain(make, "<|im_end|>")
    ids = [*row["input_ids"][:end], *spelled, *row["input_ids"][end + 1:]]
    mask = [*row["loss_mask"][:end], *[1] * len(spelled), *row["loss_mask"][end + 1:]]
    behind = end + len(spelled)
    return [{"input_ids": ids, "loss_mask": mask}], {
        "special_token_as_text": ("amber", end), "mask_disagrees": ("amber", behind),
        "roles_malformed": ("amber", behind + (make.kind == "chatml"))}  # ChatML's line break stands between


def plain(make, text):
    return make.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def all_tokenised_as_characters(make):
    row = make.row()
    ids = plain(make, make.render(row["messages"]))
    return [{**row, "input_ids": ids, "loss_mask": [0] * 9 + [1] * (len(ids) - 9)}], {
        "special_token_as_text": ("amber", 0), "template_mismatch": ("amber", 0), "mask_disagrees": ("amber", 9)}


def two_user_turns(make):
    rows, places = [], []
    for bare in (False, True):
        messages = make.talk(turns=2, system=False)
        messages.insert(1, {"role": "user", "content": make.words(5, 9)})
        rows.append(make.row(messages, bare=bare))
        places.append(len(make.ids(make.render(messages[:1]))))
    return rows, {"roles_malformed": ("amber", places)}


def the_assistant_speaks_first(make):
    messages = make.talk(turns=2, system=False)[1:]
    row = make.row(messages)
    return [row], {"roles_malformed": ("amber", first(row["loss_mask"]))}


def the_user_speaks_last(make):
    messages = make.talk(turns=2, system=False)[:-1]
    row = make.row(messages)
    end = max(i for i, token in enumerate(row["input_ids"]) if token == make.eot)
    return [row], {"roles_malformed": ("amber", end)}


def an_unknown_role(make):
    messages, more = make.talk(turns=1), make.talk(turns=1, system=False)
    return [make.row([*messages, {"role": "critic", "content": "hm"}, *more])], {"roles_malformed": ("amber", None)}


def thought_never_closed(make):
    """Kimi's marks are tokens, and the fault has a place; elsewhere they are text, which messages tell."""
    messages = make.talk(turns=1)
    messages[-1] = {"role": "assistant", "content": "<think>" + make.words(9, 12)}
    row = make.row(messages)
    at = len(row["input_ids"]) - 1 if make.kind == "kimi" else None
    return [row], {"think_unbalanced": ("amber", at)}


def thought_closed_twice(make):
    messages = make.talk(turns=1)
    messages[-1] = {"role": "assistant", "content": "so </think> " + make.words(9, 12) + "</think> and"}
    row = make.row(messages)
    closes = [i for i, token in enumerate(row["input_ids"]) if token in make.ids("</think>")]
    return [row], {"think_unbalanced": ("amber", closes[1] if make.kind == "kimi" else None)}


def tool_call_of_broken_json(make):
    """As text in an answer, of a row with messages and of one without; as arguments beside it."""
    broken = '<tool_call>{"name": "look", "arguments": {"at": 3}</tool_call>'
    rows = []
    for bare in (False, True):
        messages = make.talk(turns=1)
        rows.append(make.row([*messages[:-1], {"role": "assistant", "content": make.words(9, 12) + broken}], bare=bare))
    messages = make.talk(turns=1)
    messages[-1] = {**messages[-1], "tool_calls": [{"function": {"name": "look", "arguments": '{"at": 3'}}]}
    return [*rows, make.row(messages)], {"tool_json_invalid": ("amber", None)}


def tool_call_as_it_should_be(make):
    good = '<tool_call>{"name": "look", "arguments": {"at": 3}}</tool_call>'
    messages = make.talk(turns=1)
    return [make.row([*messages[:-1], {"role": "assistant", "content": make.words(9, 12) + good}], bare=bare)
            for bare in (False, True)], {}


def cut_in_an_answer(make):
    """By a generator's limit: nothing is wrong with it, with or without its messages, wherever it is cut."""
    rows = []
    for bare in (False, True) * 4:
        row = make.row(bare=bare)
        cut = make.rng.choice([i for i in range(1, len(row["loss_mask"])) if row["loss_mask"][i - 1]])
        rows.append({**row, "input_ids": row["input_ids"][:cut], "loss_mask": row["loss_mask"][:cut]})
    return rows, {}


def cut_right_behind_a_header(make):
    row = make.row(make.talk(turns=2))
    cut = max(i for i in range(1, len(row["loss_mask"])) if row["loss_mask"][i] > row["loss_mask"][i - 1])
    return [{**row, "input_ids": row["input_ids"][:cut], "loss_mask": row["loss_mask"][:cut]}], {}


def padded_with_ends_of_turn(make):
    """As a batch is padded, where the end of turn is the padding token too."""
    row = make.row(make.talk(turns=1))
    ids, more = row["input_ids"], 17
    return [{**row, "input_ids": ids + [make.eot] * more, "loss_mask": row["loss_mask"] + [0] * more}], {
        "roles_malformed": ("amber", len(ids) + more - 1)}


# ---------------------------------------------------------------------------------------------------- lengths


def too_few_tokens(make):
    begin = make.render([{"role": "assistant", "content": "a"}])
    begin = begin[begin.index("<|im_start|>assistant" if make.kind == "chatml" else "<|im_assistant|>"):]
    row = make.row(text=begin.rstrip())
    return [row], {"too_short": ("amber", None), "roles_malformed": ("amber", first(row["loss_mask"]))}


def prompt_as_long_as_the_window(make):
    messages = make.talk(turns=1, system=False)
    messages[0]["content"] = ""
    while len(make.ids(messages[0]["content"])) < 900:
        messages[0]["content"] += " " + make.words(1, 1)
    messages[1]["content"] = "yes, 42"
    row = make.row(messages)
    return [row], {"prompt_fills_window": ("amber", first(row["loss_mask"]))}


def answers_beyond_the_window(make):
    rows = [make.row([*make.talk(turns=1)[:-1], {"role": "assistant", "content": make.words(200, 220)}]) for _ in "ab"]
    assert all(len(row["input_ids"]) > WINDOW for row in rows)
    return rows, {"truncation_loss": ("amber", WINDOW)}


# --------------------------------------------------------------------------------------------------- contents


def in_circles(make):
    messages = make.talk(turns=1)
    lead, again = make.words(3, 4), make.words(3, 4)
    row = make.row([*messages[:-1], {"role": "assistant", "content": f"{lead} " + f"{again} " * 20}])
    begin = first(row["loss_mask"]) + len(make.ids(lead))
    return [row], {"degenerate_text": ("amber", range(begin, begin + len(make.ids(" " + again))))}


PLANTS = [no_json, no_record, mask_of_another_length, mask_of_other_values, no_tokens, beyond_the_vocabulary, all_zero,
          all_one, shifted_right, shifted_left, inverted, end_of_turn_left_out, prompt_supervised,
          last_turn_alone_supervised, llama_headers, another_tokenizers_ids, messages_of_another_row,
          special_token_typed_by_a_user, end_of_turn_tokenised_as_characters, all_tokenised_as_characters,
          two_user_turns, the_assistant_speaks_first, the_user_speaks_last, an_unknown_role, thought_never_closed,
          thought_closed_twice, tool_call_of_broken_json, tool_call_as_it_should_be, cut_in_an_answer,
          cut_right_behind_a_header, padded_with_ends_of_turn, too_few_tokens, prompt_as_long_as_the_window,
          answers_beyond_the_window, in_circles]
