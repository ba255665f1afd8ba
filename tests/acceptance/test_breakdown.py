"""Breakdowns against the walk played move by move in plain Python, and by hand."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import tiny

from eagle3nb.acceptance import breakdown, offline, token_classes
from eagle3nb.acceptance.benchmarks import Answer

V, K = 90, 5


def random_chains(seed: int, answers: int = 12) -> list[offline.Chains]:
    """Random texts of printable characters and random drafts, right more often than not; prompts up to 1,500 tokens."""
    rng, found = np.random.default_rng(seed), []
    for i in range(answers):
        prompt, length = int(rng.integers(1, (20, 300, 1500)[i % 3])), int(rng.integers(1, 60))
        text = rng.integers(3, V, size=prompt + length + K + 1)
        answer = Answer(f"p{i}", "ab"[i % 2], tuple(text[:prompt]), tuple(text[prompt:prompt + length]),
                        tuple(text[prompt + length:]), False, False)
        slots = np.arange(prompt - 1, max(prompt + length - 2, prompt - 1))
        drafted = np.stack([np.where(rng.random(len(slots)) < 0.7, text[slots + 2 + k], rng.integers(3, V, len(slots)))
                            for k in range(K)]).astype(np.int32)
        hits = np.zeros((K, len(text)), dtype=bool)
        for k in range(K):
            hits[k, slots] = drafted[k] == text[slots + 2 + k]
        found.append(offline.Chains(answer, hits, drafted))
    return found


def moves(chain: offline.Chains, steps: int):
    """(newest token's position, [(place in the text, drafted, accepted)]) of each verify, as a server goes."""
    ids, answer = chain.answer.sequence.tolist(), chain.answer
    newest = answer.start
    while newest < answer.end - 1:
        told = []
        for k in range(steps):
            drafted = int(chain.drafted[k, newest - answer.start])
            told.append((newest + 1 + k, drafted, drafted == ids[newest + 1 + k]))
            if not told[-1][2]:
                break
        yield newest, told
        newest += sum(right for _, _, right in told) + 1


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_judged_drafts_are_those_of_a_server(steps):
    found = random_chains(1)
    table = breakdown.judged(found, steps)
    assert list(table.columns) == ["answer", "step", "place", "token", "drafted", "accepted"]
    naive = [(i, k, place - chain.answer.start, int(chain.answer.sequence[place]), drafted, right)
             for i, chain in enumerate(found) for _, told in moves(chain, steps)
             for k, (place, drafted, right) in enumerate(told)]
    assert list(table.itertuples(index=False, name=None)) == naive


@pytest.mark.parametrize("steps", [2, 5])
def test_context_lengths(steps):
    found = random_chains(2)
    rows = breakdown.by_context(found, steps, bootstrap=50, seed=1)
    names = {(0, 256): "0–255", (256, 512): "256–511", (512, 1024): "512–1,023", (1024, 2048): "1,024–2,047"}
    wanted = []
    for (low, high), name in names.items():
        counts, delivered = Counter(), 0
        for i, chain in enumerate(found):
            for newest, told in moves(chain, steps):
                if low <= newest < high:
                    right = sum(r for _, _, r in told)
                    counts[i] += 1
                    counts["accepted"] += right
                    delivered += min(right + 1, chain.answer.end - 1 - newest)
        accepted = counts.pop("accepted")
        wanted.append((name, sum(counts.values()), accepted, delivered, len(counts)))
    assert [(r["context"], r["verifies"], r["accepted"], r["delivered"], r["prompts"]) for r in rows] == wanted
    for row in rows:
        assert row["tau"] == 1 + row["accepted"] / row["verifies"]
        assert row["low"] is None if row["prompts"] == 1 else row["low"] <= row["tau"] <= row["high"]
    walks = [chain.walk(steps) for chain in found]
    assert sum(r["verifies"] for r in rows) == sum(w.verifies for w in walks)
    assert sum(r["delivered"] for r in rows) == sum(w.delivered for w in walks)
    assert "tokens" not in rows[0]


def test_buckets_begin_where_they_say():
    at = [0, 255, 256, 511, 512, 1023, 1024, 2047, 2048, 131_071, 131_072]
    names = [breakdown.bucket_name(int(b)) for b in breakdown.bucket(np.array(at))]
    for position, name in zip(at, names, strict=True):
        first, last = (int(end.replace(",", "")) for end in name.split("–"))
        assert first <= position <= last


def test_a_verify_stands_where_its_newest_token_does():
    (chain,) = random_chains(4, answers=1)
    for position, name in ((255, "0–255"), (256, "256–511")):  # the newest token's, at the answer's only verify
        answer = replace(chain.answer, prompt=(1,) * position, ids=(5, 6))
        found = [offline.Chains(answer, np.zeros((K, len(answer.sequence)), dtype=bool))]
        assert [r["context"] for r in breakdown.by_context(found, 1, bootstrap=9, seed=1)] == [name]


@pytest.mark.parametrize("steps", [1, 4])
def test_classes(steps):
    found = random_chains(3)
    rng = np.random.default_rng(0)
    classes = [rng.choice(["words", "digits", "code"], len(c.answer.ids)).tolist() for c in found]
    rows = breakdown.by_class(found, classes, steps, bootstrap=100, seed=1)
    past = ["past the end"] if steps > 1 else []  # one draft never runs past the end
    assert [row["class"] for row in rows] == ["code", "digits", "words", *past]
    first, every = Counter(), Counter()
    prompts = {}
    for i, chain in enumerate(found):
        for _, told in moves(chain, steps):
            for k, (place, _, right) in enumerate(told):
                inside = place < chain.answer.end
                name = classes[i][place - chain.answer.start] if inside else "past the end"
                every[name, right] += 1
                prompts.setdefault(name, set()).add(i)
                if k == 0:
                    first[name, right] += 1
    breaks = sum(number for (_, right), number in every.items() if not right)
    for row in rows:
        name = row["class"]
        assert row["reached"] == every[name, True] + every[name, False] and row["accepted"] == every[name, True]
        assert row["share"] == pytest.approx(every[name, True] / row["reached"])
        assert row["low"] <= row["share"] <= row["high"] and row["prompts"] == len(prompts[name])
        assert (row["first_reached"], row["first_accepted"]) == (first[name, True] + first[name, False],
                                                                first[name, True])
        assert row["breaks"] == every[name, False] and row["of_breaks"] == every[name, False] / breaks
        assert row["tokens"] == sum(names.count(name) for names in classes)
    walks = [chain.walk(steps) for chain in found]
    assert sum(row["accepted"] for row in rows) == sum(w.accepted for w in walks)
    assert sum(row["first_reached"] for row in rows) == sum(w.verifies for w in walks)
    with_one = breakdown.by_class(found[1:2], classes[1:2], steps, bootstrap=100, seed=1)
    assert all(row["low"] is None and row["prompts"] == 1 for row in with_one)


# ---------------------------------------------------------------------------------------------- what breaks the chain


def by_hand(prompt: str, text: str, drafted: list[str], id: str = "a") -> offline.Chains:
    """One answer of single characters whose step-0 drafts are given for each slot; later steps draft '~'."""
    tokenizer = tiny.make_tokenizer()
    ids = [tuple(tokenizer.encode(part, add_special_tokens=False)) for part in (prompt, text, "~" * 4)]
    answer = Answer(id, "chat", *ids, False, False)
    first = tokenizer.encode("".join(drafted), add_special_tokens=False)
    table = np.stack([first, [tokenizer.encode("~", add_special_tokens=False)[0]] * len(first)]).astype(np.int32)
    hits = np.zeros((2, len(answer.sequence)), dtype=bool)
    for i in range(len(first)):
        for k in range(2):
            hits[k, answer.start - 1 + i] = table[k, i] == answer.sequence[answer.start + 1 + i + k]
    return offline.Chains(answer, hits, table)


def test_the_tokens_that_break_chains():
    tokenizer = tiny.make_tokenizer()
    draftable = np.ones(256, dtype=bool)
    draftable[tokenizer.encode("q", add_special_tokens=False)] = False
    # Drafts for the second token on. One step: every slot after a break is a verify, one slot is jumped after a hit.
    one = by_hand("xx", "a\nqbqq", ["!", "b", "b", "?", "b"])           # breaks: \n (!), q (b), b (b: a hit), q (b)
    two = by_hand("xx", "zq", ["b"], id="b")                            # q (b)
    rows = breakdown.breaks([one, two], tokenizer, draftable, 1)
    assert [(r["token"], r["breaks"], r["drafted"]) for r in rows] == [("q", 3, "b × 3"), ("↵", 1, "! × 1")]
    q, newline = rows
    assert q["share"] == 3 / 4 and q["hit_share"] == 0 and q["draftable"] == breakdown.NO_HELP
    assert q["contexts"] == "a↵⟦q⟧   z⟦q⟧" and newline["contexts"] == "a⟦↵⟧" and newline["draftable"] == "yes"
    assert breakdown.unreachable([one, two], draftable, 1) == {"breaks": 4, "outside": 3, "share": 3 / 4}
    assert len(breakdown.breaks([one, two], tokenizer, draftable, 1, top=1)) == 1
    assert breakdown.breaks([one, two], tokenizer, draftable, 1, contexts=1)[0]["contexts"] == "a↵⟦q⟧"


def test_breaks_past_the_end_cost_nobody_anything():
    tokenizer, draftable = tiny.make_tokenizer(), np.ones(256, dtype=bool)
    past = by_hand("xx", "ab", ["b"])                                   # hits b, then drafts behind the end
    past.drafted[1] = 5
    past.hits[1] = False
    assert breakdown.breaks([past], tokenizer, draftable, 2) == []
    assert breakdown.unreachable([past], draftable, 2) == {"breaks": 0, "outside": 0, "share": None}
    (row, behind) = breakdown.by_class([past], [token_classes.classify(past.answer, tokenizer)], 2, bootstrap=9, seed=1)
    assert (row["class"], row["accepted"], behind["class"], behind["breaks"]) == ("words", 1, "past the end", 1)


def test_real_chains(world):
    """From the walk over a model's answers to the tables: the sums are the walk's, the drafts the drafter's."""
    found = offline.chains(world.target, world.drafter, world.answers, 5)
    tokenizer, draftable = tiny.make_tokenizer(), world.drafter.t2d.numpy()
    classes = [token_classes.classify(chain.answer, tokenizer) for chain in found]
    rows = breakdown.by_class(found, classes, 5, bootstrap=20, seed=1)
    assert sum(r["accepted"] for r in rows) == sum(c.walk(5).accepted for c in found)
    table = breakdown.judged(found, 5)
    assert draftable[table["drafted"]].all() and ((table["token"] == table["drafted"]) == table["accepted"]).all()
    ranked = breakdown.breaks(found, tokenizer, draftable, 5, top=1000)
    assert sum(r["breaks"] for r in ranked) == breakdown.unreachable(found, draftable, 5)["breaks"]
    assert sum(r["share"] for r in ranked) == pytest.approx(1)
    outside = {r["id"] for r in ranked if r["draftable"] != "yes"}
    assert outside and outside <= set(range(40, 56)) and all(r["hit_share"] == 0 for r in ranked if r["id"] in outside)
