"""What the target's chat template leaves in token ids, and the rules on ids and masks that see every row.

`template_of` asks the tokenizer once; `template_hits` then works on ids alone, a flat batch at a time: no text, no
tokenizer, no loop over tokens. Where a rule cannot tell a fault from a habit of the template, it says nothing.
"""

import re
from dataclasses import dataclass

import numpy as np
from jinja2 import TemplateError

from eagle3nb.corpus.hits import Hits, first_by_row
from eagle3nb.corpus.masks import ANSWERS, FUSING, USERS, Markers, encode, render, spans
from eagle3nb.corpus.patterns import ends_with, find_all, in_one_row

THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷"))
# Assistant headers by which other chat formats are known: (format, its token, the header as text).
FORMATS = (("ChatML", "<|im_start|>", "<|im_start|>assistant"),
           ("Llama 3", "<|start_header_id|>", "<|start_header_id|>assistant"),
           ("Gemma", "<start_of_turn>", "<start_of_turn>model"),
           ("Llama 2 or Mistral", "[/INST]", "[/INST]"),
           ("Phi, Zephyr or GLM", "<|assistant|>", "<|assistant|>"),
           ("Kimi", "<|im_assistant|>", "<|im_assistant|>assistant"),
           ("DeepSeek", "<｜Assistant｜>", "<｜Assistant｜>"),
           ("Harmony", "<|start|>", "<|start|>assistant"))
BESIDE = ("", "\n", "\n\n", " ", "a", ".", ")", '"', "<", ">")  # text that may stand before and behind a token's
SHORTEST = 3  # tokens by which a special token spelled as text is told; fewer occur in ordinary text
LIMITS = (256, 1000)  # a row whose length is a multiple of one was probably cut there by its generator


@dataclass(frozen=True)
class Template:
    """What to look for in the ids. A pattern is a tuple of token ids; all of it is plain, so workers can be sent it."""

    user: tuple[int, ...]  # the user's header; () where none can be told
    tail: tuple[int, ...]  # what the template writes after the last end of turn
    think: tuple[int, int] | None  # the tokens that open and close a thought; None where they are no single tokens
    open_thoughts: tuple[int, ...]  # thoughts that each of markers.opens leaves open
    spelled: tuple[tuple[str, tuple[int, ...]], ...]  # own special tokens as plain text: (token, pattern)
    foreign: tuple[tuple[str, tuple[int, ...]], ...]  # headers of other formats: (format, pattern)
    specials: tuple[tuple[str, bool], ...]  # own special tokens: (token, does it hold up the turns?)


# ---------------------------------------------------------------------------------------------------- asking


def template_of(tokenizer, markers: Markers) -> Template:
    """The template of a tokenizer whose markers are known. Costs some hundred encodings of a few words."""
    known = {str(token): i for i, token in tokenizer.added_tokens_decoder.items()}
    names = {i: token for token, i in known.items()}
    conversation = [_said("user", USERS[0]), _said("assistant", ANSWERS[0])]
    whole = render(tokenizer, conversation)
    ids, own = encode(tokenizer, whole), tokenizer.get_chat_template() + whole
    pair = next(((known[a], known[b]) for a, b in THINKING if a in known and b in known), None)
    user = _user_header(tokenizer, markers)
    turns = {markers.end_of_turn, *user, *(token for header in markers.opens for token in header)} - {*(pair or ())}
    spelled = tuple((names[i], pattern) for i in markers.special_ids if i in names and not is_markup(names[i])
                    for pattern in _spellings(tokenizer, names[i]))
    foreign = []
    for name, token, header in FORMATS:
        if token not in own:
            foreign += [(name, (known[token],))] if token in known else []
            foreign += [(name, pattern) for pattern in _spellings(tokenizer, header)]
    return Template(
        user=user, tail=tuple(ids[len(ids) - ids[::-1].index(markers.end_of_turn):]), think=pair,
        open_thoughts=tuple(header.count(pair[0]) - header.count(pair[1]) if pair else 0 for header in markers.opens),
        spelled=spelled, foreign=tuple(foreign),
        specials=tuple((names[i], i in turns) for i in markers.special_ids if i in names and not is_markup(names[i])))


def is_markup(token: str) -> bool:
    """`<s>`, `</think>`: written in ordinary text too, so its text says nothing."""
    return re.fullmatch(r"</?[A-Za-z]+>", token) is not None


def _said(role: str, text: str) -> dict:
    return {"role": role, "content": text}


def _user_header(tokenizer, markers: Markers) -> tuple[int, ...]:
    """The ids before a user's text that are the same in the first turn and in a later one, whatever the text is.

    From the first special token on, so that plain words never pass for a header; that token alone where the template
    writes it nowhere else (Kimi may put a name in place of `user`).
    """
    first, later = [], [_said("user", USERS[0]), _said("assistant", ANSWERS[0])]
    try:
        headers = [_before_user(tokenizer, context) for context in (first, later)]
        whole = encode(tokenizer, render(tokenizer, [*later, *later]))
    except TemplateError:
        return ()
    shared = headers[0][len(headers[0]) - _common(headers[0][::-1], headers[1][::-1]):]
    if markers.end_of_turn in shared:
        shared = shared[len(shared) - shared[::-1].index(markers.end_of_turn):]
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    begin = next((i for i, token in enumerate(shared) if token in special), len(shared))
    while len(shared) > begin and shared[-1] not in special and not tokenizer.decode(shared[-1:]).strip():
        shared = shared[:-1]  # blanks fuse with some texts, whatever was tried
    header = tuple(shared[begin:])
    alone = header and header[0] != tokenizer.bos_token_id and whole.count(header[0]) == 2  # two user turns
    return header[:1] if alone and not any(header[0] in opens for opens in markers.opens) else header


def _before_user(tokenizer, before: list[dict]) -> list[int]:
    """The ids that precede every user text after the messages `before`; a last token that may fuse is left out."""
    shared = None
    for text in (*USERS, *ANSWERS[2:], *FUSING):
        whole = render(tokenizer, [*before, _said("user", text), _said("assistant", "So be it")])
        text = text if text in whole else text.strip()
        cut = whole.rfind(text)
        head, full = encode(tokenizer, whole[:cut]), encode(tokenizer, whole[:cut + len(text)])
        ids = full[:_common(head, full)]
        shared = ids if shared is None else shared[:_common(shared, ids)]
    return shared


def _common(a, b) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _spellings(tokenizer, text: str) -> list[tuple[int, ...]]:
    """Patterns by which `text`, which holds special tokens, is found where it was tokenised as plain characters.

    A token that fuses with a neighbour at one end is left out while enough others remain. [] where too few do, or
    where the tokenizer reads the special token whatever it is told.
    """
    special, found = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}, set()
    rests = [(behind, _plain(tokenizer, text + behind)) for behind in BESIDE]
    for before in BESIDE:
        lead, stop = _plain(tokenizer, before), _plain(tokenizer, before + text)
        for behind, rest in rests:
            whole = _plain(tokenizer, before + text + behind)
            begin, end = _common(lead, whole), _common(stop, whole)
            inner = len(whole) - _common(rest[::-1], whole[::-1])  # behind a token fused with what stands before
            # One bracket must stay: "|user|" is a cell of a table, "|user|>" and "<|user|" are not.
            pattern = tuple(whole[inner if end == len(stop) and end - inner >= SHORTEST else begin:end])
            if len(pattern) >= SHORTEST and not special.intersection(pattern):
                found.add(pattern)
    return sorted(p for p in found if not any(q != p and _holds(p, q) for q in found))


def _plain(tokenizer, text: str) -> list[int]:
    """Ids of a text in which no special token is recognised."""
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


def _holds(long: tuple, short: tuple) -> bool:
    return any(long[i:i + len(short)] == short for i in range(len(long) - len(short) + 1))


# ---------------------------------------------------------------------------------------------------- rules


def headers_before(ids: np.ndarray, begins: np.ndarray, markers: Markers) -> np.ndarray:
    """int64[K]: which of markers.opens stands before each assistant span; -1 where none does."""
    which = np.full(len(begins), -1)
    for i in reversed(range(len(markers.opens))):  # the longest are first, and win
        which[ends_with(ids, begins, markers.opens[i])] = i
    return which


@dataclass(frozen=True)
class _Batch:
    """A flat batch as the rules below see it; positions are flat."""

    ids: np.ndarray  # int32[N]
    own: np.ndarray  # uint8[N] the rows' own masks; the derived one where a row has none
    derived: np.ndarray  # uint8[N]
    starts: np.ndarray  # int64[R+1]
    spoken: np.ndarray  # bool[R]: has the row an assistant span?
    begins: np.ndarray  # int64[S] assistant spans
    ends: np.ndarray  # int64[S]
    turn_ends: np.ndarray  # int64[E] end-of-turn tokens

    def rows(self, at: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.starts, at, side="right") - 1


def mask_hits(mask: np.ndarray, starts: np.ndarray, hits: Hits) -> None:
    """Rows that supervise nothing, and rows that supervise everything. Needs no template."""
    if not len(mask):
        return
    lengths = np.diff(starts)
    hits.add("mask_all_zero", np.flatnonzero(np.maximum.reduceat(mask, starts[:-1]) == 0), None,
             lambda row, at: f"none of {lengths[row]} tokens is supervised")
    hits.add("mask_all_one", np.flatnonzero(np.minimum.reduceat(mask, starts[:-1])), None,
             lambda row, at: f"all {lengths[row]} tokens are supervised, the prompt too")


def template_hits(ids: np.ndarray, mask: np.ndarray, has_mask: np.ndarray, derived: np.ndarray, starts: np.ndarray,
                  markers: Markers, template: Template, hits: Hits) -> None:
    """Every rule on ids and masks, mask_hits included.

    ids int32[N]; mask uint8[N] the rows' own, anything where has_mask bool[R] is False; derived uint8[N] by the
    markers; starts int64[R+1]. A row without a mask of its own is judged by the derived one.
    """
    if not len(ids):
        return
    own = mask if has_mask.all() else np.where(np.repeat(has_mask, np.diff(starts)), mask, derived)
    begins, ends = spans(derived).T  # a header parts any two
    spoken = np.maximum.reduceat(derived, starts[:-1]) > 0
    batch = _Batch(ids, own, derived, starts, spoken, begins, ends,
                   np.flatnonzero(ids == markers.end_of_turn))
    named = (*template.spelled, *template.foreign, ("user", template.user))
    found = [(in_one_row(at, len(pattern), starts), name)
             for at, (name, pattern) in zip(find_all(ids, [pattern for _, pattern in named]), named, strict=True)]
    spelled, foreign, users = found[:len(template.spelled)], found[len(template.spelled):-1], found[-1][0]
    mask_hits(own, starts, hits)
    _disagreements(batch, hits)
    _unsupervised_ends(batch, hits)
    _supervised_prompts(batch, markers, hits)
    _mismatches(batch, markers, foreign, hits)
    spelled = [(at, f"{name} spelled out as text") for at, name in spelled]
    _report("special_token_as_text", spelled, starts, hits)
    _thoughts(batch, markers, template, hits)
    _roles(batch, markers, template, users, hits)


def _report(rule: str, faults: list[tuple[np.ndarray, str]], starts: np.ndarray, hits: Hits) -> None:
    """Rows under `rule` by their first fault; faults: (flat positions, what is wrong there)."""
    places = np.concatenate([at for at, _ in faults]) if faults else np.zeros(0, np.int64)
    if not len(places):
        return
    order = np.argsort(places, kind="stable")
    places, kinds = places[order], np.repeat(np.arange(len(faults)), [len(at) for at, _ in faults])[order]
    rows, at = first_by_row(places, starts)
    kinds = dict(zip(rows.tolist(), kinds[np.searchsorted(places, at + starts[rows])].tolist(), strict=True))
    hits.add(rule, rows, at, lambda row, at: f"{faults[kinds[row]][1]}, token {at}")


def _first_true(flags: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows int64[K], at int64[K]): rows with a True among flags bool[N], and where in the row the first is."""
    rows = np.flatnonzero(np.maximum.reduceat(flags.view(np.uint8), starts[:-1]))
    return rows, np.array([np.argmax(flags[starts[r]:starts[r + 1]]) for r in rows], np.int64)


def _disagreements(batch: _Batch, hits: Hits) -> None:
    def words(row, at):
        own, other = (mask[batch.starts[row]:batch.starts[row + 1]] for mask in (batch.own, batch.derived))
        return (f"{np.count_nonzero(own != other)} of {len(own)} positions differ, first {at}: mask {own[at]}, "
                f"by the template's markers {other[at]}")
    hits.add("mask_disagrees", *_first_true(batch.own != batch.derived, batch.starts), words)


def _unsupervised_ends(batch: _Batch, hits: Hits) -> None:
    """The drafter would never learn to end a turn."""
    at = batch.turn_ends[batch.turn_ends > batch.starts[batch.rows(batch.turn_ends)]]  # not a row's first token
    at = at[(batch.own[at] == 0) & (batch.own[at - 1] == 1)]
    at = at[(batch.derived[at] == 1) | ~batch.spoken[batch.rows(at)]]
    _report("eot_unsupervised", [(at, "the answer's end-of-turn token is not supervised")], batch.starts, hits)


def _supervised_prompts(batch: _Batch, markers: Markers, hits: Hits) -> None:
    """Rows without any assistant span are template_mismatch's, fully supervised ones mask_all_one's."""
    extra = batch.own > batch.derived
    rows, at = _first_true(extra, batch.starts)
    told = batch.spoken[rows] & (np.minimum.reduceat(batch.own, batch.starts[:-1])[rows] == 0)

    def words(row, at):
        start, flat = batch.starts[row], batch.starts[row] + at
        following = batch.begins[np.searchsorted(batch.begins, flat):][:1]
        which = headers_before(batch.ids, following, markers)
        if at and batch.derived[flat - 1]:
            place = "after the end of turn"
        elif len(which) and which[0] >= 0 and flat >= following[0] - len(markers.opens[which[0]]):
            place = "in the assistant's header"
        else:
            place = "in the prompt"
        count = np.count_nonzero(extra[start:batch.starts[row + 1]])
        return f"{count} tokens outside the answers are supervised, first {at} ({place}, id {batch.ids[flat]})"
    hits.add("supervised_prompt", rows[told], at[told], words)


def _mismatches(batch: _Batch, markers: Markers, foreign: list[tuple[np.ndarray, str]], hits: Hits) -> None:
    """No header of the target's in the row, or another format's."""
    rows = np.arange(len(batch.spoken))
    known, stops = batch.spoken.copy(), batch.starts[1:]
    for header in markers.opens:  # a row may end right behind its header
        known |= ends_with(batch.ids, stops, header) & (np.diff(batch.starts) >= len(header))
    strange, faults = np.zeros(len(rows), bool), []
    for at, name in foreign:
        of_known = known[batch.rows(at)]
        strange[batch.rows(at)] = True
        faults.append((at[of_known], f"a header of {name}"))
        faults.append((at[~of_known], f"no assistant header of the target's, but one of {name}"))
    faults.append((batch.starts[rows[~known & ~strange]], "the target's assistant header never occurs"))
    _report("template_mismatch", faults, batch.starts, hits)


def _thoughts(batch: _Batch, markers: Markers, template: Template, hits: Hits) -> None:
    """In each assistant span opens and closes alternate; what the header opened counts, a cut span may stay open."""
    if template.think is None or not len(batch.begins):
        return
    opener, closer = template.think
    at = np.flatnonzero((batch.ids == opener) | (batch.ids == closer))
    at = at[batch.derived[at] == 1]
    span = np.searchsorted(batch.begins, at, side="right") - 1
    which = headers_before(batch.ids, batch.begins, markers)
    before = np.where(which < 0, 0, np.array(template.open_thoughts)[which])  # int64[S] open when the answer begins
    steps = np.where(batch.ids[at] == opener, 1, -1)
    total = np.concatenate([[0], np.cumsum(steps)])
    first = np.searchsorted(span, np.arange(len(before)))  # of each span's events
    depth = total[1:] - total[first[span]] + before[span]
    final = before + total[np.searchsorted(span, np.arange(len(before)), side="right")] - total[first]
    left_open = (final > 0) & (batch.ids[batch.ends - 1] == markers.end_of_turn)
    _report("think_unbalanced", [
        (at[depth < 0], "a thought is closed that was not open"), (at[depth > 1], "a thought is opened inside another"),
        (batch.ends[left_open] - 1, "the turn ends inside a thought")], batch.starts, hits)


def _roles(batch: _Batch, markers: Markers, template: Template, users: np.ndarray, hits: Hits) -> None:
    """Turns that cannot follow one another. Rows without an assistant span are template_mismatch's."""
    empty = batch.begins[batch.ids[batch.begins] == markers.end_of_turn]
    faults = [(empty, "an assistant turn without content"), (_last_turns(batch, markers, template), (
        "the last turn is not the assistant's"))]
    if template.user:
        users = users[batch.spoken[batch.rows(users)]]
        inside = batch.derived[users] == 1
        faults.append((users[inside], "a user's header inside an assistant turn, whose end is missing"))
        places = np.concatenate([users[~inside], batch.begins])
        order = np.argsort(places, kind="stable")
        places, of_user = places[order], order < np.count_nonzero(~inside)
        follows = np.diff(batch.rows(places), prepend=-1) == 0  # another turn of the row precedes
        faults.append((places[~of_user & ~follows], "the assistant speaks before any user"))
        faults.append((places[1:][of_user[1:] & of_user[:-1] & follows[1:]], "two user turns in a row"))
    _report("roles_malformed", faults, batch.starts, hits)


def _last_turns(batch: _Batch, markers: Markers, template: Template) -> np.ndarray:
    """Flat ends of the last turns that are complete and not the assistant's, in rows that were not cut."""
    if not len(batch.turn_ends):
        return batch.turn_ends
    rows = batch.rows(batch.turn_ends)
    last = batch.turn_ends[np.flatnonzero(np.append(rows[1:] != rows[:-1], True))]
    rows = np.unique(rows)
    start, stop = batch.starts[rows], batch.starts[rows + 1]
    # What follows must be nothing, or all that the template writes there: any other rest is a row cut in its next turn.
    whole = last + 1 == stop
    if template.tail:
        whole |= (last + 1 + len(template.tail) == stop) & ends_with(batch.ids, stop, template.tail)
    cut = np.any([(stop - start) % limit == 0 for limit in LIMITS], axis=0)
    return last[whole & ~cut & batch.spoken[rows] & (batch.derived[last] == 0)]
