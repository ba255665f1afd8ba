"""Where acceptance is lost: by the length of the context, by the class of token, and the tokens that break the chain.

A verify judges its drafts up to the first wrong one, the break: those after it were never compared with anything. So
the counts below are of judged drafts alone, and over all classes they add up to the walk's.
"""

import numpy as np
import pandas as pd

from eagle3nb.acceptance import offline, token_classes

SHORTEST = 256  # tokens; the first bucket of context lengths, each later one is as long as all before it
BEFORE = 40     # characters of text before a token that broke a chain
MARKS = ("⟦", "⟧")
NO_HELP = "no: outside the draft vocabulary, training does not help"


def by_context(found: list[offline.Chains], steps: int, *, bootstrap: int, seed: int) -> list[dict]:
    """Rows {context, tau, low, high, prompts, verifies, accepted, delivered, …} by the tokens before a verify's newest.

    Buckets 0–255, 256–511, 512–1,023 and so on, those that occur. Prompts differ from bucket to bucket.
    """
    parts = []
    for i, chain in enumerate(found):
        walk = chain.walk(steps)
        parts.append(pd.DataFrame({
            "answer": i, "bucket": bucket(walk.slots + 1), "verifies": 1, "accepted": walk.lengths,
            "delivered": np.minimum(walk.lengths + 1, chain.answer.end - 2 - walk.slots)}))
    table = pd.concat(parts).groupby(["bucket", "answer"], as_index=False).sum().assign(tokens=0)
    rows = []
    for number, part in table.groupby("bucket"):
        found_row = offline.row(part, bootstrap=bootstrap, seed=seed, context=bucket_name(int(number)))
        rows.append({key: value for key, value in found_row.items() if key != "tokens"})
    return rows


def bucket(position: np.ndarray) -> np.ndarray:
    """int64: 0 below 256, 1 below 512, 2 below 1,024, …"""
    return np.searchsorted(SHORTEST * 2 ** np.arange(32), position, side="right")


def bucket_name(number: int) -> str:
    first, end = (SHORTEST * 2 ** (number - 1) if number else 0), SHORTEST * 2 ** number
    return f"{first:,}–{end - 1:,}"


def judged(found: list[offline.Chains], steps: int) -> pd.DataFrame:
    """A row a judged draft: answer (index in `found`), step, place (of the true token, 0 at the answer's first), token
    (the true one), drafted, accepted. The chains must hold what was drafted."""
    parts = []
    for i, chain in enumerate(found):
        walk, answer = chain.walk(steps), chain.answer
        drafts = np.minimum(walk.lengths + 1, steps)  # of each verify: the accepted ones and the break
        verify = np.repeat(np.arange(walk.verifies), drafts)
        step = np.arange(len(verify)) - np.repeat(np.cumsum(drafts) - drafts, drafts)
        place = walk.slots[verify] + 2 + step
        parts.append(pd.DataFrame({
            "answer": i, "step": step, "place": place - answer.start, "token": answer.sequence[place],
            "drafted": chain.drafted[step, walk.slots[verify] - (answer.start - 1)],
            "accepted": step < walk.lengths[verify]}))
    return pd.concat(parts, ignore_index=True)


def by_class(found: list[offline.Chains], classes: list[list[str]], steps: int, *, bootstrap: int,
             seed: int) -> list[dict]:
    """Rows by the class of the true token that a draft had to hit, in the order of token_classes.CLASSES.

    `classes`: token_classes.classify of each answer. {class, tokens (of the answers), first_reached, first_accepted,
    first_share (the chain's first position), reached, accepted, share, low, high (all positions), breaks, of_breaks
    (share of all breaks), prompts}. The interval is over prompts. Drafts behind an answer's end are a class of their
    own, so that the sums are the walk's.
    """
    table = judged(found, steps)
    sizes = np.array([len(names) for names in classes], dtype=np.int64)
    flat = np.array([name for names in classes for name in (*names, token_classes.PAST)], dtype=object)
    first = np.cumsum(sizes + 1) - (sizes + 1)
    table["class"] = flat[first[table["answer"]] + np.minimum(table["place"], sizes[table["answer"]])]
    tokens, breaks, rows = pd.Series(flat).value_counts(), int((~table["accepted"]).sum()), []
    for name in (*token_classes.CLASSES, token_classes.PAST):
        part = table[table["class"] == name]
        if len(part):
            start = part[part["step"] == 0]
            missed = int((~part["accepted"]).sum())
            rows.append({"class": name, "tokens": 0 if name == token_classes.PAST else int(tokens[name]),
                         "first_reached": len(start), "first_accepted": int(start["accepted"].sum()),
                         "first_share": float(start["accepted"].mean()) if len(start) else None,
                         **_share(part, bootstrap=bootstrap, seed=seed),
                         "breaks": missed, "of_breaks": missed / breaks if breaks else None})
    return rows


def _share(part: pd.DataFrame, *, bootstrap: int, seed: int) -> dict:
    """Accepted of the judged drafts in `part`, which is not empty, with the interval over its prompts."""
    sums = part.groupby("answer")["accepted"].agg(["sum", "size"])
    low = high = None
    if len(sums) > 1:  # offline.interval is of 1 + a ratio
        low, high = (end - 1 for end in offline.interval(sums["sum"], sums["size"], bootstrap=bootstrap, seed=seed))
    return {"reached": len(part), "accepted": int(part["accepted"].sum()), "share": float(part["accepted"].mean()),
            "low": low, "high": high, "prompts": len(sums)}


def breaks(found: list[offline.Chains], tokenizer, in_draft: np.ndarray, steps: int, *, top: int = 20,
           contexts: int = 2) -> list[dict]:
    """The answers' tokens that broke most chains: rows {token, id, breaks, share, hit_share, drafted, draftable,
    contexts}, at most `top`.

    share: of all breaks inside the answers. hit_share: how often a draft hit the token when it had to. drafted: what
    stood there instead, the three most frequent. in_draft bool [V]. contexts: the text before it in up to that many
    answers, the token between ⟦ ⟧, a newline as ↵.
    """
    table = _inside(judged(found, steps), found)
    reached, missed = table["token"].value_counts(), table[~table["accepted"]]
    ranked = missed.groupby("token").size().sort_values(ascending=False, kind="stable").head(top)  # ties: lowest id
    rows, texts = [], _Texts(found, tokenizer)
    for token, number in ranked.items():
        here = missed[missed["token"] == token]
        instead = here.groupby("drafted").size().sort_values(ascending=False, kind="stable").head(3)
        seen = here.drop_duplicates("answer").head(contexts)
        rows.append({
            "token": texts.token(token), "id": int(token), "breaks": int(number), "share": number / len(missed),
            "hit_share": 1 - number / reached[token],
            "drafted": ", ".join(f"{texts.token(other)} × {times}" for other, times in instead.items()),
            "draftable": "yes" if in_draft[token] else NO_HELP,
            "contexts": "   ".join(texts.context(at.answer, at.place) for at in seen.itertuples())})
    return rows


def unreachable(found: list[offline.Chains], in_draft: np.ndarray, steps: int) -> dict:
    """{breaks, outside, share}: breaks inside the answers, and those at a token outside the draft vocabulary."""
    table = _inside(judged(found, steps), found)
    missed = table[~table["accepted"]]
    outside = int((~in_draft[missed["token"].to_numpy()]).sum())
    return {"breaks": len(missed), "outside": outside, "share": outside / len(missed) if len(missed) else None}


def _inside(table: pd.DataFrame, found: list[offline.Chains]) -> pd.DataFrame:
    sizes = np.array([len(chain.answer.ids) for chain in found], dtype=np.int64)
    return table[table["place"] < sizes[table["answer"]]]


class _Texts:
    """Tokens and contexts as text; an answer is decoded once, when it is first asked for."""

    def __init__(self, found: list[offline.Chains], tokenizer):
        self.found, self.tokenizer, self.known = found, tokenizer, {}

    def token(self, token: int) -> str:
        return _one_line(self.tokenizer.decode([int(token)], skip_special_tokens=False))

    def context(self, answer: int, place: int) -> str:
        if answer not in self.known:
            self.known[answer] = token_classes.placed(self.found[answer].answer.ids, self.tokenizer)
        text, spans = self.known[answer]
        begin, end = spans[place].tolist()
        return _one_line(f"{text[max(begin - BEFORE, 0):begin]}{MARKS[0]}{text[begin:end]}{MARKS[1]}")


def _one_line(text: str) -> str:
    return text.replace("\r", "").replace("\n", "↵")
