import gzip
import json

import numpy as np
import pytest
import zstandard

from eagle3nb.corpus.masks import encode, render
from eagle3nb.corpus.records import Fault, Record, find_sources, is_excluded
from eagle3nb.corpus.scan import read_records
from eagle3nb.errors import UserError

GOOD = {"id": "a", "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}


def read(root, **options):
    [source] = find_sources(root)
    return list(read_records(source, **{"vocab_size": 100, **options}))


def one(tmp_path, write, row, **options):
    write(tmp_path / "A/rows.jsonl", [row])
    [item] = read(tmp_path, **options)
    return item


def test_a_record_comes_back_typed_and_placed(tmp_path, write):
    write(tmp_path / "A/rows.jsonl", [b"", GOOD, b"  " + json.dumps(GOOD).encode() + b"  \r"])
    first, second = read(tmp_path)
    assert (first.source, first.file, first.line) == ("A", "A/rows.jsonl", 2)
    assert first.ids.dtype == np.int32 and first.ids.tolist() == [1, 2, 3]
    assert first.mask.dtype == np.uint8 and first.mask.tolist() == [0, 1, 1]
    data = (tmp_path / "A/rows.jsonl").read_bytes()
    for record in (first, second):
        assert record.plain and data[record.offset:record.offset + len(record.raw)] == record.raw
        assert json.loads(record.raw) == GOOD


@pytest.mark.parametrize(("row", "rule", "words"), [
    (b'{"input_ids": [1, 2', "json_invalid", "line 1"),
    (b'{"input_ids": [1, NaN]}', "json_invalid", ""),
    (b"\xff\xfe{}", "json_invalid", ""),
    (b"[1, 2]", "schema", "not a JSON object"),
    ({"tokens": [1]}, "schema", "tokens"),
    ({"input_ids": "1 2"}, "schema", "input_ids is not a list"),
    ({"input_ids": [[1, 2], [3]]}, "schema", "flat"),
    ({"input_ids": [1, None]}, "schema", "flat"),
    ({"input_ids": [1, "2"]}, "schema", "flat"),
    ({"input_ids": [1.0, 2.5]}, "schema", "integers"),
    ({"input_ids": [True, False]}, "schema", "integers"),
    ({"messages": "hello"}, "schema", "messages"),
    ({"messages": [{"content": "x"}]}, "schema", "role"),
    ({"messages": [{"role": "user", "content": "x"}]}, "schema", "no tokenizer"),
    ({"input_ids": [1, 2, 3], "loss_mask": [0, 1]}, "length_mismatch", "2 values for 3 tokens"),
    ({"input_ids": [1, 2, 3], "loss_mask": [0, 2, 1]}, "mask_values", "loss_mask[1] = 2"),
    ({"input_ids": [1, 2, 3], "loss_mask": [0, -1, 1]}, "mask_values", "loss_mask[1] = -1"),
    ({"input_ids": [1, 2], "loss_mask": [0.5, 1]}, "mask_values", "0.5"),
    ({"input_ids": [1, 2], "loss_mask": [0.0, 1.0]}, "mask_values", "integers"),
    ({"input_ids": [], "loss_mask": []}, "empty_row", "no tokens"),
    ({"prompt_ids": [], "response_ids": []}, "empty_row", "no tokens"),
    ({"input_ids": [1, 100, 101]}, "token_out_of_range", "input_ids[1] = 100, the vocabulary has 100 tokens (2 such"),
    ({"input_ids": [1, -1]}, "token_out_of_range", "input_ids[1] = -1"),
    ({"input_ids": [2**40]}, "token_out_of_range", str(2**40)),
    ({"input_ids": [2**63]}, "token_out_of_range", str(2**63)),
    ({"prompt_ids": [1], "response_ids": [100]}, "token_out_of_range", "response_ids[0] = 100"),
])
def test_every_unusable_line_is_a_fault_with_its_place(tmp_path, write, row, rule, words):
    write(tmp_path / "A/rows.jsonl", [GOOD, row, GOOD])
    first, fault, third = read(tmp_path)
    assert isinstance(first, Record) and isinstance(third, Record)
    assert isinstance(fault, Fault) and (fault.rule, fault.file, fault.line) == (rule, "A/rows.jsonl", 2)
    assert words in fault.detail


def test_true_and_false_are_a_mask_but_not_kept_as_bytes(tmp_path, write):
    record = one(tmp_path, write, {"input_ids": [1, 2], "loss_mask": [False, True]})
    assert record.mask.tolist() == [0, 1] and not record.plain


def test_prompt_and_response_ids_make_their_own_mask(tmp_path, write):
    record = one(tmp_path, write, {"prompt_ids": [5, 6], "response_ids": [7]})
    assert record.ids.tolist() == [5, 6, 7] and record.mask.tolist() == [0, 0, 1] and not record.plain


@pytest.mark.parametrize("row", [
    {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "owls"}]},
    {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "owls"}]},
    {"prompt": "x", "response": "owls"},
    {"prompt": [{"role": "user", "content": "x"}], "response": "owls"},
])
def test_text_is_rendered_in_every_dialect(tmp_path, write, chatml, row):
    record = one(tmp_path, write, row, tokenizer=chatml, vocab_size=500)
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "owls"}]
    assert record.messages == messages and record.mask is None
    assert record.ids.tolist() == encode(chatml, render(chatml, messages))


def test_files_of_all_kinds_in_name_order_and_limit(tmp_path, write):
    rows = [{**GOOD, "id": str(i)} for i in range(7)]
    write(tmp_path / "A/b.jsonl.gz", rows[2:4])
    write(tmp_path / "A/a.jsonl", rows[:2])
    write(tmp_path / "A/c/d.jsonl.zst", rows[4:])
    (tmp_path / "A/notes.txt").write_text("no rows")
    assert [json.loads(item.raw)["id"] for item in read(tmp_path)] == list("0123456")
    assert [json.loads(item.raw)["id"] for item in read(tmp_path, limit=5)] == list("01234")


def test_a_zst_file_of_several_frames_is_read_whole(tmp_path):
    (tmp_path / "A").mkdir()
    line, pack = json.dumps(GOOD).encode() + b"\n", zstandard.ZstdCompressor().compress
    (tmp_path / "A/rows.jsonl.zst").write_bytes(pack(line * 3) + pack(line * 4))
    assert [item.line for item in read(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_compressed_file_cut_short_keeps_what_was_read_and_says_so(tmp_path, suffix):
    (tmp_path / "A").mkdir()
    rng = np.random.default_rng(0)
    lines = b"".join(json.dumps({"input_ids": rng.integers(0, 100, 900).tolist()}).encode() + b"\n" for _ in range(300))
    packed = gzip.compress(lines, 1) if suffix == "gz" else zstandard.ZstdCompressor().compress(lines)
    (tmp_path / f"A/rows.jsonl.{suffix}").write_bytes(packed[:-40_000])
    items = read(tmp_path)
    assert isinstance(items[-1], Fault) and items[-1].rule == "json_invalid" and "cannot be read on" in items[-1].detail
    assert sum(isinstance(item, Record) for item in items) > 50


@pytest.mark.parametrize(("exclude", "words"), [
    (["A9"], "there are A1_longform, A2_chat"), (["A1_longfrom"], "did you mean 'A1_longform'"),
    (["A1", "A2_chat"], "leaves no dataset")])
def test_an_exclusion_that_cannot_be_meant(tmp_path, write, exclude, words):
    write(tmp_path / "A1_longform/rows.jsonl", [GOOD])
    write(tmp_path / "A2_chat/rows.jsonl", [GOOD])
    with pytest.raises(UserError, match=words):
        find_sources(tmp_path, exclude)


def test_exclusion_by_name_or_by_what_stands_before_the_underscore(tmp_path, write):
    for name in ("A1_longform", "A10_chat", "A1b"):
        write(tmp_path / name / "rows.jsonl", [GOOD])
    assert [source.name for source in find_sources(tmp_path, ["A1"])] == ["A10_chat", "A1b"]
    assert [source.name for source in find_sources(tmp_path, ["A1_longform", "A1b"])] == ["A10_chat"]
    assert not is_excluded("A1_longform", ["A", "A1_long"])
    write(tmp_path / "A1" / "rows.jsonl", [GOOD])  # now A1 is a dataset's own name, and means that one
    assert [source.name for source in find_sources(tmp_path, ["A1"])] == ["A10_chat", "A1_longform", "A1b"]


def test_a_root_that_is_missing_or_holds_nothing(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        find_sources(tmp_path / "nowhere")
    (tmp_path / ".hidden").mkdir()
    with pytest.raises(UserError, match="holds no dataset"):
        find_sources(tmp_path)
