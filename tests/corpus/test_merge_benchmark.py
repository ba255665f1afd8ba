"""The merge benchmark measures what it says: its corpus, its contestants' rows, its memory, its verdict."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks import contestants, corpus, watch

from eagle3nb.corpus.masks import Markers, mask_from_markers

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "merge.py"
HAS_DATASETS = importlib.util.find_spec("datasets") is not None


def read(root):
    """[(source, row, line)] in file order."""
    return [(path.parent.name, json.loads(line), line) for path in sorted(root.rglob("*.jsonl"))
            for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def sixty(tmp_path_factory):
    root = tmp_path_factory.mktemp("sixty")
    return root, corpus.make_corpus(root, records=60, seed=3)


def test_the_corpus_keeps_its_promises(sixty):
    root, made = sixty
    rows = read(root)
    assert {source for source, _, _ in rows} == set(corpus.SOURCES) and len(corpus.SOURCES) == 9
    assert all(json.dumps(row) == line for _, row, line in rows), "written as json.dumps writes"
    assert made.bytes == sum(len(line) + 1 for _, _, line in rows)
    assert len({row["id"] for _, row, _ in rows}) == len(rows) == 61
    ids = [np.array(row["input_ids"], np.int32) for _, row, _ in rows]
    masks = [np.array(row["loss_mask"]) if "loss_mask" in row else mask_from_markers(x, corpus.MARKERS)
             for x, (_, row, _) in zip(ids, rows, strict=True)]
    assert all(len(x) == len(mask) for x, mask in zip(ids, masks, strict=True))
    learns = [bool((cut[:-1] & cut[1:]).any()) for cut in (mask[:8192] for mask in masks)]
    assert sum(learns) == made.records == 60 and made.skipped == 1
    assert all(np.array_equal(mask, mask_from_markers(x, corpus.MARKERS)) for x, mask, good
               in zip(ids, masks, learns, strict=True) if good)
    assert not any(mask.any() for mask, good in zip(masks, learns, strict=True) if not good)
    assert sum(len(x) > 8192 for x in ids) == made.cut == 12  # 20 %
    assert sum("loss_mask" not in row for _, row, _ in rows) == made.maskless == 3  # 5 %
    kept = sum(min(len(x), 8192) for x, good in zip(ids, learns, strict=True) if good)
    assert kept == made.tokens == round(87_800_000 * 60 / 37_312)
    flat = np.concatenate(ids)
    digits = np.char.str_len(flat.astype(str))
    assert flat.min() >= 0 and flat.max() < corpus.VOCAB
    assert ((digits >= 3) & (digits <= 6)).mean() > 0.9
    share = np.bincount(flat[flat < corpus.TEXT], minlength=corpus.TEXT) / len(flat)
    assert share[:100].sum() > 20 * share[10_000:10_100].sum(), "low ids are the common ones"
    assert sum(x.tolist().count(corpus.ASSISTANT) > 1 for x in ids) > 30, "several turns a row"


def test_the_full_corpus_comes_to_the_reference_run_s_count():
    lengths, maskless, supervised = corpus._plan(37_312, np.random.default_rng(0))
    kept = lengths[supervised]
    assert len(kept) == 37_312 and np.minimum(kept, 8192).sum() == 87_800_000
    assert (kept > 8192).sum() == 7462 and maskless.sum() == 1866 and not maskless[~supervised].any()
    assert lengths.min() >= 64 and lengths.max() <= 16_384


def test_the_seed_gives_the_bytes(sixty, tmp_path):
    root, made = sixty
    again, other = tmp_path / "again", tmp_path / "other"
    assert corpus.make_corpus(again, records=60, seed=3) == made
    corpus.make_corpus(other, records=60, seed=4)
    assert read(again) == read(root) != read(other)


def test_files_end_where_they_should(tmp_path, monkeypatch):
    whole, split = tmp_path / "whole", tmp_path / "split"
    made = corpus.make_corpus(whole, records=200)
    monkeypatch.setattr(corpus, "ROWS_A_FILE", 20)  # a batch of 32 would run over the end
    assert corpus.make_corpus(split, records=200).records == made.records
    assert len(list(split.glob("A2_agentic/*.jsonl"))) == 3  # 44 rows
    counts = [len(path.read_text().splitlines()) for path in sorted(split.glob("A2_agentic/*.jsonl"))]
    assert counts == [20, 20, 4]
    assert [row["id"] for _, row, _ in read(split)] == [row["id"] for _, row, _ in read(whole)]


def test_the_plain_script_derives_the_mask_as_the_merge_does():
    rng = np.random.default_rng(0)
    markers = Markers(opens=((1, 2, 3), (1, 2)), end_of_turn=4, special_ids=())
    for length in [0, 1, 2, 3, *rng.integers(4, 60, 300)]:
        ids = rng.integers(0, 6, length).astype(np.int32)
        plain = contestants.derive(ids.tolist(), [list(header) for header in markers.opens], markers.end_of_turn)
        assert plain == mask_from_markers(ids, markers).tolist()


@pytest.mark.parametrize("mask, kept", [([0, 1, 0, 1], False), ([0, 0, 1, 1], True), ([0, 0, 0, 0, 1, 1], False),
                                        ([1], False), ([], False)])
def test_the_plain_script_skips_what_teaches_nothing(mask, kept):
    row = contestants.cut({"id": "a", "input_ids": list(range(len(mask))), "loss_mask": mask}, {"max_seq_len": 4})
    assert (row is not None) == kept
    assert not kept or row["input_ids"] == [0, 1, 2, 3]


def test_fingerprints_tell_rows_apart_but_not_orders_or_spellings(tmp_path):
    def of(rows, dumps=json.dumps):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(dumps(row) + "\n" for row in rows))
        return corpus.fingerprint(path)

    a = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}
    b = {"input_ids": [1, 2, 3], "loss_mask": [1, 1, 1]}
    assert of([a, b, b]) == of([b, a, b], lambda row: json.dumps({"x": 1} | row, separators=(",", ":")))
    assert len({of(rows) for rows in ([a], [b], [a, a], [a, b], [a, a, b], [a, b, b])}) == 6
    assert of([a, b])[:2] == (2, 6)


def test_memory_is_the_whole_tree_s_and_time_ends_at_the_exit(tmp_path, monkeypatch):
    """The child has its memory until it was read, however late that is."""
    there, known, memory = tmp_path / "there", tmp_path / "seen", watch._memory
    child = ("import pathlib, sys, time; x = b'x' * 80_000_000; there, known = map(pathlib.Path, sys.argv[1:])\n"
             "there.touch(); time.sleep(0.6); end = time.monotonic() + 300\n"
             "while not known.exists() and time.monotonic() < end: time.sleep(0.01)")
    arguments = ["-c", child, str(there), str(known)]
    code = f"import subprocess, sys; subprocess.run([sys.executable, *{arguments}]); print('done'); sys.exit(3)"

    def read(pid):
        before, found = there.exists(), memory(pid)
        if before:
            known.touch()
        return found

    monkeypatch.setattr(watch, "_memory", read)
    seen = watch.watch([sys.executable, "-c", code], tmp_path / "log")
    assert seen.code == 3 and (tmp_path / "log").read_text() == "done\n"
    assert 80e6 < seen.memory < 160e6 and seen.mapped < seen.memory
    assert seen.seconds > 0.6 and 0 < seen.cpu_seconds < seen.seconds


def benchmark(folder, *options, script=SCRIPT):
    return subprocess.run([sys.executable, str(script), "--records", "60", "--folder", str(folder / "here"), "--json",
                           str(folder / "table.json"), "--repeats", "1", *options], capture_output=True, text=True)


def test_the_benchmark_runs_from_end_to_end_and_leaves_nothing(tmp_path):
    for _ in range(5):  # once more where a process was over before its memory was read
        ran = benchmark(tmp_path, "--big", "0.005", "--no-gate")
        assert ran.returncode == 0, ran.stderr
        result = json.loads((tmp_path / "table.json").read_text())
        if result["big"]["peak"]:
            break
    rows = {row["contestant"]: row for row in result["contestants"]}
    assert len(rows) == 6 and all(name in ran.stdout for name in rows)
    if HAS_DATASETS:
        assert rows["HF datasets"]["rows"] == 60
    else:
        assert rows.pop("HF datasets") == {"contestant": "HF datasets", "problem": "not installed"}
        (bound,) = [bound for bound in result["bounds"] if "HF datasets" in bound["bound"]]
        assert not bound["met"] and bound["found"] == "HF datasets not installed"
    assert not [row for row in rows.values() if "problem" in row]
    assert all(rows[name]["rows"] == 60 for name in ("plain script", "ours: merge", "ours: verify"))
    assert all(row["mb_s"] > 0 and row["wall_s"] > row["import_s"] for row in rows.values())
    assert rows["plain script"]["over_plain"] == 1
    bounds = {bound["bound"]: bound for bound in result["bounds"]}
    assert len(bounds) == 7
    assert bounds["the same 60 rows of 141,188 tokens"]["met"]
    assert result["accounting"][-1] == "Merge complete. 60 records, 0.1M tokens." and len(result["accounting"]) == 10
    assert result["accounting"][0] in ran.stdout
    assert result["big"]["bytes"] == pytest.approx(5e6, rel=0.3) and result["big"]["peak"] > 10e6
    assert not list((tmp_path / "here").iterdir())


def test_a_missed_bound_is_named_and_fails(tmp_path):
    """A plain script that alters one row's mask is found out."""
    shutil.copytree(SCRIPT.parent, tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    contestants = tmp_path / "scripts" / "contestants.py"
    right, wrong = "    random.shuffle(rows)\n", "    rows[7]['loss_mask'][0] ^= 1\n"
    assert contestants.read_text().count(right) == 1
    contestants.write_text(contestants.read_text().replace(right, right + wrong))
    ran = benchmark(tmp_path, "--big", "0", script=tmp_path / "scripts" / "merge.py")
    assert ran.returncode == 1
    assert "MISSED  the same 60 rows of 141,188 tokens: not from all of plain script" in ran.stdout
    assert "missed: " in ran.stderr and "the same 60 rows of 141,188 tokens" in ran.stderr
    assert not list((tmp_path / "here").iterdir())
