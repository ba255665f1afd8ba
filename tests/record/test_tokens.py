"""Examples of findings: what is shown is what the file holds, whatever the file holds."""

import gzip
import json
import random
import unicodedata
from html.parser import HTMLParser

import numpy as np
import pytest
import tiny
import zstandard
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle3nb.corpus.audit import Finding
from eagle3nb.corpus.decision import Rules
from eagle3nb.corpus.masks import find_markers, mask_from_markers
from eagle3nb.corpus.survey import survey
from eagle3nb.record import stage, tokens
from eagle3nb.record.tokens import AROUND, FAULT, LIMIT, SUPERVISED, examples, visible

PACK = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}
NASTY = "<script>alert(1)</script>\x1b[31m\r\n\x00\u202eevil\u2066&\"'"


class Shown(HTMLParser):
    """The tokens of a page: [(id, text, supervised, at the fault)], and all its tags and text."""

    def __init__(self, html: str):
        super().__init__()
        self.tokens, self.open, self.tags, self.text = [], [], set(), ""
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.add(tag)
        self.open.append((tag, attributes))
        assert set(attributes) <= {"style", "title"}
        if "title" in attributes:
            supervised = any(other.get("style") == SUPERVISED for _, other in self.open)
            self.tokens.append([int(attributes["title"]), "", supervised, attributes.get("style") == FAULT])

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        self.text += data
        if any("title" in attributes for _, attributes in self.open):
            self.tokens[-1][1] += data.strip("❲❳") if self.tokens[-1][3] else data


def letters(alphabet: list[str], decoder=None) -> PreTrainedTokenizerFast:
    """A tokenizer of just these tokens."""
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, merges=[]))
    made.decoder = decoder or decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def look(root, rows, name="A/rows.jsonl", vocab=200, markers=None):
    """A survey of one file that holds these rows (dicts, or bytes as they are)."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)
    path.write_bytes(PACK[path.suffix if path.suffix != ".jsonl" else ""](lines))
    return survey(root, rules=Rules(1000, markers=markers), vocab_size=vocab, processes=1)


def finding(*places, rule="supervised_prompt", file="A/rows.jsonl", detail="wrong"):
    """A finding with examples at (line, at)."""
    return Finding(rule, "amber", "A", len(places), "a message", "a remedy",
                   [{"file": file, "line": line, "at": at, "detail": detail} for line, at in places])


def test_examples_end_where_a_page_would_grow_too_large(tmp_path, monkeypatch):
    found = look(tmp_path, [row_of([5] * 60, [1] * 60)] * 9)
    listed = [finding((1, 1), (2, 2), (3, 3)), finding((4, 4), (5, 5), rule="schema")]
    everything, _ = examples(listed, found)
    assert "more examples" not in everything and everything.count("rows.jsonl line") == 5
    monkeypatch.setattr("eagle3nb.record.tokens.WHOLE", everything.index("line 2"))
    html, text = examples(listed, found)
    assert [f"line {n}" in html for n in range(1, 6)] == [True, True, False, False, False]
    assert "schema" in html  # every finding is named
    assert all("3 more examples are named in findings.json" in shown for shown in (html, text))


def row_of(ids, mask):
    return {"input_ids": ids, "loss_mask": mask}


def test_the_window_shows_the_rows_tokens_their_mask_and_the_fault(tmp_path):
    rng, tokenizer = random.Random(1), tiny.make_tokenizer()
    rows = [row_of([rng.randrange(98) for _ in range(n)], [rng.randrange(2) for _ in range(n)])
            for n in (1, 2, 23, 24, 25, 48, 49, 50, 200, 200, 200)]
    found = look(tmp_path, rows)
    for line, row in enumerate(rows, 1):
        total = len(row["input_ids"])
        for at in {0, 1, total // 2, total - 1, rng.randrange(total)} & set(range(total)):
            html, text = examples([finding((line, at))], found, tokenizer)
            begin = max(0, min(at - AROUND, total - 2 * AROUND - 1))
            whole = list(zip(row["input_ids"], [tokenizer.decode([t]).replace("\n", "⏎") for t in row["input_ids"]],
                             [m == 1 for m in row["loss_mask"]], [i == at for i in range(total)], strict=True))
            wanted = whole[begin:begin + 2 * AROUND + 1]
            page = Shown(html)
            assert [tuple(token) for token in page.tokens] == wanted
            assert at - begin < len(wanted) and min(at, AROUND) <= at - begin
            last = text.splitlines()[-1][4:]
            assert last.startswith("… ") == (begin > 0) and last.endswith(" …") == (begin + len(wanted) < total)
            bare = "".join(f"[[{t}]]" if fault else t for _, t, _, fault in wanted)
            assert last.removeprefix("… ").removesuffix(" …").replace("⟦", "").replace("⟧", "") == bare
            state = "supervised" if row["loss_mask"][at] else "not supervised"
            told = f"A/rows.jsonl line {line}, token {at} of {total} (id {row['input_ids'][at]}, {state}): wrong"
            assert told in page.text and told in text


def test_without_a_place_the_beginning_or_the_first_answer_is_shown(tmp_path):
    tokenizer = tiny.make_tokenizer()
    found = look(tmp_path, [row_of(list(range(3, 90)) * 2, [0] * 100 + [1] * 74)])
    for rule, begin in (("too_short", 0), ("near_duplicates", 100 - AROUND)):
        for at in (None, 174, 10_000):  # the last two: the file has changed since
            html, text = examples([finding((1, at), rule=rule)], found, tokenizer)
            page = Shown(html)
            assert [t[0] for t in page.tokens] == (list(range(3, 90)) * 2)[begin:begin + 2 * AROUND + 1]
            assert not any(t[3] for t in page.tokens) and f"tokens {begin} to {begin + 48} of 174" in text


def test_a_row_without_a_mask_shows_the_templates(tmp_path):
    tokenizer, ids = tiny.make_tokenizer(), tiny.random_row(np.random.default_rng(0), 1)["input_ids"]
    markers = find_markers(tokenizer)
    for known, wanted in ((markers, mask_from_markers(np.array(ids), markers)), (None, [0] * len(ids))):
        found = look(tmp_path, [{"input_ids": ids}], markers=known)
        page = Shown(examples([finding((1, 0))], found, tokenizer)[0])
        assert [t[2] for t in page.tokens] == [m == 1 for m in wanted][:2 * AROUND + 1]


@pytest.mark.parametrize("suffix", PACK)
def test_the_right_line_is_read_among_blank_ones_and_broken_ones(tmp_path, suffix):
    rng, rows = random.Random(2), []
    for i in range(400):
        row = json.dumps(row_of([3 + i % 90, i % 7 + 3, 3 + i // 90], [0, 1, 1])).encode()
        rows.append(rng.choice([b"", b"  \t", b"{ broken " + str(i).encode(), row, b"  " + row + b"\r", row]))
    file = f"A/rows.jsonl{suffix}"
    found = look(tmp_path, rows, file)
    for some in (range(1, 402), [400], [1], [77, 76, 3]):
        text = examples([finding(*((line, None) for line in some), file=file)], found, None, most=1000)[1]
        told = text.splitlines()[4:]
        for line, shown in zip(some, told[::2], strict=True):
            raw = rows[line - 1].strip() if line <= 400 else b""
            if raw.startswith(b"{\""):
                wanted = "".join(f"‹{token}›" for token in json.loads(raw)["input_ids"][:1])
                assert shown.strip().startswith(wanted)
            else:
                assert shown.strip() == (raw.decode() or (
                    "(the line cannot be read again)" if suffix or line > 400 and suffix else "(an empty line)"))


def test_lines_that_are_no_rows_are_shown_as_they_stand_and_cut(tmp_path):
    long = b'{"input_ids": "' + b"x" * 1000
    found = look(tmp_path, [long, b'{"input_ids": [], "loss_mask": []}', b"\xff\xfe{"])
    html, text = examples([finding((1, None), (2, None), (3, None), rule="schema", detail="not good")], found)
    assert long[:199].decode() + "…" in text and "x" * 200 not in text
    assert '{"input_ids": [], "loss_mask": []}' in text and "��{" in text
    assert text.count("line 1: not good") == 1 and not Shown(html).tokens


def test_other_peoples_text_can_do_no_harm(tmp_path):
    alphabet = [*NASTY, "<script>x</script>", "\u200b", "a\x1b[2Jb", "`", "⏎"]
    ids = list(range(len(alphabet)))
    tokenizer = letters([f"{i}{text}" if alphabet.index(text) != i else text for i, text in enumerate(alphabet)])
    bad = b'{"x": "' + NASTY.encode().replace(b"\r\n", b"") + b'", "prompt": [}'
    found = look(tmp_path, [row_of(ids, [i % 2 for i in ids]), bad])
    evil = finding((1, 3), (2, None), detail=NASTY)
    evil = Finding(evil.rule, evil.severity, NASTY.replace("\n", ""), 1, NASTY, "", evil.examples)
    html, text = examples([evil], found, tokenizer)
    page = Shown(html)
    assert page.tags == {"p", "span", "strong", "u", "div", "bdi"} and [t[0] for t in page.tokens] == ids
    for shown in (html, text):
        assert {c for c in shown if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp")} <= {"\n"}
    assert "␛[31m" in text and "‹U+202E›" in text and "<script>" in page.text and "<script" not in html


def test_bytes_of_half_a_character_and_blanks_are_seen(tmp_path):
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = letters(symbols, decoders.ByteLevel())
    encoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ids = [symbols.index(c) for c in encoder.pre_tokenize_str("né \t✓")[0][0]]
    found = look(tmp_path, [row_of(ids, [1] * len(ids))], vocab=300)
    page = Shown(examples([finding((1, None))], found, tokenizer)[0])
    assert [t[1] for t in page.tokens] == ["n", "�", "�", " ", "⇥", "�", "�", "�"]
    sentence = letters(["▁the", "▁cat", "s", "<0x0A>"], decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]))
    found = look(tmp_path, [row_of([0, 1, 2, 3, 9], [1] * 5)])
    assert [t[1] for t in Shown(examples([finding((1, None))], found, sentence)[0]).tokens] == [
        " the", " cat", "s", "⏎", "‹9›"]


def test_an_example_is_bounded_whatever_its_tokens(tmp_path):
    tokenizer = letters(["\u202e" * 500, "\u2066" * 500, "<" * 500])
    ids = [i % 3 for i in range(400)]
    found = look(tmp_path, [row_of(ids, [i % 2 for i in ids])])
    html = examples([finding((1, 200), detail="<" * 10_000)], found, tokenizer)[0]
    assert len(html.encode()) < LIMIT + 2500 and 10 < len(Shown(html).tokens) < 49
    assert sum(t[3] for t in Shown(html).tokens) == 1


def test_a_large_compressed_file_is_read_no_further_than_needed(tmp_path, monkeypatch):
    rows = [row_of([i % 90 + 3] * 100, [1] * 100) for i in range(30_000)]  # three parts of 4 MB
    found, taken, read = look(tmp_path, rows, "A/rows.jsonl.gz"), [], tokens.read

    def counting(chunk):
        for part in read(chunk):
            taken.append(len(part.raws))
            yield part

    monkeypatch.setattr(tokens, "read", counting)
    early, late = (finding((line, 0), file="A/rows.jsonl.gz") for line in (3, 29_999))
    assert "[[‹5›]]" in examples([early], found)[1] and len(taken) == 1
    assert f"[[‹{29_998 % 90 + 3}›]]" in examples([late, early], found)[1] and len(taken) > 3
    monkeypatch.setattr(tokens, "FAR", 1000)
    assert "cannot be read again" in examples([late], found)[1]


def test_files_that_have_gone_are_told(tmp_path):
    found = look(tmp_path, [row_of([1, 2, 3], [0, 1, 1])])
    (tmp_path / "A/rows.jsonl").unlink()
    assert "cannot be read again" in examples([finding((1, 0))], found)[1]
    assert "cannot be read again" in examples([finding((1, 0), file="B/none.jsonl")], found)[1]
    assert examples([Finding("disk_short", "red", "", 1, "m", "r")], found) == examples([], found) == ("", "")


def test_a_text_of_any_kind_is_visible():
    rng = random.Random(3)
    for _ in range(200):
        text = "".join(chr(rng.choice([rng.randrange(0x20), rng.randrange(0x110000)])) for _ in range(30))
        shown = visible(text, 20)
        shown.encode()
        assert not any(unicodedata.category(c) in ("Cc", "Zl", "Zp", "Cs") for c in shown) and shown.endswith("…")
    assert visible("👩\u200d🔬 नी", 20) == "👩\u200d🔬 नी"


def test_a_stage_shows_both_and_nothing_for_nothing(monkeypatch):
    shown = []
    monkeypatch.setattr(stage, "show", lambda html, text: shown.append((html, text)))
    stage.Stage.html(None, "<p>x</p>", "x")
    stage.Stage.html(None, "", "")
    assert shown == [("<p>x</p>", "x")]
