"""Evaluation prompts in the corpus: against a slow search, and put where they must and where they must not be found."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3nb.corpus import overlap
from eagle3nb.corpus.masks import encode, render
from eagle3nb.corpus.overlap import COMMON, ENOUGH, GRAM, needles, needles_of, overlaps
from eagle3nb.errors import UserError

HEADER, END = [1, 2, 3], [4]


def turn(content):
    return [*HEADER, *content, *END]


def prompts_of(*contents):
    return [("bench", f"p{i}", list(content), turn(content)) for i, content in enumerate(contents)]


def found(rows, sought):
    """{row: (at, prompt, share)}."""
    ids = np.concatenate([np.asarray(row, np.int32) for row in rows] or [np.zeros(0, np.int32)])
    rows, at, prompt, share = overlaps(ids, np.cumsum([0, *map(len, rows)]), sought)
    assert rows.dtype == at.dtype == prompt.dtype == np.int64
    return {r: (int(a), int(p), float(s)) for r, a, p, s in zip(rows.tolist(), at, prompt, share, strict=True)}


def grams(ids):
    """[(n-gram, position)]"""
    return [(tuple(ids[i:i + GRAM]), i) for i in range(len(ids) - GRAM + 1)]


def slow(rows, prompts):
    """The same by the docstring's words, in plain loops."""
    have = [{gram for gram, _ in grams(content)} for _, _, content, _ in prompts]
    have = [{gram for gram in mine if sum(gram in other for other in have) <= COMMON} for mine in have]
    hits = {}
    for r, row in enumerate(rows):
        best = []
        for p, (_, _, _, whole) in enumerate(prompts):
            places = [i for i in range(len(row) - len(whole) + 1) if whole and row[i:i + len(whole)] == whole]
            best += [(-1.0, p, places[0])] if places else []
            matched = {gram for gram, _ in grams(row)} & have[p]
            if matched and (4 * len(matched) >= max(len(have[p]), 4 * ENOUGH) or 2 * len(matched) >= len(have[p])):
                at = min(i for gram, i in grams(row) if gram in matched)
                best.append((-len(matched) / len(have[p]), p, at))
        if best:
            share, prompt, at = min(best)
            hits[r] = at, prompt, -share
    return hits


def fresh(rng, count):
    return rng.integers(100, 100_000, count).tolist()


@given(seed=st.integers(0, 10_000))
def test_equals_the_slow_search(seed):
    """Prompts of few different tokens that share parts, rows of pieces of them: all sorts of overlaps arise."""
    rng = np.random.default_rng(seed)
    pool = [rng.integers(5, 8, int(rng.integers(1, 40))).tolist() for _ in range(6)]
    contents = [sum((pool[i] for i in rng.integers(0, 6, int(rng.integers(1, 4)))), []) for _ in range(12)]
    prompts = prompts_of(*contents)
    prompts[3] = *prompts[3][:3], []
    rows = []
    for _ in range(8):
        row = []
        for _ in range(int(rng.integers(1, 6))):
            content = contents[rng.integers(12)]
            cut = sorted(rng.integers(0, len(content) + 1, 2))
            row += [turn(content), content[cut[0]:cut[1]], [9], pool[rng.integers(6)], [1, 2]][rng.integers(5)]
        rows.append(row or [9])
    assert found(rows, needles(prompts)) == slow(rows, prompts)


def test_a_prompt_in_the_middle_of_a_row():
    rng = np.random.default_rng(0)
    content = fresh(rng, 60)
    sought = needles(prompts_of(fresh(rng, 80), content))
    rows = [fresh(rng, 300), fresh(rng, 100) + content + fresh(rng, 50), fresh(rng, 40) + content[20:45]]
    assert found(rows, sought) == {1: (100, 1, 1.0), 2: (40, 1, 13 / 48)}
    assert (sought.benchmarks[1], sought.names[1]) == ("bench", "p1")


def test_it_takes_a_quarter_of_the_ngrams_and_ten_or_half_of_a_short_prompts():
    rng = np.random.default_rng(1)
    long, middle, short = fresh(rng, 100), fresh(rng, 44), fresh(rng, 17)  # 88, 32 and 5 n-grams
    sought = needles(prompts_of(long, middle, short))
    around = fresh(rng, 5)
    for i, (content, enough, of) in enumerate([(long, 22, 88), (middle, 10, 32), (short, 3, 5)]):
        first = 30 if i == 0 else 1
        assert found([around + content[first:first + GRAM + enough - 2] + around], sought) == {}
        assert found([around + content[first:first + GRAM + enough - 1] + around], sought) == {0: (5, i, enough / of)}
    pieces = [token for i in range(0, 44, 11) for token in [*long[i:i + 2 * GRAM - 3], 7]]  # here and there: 4 · 11
    assert found([pieces], sought) == {0: (0, 0, 44 / 88)}
    assert found([around + short[:GRAM + 1], short[GRAM + 1:]], sought) == {}  # no n-gram reaches into the next row
    assert found([(long[:GRAM] + [7]) * 30], sought) == {}  # the same one again is one


def test_a_short_prompt_is_found_as_a_turn_only():
    rng = np.random.default_rng(2)
    content = fresh(rng, 6)
    sought = needles(prompts_of(content))
    row = fresh(rng, 20)
    assert found([row + content + row], sought) == {}
    assert found([row + turn(content) + row, row, turn(content)], sought) == {0: (20, 0, 1.0), 2: (0, 0, 1.0)}
    assert found([row + HEADER + content + [99] + END], sought) == {}
    assert found([turn(content)[:-1], turn(content)[-1:] + row], sought) == {}  # cut by the border of two rows


def test_a_turn_is_compared_token_for_token():
    """A key is made of 16 tokens of a turn: another turn that has them all is not the prompt."""
    rng = np.random.default_rng(3)
    content = fresh(rng, 12)  # no n-gram: with END and HEADER 16 tokens, so double it in the middle
    whole = HEADER + content + fresh(rng, 30) + END
    sought = needles([("bench", "a", content, whole), ("bench", "b", content, whole)])
    for i in range(len(whole)):
        other = [*whole[:i], whole[i] + 1, *whole[i + 1:]]
        assert found([other], sought) == {}
    assert found([[8] + whole], sought) == {0: (1, 0, 1.0)}
    alike = needles([("bench", "a", content, [*whole[:i], whole[i] + 1, *whole[i + 1:]]) for i in range(len(whole))]
                    + [("bench", "b", content, whole)])
    assert len(set(alike.turn_keys.tolist())) < len(whole)  # many equal the last one's
    assert found([whole], alike) == {0: (0, len(whole), 1.0)}


def test_a_row_is_told_by_the_prompt_of_the_highest_share():
    rng = np.random.default_rng(4)
    one, other = fresh(rng, 100), fresh(rng, 40)
    row = one[:50] + [7] + other[:38]
    assert found([row], needles(prompts_of(one, other))) == {0: (51, 1, 26 / 28)}
    assert found([turn(one) + other], needles(prompts_of(other, one))) == {0: (4 + 100, 0, 1.0)}  # equal: the first


def test_what_many_prompts_share_is_their_instruction():
    rng = np.random.default_rng(5)
    instruction = fresh(rng, 60)
    contents = [instruction + fresh(rng, 30) for _ in range(COMMON + 1)]
    row = fresh(rng, 9) + instruction + fresh(rng, 90)
    assert found([row], needles(prompts_of(*contents))) == {}
    assert found([row + contents[4][-30:]], needles(prompts_of(*contents)))[0][1] == 4
    assert found([row], needles(prompts_of(*contents[1:])))[0][1] == 0  # of eight it is still their text
    only = needles(prompts_of(*[instruction] * (COMMON + 1)))
    assert found([row, turn(instruction)], only) == {1: (0, 0, 1.0)}


def test_nothing_to_look_for_and_nowhere_to_look():
    rng = np.random.default_rng(6)
    nothing, some = needles([]), needles(prompts_of(fresh(rng, 30)))
    assert (len(nothing), len(some)) == (0, 1) and not nothing
    assert found([fresh(rng, 50), [1]], nothing) == {}
    assert found([], nothing) == found([], some) == found([[1], [1, 2], fresh(rng, 12)], some) == {}
    assert found([fresh(rng, 50)], needles([("bench", "a", [], [])])) == {}


def test_needles_survive_being_sent_and_blocks_have_no_seam(monkeypatch):
    rng = np.random.default_rng(7)
    contents = [fresh(rng, int(rng.integers(3, 60))) for _ in range(30)]
    rows = [fresh(rng, int(rng.integers(1, 90))) + turn(contents[i]) + fresh(rng, 5) for i in range(30)]
    sought = pickle.loads(pickle.dumps(needles(prompts_of(*contents))))
    whole = found(rows, sought)
    assert [hit[1] for hit in whole.values()] == list(range(30))
    monkeypatch.setattr("eagle3nb.corpus.ngrams.BLOCK", 7)
    monkeypatch.setattr(overlap, "TURNS", 4)
    assert found(rows, sought) == whole


MISTRAL = ("<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]{% else %}"
           "{{ m.content }}</s>{% endif %}{% endfor %}")
LLAMA = ("<|begin|>{% for m in messages %}<|start|>{{ m.role }}<|stop|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
         "{% if add_generation_prompt %}<|start|>assistant<|stop|>\n\n{% endif %}")
ENDLESS = ("<s>{% for m in messages %}{% if m.role == 'user' %}<|U|>{{ m.content }}{% else %}<|A|>{{ m.content }}</s>"
           "{% endif %}{% endfor %}{% if add_generation_prompt %}<|A|>{% endif %}")


@pytest.mark.parametrize(("template", "header", "end"), [
    (None, "<|im_start|>user\n", "<|im_end|>"), (MISTRAL, "[INST] ", " [/INST]"),
    (LLAMA, "<|start|>user<|stop|>\n\n", "<|eot|>"), (ENDLESS, "<|U|>", "<|A|>")])
def test_a_turn_is_cut_out_of_what_the_template_renders(chatml, template, header, end):
    tokenizer = copy.deepcopy(chatml)
    if template:
        tokenizer.chat_template = template
        tokenizer.add_special_tokens({"additional_special_tokens": [
            "<s>", "</s>", "<|begin|>", "<|start|>", "<|stop|>", "<|eot|>", "<|U|>", "<|A|>"]})
    text = "the user asks\n\nthe assistant sings of 93 owls and 17 kettles"
    sought = needles_of([("bench", "long", text + "\n"), ("bench", "short", "sing")], tokenizer)
    strips = template in (MISTRAL, LLAMA)
    assert tokenizer.decode(sought.turns[0]) == header + text + ("" if strips else "\n") + end
    assert text[5:-5] in tokenizer.decode(sought.tokens) and header not in tokenizer.decode(sought.tokens)
    for i, asked in enumerate((text + "\n", "sing")):
        talks = [[("user", asked), ("assistant", "no")], [("user", "Be kind"), ("assistant", "no"), ("user", asked)]]
        for talk in talks:
            messages = [{"role": role, "content": content} for role, content in talk]
            ids = encode(tokenizer, render(tokenizer, messages, generation=template is not MISTRAL))
            assert found([ids], sought)[0][1:] == (i, 1.0)
        longer = [{"role": "user", "content": asked + " code(x) " + asked}, {"role": "assistant", "content": "no"}]
        assert (i == 0) == bool(found([encode(tokenizer, render(tokenizer, longer))], sought))


def test_the_other_templates(kimi, markless):
    sought = needles_of([("bench", "a", "sing")], kimi)
    assert kimi.decode(sought.turns[0]) == "<|im_user|>user<|im_middle|>sing<|im_end|>"
    sought = needles_of([("bench", "a", "sing")], markless)
    assert len(sought.turns[0]) == 0  # nothing is around a turn, so "sing" would be one wherever it stands
    silent = copy.deepcopy(kimi)
    silent.chat_template = "{% for m in messages %}<|im_end|>{% endfor %}"
    with pytest.raises(UserError, match="leaves out"):
        needles_of([("bench", "a", "sing")], silent)
    silent.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(UserError, match="renders no conversation"):
        needles_of([("bench", "a", "sing")], silent)
