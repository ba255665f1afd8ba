"""Talks: conversations on their way from prompt to record, one answer at a time.

An answer comes as ids (the target here, SGLang's /generate): then the record is exactly what the target saw and wrote.
Or it comes as a message (a chat endpoint): then the target's own template renders it and its tokenizer reads that. Both
derivations of the mask must agree with the record before it is kept; where the template is not prefix-stable, the
markers' alone, and the text must give its own tokens back.

A template may rewrite what was said before, by leaving out the thoughts of earlier turns. What the target saw at a
later turn is then no continuation of what it wrote at an earlier one, and a talk becomes a row a turn: the earlier
turns as the later prompt has them, not supervised, and the new answer, supervised.
"""

from array import array
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from eagle3nb.corpus.loops import ends_in_circles
from eagle3nb.corpus.masks import (
    Markers,
    encode,
    find_markers,
    mask_from_markers,
    mask_from_prefixes,
    render,
    spans,
)
from eagle3nb.corpus.template import THINKING
from eagle3nb.progress import progress
from eagle3nb.synthesis.endpoint import Answer
from eagle3nb.synthesis.messages import REFUSES, Spelling, arguments_of, spelling_of, spoken
from eagle3nb.synthesis.prompts import Prompt

ATTEMPTS = 3  # samples of one answer before it is given up
ALONE, DROPPED = "by markers alone", "thought dropped by the template"  # notes on answers that are kept
FINAL = ("refused", "cut in its thought", "cut in its call", "longer than the context")  # others are sampled again
MANY = 1000  # prompts
LOOP_GRAM, LOOP_SHARE, LOOP_TAIL = 8, 0.35, 24


@dataclass(frozen=True)
class Language:
    """How the target writes. `free`: special tokens that its template itself puts into an answer, around thoughts and
    calls; any other in an answer's text is a fault."""

    tokenizer: object
    markers: Markers
    eos: tuple[int, ...]
    free: frozenset[int]
    spelling: Spelling


@dataclass(frozen=True)
class Row:
    """A record so far. `own`: the places in `messages` of the answers that are supervised in it. Of a talk that goes on
    or waits to be written, ids and mask are packed: there may be a hundred million."""

    ids: list[int] | array
    mask: list[int] | bytes
    messages: list[dict]
    own: frozenset[int]
    finish: str  # "stop", "length" or "tool_calls" of the last answer


@dataclass
class Talk:
    """`messages` as the template takes them, `said` as a chat endpoint does; `asked`: the rendered prompt's ids."""

    prompt: Prompt
    asked: list[int]
    messages: list[dict]
    said: list[dict]
    rows: list[Row] = field(default_factory=list)  # the last one may still grow
    turn: int = 0  # the answer that is wanted next
    attempt: int = 0
    over: bool = False
    why: str = ""  # it is over before its last turn
    model: str = ""  # that answered last, where an endpoint did

    @property
    def key(self) -> tuple[str, int, int]:
        return self.prompt.id, self.turn, self.attempt


def language_of(tokenizer, eos: tuple[int, ...]) -> Language:
    """Raises UserError where the template has no markers."""
    markers = find_markers(tokenizer)
    known = {str(token): i for i, token in tokenizer.added_tokens_decoder.items()}
    free = {known[mark] for pair in THINKING for mark in pair if mark in known}
    tool = {"type": "function", "function": {"name": "look", "description": "", "parameters": {
        "type": "object", "properties": {"at": {"type": "string"}}}}}
    for content, arguments in product(("Well", None), ('{"at": "sky"}', {"at": "sky"})):
        call = {"id": "functions.look:0", "type": "function", "function": {"name": "look", "arguments": arguments}}
        answer = {"role": "assistant", "content": content, "reasoning_content": "Hm", "tool_calls": [call]}
        try:
            ids = encode(tokenizer, render(tokenizer, [{"role": "user", "content": "Hi"}, answer], tools=[tool]))
        except REFUSES:
            continue  # a template without tools, or one that takes them in another form
        free |= {token for token, own in zip(ids, mask_from_markers(np.asarray(ids), markers), strict=True) if own}
    free -= {markers.end_of_turn, *eos}
    return Language(tokenizer, markers, tuple(eos), frozenset(free & set(markers.special_ids)),
                    spelling_of(tokenizer, markers))


# ---------------------------------------------------------------------------------------------------- asking


def begin(prompt: Prompt, tokenizer) -> Talk:
    """A talk that waits for its first answer; over at once where the template has no place for such messages."""
    opening = list(prompt.opening)
    try:
        return Talk(prompt, asked_ids(opening, prompt, tokenizer), opening, opening)
    except REFUSES:
        return Talk(prompt, [], opening, opening, over=True, why="template refuses")


def begun(prompts: list[Prompt], tokenizer, what: str) -> list[Talk]:
    """Talks that wait; thousands take seconds, and tell how far they are."""
    if len(prompts) < MANY:
        return [begin(prompt, tokenizer) for prompt in prompts]
    talks = []
    with progress(len(prompts), f"{what}: prompts", "prompts") as bar:
        for prompt in prompts:
            talks.append(begin(prompt, tokenizer))
            bar.advance()
    return talks


def asked_ids(messages: list[dict], prompt: Prompt, tokenizer) -> list[int]:
    return encode(tokenizer, render(tokenizer, messages, generation=True, tools=list(prompt.tools) or None))


def follow(talk: Talk, said: dict | None, tokenizer) -> None:
    """After an answer: the prompt's next messages go behind it; the talk is over where there are none, or they do not
    fit. `said`: a chat endpoint's answer; None for one of ids.

    Tools' results belong to the calls of the answer before, one each, and take over their ids. In an answer of ids a
    call is text to us, and whether the result fits is the prompt's affair.
    """
    talk.turn, talk.attempt, talk.asked = talk.turn + 1, 0, []
    if talk.over or talk.turn > len(talk.prompt.later):
        talk.over = True
        return
    block, calls = list(talk.prompt.later[talk.turn - 1]), (said or {}).get("tool_calls") or []
    results = [message for message in block if message["role"] == "tool"]
    if said and len(calls) != len(results):
        talk.over, talk.why = True, "results do not fit the calls"
        return
    if calls:
        block = [{**message, "tool_call_id": call.get("id", "")} for message, call in zip(results, calls, strict=True)]
    talk.messages, talk.said = [*talk.messages, *block], [*talk.said, *block]
    try:
        talk.asked = asked_ids(talk.messages, talk.prompt, tokenizer)
    except REFUSES:
        talk.over, talk.why = True, "template refuses"


# ---------------------------------------------------------------------------------------------------- answers


def take(talk: Talk, answer: Answer, language: Language, counts: Counter) -> None:
    """Judge an answer and move its talk on: the next turn, another attempt, or the end.

    `counts`: answers kept by how they ended, and faults by reason; "given up" counts talks.
    """
    talk.model = answer.model or talk.model
    if answer.outcome in ("refused", "failed"):
        found, fault, note = None, "refused" if answer.outcome == "refused" else answer.reason, ""
    elif answer.ids:
        found, fault, note = row_of_ids(talk, list(answer.ids), language)
    else:
        found, fault, note = row_of_message(talk, answer, language)
    if fault:
        counts[fault] += 1
        talk.attempt += 1
        talk.over = talk.attempt == ATTEMPTS or fault in FINAL
        counts["given up"] += talk.attempt == ATTEMPTS
        talk.why = "" if not talk.over else "given up" if talk.attempt == ATTEMPTS else fault
        return
    counts[found.finish] += 1
    if note:
        counts[note] += 1
    if talk.rows and goes_on(found.ids, talk.rows[-1]):
        talk.rows.pop()
    talk.rows.append(replace(found, ids=array("i", found.ids), mask=bytes(found.mask)))
    talk.messages, talk.said = found.messages, [*talk.said, answer.message or found.messages[-1]]
    talk.over = found.finish == "length"
    follow(talk, answer.message, language.tokenizer)


def row_of_ids(talk: Talk, new: list[int], language: Language) -> tuple[Row | None, str, str]:
    """(row, fault, note) of exact ids. Notes are counted beside the answers they are about."""
    ended = new[-1] in language.eos
    body = new[:-1] if ended else new
    if fault := fault_of(body, language):
        return None, fault, ""
    message = as_message(language.tokenizer.decode(body), language)
    row = extended(talk, talk.asked + new, len(talk.asked), message, "stop" if ended else "length")
    checked = agree(row, talk.prompt, language)
    if checked != "both" and not language.markers.stable and not gives_back(row.ids, talk.asked, language.tokenizer):
        checked = ""
    # The text's own tokens are not those that were sampled: a server would see others at the next turn.
    return (row, "", "" if checked == "both" else ALONE) if checked else (None, "retokenises", "")


def as_message(text: str, language: Language) -> dict:
    """An answer's text as the template takes it back: the thought apart, where the template has a place for it."""
    opener, closer = language.spelling.thought
    thought, closed, said = text.partition(closer)
    if language.spelling.places and closed:
        return {"role": "assistant", "content": said.lstrip("\n"),
                "reasoning_content": thought.rpartition(opener)[2].strip("\n")}
    return {"role": "assistant", "content": text}


def gives_back(ids: list[int], asked: list[int], tokenizer) -> bool:
    """Whether decoding and encoding gives the ids again; True too for a tokenizer of which no prompt's ids do."""
    def again(some):
        return encode(tokenizer, tokenizer.decode(some)) == some
    return again(ids) or not again(asked)


def row_of_message(talk: Talk, answer: Answer, language: Language) -> tuple[Row | None, str, str]:
    """(row, fault, note) of a chat endpoint's answer, as the target's template writes it."""
    said, cut, tokenizer = answer.message, answer.outcome == "length", language.tokenizer
    if cut and not (said.get("content") or "").strip():
        return None, "cut in its thought" if said.get("reasoning_content") else "empty", ""
    if cut and said.get("tool_calls"):
        return None, "cut in its call", ""
    if any(arguments_of(call) is None for call in said.get("tool_calls") or ()):
        return None, "call is no JSON", ""
    texts = f"{said.get('content') or ''}{said.get('reasoning_content') or ''}"
    if any(mark in texts for mark in tokenizer.convert_ids_to_tokens(sorted(foreign(language)))):
        return None, "special token", ""
    end = tokenizer.decode([language.markers.end_of_turn])
    found = spoken(talk.messages, said, cut, list(talk.prompt.tools) or None, tokenizer, language.spelling, end)
    if found is None:
        return None, "template drops it", ""
    before, ids = encode(tokenizer, found.before), encode(tokenizer, found.before + found.text)
    if ids[:len(before)] != before:  # a server reads the prompt before there is an answer for it to fuse with
        ids = before + encode(tokenizer, found.text)
    if fault := fault_of(ids[len(before):len(ids) - (not cut)], language):
        return None, fault, ""
    row = extended(talk, ids, len(before), found.message, answer.outcome)
    checked = agree(row, talk.prompt, language)
    note = DROPPED if found.dropped else "" if checked == "both" else ALONE
    return (row, "", note) if checked else (None, "masks disagree", "")


def extended(talk: Talk, ids: list[int], start: int, message: dict, finish: str) -> Row:
    """The talk's last row with this answer (ids[start:]), or where `ids` do not go on with it, a row of its own."""
    last = talk.rows[-1] if talk.rows and goes_on(ids, talk.rows[-1]) else Row([], [], [], frozenset(), "")
    mask = [*last.mask, *[0] * (start - len(last.mask)), *[1] * (len(ids) - start)]
    return Row(ids, mask, [*talk.messages, message], last.own | {len(talk.messages)}, finish)


def goes_on(ids: list[int], row: Row) -> bool:
    """Whether `ids` begin with the row's."""
    return ids[:len(row.ids)] == list(row.ids)


# ---------------------------------------------------------------------------------------------------- judging


def fault_of(body: list[int], language: Language) -> str:
    """Why an answer's tokens (without the end of turn) make no record; empty if they do."""
    if len(body) < 2:
        return "empty"
    if not foreign(language).isdisjoint(body):
        return "special token"
    return "looping" if looping(body) else ""


def foreign(language: Language) -> set[int]:
    """Special tokens that no answer holds."""
    return set(language.markers.special_ids) - language.free


def looping(ids) -> bool:
    """Whether a text goes round in circles: over a third of its 8-grams stood there before, or its last 24 tokens or
    more repeat a block of at most half their length."""
    ids = np.asarray(ids)
    grams = [tuple(ids[i:i + LOOP_GRAM].tolist()) for i in range(len(ids) - LOOP_GRAM + 1)]
    if len(grams) >= LOOP_TAIL and 1 - len(set(grams)) / len(grams) > LOOP_SHARE:
        return True
    return ends_in_circles(ids)


def agree(row: Row, prompt: Prompt, language: Language) -> str:
    """Whether a row's ids and mask equal both derivations, from the markers and from its messages' own rendering:
    "both"; "markers", where the template is not prefix-stable and the second does not apply; "" where one disagrees.

    An answer cut at its limit lacks the end of turn that its rendering has: there the ids must begin the rendering.
    Where a template writes an empty thought for an answer without one, nobody can tell from the row whether the target
    closed it or the template did: a difference of no more than that is none.
    """
    derived = mask_from_markers(np.asarray(row.ids), language.markers)
    speakers = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
    answers = spans(derived).tolist()
    if not row.own.issuperset(speakers):
        if len(answers) != len(speakers):
            return ""
        for place, (begin, end) in zip(speakers, answers, strict=True):
            derived[begin:end] *= place in row.own
    own, stable = np.array(row.mask, np.uint8), language.markers.stable
    if not np.array_equal(derived, own) and (stable or not thoughts_alone(derived, own, row.ids, language)):
        return ""
    found = mask_from_prefixes(row.messages, language.tokenizer, list(prompt.tools) or None, row.own)
    if found is not None and found[0][:len(row.ids)].tolist() == row.ids:
        other = found[1][:len(row.ids)]
        if np.array_equal(other, derived) and np.array_equal(other, own):
            return "both"
        return "" if stable or not thoughts_alone(other, own, row.ids, language) else "markers"
    return "" if stable else "markers"


def thoughts_alone(a: np.ndarray, b: np.ndarray, ids: list[int], language: Language) -> bool:
    """Whether two masks differ in nothing but thought marks and blanks, each time right before a span of both."""
    for begin, end in spans((a != b).astype(np.uint8)).tolist():
        marks = [token for token in ids[begin:end] if language.tokenizer.decode([token]).strip()]
        if not language.free.issuperset(marks) or end == len(ids) or not a[end] or not b[end]:
            return False
    return True


# ---------------------------------------------------------------------------------------------------- records


def records(talk: Talk, tokenizer, part: int = 0, facts: dict | None = None) -> list[dict]:
    """The talk's records as DESIGN section 3 has them. `facts`: what else stands in each, of an endpoint's answers."""
    return [as_record(talk, row, number, tokenizer, part, facts) for number, row in enumerate(talk.rows)]


def as_record(talk: Talk, row: Row, number: int, tokenizer, part: int, facts: dict | None) -> dict:
    """A cut answer's text would not give its ids back, so such a record has no `messages` (an endpoint's has `prompt`,
    those before the answer); any other equals its messages' rendering, to the line break at the end."""
    name = f"{talk.prompt.id}#{number + 1}" if number else talk.prompt.id
    tools = list(talk.prompt.tools)
    ids, mask = list(row.ids), list(row.mask)
    record = {"id": numbered(name, part), "input_ids": ids, "loss_mask": mask, "finish": row.finish}
    if row.finish != "length":
        record["messages"] = row.messages
        whole = encode(tokenizer, render(tokenizer, row.messages, tools=tools or None))
        if whole[:len(ids)] == ids:
            record |= {"input_ids": whole, "loss_mask": mask + [0] * (len(whole) - len(ids))}
    elif facts is not None:
        record["prompt"] = row.messages[:-1]
    if tools:
        record["tools"] = tools
    return record | (facts or {})


def numbered(name: str, part: int) -> str:
    """A dataset's name, or a row's: of a later part with the part's number, so that it stands once."""
    return f"{name}.{part}" if part else name
