"""Rules on one row's conversation: its messages, its tool calls, and what the chat template makes of them.

They render and decode, milliseconds a row, so they see a sample. As everywhere in the audit a rule names the first
fault of a row and keeps silent where a habit of the template could explain what it sees.
"""

import re
from bisect import bisect
from itertools import pairwise

import numpy as np
import orjson
from jinja2 import TemplateError

from eagle3nb.corpus.masks import encode, mask_from_markers, mask_from_prefixes, render, spans
from eagle3nb.corpus.template import THINKING, Template

SYSTEM, TOOLS = ("system", "developer"), ("tool", "function")
ROLES = (*SYSTEM, "user", "assistant", *TOOLS)
# Tool calls in text: Hermes and Qwen, whose body is JSON unless it is marked up itself (Qwen3-Coder, GLM), and Kimi.
HERMES, KIMI = (re.compile(f"{re.escape(opener)}(.*?)({re.escape(closer)}|(?={re.escape(opener)})|\\Z)", re.S)
                for opener, closer in (("<tool_call>", "</tool_call>"),
                                       ("<|tool_call_argument_begin|>", "<|tool_call_end|>")))
MARKED_UP = re.compile(r"<function=|<arg_key>|<parameter|<invoke")
CALLING = re.compile(r"call|function|python_tag|\{", re.I)  # an answer without any of these called no tool
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.S)
THOUGHT = re.compile("|".join(f"{re.escape(a)}.*?(?:{re.escape(b)}|\\Z)" for a, b in THINKING)
                     + "|" + "|".join(re.escape(b) for _, b in THINKING), re.S)


def conversation_faults(record, rules, template: Template | None) -> list[tuple[str, str]]:
    """[(rule, detail)], each rule at most once.

    record: a records.Record, or whatever has its ids, mask, messages and tools. rules: a decision.Rules, of which the
    markers and the tokenizer are used; where it has none, only the rules on the messages alone apply.
    """
    ready, messages = template is not None and rules.markers is not None, record.messages
    cut = ready and _is_cut(record.ids, rules.markers)
    found = []
    if messages:
        opened = ready and any(template.open_thoughts)
        found = [("roles_malformed", role_fault(messages)), ("think_unbalanced", thought_fault(messages, opened, cut)),
                 ("tool_json_invalid", tool_fault(messages, cut))]
        if ready:
            found += [("special_token_as_text", injected_token(messages, template)),
                      ("template_mismatch", rendering_difference(record, rules, template)),
                      ("mask_disagrees", prefix_disagreement(record, rules))]
    elif ready:
        found = [("tool_json_invalid", tool_fault_in_ids(record, rules, cut))]
    return [(rule, detail) for rule, detail in found if detail]


def text_of(message: dict) -> str:
    """The content as text; parts that are not text are left out."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part if isinstance(part, str) else str(part.get("text") or "")
                       for part in content if isinstance(part, str | dict))
    return content if isinstance(content, str) else ""


def _is_cut(ids: np.ndarray, markers) -> bool:
    """Does the row end inside an answer? Then what is open may have been closed beyond its end."""
    return len(ids) > 0 and ids[-1] != markers.end_of_turn and bool(mask_from_markers(ids, markers)[-1])


# ---------------------------------------------------------------------------------------------------- messages


def role_fault(messages: list[dict]) -> str:
    """The first turn that cannot stand where it stands, in words; "" where there is none."""
    roles = [message.get("role") for message in messages]
    for i, role in enumerate(roles):
        before = roles[i - 1] if i else None
        said = [r for r in roles[:i] if r not in SYSTEM]
        if role not in ROLES:
            return f"message {i} has the unknown role {role!r}"
        if role in SYSTEM and before is not None and before not in SYSTEM:
            return f"message {i} is a system message after {before}"
        if role == "assistant" and not said:
            return f"message {i}: the assistant speaks first"
        if role == before and role in ("user", "assistant"):
            return f"messages {i - 1} and {i} are both {role}'s"
        if role == "assistant" and _is_empty(messages[i]):
            return f"message {i}: the assistant says nothing and calls no tool"
    if "assistant" not in roles:
        return "no message is the assistant's"
    return "" if roles[-1] == "assistant" else f"the last message is {roles[-1]}'s, not the assistant's"


def _is_empty(message: dict) -> bool:
    other = ("tool_calls", "function_call", "reasoning", "reasoning_content", "thinking")
    return not (text_of(message).strip() or any(message.get(name) for name in other)
                or isinstance(message.get("content"), list) and message["content"])


def thought_fault(messages: list[dict], opened: bool, cut: bool) -> str:
    """Thoughts that do not pair in an assistant's text. opened: the template's header opens one.

    cut: the last message may end inside a thought. Marks that are quoted as code are no fault.
    """
    for i, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        text, may_end = text_of(message), cut and i == len(messages) - 1
        for opener, closer in THINKING:
            faults = [_unpaired(t, opener, closer, opened, may_end) for t in (text, CODE.sub("", text))]
            if all(faults):
                return f"message {i}: {faults[0]}"
    return ""


def _unpaired(text: str, opener: str, closer: str, opened: bool, may_end: bool) -> str:
    marks = re.findall(f"{re.escape(opener)}|{re.escape(closer)}", text)
    if marks[:1] == [closer]:
        if not opened:
            return f"{closer} without {opener}"
        marks = [opener, *marks]
    if twice := next((a for a, b in pairwise(marks) if a == b), None):
        return f"{twice} twice in a row"
    return f"{opener} is not closed" if marks[-1:] == [opener] and not may_end else ""


def injected_token(messages: list[dict], template: Template) -> str:
    """Text that the tokenizer turns into a special token: any of the template's in what the target is told, those
    that hold up the turns in what it says."""
    for i, message in enumerate(messages):
        text, told = text_of(message), message.get("role") != "assistant"
        token = next((token for token, of_turns in template.specials if (told or of_turns) and token in text), None)
        if token:
            return f"message {i} ({message.get('role')}) holds {token}, which becomes the special token"
    return ""


# ---------------------------------------------------------------------------------------------------- tool calls


def tool_fault(messages: list[dict], cut: bool) -> str:
    """Arguments that are no JSON object, a call in the text that is no JSON, a result that nobody asked for."""
    caller = None  # the last message that was not a tool's
    for i, message in enumerate(messages):
        if message.get("role") in TOOLS:
            if caller is None or not _calls(caller):
                return f"message {i}: a tool's result without a call before it"
            continue
        caller = message
        if message.get("role") == "assistant":
            fault = _call_fault(message) or text_call_fault(text_of(message), cut and i == len(messages) - 1)
            if fault:
                return f"message {i}: {fault}"
    return ""


def _calls(message: dict) -> bool:
    """May the message have called a tool? Formats of calls in text are many, so any sign of one will do."""
    return message.get("role") == "assistant" and bool(
        message.get("tool_calls") or message.get("function_call") or CALLING.search(text_of(message)))


def _call_fault(message: dict) -> str:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        return "tool_calls is not a list"
    for call in calls:
        called = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(called, dict) or not called.get("name"):
            return "a tool call without a function's name"
        given = called.get("arguments")
        if given is not None and not isinstance(given, dict) and not _is_object(given):
            return f"the arguments of {called['name']} are no JSON object: {_short(given)}"
    return ""


def text_call_fault(text: str, cut: bool = False) -> str:
    """The first tool call in a text that is not closed or whose JSON cannot be read. cut: the last may be open."""
    for pattern, what in ((HERMES, "<tool_call>"), (KIMI, "<|tool_call_argument_begin|>")):
        for found in pattern.finditer(text):
            body, close = found.group(1).strip(), found.group(2)
            if not close:
                if cut and found.end() == len(text):
                    continue
                return f"{what} is not closed: {_short(body)}"
            if pattern is HERMES and MARKED_UP.search(body):
                continue
            if not _is_object(body):
                return f"{what} holds no JSON object: {_short(body)}"
    return ""


def tool_fault_in_ids(record, rules, cut: bool) -> str:
    """`text_call_fault` of the supervised spans of a row that has no messages, decoded."""
    mask = record.mask if record.mask is not None else mask_from_markers(record.ids, rules.markers)
    for begin, end in spans(mask).tolist():
        text = _decoded(rules.tokenizer, record.ids[begin:end])
        if fault := text_call_fault(text, cut and end == len(mask)):
            return f"answer at token {begin}: {fault}"
    return ""


def _is_object(text) -> bool:
    try:
        return isinstance(orjson.loads(text), dict)
    except (orjson.JSONDecodeError, TypeError):
        return False


def _short(value, length: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= length else text[:length] + "…"


# ---------------------------------------------------------------------------------------------------- rendering


def rendering_difference(record, rules, template: Template) -> str:
    """How the row's tokens differ from its messages as the template renders them; "" where they don't.

    Not told as differences: a row cut short, another tokenisation of the same text (an answer as it was sampled), an
    end of sequence behind the last turn, thoughts where the template's own treatment of them varies, and a system
    prompt with a date.
    """
    tokenizer, ids = rules.tokenizer, record.ids.tolist()
    try:
        rendered = render(tokenizer, record.messages, tools=record.tools)
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        return f"the chat template refuses the row: {str(error).strip().splitlines()[0] if str(error) else repr(error)}"
    wanted = encode(tokenizer, rendered)
    if wanted[:len(ids)] == ids:
        return ""
    if "strftime_now" in tokenizer.get_chat_template() and template.user:
        ids, wanted = (_from_first(side, template.user) for side in (ids, wanted))
    have, want = (_comparable(_decoded(tokenizer, side), rules.markers.stable)
                  for side in (ids, wanted))
    at = next((i for i, (a, b) in enumerate(zip(have, want, strict=False)) if a != b), min(len(have), len(want)))
    if at == len(have) or at == len(want) and not _without_specials(have[at:], tokenizer).strip():
        return ""
    where = ""
    if rules.markers.stable:  # else thoughts were taken out, and text says nothing of tokens
        token = bisect(range(len(ids)), at, key=lambda n: len(_decoded(tokenizer, ids[:n + 1])))
        where = f" at token {len(record.ids) - len(ids) + token}"
    return (f"the row differs from its rendered messages{where}: "
            f"{_short(have[at:at + 40])} where the template writes {_short(want[at:at + 40])}")


def _decoded(tokenizer, ids) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _comparable(text: str, stable: bool) -> str:
    """Text without a character that a cut halved, and without thoughts where a template empties earlier ones."""
    text = text.rstrip("\ufffd")
    return text.rstrip() if stable else re.sub(r"\s+", "", THOUGHT.sub("", text))


def _without_specials(text: str, tokenizer) -> str:
    for token in tokenizer.all_special_tokens:
        text = text.replace(token, "")
    return text


def _from_first(ids: list[int], pattern: tuple[int, ...]) -> list[int]:
    """From the pattern's first place on; all of it where there is none."""
    return next((ids[i:] for i in range(len(ids)) if tuple(ids[i:i + len(pattern)]) == pattern), ids)


def prefix_disagreement(record, rules) -> str | None:
    """How the row's mask differs from the one that prefix rendering gives: "" where it does not.

    A row without a mask of its own is compared by its derived one. None where the derivation does not apply: no
    messages, a template that is not prefix-stable, or other tokens than the row's.
    """
    if not record.messages or rules.tokenizer is None or rules.markers is None or not rules.markers.stable:
        return None
    found = mask_from_prefixes(record.messages, rules.tokenizer, record.tools)
    if found is None or not np.array_equal(found[0], record.ids):
        return None
    own = record.mask if record.mask is not None else mask_from_markers(record.ids, rules.markers)
    at = np.flatnonzero(own != found[1])
    if not len(at):
        return ""
    return (f"{len(at)} of {len(own)} positions differ, first {at[0]}: mask {own[at[0]]}, "
            f"by prefix rendering {found[1][at[0]]}")
