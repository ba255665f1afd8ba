"""The vectorised rules agree with a walk over each row, token by token."""

import numpy as np
import pytest


def places_of(ids, pattern):
    n = len(pattern)
    return [i for i in range(len(ids) - n + 1) if n and list(ids[i:i + n]) == list(pattern)]


def walk(ids, own, derived, rows):
    """{rule: position or None} of one row, token by token."""
    markers, template, found, T = rows.markers, rows.template, {}, len(ids)
    own = derived if own is None else own

    def first(rule, places):
        if places:
            found[rule] = min(places)

    if not any(own):
        found["mask_all_zero"] = None
    if all(own):
        found["mask_all_one"] = None
    first("mask_disagrees", [t for t in range(T) if own[t] != derived[t]])
    first("eot_unsupervised", [t for t in range(1, T) if ids[t] == markers.end_of_turn and own[t - 1] and not own[t]
                               and (derived[t] or not any(derived))])
    if any(derived) and not all(own):
        first("supervised_prompt", [t for t in range(T) if own[t] and not derived[t]])
    foreign = [t for _, pattern in template.foreign for t in places_of(ids, pattern)]
    headed = any(derived) or any(tuple(ids[T - len(h):]) == h for h in markers.opens if len(h) <= T)
    first("template_mismatch", foreign or ([] if headed else [0]))
    first("special_token_as_text", [t for _, pattern in template.spelled for t in places_of(ids, pattern)])
    spans = [(t, next((e for e in range(t, T) if not derived[e]), T)) for t in range(T)
             if derived[t] and not derived[t - 1]]
    thoughts = []
    for begin, end in spans:
        header = next(i for i, h in enumerate(markers.opens) if tuple(ids[max(begin - len(h), 0):begin]) == h)
        depth = template.open_thoughts[header]
        for t in range(begin, end):
            if template.think and ids[t] in template.think:
                depth += 1 if ids[t] == template.think[0] else -1
                thoughts += [t] if depth not in (0, 1) else []
        if depth > 0 and ids[end - 1] == markers.end_of_turn:
            thoughts.append(end - 1)
    first("think_unbalanced", thoughts)
    users, faults, before = set(places_of(ids, template.user)), [], None
    for t in range(T if spans else 0):
        if t in users:
            faults += [t] if derived[t] or before == "user" else []
            before = before if derived[t] else "user"
        if any(t == begin for begin, _ in spans):
            faults += [t] if before is None or ids[t] == markers.end_of_turn else []
            before = "assistant"
    ends = [t for t in range(T) if ids[t] == markers.end_of_turn]
    if spans and ends and not derived[ends[-1]] and T % 256 and T % 1000:
        faults += [ends[-1]] if tuple(ids[ends[-1] + 1:]) in ((), template.tail) else []
    first("roles_malformed", faults)
    return found


def soup(rows, rng):
    """Anything: pieces of turns, of thoughts, of foreign text, in any order."""
    pieces = [rows.template.user, rows.template.user[:1], rows.template.tail, (rows.markers.end_of_turn,),
              (rows.markers.end_of_turn,), *rows.markers.opens, *rows.markers.opens, *((t,) for t in (
                  rows.template.think or ())), *(rows.ids(text) for text in ("owls", "\n", "93"))]
    rare = [pattern for _, pattern in (*rows.template.spelled, *rows.template.foreign)]
    return [token for _ in range(rng.integers(1, 14)) for token in
            (rare[rng.integers(len(rare))] if rng.random() < 0.05 else pieces[rng.integers(len(pieces))])] or [1]


@pytest.mark.parametrize("name", ["chatml", "kimi", "llama3", "deepseek"])
def test_the_rules_agree_with_a_walk_over_each_row(kinds, name):
    rows, rng, seen = kinds[name], np.random.default_rng(7), set()
    for _ in range(60):
        batch = [soup(rows, rng) for _ in range(rng.integers(1, 6))]
        derived, masks = [rows.derive(row).tolist() for row in batch], []
        for row, mask in zip(batch, derived, strict=True):
            flips = (rng.random(len(row)) < rng.choice([0, 0, 0.1, 1])).astype(int)
            masks.append([[int(m) ^ int(f) for m, f in zip(mask, flips, strict=True)], mask, None, [1] * len(row)][
                rng.choice(4, p=[0.6, 0.2, 0.15, 0.05])])
        hits = rows.hits(batch, masks)
        expected = [walk(*each, rows) for each in zip(batch, masks, derived, strict=True)]
        for rule in {*hits.counts, *(rule for row in expected for rule in row)}:
            places = [(i, row[rule]) for i, row in enumerate(expected) if rule in row]
            assert hits.counts[rule] == len(places), rule
            assert [(row, at) for row, at, _ in hits.examples[rule]] == places[:5], rule
            assert all(detail for _, _, detail in hits.examples[rule])
            seen.add(rule)
    assert len(seen) == (9 if rows.template.think else 8)  # every rule had its fault
