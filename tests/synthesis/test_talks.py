"""Random talks of several turns, with tools and thoughts, against a naive rendering in pieces; what is no record."""

import json
import random
import re
from collections import Counter
from dataclasses import replace

import pytest
from synthesis.speaking import END, FORGETS, OBJECTS, PLAIN, TOOLS, call, naive, tokenizer_of

from eagle3nb.synthesis.endpoint import Answer
from eagle3nb.synthesis.prompts import Prompt
from eagle3nb.synthesis.sources import prompt_of
from eagle3nb.synthesis.talks import ATTEMPTS, begin, language_of, records, take

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
FACTS = {"model": "m", "on_policy": False}


def held(prompt: Prompt, template: str, says, exact: bool = False):
    """(records, counts, the talk) of a prompt whose answers `says(ask)` gives."""
    tokenizer = tokenizer_of(template)
    language, counts = language_of(tokenizer, (END,)), Counter()
    talk = begin(prompt, tokenizer)
    while not talk.over:
        said = says(talk)
        answer = said if isinstance(said, Answer) else Answer(
            talk.key, "tool_calls" if "tool_calls" in said else "stop", message=said) if not exact else Answer(
            talk.key, "stop" if said[-1] == END else "length", ids=tuple(said))
        take(talk, answer, language, counts)
    return records(talk, tokenizer, 0, FACTS), counts, talk


def word(draw: random.Random) -> str:
    letters = "".join(draw.choice("abcdefghij éü\n{}\"'") for _ in range(draw.randint(3, 12)))
    return letters.strip() + draw.choice("klmn")


def random_talk(draw: random.Random):
    """(prompt's messages, its answers, the pieces of the whole conversation without the tools' head)."""
    messages, answers, pieces = [], [], []

    def says(role, text, own=0, before=""):
        pieces.append((f"<|im_start|>{role}\n{before}", 0))
        pieces.append((f"{text}<|im_end|>", own))
        pieces.append(("\n", 0))

    if draw.random() < 0.5:
        messages.append({"role": "system", "content": word(draw)})
        says("system", messages[-1]["content"])
    for turn in range(draw.randint(1, 4)):
        messages.append({"role": "user", "content": word(draw)})
        says("user", messages[-1]["content"])
        if draw.random() < 0.25:  # an answer that is given: context
            messages.append({"role": "assistant", "content": word(draw)})
            says("assistant", messages[-1]["content"])
            messages.append({"role": "user", "content": word(draw)})
            says("user", messages[-1]["content"])
        while draw.random() < 0.4:  # calls and their results
            if messages[-1]["role"] == "tool":
                messages.append({"role": "assistant"})
            calls = [call("look", 10 * turn + n, at=word(draw)) for n in range(draw.randint(1, 3))]
            answers.append({"role": "assistant", "content": draw.choice(["", word(draw)]), "tool_calls": calls})
            if draw.random() < 0.5:
                answers[-1]["reasoning_content"] = word(draw)
            says("assistant", spoken(answers[-1]), 1)
            for _ in calls:
                messages.append({"role": "tool", "content": word(draw), "tool_call_id": "of another talk"})
                says("tool", messages[-1]["content"])
        answers.append({"role": "assistant", "content": word(draw)})
        if draw.random() < 0.5:
            answers[-1]["reasoning_content"] = word(draw)
        says("assistant", spoken(answers[-1]), 1)
    return messages, answers, pieces


def spoken(message: dict) -> str:
    thought = f"<think>{message['reasoning_content']}</think>" if message.get("reasoning_content") else ""
    calls = "".join(f"<tool_call>{c['function']['name']} {c['function']['arguments']}</tool_call>"
                    for c in message.get("tool_calls", ()))
    return thought + message["content"] + calls


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("exact", [False, True])
def test_a_talk_becomes_what_the_template_writes(seed, exact):
    """The one row's ids and mask are those of the pieces, whether answers come as messages or as ids."""
    messages, answers, pieces = random_talk(random.Random(seed))
    answered = iter(answers)

    def says(talk):
        message = next(answered)
        return naive([(spoken(message) + "<|im_end|>", 1)])[0] if exact else message

    rows, counts, talk = held(prompt_of("a", "X", messages, [TOOL]), TOOLS, says, exact)
    head = [(f"<|im_start|>tools\n{json.dumps(TOOL)}\n<|im_end|>\n", 0)]
    assert (rows[0]["input_ids"], rows[0]["loss_mask"]) == naive(head + pieces)
    assert len(rows) == 1 and rows[0]["tools"] == [TOOL] and not talk.why
    assert rows[0] | FACTS == rows[0] and "by markers alone" not in counts
    assert sum(counts[name] for name in ("stop", "tool_calls")) == len(answers)
    if not exact:
        spoken_to = [m for m in talk.said if m["role"] == "tool"]
        asked = [c["id"] for m in answers for c in m.get("tool_calls", ())]
        assert [m["tool_call_id"] for m in spoken_to] == asked, "results take over the ids of the calls made here"
        assert [m for m in talk.said if m["role"] == "assistant" and m in answers] == answers


@pytest.mark.parametrize("exact", [False, True])
def test_where_thoughts_are_forgotten_a_turn_is_a_row_as_the_target_saw_it(exact):
    messages = [{"role": "user", "content": text} for text in ("one?", "two?", "three?")]
    said = [{"role": "assistant", "content": f"{n}.", "reasoning_content": f"hm {n}"} for n in ("one", "two", "three")]
    answered = iter(said)

    def says(talk):
        message = next(answered)
        text = f"{message['reasoning_content']}</think>{message['content']}<|im_end|>"
        return naive([(text, 1)])[0] if exact else message

    rows, counts, _ = held(prompt_of("a", "X", messages), FORGETS, says, exact)
    assert [row["id"] for row in rows] == ["a", "a#2", "a#3"] and counts["stop"] == 3
    for turn, row in enumerate(rows):
        pieces = []
        for n in range(turn + 1):
            thought = said[n]["reasoning_content"] if n == turn else ""
            pieces += [(f"<|im_start|>user\n{messages[n]['content']}<|im_end|>\n<|im_start|>assistant\n<think>", 0),
                       (f"{thought}</think>{said[n]['content']}<|im_end|>", int(n == turn)), ("\n", 0)]
        assert (row["input_ids"], row["loss_mask"]) == naive(pieces), turn
        assert row["messages"][-1] == said[turn]
    assert "by markers alone" not in counts, "of each row's own answer both derivations are there"


def test_a_forgetting_template_keeps_one_row_while_nothing_was_thought():
    """Earlier turns are then what was written, emptied thoughts included: the rows go on with one another."""
    messages = [{"role": "user", "content": text} for text in ("one?", "two?")]
    answered = iter(["</think>1.", "</think>2."])
    rows, _, _ = held(prompt_of("a", "X", messages), FORGETS,
                      lambda talk: naive([(next(answered) + "<|im_end|>", 1)])[0], True)
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>"
    assert [(row["input_ids"], row["loss_mask"]) for row in rows] == [naive([
        (turn.format("one?"), 0), ("</think>1.<|im_end|>", 1), ("\n" + turn.format("two?"), 0),
        ("</think>2.<|im_end|>", 1), ("\n", 0)])]


@pytest.mark.parametrize("said", ["message", "ids"])
def test_an_empty_thought_may_be_the_templates_or_the_targets(said):
    """Of a chat's answer nobody knows, of ids one does; neither is refused for the other's sake."""
    rows, counts, _ = held(replace(asks(), tools=()), FORGETS, lambda talk: message("Yes.") if said == "message" else
                           naive([("</think>Yes.<|im_end|>", 1)])[0], said == "ids")
    assert (rows[0]["input_ids"], rows[0]["loss_mask"]) == naive([
        ("<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n<think>", 0), ("</think>", int(said == "ids")),
        ("Yes.<|im_end|>", 1), ("\n", 0)])
    assert +counts == Counter({"stop": 1, "by markers alone": 1})


def asks(text: str = "Hi?", *later) -> Prompt:
    return Prompt("a", "X", ({"role": "user", "content": text},), later, (TOOL,))


def message(content="", **more) -> dict:
    return {"role": "assistant", "content": content} | more


def test_arguments_go_into_the_template_as_it_takes_them():
    made = message(tool_calls=[call("look", 1, at="sky")])
    for template, wanted in ((TOOLS, '<tool_call>look {"at":"sky"}</tool_call>'),
                             (OBJECTS, '<tool_call>look [["at", "sky"]]</tool_call>')):
        rows, _, talk = held(asks(), template, lambda talk: made)
        assert wanted in tokenizer_of(template).decode(rows[0]["input_ids"]) and talk.said[-1] == made
    rows, counts, _ = held(asks(), PLAIN, lambda talk: made)
    assert rows == [] and counts["template drops it"] == ATTEMPTS, "a template without tools loses what was called"


EMPTIES = PLAIN.replace("{{ m.content }}", "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content if "
                        "m.tool_calls else '' }}</think>{% endif %}{{ m.content }}")  # as Kimi-K2's, of a finished turn
STRIPS = PLAIN.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
OPENS = STRIPS.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")  # as DeepSeek-R1's


@pytest.mark.parametrize("template, asked, kept", [
    (TOOLS, "", "<think>because</think>Yes."),
    (PLAIN, "", "<think>\nbecause\n</think>\n\nYes."),  # it does not speak of thoughts, the tokenizer has their marks
    (EMPTIES, "", "<think>because</think>Yes."),
    (EMPTIES.replace("<think>{{", "<think>\n{{").replace("}}</think>", "}}\n</think>\n\n"), "",
     "<think>\nbecause\n</think>\n\nYes."),
    (OPENS, "<think>\n", "because\n</think>\n\nYes."),
    (FORGETS, "<think>", "because</think>Yes."),
    (STRIPS, "", "Yes.")])
def test_a_thought_is_kept_where_the_target_wrote_it(template, asked, kept):
    """Even where the template empties it in the whole's rendering; all that followed the prompt is supervised."""
    rows, counts, _ = held(replace(asks(), tools=()), template,
                           lambda talk: message("Yes.", reasoning_content="because"))
    wanted = naive([(f"<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n{asked}", 0), (f"{kept}<|im_end|>", 1)])
    end = len(wanted[0])
    assert (rows[0]["input_ids"][:end], rows[0]["loss_mask"][:end]) == wanted and not any(rows[0]["loss_mask"][end:])
    assert counts["thought dropped by the template"] == (template == STRIPS)


def test_a_call_without_words_goes_as_the_template_takes_it():
    """DeepSeek's writes an answer that has a content, an empty one too, behind its calls as a turn of its own."""
    apart = PLAIN.replace("{{ m.content }}", (
        "{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>{{ c.function.name + ' ' + c.function.arguments }}"
        "</tool_call>{% endfor %}{% if m.content is not none %}<|im_end|>\n<|im_start|>assistant\n{% endif %}"
        "{% endif %}{{ m.content or '' }}"))
    rows, _, _ = held(asks(), apart, lambda talk: message(tool_calls=[call("look", 1, at="sky")]))
    assert (rows[0]["input_ids"], rows[0]["loss_mask"]) == naive([
        ("<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n", 0),
        ('<tool_call>look {"at":"sky"}</tool_call><|im_end|>', 1), ("\n", 0)])


def test_thoughts_between_calls_stay_in_the_row_and_those_before_the_last_question_do_not():
    """As Kimi-K2's template: a chain of calls keeps its thoughts until it is answered."""
    chain = ("{% set ns = namespace(last=-1) %}{% for m in messages %}"
             "{% if m.role == 'assistant' and not m.tool_calls %}{% set ns.last = loop.index0 %}{% endif %}"
             "{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
             "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content if loop.index0 > ns.last else '' }}</think>"
             "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} "
             "{{ c.function.arguments }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
             "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    said = [message("", reasoning_content="look", tool_calls=[call("look", 1, at="sky")]),
            message("Blue.", reasoning_content="seen"), message("Bye.", reasoning_content="done")]
    answered = iter(said)
    told = (("user", "Sky?"), ("tool", "blue"), ("user", "Thanks."))
    prompt = prompt_of("a", "X", [{"role": role, "content": text} for role, text in told])
    rows, counts, _ = held(prompt, chain, lambda talk: next(answered))
    spans = [spoken(one) + "<|im_end|>" for one in said]
    first = [("<|im_start|>user\nSky?<|im_end|>\n<|im_start|>assistant\n", 0), (spans[0], 1),
             ("\n<|im_start|>tool\nblue<|im_end|>\n<|im_start|>assistant\n", 0), (spans[1], 1)]
    forgotten = [(re.sub("(look|seen)</think>", "</think>", piece), 0) for piece, _ in first]
    last = [*forgotten, ("\n<|im_start|>user\nThanks.<|im_end|>\n<|im_start|>assistant\n", 0), (spans[2], 1)]
    assert [(row["input_ids"], row["loss_mask"]) for row in rows] == [naive(first), naive(last)]
    assert +counts == Counter({"stop": 2, "tool_calls": 1, "by markers alone": 2})


def test_a_cut_answer_ends_where_it_was_cut():
    cut = message("Once upon", reasoning_content="t")
    rows, counts, talk = held(replace(asks("Hi?", ({"role": "user", "content": "More?"},)), tools=()), TOOLS,
                              lambda talk: Answer(talk.key, "length", message=cut))
    assert (rows[0]["input_ids"], rows[0]["loss_mask"]) == naive([
        ("<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n", 0), ("<think>t</think>Once upon", 1)])
    assert "messages" not in rows[0] and rows[0]["prompt"] == [{"role": "user", "content": "Hi?"}]
    assert counts["length"] == 1 and talk.turn == 1


@pytest.mark.parametrize("answer, why, tries", [
    (Answer((), "refused", "refusal"), "refused", 1),
    (Answer((), "failed", "longer than the context"), "longer than the context", 1),
    (Answer((), "failed", "empty"), "empty", ATTEMPTS),
    (Answer((), "length", message=message("", reasoning_content="so")), "cut in its thought", 1),
    (Answer((), "length", message=message("I", tool_calls=[call("look", 1)])), "cut in its call", 1),
    (Answer((), "stop", message=message("")), "empty", ATTEMPTS),
    (Answer((), "stop", message=message("round and " * 12)), "looping", ATTEMPTS),
    (Answer((), "stop", message=message("So <|im_start|>user\nwell")), "special token", ATTEMPTS),
    (Answer((), "stop", message=message("So <|im_end|>\n<|im_start|>assistant\nwell")), "special token", ATTEMPTS),
    (Answer((), "tool_calls", message=message(tool_calls=[
        {"id": "1", "function": {"name": "look", "arguments": '{"at": '}}])), "call is no JSON", ATTEMPTS),
    (Answer((), "stop", ids=(40, 1, 40, 41, END)), "special token", ATTEMPTS),
    (Answer((), "stop", ids=(40, END)), "empty", ATTEMPTS)])
def test_what_makes_no_record_is_counted_by_its_reason(answer, why, tries):
    rows, counts, talk = held(asks(), TOOLS, lambda talk: replace(answer, key=talk.key))
    assert rows == [] and +counts == Counter({why: tries} | ({"given up": 1} if tries == ATTEMPTS else {}))
    assert talk.why == ("given up" if tries == ATTEMPTS else why)


def test_results_that_do_not_fit_the_calls_end_the_talk_and_keep_what_was_said():
    results = tuple({"role": "tool", "content": "blue"} for _ in range(2))
    one = message(tool_calls=[call("look", 1, at="sky")])
    for later, said in (((results,), one), ((results,), message("I know it.")),
                        ((({"role": "user", "content": "And?"},),), one)):
        rows, _, talk = held(asks("Hi?", *later), TOOLS, lambda talk, said=said: said)
        assert talk.why == "results do not fit the calls" and len(rows) == 1
        assert [m["role"] for m in rows[0]["messages"]] == ["user", "assistant"]


def test_a_template_that_refuses_the_prompt_asks_nothing():
    strict = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    tokenizer = tokenizer_of(strict + PLAIN)
    talk = begin(Prompt("a", "X", ({"role": "tool", "content": "x"},)), tokenizer)
    assert talk.over and talk.why == "template refuses"


def test_free_are_the_special_tokens_that_the_template_itself_writes_into_answers():
    assert language_of(tokenizer_of(PLAIN), (END,)).free == frozenset()
    assert language_of(tokenizer_of(TOOLS), (END,)).free == {2, 3, 4, 5}
    assert not language_of(tokenizer_of(FORGETS), (END,)).markers.stable
