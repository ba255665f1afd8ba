"""The merge with all its options, held to a reference of plain loops: rows, order, bytes, index and books."""

import json
import random
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from leisure import AT_LEISURE

from eagle3nb.corpus import index, passes
from eagle3nb.corpus import lines as lines_module
from eagle3nb.corpus import merge as merging
from eagle3nb.corpus import scan as scan_module
from eagle3nb.corpus.batch import batches
from eagle3nb.corpus.masks import Markers
from eagle3nb.corpus.merge import merge
from eagle3nb.corpus.overlap import needles
from eagle3nb.corpus.records import find_sources
from eagle3nb.corpus.selection import VALIDATION, Mix
from eagle3nb.corpus.verify import verify
from eagle3nb.errors import UserError

V = 50
MARKERS = Markers(((40, 41, 42), (40, 41)), 43, (40, 41, 42, 43))
TURN = [44, 7, 8, 9, 45]  # an evaluation prompt as a user turn
NO_MASK, UNSUPERVISED = "no loss_mask and no template to derive one", "no supervised tokens"
CUT_AWAY, TOO_LONG = "no supervised tokens within max_seq_len", "longer than max_seq_len"
NO_TURN = "no complete turn within max_seq_len"
FAULTS = {"json_invalid", "schema", "empty_row", "token_out_of_range", "length_mismatch", "mask_values"}

# ------------------------------------------------------------------------------------------------------ the reference


def derived(ids: list) -> list:
    mask, t = [0] * len(ids), 0
    while t < len(ids):
        header = next((header for header in MARKERS.opens if tuple(ids[t:t + len(header)]) == header), ())
        t += max(len(header), 1)
        if header:
            while t < len(ids):
                mask[t], t = 1, t + 1
                if ids[t - 1] == MARKERS.end_of_turn:
                    break
    return mask


def learns(mask: list) -> bool:
    return any(a and b for a, b in zip(mask, mask[1:], strict=False))


def kept_tokens(mask: list, most: int, truncation: str) -> tuple[int, str]:
    """(tokens that are left, why the row is not)."""
    if len(mask) <= most:
        return len(mask), ""
    if truncation == "right":
        return most, ""
    if truncation == "drop":
        return most, TOO_LONG
    last = t = 0
    while t < len(mask):  # turn by turn
        end = t
        while end < len(mask) and mask[end] == mask[t]:
            end += 1
        if mask[t] and end <= most:
            last = end
        t = end
    return (last, "") if last else (most, NO_TURN)


def decided(row: dict, rule: str, raw: bytes, options: dict) -> dict:
    """What a line becomes: {"reason"} or {"ids", "mask", "line" (a dict) or the bytes themselves, counts}."""
    if rule:
        return {"reason": rule}
    ids, own, most = row["input_ids"], row.get("loss_mask"), options["max_seq_len"]
    mask = own
    if own is None or options["masks"] == "template":
        if options["markers"] is None:
            return {"reason": NO_MASK}
        mask = derived(ids)
    length, reason = kept_tokens(mask, most, options["truncation"])
    if not reason and not learns(mask):
        reason = UNSUPERVISED
    if not reason and not learns(mask[:length]):
        reason = CUT_AWAY
    if reason:
        return {"reason": reason}
    line = json.loads(raw)
    if length < len(ids):
        line = {key: value[:length] if isinstance(value, list) and len(value) == len(ids) and key != "id" else value
                for key, value in line.items() if key not in ("messages", "tools")}
    line |= {"input_ids": ids[:length], "loss_mask": mask[:length]}
    return {"reason": "", "ids": ids[:length], "mask": mask[:length], "line": line,
            "bytes": raw if line == json.loads(raw) else None, "truncated": len(ids) - length,
            "teachers": sum(a and b for a, b in zip(mask[:length], mask[1:length], strict=False))}


def digest(ids: list) -> bytes:
    return xxhash.xxh3_128_digest(b"".join(token.to_bytes(4, "little") for token in ids))


def key(row: dict, occurrence: int, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(digest(row["ids"]) + occurrence.to_bytes(8, "little"), seed)


def holds(ids: list, part: list) -> bool:
    return any(ids[t:t + len(part)] == part for t in range(len(ids)))


def reference(corpus: dict, options: dict, mix: Mix, seed: int) -> tuple[list, list, int]:
    """([(row, copy)] in order, removed rows, rows held out) of {source: {file: [(raw, row, rule) or blank bytes]}}."""
    rows, removed = [], []
    for source, files in corpus.items():
        for file, items in files.items():
            for number, item in enumerate(items, 1):
                if isinstance(item, tuple):
                    raw, row, rule = item
                    found = decided(row, rule, raw, options) | {
                        "source": source, "file": file, "number": number, "raw": raw}
                    (removed if found["reason"] else rows).append(found)

    def remove(reason, which):
        removed.extend(row | {"reason": reason} for row in which)
        return [row for row in rows if not any(row is other for other in which)]

    if options["needles"]:
        rows = remove("holds an evaluation prompt", [row for row in rows if holds(row["ids"], TURN)])
    groups: dict = {}
    for row in rows:
        groups.setdefault(tuple(row["ids"]), []).append(row)
    for group in groups.values():
        for rank, row in enumerate(sorted(group, key=lambda row: xxhash.xxh3_64_intdigest(row["raw"]))):
            row["rank"] = rank
    if mix.dedup == "exact":
        rows = remove("duplicate", [row for row in rows if row["rank"]])
    shares = {ids: key({"ids": list(ids)}, 0, VALIDATION) / 2**64 for ids in groups}
    held = [ids for ids in groups if shares[ids] < mix.validation_share] or [min(groups, key=shares.get, default=None)]
    for row in rows:
        row |= {"held": bool(mix.validation_share) and tuple(row["ids"]) in held, "times": 1}
    for source in corpus:
        short = source.split("_")[0]
        cap = mix.caps.get(source, mix.caps.get(short))
        weight = mix.weights.get(source, mix.weights.get(short))
        drawn = sorted((row for row in rows if row["source"] == source), key=lambda row: key(row, row["rank"], seed))
        if cap is not None:
            rows = remove("over the source's cap", drawn[cap:])
            drawn = drawn[:cap]
        if weight is not None:
            drawn = [row for row in drawn if not row["held"]]
            rest = round(weight * len(drawn)) - int(weight) * len(drawn)
            for place, row in enumerate(drawn):
                row["times"] = int(weight) + (place < rest)
            rows = remove("thinned by the source's weight", [row for row in drawn if not row["times"]])
    written = [(row, copy) for row in rows for copy in range(row["times"])]
    written.sort(key=lambda both: (both[0]["held"], key(both[0], both[0]["rank"] + (both[1] << 32), seed)))
    return written, removed, sum(row["held"] for row in rows)


# ------------------------------------------------------------------------------------------------- corpora at random


def some_row(rng: random.Random, n: int) -> tuple[bytes, dict, str]:
    """(line, row, the rule by which it is none)."""
    kind = rng.random()
    if kind < 0.06:
        raw, rule = rng.choice([(b"{", "json_invalid"), (b"[1]", "schema"), (b'{"input_ids": []}', "empty_row"),
                                (b'{"input_ids": [1, 50]}', "token_out_of_range"),
                                (b'{"input_ids": [1], "loss_mask": [1, 1]}', "length_mismatch"),
                                (b'{"input_ids": [1, 2], "loss_mask": [1, 2]}', "mask_values")])
        return raw, {}, rule
    length = rng.choice([1, 2, 3, 5, 8, 8, 13])
    ids = [rng.choice([1, 2, 3, 40, 41, 42, 43]) for _ in range(length)]
    if rng.random() < 0.3:
        ids[:3] = [40, 41, rng.choice([42, 5])]
    if rng.random() < 0.1:
        ids += TURN + [6]
    row = {"input_ids": ids}
    if rng.random() < 0.8:
        row["loss_mask"] = [int(rng.random() < 0.7) for _ in ids]
    if rng.random() < 0.5:
        row = {"id": rng.choice([n, f"é{n}", [n] * len(ids)]), **row}
    if rng.random() < 0.3 and "loss_mask" in row:
        row |= {"messages": [{"role": "user", "content": "x\n"}], "weights": [0.5] * len(ids), "score": 1.5}
    spaces = rng.choice([(", ", ": "), (",", ":"), (" , ", " : ")])
    raw = json.dumps(row, ensure_ascii=rng.random() < 0.5, separators=spaces).encode()
    return raw, row, ""


def some_corpus(rng: random.Random, count: int) -> dict:
    """{source: items}: rows, some of them several times, in this source or another."""
    rows = [some_row(rng, n) for n in range(count)]
    corpus = {"A_x": [], "B_y": [], "C": []}
    for row in rows + rng.choices(rows, k=count // 3):
        corpus[rng.choice(list(corpus))].append(row)
    return corpus


def spread(rng: random.Random, corpus: dict) -> dict:
    """The same rows of each source in other files, in another order, with blank lines between them."""
    files: dict = {}
    for source, items in corpus.items():
        names = rng.sample(["a.jsonl", "b.jsonl.gz", "c/d.jsonl", "e.jsonl.zst"], rng.randint(1, 4))
        files[source] = {f"{source}/{name}": [] for name in sorted(names)}
        for item in rng.sample(items, len(items)):
            file = files[source][rng.choice(list(files[source]))]
            file += [b" "] * (rng.random() < 0.1) + [item]
    return files


def merged(root: Path, files: dict, write, options: dict, mix: Mix, seed: int, size: int = 1 << 22, processes: int = 1):
    for source in files.values():
        for file, items in source.items():
            write(root / "in" / file, [item[0] if isinstance(item, tuple) else item for item in items])
    with (mock.patch.object(scan_module, "chunks", partial(lines_module.chunks, size=size)),
          mock.patch.object(scan_module, "batches", partial(batches, size=size)),
          mock.patch.object(merging, "BLOCK", size), mock.patch.object(passes, "HELD", size),
          mock.patch.object(index, "GROUP", min(size, 1 << 16))):
        return merge(find_sources(root / "in"), root / "out", seed=seed, vocab_size=V, mix=mix, processes=processes,
                     **options)


def check_files(out: Path, report: dict, corpus: dict, written: list, removed: list, held: int) -> None:
    """merged.jsonl, its index, rejected.jsonl and merge.json, each against the reference."""
    data = (out / "merged.jsonl").read_bytes()
    lines, index = data.split(b"\n"), pd.read_parquet(out / "index.parquet")
    assert lines.pop() == b"" and len(lines) == len(written) == len(index)
    for line, (row, _) in zip(lines, written, strict=True):
        assert json.loads(line) == row["line"] and line == (row["bytes"] or line)
    for i, (entry, (row, copy)) in enumerate(zip(index.itertuples(), written, strict=True)):
        ids, mask = row["ids"], row["mask"]
        assert data[entry.offset:entry.offset + entry.bytes] == lines[i]
        assert (entry.copy, entry.validation) == (copy, i >= len(written) - held)
        assert (entry.tokens, entry.supervised, entry.teacher_positions, entry.truncated) == (
            len(ids), sum(mask), row["teachers"], row["truncated"])
        assert entry.xxh3 == digest(ids).hex() and entry.mask_xxh3 == xxhash.xxh3_64_hexdigest(bytes(mask))
    # Lines of one source that are equal to the byte: which of them is written is not promised.
    where = Counter((row["source"], row["raw"], copy) for row, copy in written)
    at = {(row["file"], row["number"]): row["raw"] for row in [*(row for row, _ in written), *removed]}
    assert where == Counter((entry.source, at[entry.file, entry.line], entry.copy) for entry in index.itertuples())
    rejected = [json.loads(line) for line in (out / "rejected.jsonl").read_bytes().splitlines()]
    assert Counter((r["source"], at[r["file"], r["line"]], r["reason"]) for r in rejected) == Counter(
        (row["source"], row["raw"], row["reason"]) for row in removed)
    places = [(r["file"], r["line"]) for r in rejected]
    kept = {(entry.file, entry.line) for entry in index.itertuples()}
    assert len(set(places)) == len(places) and not kept & set(places) and len(places) + len(kept) == len(at)
    assert all(bool(r.get("detail")) == (r["reason"] in FAULTS) for r in rejected)
    for source in report["sources"]:
        mine = [(row, copy) for row, copy in written if row["source"] == source["name"]]
        read = sum(isinstance(item, tuple) for items in corpus[source["name"]].values() for item in items)
        assert source["lines"] == read == source["records"] - source["copies"] + sum(source["skipped"].values())
        assert source["skipped"] == Counter(row["reason"] for row in removed if row["source"] == source["name"])
        assert (source["records"], source["copies"]) == (len(mine), sum(copy > 0 for _, copy in mine))
        assert (source["tokens"], source["supervised"], source["teacher_positions"]) == tuple(
            sum(count) for count in ([len(row["ids"]) for row, _ in mine], [sum(row["mask"]) for row, _ in mine],
                                     [row["teachers"] for row, _ in mine]))
        assert source["truncated_tokens"] == sum(row["truncated"] for row, _ in mine)
        assert source["truncated_records"] == sum(row["truncated"] > 0 for row, _ in mine)
    for name in ("records", "copies", "tokens", "supervised", "teacher_positions", "truncated_records"):
        assert report[name] == sum(source[name] for source in report["sources"])
    assert report["validation"] == {"records": held, "first_row": len(written) - held,
                                    "tokens": sum(len(row["ids"]) for row, _ in written[len(written) - held:])}
    assert report["bytes"] == len(data) and report == json.loads((out / "merge.json").read_bytes())
    assert verify(out)["records"] == len(written)


mixes = st.builds(
    Mix, st.sampled_from(["exact", "none"]), st.dictionaries(st.sampled_from(["A", "C"]), st.integers(1, 8)),
    st.dictionaries(st.sampled_from(["A_x", "B", "C"]), st.sampled_from([0.5, 1, 2.5, 0.1, 2])),
    st.sampled_from([0, 0.0, 0.2]))
options_of = st.fixed_dictionaries({
    "max_seq_len": st.sampled_from([3, 5, 8, 100]), "truncation": st.sampled_from(["right", "turn", "drop"]),
    "markers": st.sampled_from([None, MARKERS]), "masks": st.sampled_from(["own", "template"]),
    "needles": st.sampled_from([None, needles([("evil", "q1", TURN[1:-1], TURN)])])})


@settings(max_examples=80, suppress_health_check=[
    *AT_LEISURE.suppress_health_check, HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32), st.integers(0, 30), options_of, mixes, st.integers(0, 2**64 - 1),
       st.sampled_from([1, 7, 90, 1000, 1 << 22]))
def test_any_corpus_under_any_options_is_what_the_reference_makes(write, draw, count, options, mix, seed, size):
    rng = random.Random(draw)
    if options["markers"] is None:
        options = options | {"masks": "own"}
    corpus = some_corpus(rng, count)
    layouts = [spread(rng, corpus), spread(rng, corpus)]
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        written, removed, held = reference(layouts[0], options, mix, seed)
        if not written or held == len(written):
            with pytest.raises(UserError, match="keeps no record|leaves none"):
                merged(Path(one), layouts[0], write, options, mix, seed, size)
            return
        report = merged(Path(one), layouts[0], write, options, mix, seed, size)
        check_files(Path(one) / "out", report, layouts[0], written, removed, held)
        merged(Path(two), layouts[1], write, options, mix, seed)
        assert (Path(two) / "out/merged.jsonl").read_bytes() == (Path(one) / "out/merged.jsonl").read_bytes()


def test_one_two_and_three_processes_write_the_same_bytes(tmp_path, write):
    rng = random.Random(3)
    corpus = some_corpus(rng, 600)
    options = {"max_seq_len": 8, "truncation": "turn", "markers": MARKERS, "masks": "own", "needles": None}
    mix, found = Mix("none", {"A": 100}, {"B_y": 2.5}, 0.1), []
    for processes in (1, 2, 3):
        layout = spread(rng, corpus)
        root = tmp_path / str(processes)
        report = merged(root, layout, write, options, mix, 7, size=5000, processes=processes)
        found.append((root / "out/merged.jsonl").read_bytes())
        check_files(root / "out", report, layout, *reference(layout, options, mix, 7))
        assert verify(root / "out", processes)["records"] == report["records"]
    assert found[0] == found[1] == found[2]


def test_near_duplicates_go_and_the_one_that_stays_is_decided_by_content(tmp_path, write):
    rng, groups = np.random.default_rng(1), []
    for _ in range(25):
        text = rng.integers(0, V, 120)
        groups.append([text])
        for _ in range(rng.integers(0, 3)):
            near = text.copy()
            near[rng.integers(10, 100, 2)] = rng.integers(0, V)
            groups[-1].append(near)
    rows = [{"input_ids": text.tolist() + [1] * 80, "loss_mask": [0] * 30 + [1] * 170} for group in groups
            for text in group]
    for name, layout in (("one", [rows]), ("two", [rows[::-1][:20], rows[::-1][20:]])):
        for i, part in enumerate(layout):
            write(tmp_path / name / f"A/{i}.jsonl", part)
    options = {"max_seq_len": 150, "vocab_size": V, "markers": None, "mix": Mix("near")}
    reports = [merge(find_sources(tmp_path / name), tmp_path / f"out-{name}", seed=1, **options)
               for name in ("one", "two")]
    data = (tmp_path / "out-one/merged.jsonl").read_bytes()
    assert data == (tmp_path / "out-two/merged.jsonl").read_bytes()
    kept = [json.loads(line)["input_ids"][:120] for line in data.splitlines()]
    for group in groups:
        assert sum(text.tolist() in kept for text in group) == 1
    distinct = len({tuple(text.tolist()) for group in groups for text in group})
    assert reports[0]["skipped"] == {"near duplicate": distinct - 25} | (
        {"duplicate": len(rows) - distinct} if len(rows) > distinct else {})
    merge(find_sources(tmp_path / "one"), tmp_path / "out-seed", seed=2, **options)
    assert sorted((tmp_path / "out-seed/merged.jsonl").read_bytes().splitlines()) == sorted(data.splitlines())


@pytest.mark.parametrize("source", ["right", "turn", "drop"])
def test_the_kinds_of_truncation_on_a_conversation(tmp_path, write, source):
    """Two turns of four tokens after questions of three: 3 + 4 + 3 + 4."""
    mask = [0, 0, 0, 1, 1, 1, 1] * 2
    for length in range(1, 15):
        write(tmp_path / f"{length}/A/rows.jsonl", [{"id": i, "input_ids": [i] * length, "loss_mask": mask[:length]}
                                                    for i in range(2)] + [{"input_ids": [9] * 3, "loss_mask": [1] * 3}])
    expected = {  # tokens of the row of 14 at each max_seq_len; 0 where it is not kept
        "right": {3: 0, 4: 0, 5: 5, 6: 6, 7: 7, 8: 8, 13: 13, 14: 14},
        "turn": {3: 0, 6: 0, 7: 7, 8: 7, 10: 7, 13: 7, 14: 14}, "drop": {3: 0, 7: 0, 13: 0, 14: 14}}[source]
    for most, left in expected.items():
        report = merge(find_sources(tmp_path / "14"), tmp_path / "out", max_seq_len=most, seed=1, vocab_size=V,
                       markers=None, truncation=source)
        tokens = Counter(pd.read_parquet(tmp_path / "out/index.parquet")["tokens"])
        assert tokens == Counter({3: 1} | ({left: 2} if left else {}))
        if not left:
            reason = {"right": CUT_AWAY, "turn": NO_TURN, "drop": TOO_LONG}[source]
            assert report["skipped"] == {reason: 2}


def test_decontamination_takes_prompts_out_of_what_is_left_of_a_row_and_names_the_benchmarks(tmp_path, write):
    prompt = list(range(20))
    found = needles([("exam", "q1", prompt, []), ("quiz", "q2", TURN[1:-1], TURN), ("exam", "q3", prompt[::-1], [])])
    rows = [{"id": i, "input_ids": ids, "loss_mask": [1] * len(ids)} for i, ids in enumerate([
        [30, *prompt, 30], [31] * 20 + TURN, [32] * 38 + TURN, [33] * 30, [34, *prompt[:6], 34],
        [35, *TURN[1:-1], 35]])]
    write(tmp_path / "in/A/rows.jsonl", rows)
    report = merge(find_sources(tmp_path / "in"), tmp_path / "out", max_seq_len=40, seed=1, vocab_size=V, markers=None,
                   needles=found)
    assert report["skipped"] == {"holds an evaluation prompt": 2} and report["decontaminate"] == ["exam", "quiz"]
    kept = sorted(json.loads(line)["id"] for line in (tmp_path / "out/merged.jsonl").read_bytes().splitlines())
    assert kept == [2, 3, 4, 5]  # of row 2 the prompt is cut off
    rejected = [json.loads(line) for line in (tmp_path / "out/rejected.jsonl").read_bytes().splitlines()]
    assert [(r["line"], r["reason"]) for r in rejected] == [(1, "holds an evaluation prompt"),
                                                          (2, "holds an evaluation prompt")]


def test_more_data_moves_nothing_between_training_and_validation(tmp_path, write):
    rng = random.Random(2)
    rows = [{"input_ids": [rng.randrange(V) for _ in range(9)], "loss_mask": [1] * 9} for _ in range(900)]
    parts = []
    for seed, count in ((1, 300), (2, 300), (1, 900)):
        write(tmp_path / "in/A/rows.jsonl", rows[:count] + rows[:50])
        merge(find_sources(tmp_path / "in"), tmp_path / "out", max_seq_len=40, seed=seed, vocab_size=V, markers=None,
              mix=Mix("none", weights={"A": 2}, validation_share=0.2))
        index = pd.read_parquet(tmp_path / "out/index.parquet")
        parts.append((set(index["xxh3"][index["validation"]]), set(index["xxh3"][~index["validation"]])))
        assert not parts[-1][0] & parts[-1][1] and not index["copy"][index["validation"]].any()
    assert parts[0] == parts[1]
    assert parts[0][0] <= parts[2][0] and parts[0][1] <= parts[2][1] and len(parts[2][0]) > 2 * len(parts[0][0])


def test_include_beside_exclude(tmp_path, write):
    for name in ("A1_long", "A1_short", "A10_chat", "B"):
        write(tmp_path / name / "rows.jsonl", [{"input_ids": [1, 2], "loss_mask": [1, 1]}])

    def found(exclude=(), include=()):
        return [source.name for source in find_sources(tmp_path, exclude, include)]

    assert found() == found([], []) == ["A10_chat", "A1_long", "A1_short", "B"]
    assert found(include=["A1"]) == ["A1_long", "A1_short"] and found(include=["B", "A10_chat"]) == ["A10_chat", "B"]
    assert found(["A1_long"], ["A1"]) == ["A1_short"]
    for lists, words in ((([], ["A9"]), "include: 'A9' matches no dataset in .*; there are A10_chat"),
                         (([], ["A1_logn"]), "include: 'A1_logn' .*did you mean 'A1_long'"),
                         ((["B"], ["B"]), "'B' stands in include and in exclude"),
                         ((["A1"], ["A1_long"]), "include and exclude leave no dataset"),
                         (([], "A1"), "include is 'A1'; give a list, as in .A1."), (("B", []), "exclude is 'B'")):
        with pytest.raises(UserError, match=words):
            found(*lists)
