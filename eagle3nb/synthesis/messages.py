"""A chat endpoint's answer as the text that the target wrote: what follows the prompt, thought, calls and all.

The target's own template says how its answers are spelled, but not always in place. One leaves the thought of a
finished turn out (Kimi-K2's writes `<think></think>` for it, DeepSeek-R1's nothing), or opens it in the prompt already.
So an answer is taken from the conversation's rendering, put behind the prompt as it was asked, and a thought that the
rendering has emptied is put back where it stood.
"""

import json
import re
from dataclasses import dataclass
from itertools import product

from jinja2 import TemplateError

from eagle3nb.corpus.masks import Markers, render
from eagle3nb.corpus.template import THINKING

REFUSES = (TemplateError, TypeError, ValueError, KeyError)  # by a template that has no place for some messages


@dataclass(frozen=True)
class Spelling:
    """How a template spells an assistant's turn. `heads`: what it writes before one, without a thought that it opens.

    `thought`: the marks around one. `places`: the template takes thoughts as `reasoning_content`. `silent`: it does not
    speak of thoughts at all, though its tokenizer has marks for them.
    """

    heads: tuple[str, ...]
    thought: tuple[str, str]
    places: bool
    silent: bool


@dataclass(frozen=True)
class Spoken:
    """`message`: the answer as the template takes it. `before`: what was asked, `text`: what followed, with the end of
    turn unless it was cut. `dropped`: there was a thought that the template has no place for."""

    message: dict
    before: str
    text: str
    dropped: bool


def spelling_of(tokenizer, markers: Markers) -> Spelling:
    template = tokenizer.get_chat_template()
    known = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    marks = (pair for where in (template, known) for pair in THINKING if pair[1] in where)
    thought = next(marks, THINKING[0])
    heads = {tokenizer.decode(list(header)).partition(thought[0])[0] for header in markers.opens}
    return Spelling(tuple(sorted(heads - {""}, key=len, reverse=True)), thought, "reasoning_content" in template,
                    thought[1] in known and thought[1] not in template)


def spoken(messages: list[dict], said: dict, cut: bool, tools, tokenizer, spelling: Spelling,
           end: str) -> Spoken | None:
    """The answer `said` to `messages`; None where the template drops a part of it. `end`: the end-of-turn token."""
    asked, thought = render(tokenizer, messages, generation=True, tools=tools), said.get("reasoning_content") or ""
    for message, wanted in forms(said, spelling):
        try:
            whole = render(tokenizer, [*messages, message], tools=tools)
        except REFUSES:
            continue
        turn = whole[turn_of(whole, spelling):]
        if all(part in turn for part in wanted) and end in turn:
            break
    else:
        return None
    before, text = continued(asked, whole, thought.strip(), spelling)
    text = text[:text.rindex(end) + len(end)]
    if cut:  # what the template writes behind it was not generated
        content = said["content"].strip()
        text = text[:text.rindex(content, 0, len(text) - len(end)) + len(content)]
    return Spoken(message, before, text, bool(thought) and thought.strip() not in text)


def turn_of(text: str, spelling: Spelling) -> int:
    """Where the last turn begins, behind its head; 0 where none is found."""
    return max((at + len(head) for head in spelling.heads if (at := text.rfind(head)) >= 0), default=0)


def continued(asked: str, whole: str, thought: str, spelling: Spelling) -> tuple[str, str]:
    """(what was asked, what followed) of a prompt and of the conversation with its answer, which may write what came
    before in another way."""
    begin, (opener, closer) = turn_of(asked, spelling), map(re.escape, spelling.thought)
    turn, opened = whole[turn_of(whole, spelling):], asked[begin:]
    empty = re.match(rf"\s*{opener}(\s*){closer}\s*", turn)
    if thought and thought not in turn:
        if empty:
            half = len(empty[1]) // 2
            turn = turn[:empty.start(1)] + empty[1][:half] + thought + empty[1][half:] + turn[empty.end(1):]
        elif within := re.fullmatch(rf"\s*{opener}(\s*)", opened):
            close = "\n{}\n\n" if "\n" in within[1] else "{}"
            turn = opened + thought + close.format(spelling.thought[1]) + turn
    elif empty and not thought:  # by the template, as far as anybody knows
        return asked[:begin] + empty[0], turn[empty.end():]
    if turn.startswith(opened):
        return asked, turn[len(opened):]
    return asked[:begin], turn  # the prompt opened a thought, and there was none: it was asked without


def arguments_of(call: dict) -> dict | None:
    """A call's arguments as an object; None where they are none."""
    given = call["function"].get("arguments") or "{}"
    try:
        found = json.loads(given) if isinstance(given, str) else given
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def forms(said: dict, spelling: Spelling):
    """(message, texts that must be in its rendering): the forms in which templates take an answer, the most faithful
    first. A thought as a field of its own, or within the content; a call's arguments as the text that the model wrote,
    or as an object."""
    content, thought = said.get("content") or "", said.get("reasoning_content") or ""
    calls = said.get("tool_calls") or ()
    plain = {"role": "assistant", "content": content}
    apart = plain | ({"reasoning_content": thought} if thought else {})
    ways = [(apart, [thought.strip()] if thought else []), (apart, [])]
    if thought and spelling.silent:
        opener, closer = spelling.thought
        ways[1:1] = [({**plain, "content": f"{opener}\n{thought.strip()}\n{closer}\n\n{content}"}, [thought.strip()])]
    for (message, wanted), as_text in product(ways, (True, False) if calls else (True,)):
        wanted = [*wanted, *([content.strip()] if content.strip() else [])]
        if calls:
            made = [{**call, "function": {**call["function"], "arguments": call["function"].get("arguments") or "{}"
                                          if as_text else arguments_of(call)}} for call in calls]
            message = {**message, "tool_calls": made}
            wanted += [call["function"]["name"] for call in made]
            wanted += [call["function"]["arguments"] for call in made] if as_text else []
        yield message, wanted
        if calls and not content:
            yield {**message, "content": None}, wanted  # DeepSeek's write an empty content as a turn of its own
