import json
import random

import numpy as np
import pandas as pd
import pytest

from eagle3nb.corpus import accounts, passes
from eagle3nb.corpus import merge as merging
from eagle3nb.corpus.decision import accounting_lines as lines_of
from eagle3nb.corpus.masks import encode, find_markers, render
from eagle3nb.corpus.merge import merge
from eagle3nb.corpus.merged import Corpus
from eagle3nb.corpus.records import find_sources
from eagle3nb.corpus.selection import Mix
from eagle3nb.corpus.verify import verify
from eagle3nb.errors import UserError

V, CUT = 100, 24


def random_row(rng: random.Random, n: int) -> dict:
    length = rng.randint(1, 40)
    ids, mask = [rng.randrange(V) for _ in range(length)], [int(rng.random() < 0.5) for _ in range(length)]
    return {"id": f"r{n}", "input_ids": ids, "loss_mask": mask, "messages": [{"role": "user", "content": "é"}]}


def rows_of(seed: int, count: int) -> list[dict]:
    rng = random.Random(seed)
    rows = [random_row(rng, n) for n in range(count)]
    return rows + rng.choices(rows, k=count // 10)  # some twice


def run(root, out, seed=1, **options):
    options = {"max_seq_len": CUT, "vocab_size": V, "markers": None, "mix": Mix("none"), **options}
    return merge(find_sources(root), out, seed=seed, **options)


def naive(rows):
    """What must be in the corpus, by the definition, in no order: [(ids, mask)]."""
    kept = []
    for row in rows:
        ids, mask = row["input_ids"][:CUT], row["loss_mask"][:CUT]
        if any(a and b for a, b in zip(mask, mask[1:], strict=False)):
            kept.append((tuple(ids), tuple(mask)))
    return sorted(kept)


def read_back(out):
    corpus = Corpus.open(out)
    return [tuple(map(tuple, (ids.tolist(), mask.tolist()))) for ids, mask in map(corpus.row, range(len(corpus)))]


def test_the_corpus_holds_exactly_what_the_definition_keeps(tmp_path, write):
    a, b = rows_of(0, 200), rows_of(1, 150)
    write(tmp_path / "in/A_x/rows.jsonl", a)
    write(tmp_path / "in/B_y/one.jsonl.gz", b[:70])
    write(tmp_path / "in/B_y/two.jsonl.zst", b[70:])
    report = run(tmp_path / "in", tmp_path / "out")
    kept = naive(a + b)
    assert sorted(read_back(tmp_path / "out")) == kept
    assert report["records"] == len(kept) and report["tokens"] == sum(len(ids) for ids, _ in kept)
    assert report["supervised"] == sum(sum(mask) for _, mask in kept)
    assert report["truncated_tokens"] == sum(max(0, len(r["input_ids"]) - CUT) for r in a + b if naive([r]))
    for source, rows in zip(report["sources"], (a, b), strict=True):
        assert source["records"] == len(naive(rows)) and source["lines"] == len(rows)
        assert source["records"] + sum(source["skipped"].values()) == len(rows)
    assert verify(tmp_path / "out")["records"] == len(kept)


def test_the_index_points_at_every_row_and_names_where_it_came_from(tmp_path, write):
    rows = rows_of(2, 80)
    write(tmp_path / "in/A/rows.jsonl", rows)
    run(tmp_path / "in", tmp_path / "out")
    data, index = (tmp_path / "out/merged.jsonl").read_bytes(), pd.read_parquet(tmp_path / "out/index.parquet")
    lines = data.splitlines()
    assert len(index) == len(lines)
    for i, entry in enumerate(index.itertuples()):
        line, origin = data[entry.offset:entry.offset + entry.bytes], rows[entry.line - 1]
        row = json.loads(line)
        assert line == lines[i] and (entry.source, entry.file) == ("A", "A/rows.jsonl")
        assert row["id"] == origin["id"] and row["input_ids"] == origin["input_ids"][:CUT]
        assert (entry.tokens, entry.supervised) == (len(row["input_ids"]), sum(row["loss_mask"]))
        assert entry.truncated == len(origin["input_ids"]) - len(row["input_ids"])


def test_unchanged_rows_keep_their_bytes_and_cut_rows_lose_their_text(tmp_path, write):
    spelt = b'{"loss_mask":[0,1, 1],  "x": {"y": 1e3}, "input_ids": [ 1,2,3 ], "messages": [], "id": 7}'
    long = {"id": "long", "source": "s", "input_ids": [5] * 30, "loss_mask": [1] * 30, "messages": [{"role": "user"}],
            "weights": [0.5] * 30, "score": 2}
    write(tmp_path / "in/A/rows.jsonl", [spelt, long])
    run(tmp_path / "in", tmp_path / "out")
    lines = (tmp_path / "out/merged.jsonl").read_bytes().splitlines()
    assert spelt in lines
    [cut] = [json.loads(line) for line in lines if line != spelt]
    assert cut == {"id": "long", "source": "s", "input_ids": [5] * CUT, "loss_mask": [1] * CUT, "weights": [0.5] * CUT,
                   "score": 2}


def test_the_same_seed_gives_the_same_bytes_however_the_rows_are_spread(tmp_path, write, monkeypatch):
    rows = rows_of(3, 300)
    write(tmp_path / "one/A/all.jsonl", rows)
    shuffled = random.Random(5).sample(rows, len(rows))
    write(tmp_path / "many/A/1.jsonl.gz", shuffled[:100])
    write(tmp_path / "many/B/2.jsonl", shuffled[100:120])
    write(tmp_path / "many/B/3.jsonl", shuffled[120:])
    reports = [run(tmp_path / name, tmp_path / f"out-{name}") for name in ("one", "many")]
    first = (tmp_path / "out-one/merged.jsonl").read_bytes()
    assert (tmp_path / "out-many/merged.jsonl").read_bytes() == first
    for name in ("order_hash", "corpus_hash", "lines_xxh3", "tokens"):
        assert reports[0][name] == reports[1][name]
    monkeypatch.setattr(passes, "OPEN_FILES", 1)
    assert run(tmp_path / "many", tmp_path / "out-files")["lines_xxh3"] == reports[0]["lines_xxh3"]
    before = (tmp_path / "out-one/merge.json").read_bytes(), (tmp_path / "out-one/index.parquet").read_bytes()
    run(tmp_path / "one", tmp_path / "out-one")
    assert before == ((tmp_path / "out-one/merge.json").read_bytes(), (tmp_path / "out-one/index.parquet").read_bytes())
    other = run(tmp_path / "one", tmp_path / "out-seed", seed=2)
    assert other["order_hash"] != reports[0]["order_hash"]
    assert sorted((tmp_path / "out-seed/merged.jsonl").read_bytes().splitlines()) == sorted(first.splitlines())


def test_the_shuffle_is_global_and_spreads_equal_rows(tmp_path, write):
    rng = random.Random(0)
    for name in ("A", "B"):
        rows = [[rng.randrange(V) for _ in range(9)] for _ in range(1000)]
        write(tmp_path / f"in/{name}/rows.jsonl", [{"input_ids": ids, "loss_mask": [1] * 9} for ids in rows])
    write(tmp_path / "in/C/rows.jsonl", [{"input_ids": [1, 2, 3], "loss_mask": [1, 1, 1]}] * 1000)
    run(tmp_path / "in", tmp_path / "out")
    index = Corpus.open(tmp_path / "out").index
    for name in "ABC":  # the mean place of 1000 of 3000 rows; its standard deviation is 22
        places = np.flatnonzero((index["source"] == name).to_numpy())
        assert abs(places.mean() - 1499.5) < 5 * 22
        # gaps between neighbours of one source are geometric with p = 1/3: about 333 of 999 are 1 (sd 15)
        assert abs((np.diff(places) == 1).sum() - 333) < 5 * 15


def test_accounting_lines_to_the_letter():
    def source(name, records, tokens, **skipped):
        return {"name": name, "records": records, "tokens": tokens, "skipped": skipped}
    assert lines_of([source("A2_kimik25", 2000, 2_600_000), source("tiny", 3, 49_999),
                     source("B1_glaive", 9998, 16_700_000, schema=1, empty_row=2)]) == [
        "  A2_kimik25                  2000 records,     2.6M tokens (0 skipped)",
        "  tiny                           3 records,    50.0K tokens (0 skipped)",
        "  B1_glaive                   9998 records,    16.7M tokens (3 skipped)",
        "Merge complete. 12,001 records, 19.3M tokens."]
    assert lines_of([source("A", 1, 1234)])[-1] == "Merge complete. 1 records, 1.2K tokens."
    assert lines_of([source("A", 37_312, 87_800_000)])[-1] == "Merge complete. 37,312 records, 87.8M tokens."


def test_faulty_and_unsupervised_rows_are_skipped_and_counted_by_reason(tmp_path, write):
    write(tmp_path / "in/A/rows.jsonl", [
        {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}, b"{",
        {"input_ids": [V]}, {"input_ids": [1], "loss_mask": [1, 1]},
        {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}, {"input_ids": [1, 2, 3], "loss_mask": [1, 0, 1]},
        {"input_ids": [1] * 30, "loss_mask": [0] * 24 + [1] * 6}, {"input_ids": [1, 2, 3]}])
    report = run(tmp_path / "in", tmp_path / "out")
    assert report["skipped"] == {
        "json_invalid": 1, "token_out_of_range": 1, "length_mismatch": 1, "no supervised tokens": 2,
        "no supervised tokens within max_seq_len": 1, "no loss_mask and no template to derive one": 1}
    assert report["records"] == 1 and lines_of(report["sources"])[0].endswith("(7 skipped)")


def text_rows(tokenizer):
    messages = [{"role": "user", "content": "the question"}, {"role": "assistant", "content": "owls sing"}]
    ids = encode(tokenizer, render(tokenizer, messages))
    start = len(encode(tokenizer, render(tokenizer, messages[:1], generation=True)))
    mask = [int(start <= t < len(ids) - 1) for t in range(len(ids))]  # the last token is the newline
    return messages, ids, mask


def test_masks_are_derived_where_missing_and_the_own_one_wins(tmp_path, write, chatml):
    messages, ids, mask = text_rows(chatml)
    own = [0] * (len(ids) - 3) + [1, 1, 1]
    write(tmp_path / "in/A/rows.jsonl", [
        {"id": "text", "messages": messages}, {"id": "ids", "input_ids": ids},
        {"id": "own", "input_ids": ids, "loss_mask": own, "messages": messages},
        {"id": "right", "input_ids": ids, "loss_mask": mask, "messages": messages}])
    options = {"max_seq_len": 100, "vocab_size": 500, "markers": find_markers(chatml), "tokenizer": chatml}
    report = run(tmp_path / "in", tmp_path / "out", **options)
    rows = {r["id"]: r for r in map(json.loads, (tmp_path / "out/merged.jsonl").read_bytes().splitlines())}
    assert all(row["input_ids"] == ids for row in rows.values())
    assert [rows[name]["loss_mask"] for name in ("text", "ids", "own", "right")] == [mask, mask, own, mask]
    assert report["provenance"] == {"own": 2, "derived": 2, "markers_agree": 1, "markers_disagree": 1,
                                    "prefixes_agree": 1}  # rows with a mask of their own are the audit's to render
    anew = run(tmp_path / "in", tmp_path / "anew", masks="template", **options)
    rows = [json.loads(line) for line in (tmp_path / "anew/merged.jsonl").read_bytes().splitlines()]
    assert [row["loss_mask"] for row in rows] == [mask] * 4 and anew["provenance"]["derived"] == 4
    assert all("messages" in row for row in rows if row["id"] != "ids")


def test_a_row_without_mask_whose_derivations_disagree_is_skipped(tmp_path, write, chatml, monkeypatch):
    messages, ids, mask = text_rows(chatml)
    write(tmp_path / "in/A/rows.jsonl", [{"messages": messages}, {"input_ids": ids, "loss_mask": mask}])
    wrong = np.array(mask, np.uint8)[::-1]
    monkeypatch.setattr("eagle3nb.corpus.decision.mask_from_prefixes", lambda *_: (np.array(ids, np.int32), wrong))
    report = run(tmp_path / "in", tmp_path / "out", max_seq_len=100, vocab_size=500, markers=find_markers(chatml),
                 tokenizer=chatml)
    assert report["skipped"] == {"no loss_mask and the derivations disagree": 1} and report["records"] == 1


def test_limit_takes_the_first_lines_of_each_source(tmp_path, write):
    rows = [{"input_ids": [i, i, i], "loss_mask": [1, 1, 1]} for i in range(50)]
    write(tmp_path / "in/A/1.jsonl", rows[:30])
    write(tmp_path / "in/A/2.jsonl", rows[30:])
    write(tmp_path / "in/B/1.jsonl", rows[:2])
    report = run(tmp_path / "in", tmp_path / "out", limit=35)
    assert [source["records"] for source in report["sources"]] == [35, 2]


def test_nothing_left_is_an_error_and_the_old_corpus_stands(tmp_path, write):
    write(tmp_path / "in/A/rows.jsonl", rows_of(0, 20))
    run(tmp_path / "in", tmp_path / "out")
    before = (tmp_path / "out/merged.jsonl").read_bytes()
    write(tmp_path / "none/A/rows.jsonl", [{"input_ids": [1, 2], "loss_mask": [0, 0]}])
    with pytest.raises(UserError, match="keeps no record"):
        run(tmp_path / "none", tmp_path / "out")
    assert (tmp_path / "out/merged.jsonl").read_bytes() == before


@pytest.mark.parametrize("moment", ["os.pread", "eagle3nb.corpus.merge.replace_folder", "os.fsync"])
def test_a_merge_that_dies_leaves_the_old_corpus_whole(tmp_path, write, monkeypatch, moment):
    write(tmp_path / "in/A/rows.jsonl", rows_of(0, 20))
    run(tmp_path / "in", tmp_path / "out")
    corpus = Corpus.open(tmp_path / "out").hash

    def die(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(moment, die)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "in", tmp_path / "out", seed=9)
    monkeypatch.undo()
    assert Corpus.open(tmp_path / "out").hash == corpus and verify(tmp_path / "out")["corpus_hash"] == corpus
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "index.parquet", "merge.json", "merged.jsonl", "rejected.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a_full_disk_is_one_line(tmp_path, write, monkeypatch):
    write(tmp_path / "in/A/rows.jsonl", rows_of(0, 20))
    monkeypatch.setattr(merging, "disk_free", lambda _: 10)
    with pytest.raises(UserError, match="make room"):
        run(tmp_path / "in", tmp_path / "out")


def edited(data: bytes, what: str) -> bytes:
    lines = data.splitlines(keepends=True)
    if what == "swap":
        i = next(i for i in range(len(lines) - 1) if len(lines[i]) != len(lines[i + 1]))
        lines[i:i + 2] = lines[i + 1], lines[i]
    if what == "digit":
        at = data.index(b'"input_ids": [') + 14
        return data[:at] + (b"8" if data[at:at + 1] != b"8" else b"7") + data[at + 1:]
    if what == "mask":
        return data.replace(b"[0, 1, 1,", b"[1, 0, 1,", 1)
    return b"".join(lines)


@pytest.mark.parametrize("what", ["swap", "digit", "mask"])
def test_verify_sees_whatever_changed_in_the_rows(tmp_path, write, what):
    write(tmp_path / "in/A/rows.jsonl", rows_of(4, 60))
    run(tmp_path / "in", tmp_path / "out", max_seq_len=1000)
    path = tmp_path / "out/merged.jsonl"
    changed = edited(path.read_bytes(), what)
    assert changed != path.read_bytes() and len(changed) == path.stat().st_size
    path.write_bytes(changed)
    with pytest.raises(UserError, match="merged.jsonl row"):
        verify(tmp_path / "out")


@pytest.mark.parametrize("name", ["merged.jsonl", "index.parquet"])
def test_files_of_two_merges_are_refused(tmp_path, write, name):
    write(tmp_path / "in/A/rows.jsonl", rows_of(4, 60))
    run(tmp_path / "in", tmp_path / "out")
    run(tmp_path / "in", tmp_path / "other", max_seq_len=10)
    (tmp_path / "out" / name).write_bytes((tmp_path / "other" / name).read_bytes())
    with pytest.raises(UserError, match="different merges"):
        Corpus.open(tmp_path / "out")
    (tmp_path / "out" / name).unlink()
    with pytest.raises(UserError, match="does not exist"):
        Corpus.open(tmp_path / "out")


@pytest.mark.parametrize(("options", "words"), [
    ({"masks": "mine"}, "choose 'own' or 'template'"), ({"masks": "template"}, "tokenizer"),
    ({"max_seq_len": 2}, "at least 3")])
def test_rules_that_make_no_sense(tmp_path, write, options, words):
    write(tmp_path / "in/A/rows.jsonl", rows_of(4, 5))
    with pytest.raises(UserError, match=words):
        run(tmp_path / "in", tmp_path / "out", **options)


def test_tables_and_the_mix_along_the_order(tmp_path, write):
    write(tmp_path / "in/A/rows.jsonl", [{"input_ids": [i, i, i], "loss_mask": [1, 1, 1]} for i in range(75)])
    write(tmp_path / "in/B/rows.jsonl", [b"{", *({"input_ids": [i] * 6, "loss_mask": [1] * 6} for i in range(75))])
    report = run(tmp_path / "in", tmp_path / "out")
    columns = "lines read", "records", "skipped"
    assert [tuple(row[c] for c in columns) for row in accounts.account(report)] == [(75, 75, 0), (76, 75, 1)]
    assert accounts.skipped(report) == [{"source": "B", "reason": "json_invalid", "rows": 1}]
    index = Corpus.open(tmp_path / "out").index
    mix = accounts.mix(index)
    assert list(mix.columns) == ["A", "B"] and np.allclose(mix.sum(axis=1), 100) and len(mix) == 3
    for middle, share in zip(mix.index, mix["A"], strict=True):
        rows = index[round(middle * 1.5) - 25:round(middle * 1.5) + 25]
        assert share == pytest.approx(100 * rows[rows["source"] == "A"]["tokens"].sum() / rows["tokens"].sum())
