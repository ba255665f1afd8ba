"""States that other tools left, in their files' formats, read in through the checks; and the faults that these have."""

import gzip
import io
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3nb.cli import main
from eagle3nb.errors import UserError
from eagle3nb.states import foreign, foreign_files
from eagle3nb.states import reference as references
from eagle3nb.states.extract import extract
from eagle3nb.states.foreign import import_states
from eagle3nb.states.hf import TransformersTarget
from eagle3nb.states.store import Store


@pytest.fixture(scope="module")
def streams(corpus, target):
    """(ids, mask, aux [T, 3h], last [T, h] after the final norm, and before it, residual [9, T, h]) of every row."""
    reference, _ = references.load_reference(target.dir, target.layers)
    found = []
    for i in range(len(corpus)):
        ids, mask = corpus.row(i)
        s = reference.streams(ids)
        aux = torch.cat([s.residual[layer] for layer in target.layers], -1)
        found.append((ids, mask, aux.clone(), s.last.clone(), s.residual[-1].clone(), s.residual.clone()))
    return found


@pytest.fixture(scope="module")
def own(corpus, target, tmp_path_factory):
    """The store that our own extraction makes, float32."""
    folder = tmp_path_factory.mktemp("own")
    extract(corpus, target, folder, dtype="fp32", batch_tokens=512, shard_tokens=900)
    return Store.open(folder)


def specforge(folder, streams, change=lambda i, row: row, zipped=True):
    """As prepare_hidden_states.py: sub-folders of rows, torch.save of a dict, a leading dimension of 1."""
    for i, (ids, mask, aux, last, *_) in enumerate(streams):
        row = change(i, {"input_ids": torch.from_numpy(ids).long(), "loss_mask": torch.from_numpy(mask).long(),
                         "hidden_state": last[None], "aux_hidden_state": aux[None]})
        place = folder / f"rows_{i // 10 * 10}-{i // 10 * 10 + 10}"
        place.mkdir(parents=True, exist_ok=True)
        if i % 3:
            torch.save(row, place / f"data_{i}.ckpt", _use_new_zipfile_serialization=zipped)
        else:
            buffer = io.BytesIO()
            torch.save(row, buffer)
            (place / f"data_{i}.ckpt.gz").write_bytes(gzip.compress(buffer.getvalue()))
    return folder


def speculators(folder, streams, change=lambda i, row: row, dtype=torch.float32):
    """As generate-offline-data with vLLM: four layers, the last before the final norm; fp8 with a scale a token."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, (ids, _, aux, _, before, *_) in enumerate(streams):
        states = torch.stack([*aux.chunk(3, -1), before], 1)  # [T, 4, h]
        row = {"token_ids": torch.from_numpy(ids).long(), "hidden_states": states.to(dtype)}
        if dtype == torch.float8_e4m3fn:
            scale = (states.abs().amax((1, 2), keepdim=True) / 448).clamp_min(1e-12)
            row |= {"hidden_states": (states / scale).to(dtype), "hidden_states_scales": scale}
        save_file({k: v.contiguous() for k, v in change(i, row).items()}, folder / f"hs_{i}.safetensors")
    return folder


def old_speculators(folder, streams):
    folder.mkdir(parents=True)
    for i, (ids, mask, aux, last, *_) in enumerate(streams):
        torch.save({"input_ids": ids.tolist(), "loss_mask": torch.from_numpy(mask),
                    "hidden_states": [*aux.chunk(3, -1), last]}, folder / f"data_{i}.pt")
    return folder


def bring(kind, folder, corpus, target, out, **settings):
    return import_states(kind, folder, corpus, target.dir, out, shard_tokens=900, **settings)


def compare(store, own, limit):
    """The largest relative error of any token of any row."""
    worst = 0.0
    for i in range(len(own)):
        a, b = store.row(i), own.row(i)
        assert np.array_equal(a.ids, b.ids) and np.array_equal(a.mask, b.mask)
        assert np.array_equal(a.last_positions, b.last_positions)
        for x, y in ((a.aux, b.aux), (a.last, b.last)):
            if len(y):
                worst = max(worst, float(((x - y).norm(dim=-1) / y.norm(dim=-1)).max()))
        if limit < 1e-3:
            assert np.array_equal(a.teacher_argmax, b.teacher_argmax)
            assert np.allclose(a.teacher_lse, b.teacher_lse, atol=1e-4)
    assert worst < limit
    return worst


@pytest.mark.parametrize("memory", [None, 0])
@pytest.mark.parametrize("kind, make, normed", [("specforge", specforge, True), ("speculators", speculators, False),
                                                ("speculators", old_speculators, True)])
def test_the_store_is_that_of_our_own_extraction(corpus, target, streams, own, tmp_path, kind, make, normed, memory):
    found = bring(kind, make(tmp_path / "files", streams), corpus, target, tmp_path / "store", memory=memory)
    assert found["files"] == len(corpus) and found["unused"] == 0 and found["store"]["dtype"] == "fp32"
    assert [row["taken"] for row in found["last"]] == [normed, not normed]
    store = Store.open(tmp_path / "store")
    store.check_corpus(corpus)
    store.verify()
    compare(store, own, 1e-4)
    assert store.fingerprint["engine"] == f"{kind} files" and store.fingerprint["last"] == "after the final norm"
    told = [row["result"] for row in found["checks"]]
    assert told.count("not run: not loaded that far") == (0 if memory is None else 3)
    assert told[-1] == ("holds" if normed else "came before it, and is normed here")


def test_files_of_torch_before_zip_are_read_too(corpus, target, streams, own, tmp_path):
    bring("specforge", specforge(tmp_path / "files", streams, zipped=False), corpus, target, tmp_path / "store")
    compare(Store.open(tmp_path / "store"), own, 1e-4)


@pytest.mark.parametrize("dtype, stored, limit", [(torch.bfloat16, "bf16", 0.01), (torch.float16, "fp32", 0.002),
                                                  (torch.float8_e4m3fn, "bf16", 0.3)])
def test_other_dtypes(corpus, target, streams, own, tmp_path, dtype, stored, limit):
    found = bring("speculators", speculators(tmp_path / "files", streams, dtype=dtype), corpus, target,
                  tmp_path / "store")
    assert found["store"]["dtype"] == stored and found["last"][1]["taken"]
    assert compare(Store.open(tmp_path / "store"), own, limit) > limit / 100


def test_the_stores_dtype_may_be_another(corpus, target, streams, tmp_path):
    found = bring("speculators", speculators(tmp_path / "files", streams), corpus, target, tmp_path / "store",
                  dtype="bf16")
    assert found["store"]["dtype"] == "bf16" and Store.open(tmp_path / "store").row(0).aux.dtype == torch.bfloat16


def test_rows_without_a_file_are_named_with_the_nearest(corpus, target, streams, tmp_path):
    folder = speculators(tmp_path / "files", streams[:5] + streams[7:])
    with pytest.raises(UserError, match="2 of 24 rows of the corpus have no file with their tokens in .*, the first is "
                                        "row 5 of"):
        bring("speculators", folder, corpus, target, tmp_path / "store")
    n = len(streams[6][0])

    def cut(i, row):  # as another max_length would
        return row if i != 6 else {key: value[: n - 3] for key, value in row.items()}

    folder = speculators(tmp_path / "cut", streams, cut)
    with pytest.raises(UserError, match=rf"row 6 of {n} tokens \(hs_6.safetensors has the same first {n - 3} tokens, "
                                        rf"and {n - 3} in all\); merge the rows"):
        bring("speculators", folder, corpus, target, tmp_path / "store")
    assert not (tmp_path / "store").exists()
    found = bring("speculators", folder, corpus, target, tmp_path / "store", limit=5)
    assert found["files"] == 5 and found["unused"] == 19 and found["store"]["rows"] == 5


def test_the_order_of_files_does_not_matter_and_rows_may_share_one(corpus, target, streams, own, tmp_path):
    folder = speculators(tmp_path / "files", [*streams[::-1], streams[3]])
    found = bring("speculators", folder, corpus, target, tmp_path / "store")
    assert found["files"] == 24 and found["unused"] == 1
    compare(Store.open(tmp_path / "store"), own, 1e-4)


def test_a_mask_that_is_not_the_corpuss(corpus, target, streams, own, tmp_path):
    at = int(streams[4][1].argmax())

    def change(i, row):  # SpecForge #885: the mask is not shifted with the tokens
        return row if i != 4 else row | {"loss_mask": row["loss_mask"].roll(-1)}

    folder = specforge(tmp_path / "files", streams, change)
    with pytest.raises(UserError, match=rf"loss mask in …/rows_0-10/data_4.ckpt is not that of row 4 of the corpus, "
                                        rf"first at token {at - 1}; set masks to corpus"):
        bring("specforge", folder, corpus, target, tmp_path / "store")
    bring("specforge", folder, corpus, target, tmp_path / "store", masks="corpus")
    compare(Store.open(tmp_path / "store"), own, 1e-4)


# ---------------------------------------------------------------------------------------------------- faults


def shifted(states):
    return torch.cat([states[:1], states[:-1]])


def of_layers(s, layers):
    return torch.cat([s[5][layer] for layer in layers], -1), s[3]


FAULTS = {  # (aux, last) of a row, from its streams and the final norm
    "one layer early": (lambda s, norm: of_layers(s, [1, 3, 4]), "layer 2 is the residual stream after 1"),
    "mid layer": (lambda s, norm: of_layers(s, [2, 3, 5]), "layer 4 is the residual stream after 3"),
    "another order": (lambda s, norm: of_layers(s, [2, 5, 4]), "in the order 2, 5, 4 instead of 2, 4, 5"),
    "one twice": (lambda s, norm: of_layers(s, [2, 4, 4]), "layers 4 and 5 is one stream twice"),
    "shifted": (lambda s, norm: (shifted(s[2]), s[3]), "that layer's, but one token too late"),
    "last shifted": (lambda s, norm: (s[2], shifted(s[3])), "last hidden state stands one token too late"),
    "twice normed": (lambda s, norm: (s[2], norm(s[3])), "the final norm twice"),
    "junk": (lambda s, norm: (torch.randn_like(s[2]), s[3]), "differs from every layer of the checkpoint"),
    "junk last": (lambda s, norm: (s[2], torch.randn_like(s[3])), "last hidden state differs by"),
}


@pytest.mark.parametrize("name", list(FAULTS))
def test_states_that_are_not_what_they_should_be(corpus, target, streams, tmp_path, name):
    fault, message = FAULTS[name]
    norm = references.final_norm(target.dir)
    spoilt = [(s[0], s[1], *fault(s, norm)) for s in streams]
    with pytest.raises(UserError, match=message) as error:
        bring("specforge", specforge(tmp_path / "files", spoilt), corpus, target, tmp_path / "store")
    assert str(error.value).startswith("…/") and "\n" not in str(error.value) and "probe" not in str(error.value)
    assert not (tmp_path / "store").exists()  # nothing written before the checks


def test_a_neighbours_states(corpus, target, streams, tmp_path):  # SF 9ca23a3d; and a read error's sample 0
    def of_row_0(i):
        n, aux, last = len(streams[i][0]), streams[0][2], streams[0][3]
        return (*(torch.cat([x, x.new_zeros(max(0, n - len(x)), x.shape[1])])[:n] for x in (aux, last)),)

    spoilt = [(s[0], s[1], *of_row_0(i)) for i, s in enumerate(streams)]
    with pytest.raises(UserError, match="layer 2"):
        bring("specforge", specforge(tmp_path / "files", spoilt), corpus, target, tmp_path / "store")


@pytest.mark.parametrize("key, channel, name", [("aux_hidden_state", 70, "layer 4"),
                                                ("hidden_state", 3, "the last layer")])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_value_that_is_no_number_in_any_row(corpus, target, streams, tmp_path, key, channel, name, value):
    """In a row that the sample does not hold: what stood before is kept, and the import can go on."""
    sampled = set(np.random.default_rng(0).permutation(24)[:8].tolist())
    victim = next(i for i in range(23, 0, -1) if i not in sampled and i % 3)

    def change(i, row):
        if i == victim:
            row[key] = row[key].clone()
            row[key][0, 9, channel] = value
        return row

    folder = specforge(tmp_path / "files", streams, change)
    with pytest.raises(UserError, match=rf"data_{victim}.ckpt, token 9: {name} holds {value}; have specforge make it"):
        bring("specforge", folder, corpus, target, tmp_path / "store")
    specforge(folder, streams)
    again = bring("specforge", folder, corpus, target, tmp_path / "store")
    assert 0 < again["store"]["shards_kept"] < again["store"]["shards"]
    Store.open(tmp_path / "store").check_corpus(corpus)


@pytest.mark.parametrize("key, name", [("aux_hidden_state", "three layers"), ("hidden_state", "the last layer")])
def test_a_capture_that_was_cut_off(corpus, target, streams, tmp_path, key, name):  # SF c7fc438e, SP #279
    def change(i, row):
        return row | {key: row[key][:, 16:]}

    n = len(streams[0][0])
    with pytest.raises(UserError, match=rf"tokens and \d+ states \({name}\): a prefix cache or chunked prefill"):
        bring("specforge", specforge(tmp_path / "files", streams, change), corpus, target, tmp_path / "store")
    assert n > 16


def test_another_targets_states(corpus, target, streams, tmp_path):
    def change(i, row):
        return row | {"aux_hidden_state": row["aux_hidden_state"][..., : 3 * 48]}

    with pytest.raises(UserError, match="states .three layers. of 144 channels, the target's have 192"):
        bring("specforge", specforge(tmp_path / "files", streams, change), corpus, target, tmp_path / "store")


def test_another_number_of_layers(corpus, target, streams, tmp_path):
    def change(i, row):
        return row | {"hidden_states": row["hidden_states"][:, :3]}

    with pytest.raises(UserError, match="holds 3 layers, not the three captured ones and the last"):
        bring("speculators", speculators(tmp_path / "files", streams, change), corpus, target, tmp_path / "store")


def test_files_that_are_torn(corpus, target, streams, tmp_path):  # RESEARCH 59: counted as done for ever
    for kind, folder, name in (("specforge", specforge(tmp_path / "a", streams), "rows_0-10/data_5.ckpt"),
                               ("specforge", specforge(tmp_path / "b", streams), "rows_0-10/data_6.ckpt.gz"),
                               ("speculators", speculators(tmp_path / "c", streams), "hs_7.safetensors")):
        path = folder / name
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(UserError, match=rf"{path.name} cannot be read \(.*\); move it away"):
            bring(kind, folder, corpus, target, tmp_path / "store")
    path.write_bytes(b"")
    with pytest.raises(UserError, match="cannot be read"):
        bring("speculators", path.parent, corpus, target, tmp_path / "store")


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_a_pickle_that_would_run_code_is_not_loaded(corpus, target, streams, tmp_path):
    folder = specforge(tmp_path / "files", streams)
    sprung = tmp_path / "sprung"
    for content in (pickle.dumps({"input_ids": Trap(str(sprung))}), None):
        path = folder / "rows_0-10" / "data_1.ckpt"
        if content:
            path.write_bytes(content)
        else:
            torch.save({"input_ids": Trap(str(sprung)), "loss_mask": 1}, path)
        with pytest.raises(UserError, match=r"data_1.ckpt (holds more than tensors|cannot be read)"):
            bring("specforge", folder, corpus, target, tmp_path / "store")
        assert not sprung.exists()


@pytest.mark.parametrize("content", [{"input_ids": torch.arange(4)}, {"input_ids": "text", "loss_mask": [0]},
                                     {"input_ids": torch.arange(4), "loss_mask": torch.ones(3)}, [1, 2], 7])
def test_files_of_another_content(corpus, target, tmp_path, content):
    (tmp_path / "files").mkdir()
    torch.save(content, tmp_path / "files" / "data_0.ckpt")
    with pytest.raises(UserError, match=r"data_0\.ckpt") as error:
        foreign_files.read_tokens(tmp_path / "files" / "data_0.ckpt")
    assert "\n" not in str(error.value) and "; " in str(error.value)


def test_what_is_asked_for_wrongly(corpus, target, tmp_path):
    for settings, message in (({"kind": "torchspec"}, "'torchspec' is no known kind"),
                              ({"masks": "mine"}, "masks is 'mine'"),
                              ({}, r"holds no file \*\.ckpt or \*\.ckpt\.gz")):
        arguments = {"kind": "specforge", "folder": tmp_path, "corpus": corpus, "target": target.dir,
                     "states": tmp_path / "s"} | settings
        with pytest.raises(UserError, match=message):
            import_states(**arguments)


def test_two_readings_that_contradict_are_not_decided(target, tmp_path):
    files = type("Files", (), {"folder": tmp_path})
    rows = [{"argmax share": 0.1, "tokens": 900, "rms over the norm's weight": 1.0},
            {"argmax share": 0.8, "tokens": 900, "rms over the norm's weight": 1.0}]
    with pytest.raises(UserError, match="before or after the final norm cannot be told"):
        foreign.decide(files, rows)
    rows[0]["argmax share"] = 0.78  # no difference that chance does not make
    assert foreign.decide(files, rows) is True
    with pytest.raises(UserError, match="cannot be told"):
        foreign.decide(files, [row | {"rms over the norm's weight": None} for row in rows])
    rows[0]["argmax share"] = 0.1
    assert foreign.decide(files, [row | {"rms over the norm's weight": None} for row in rows]) is False


def test_text_of_the_target_decides_by_the_head(target, tmp_path):
    """On the target's own text, lm_head(last) says which reading is right; the figures of both are told."""
    prompt = [1, 5, 9, 30]
    ids = np.array(prompt + target.generate([prompt], max_new_tokens=60)[0], np.int32)
    mask = np.array([0] * 4 + [1] * 60, np.uint8)
    [(_, last)] = target.capture([ids])
    files = type("Files", (), {"logits": staticmethod(target.logits), "facts": target.facts, "folder": tmp_path,
                               "norm": staticmethod(references.final_norm(target.dir))})
    plain, normed = foreign.readings(files, [(ids, mask)], [(None, last)])
    assert plain["argmax share"] == 1 > 0.9 > normed["argmax share"] and plain["tokens"] == 60
    assert abs(plain["rms over the norm's weight"] - 1) < 1e-4 and foreign.decide(files, [plain, normed])


def test_on_the_command_line(corpus, target, streams, own, tmp_path, capsys):
    work = tmp_path / "work"
    work.mkdir()
    (work / "corpus").symlink_to(corpus.folder)
    folder = speculators(tmp_path / "files", streams)
    assert main(["import-states", "speculators", str(folder), str(work), "--target", str(target.dir)]) == 0
    told = capsys.readouterr().out
    assert "came before it, and is normed here" in told and "24 rows" in told and "0 files belong to no row" in told
    compare(Store.open(work / "states"), own, 1e-4)
    assert main(["import-states", "specforge", str(folder), str(work), "--target", str(target.dir)]) == 1
    assert "holds no file *.ckpt" in capsys.readouterr().err


def test_a_store_of_our_own_is_not_written_over(corpus, target, streams, tmp_path):
    extract(corpus, target, tmp_path / "store", dtype="fp32", batch_tokens=512, shard_tokens=900)
    with pytest.raises(UserError, match="another engine"):
        bring("speculators", speculators(tmp_path / "files", streams), corpus, target, tmp_path / "store")


def test_a_file_that_changes_while_it_is_imported(corpus, target, streams, tmp_path):
    folder = speculators(tmp_path / "files", streams)
    files = foreign.FileTarget("speculators", folder, target.dir)
    files.assign(corpus, 24, "same")
    states = load_file(folder / "hs_3.safetensors")
    save_file(states | {"token_ids": states["token_ids"].flip(0)}, folder / "hs_3.safetensors")
    with pytest.raises(UserError, match="hs_3.safetensors has changed since its tokens were read"):
        files.capture([streams[3][0]])


def test_a_wrapped_targets_norm_with_one_added(tmp_path):
    """Gemma's RMSNorm multiplies by 1 + weight: a plain RMSNorm of the stored weight would be another."""
    import transformers as t

    model = t.Gemma3ForCausalLM(t.Gemma3TextConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=8, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, vocab_size=64, max_position_embeddings=64, sliding_window=16))
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data = 0.5 * torch.randn_like(weight)
    model.save_pretrained(tmp_path)
    norm, states = references.final_norm(tmp_path), torch.randn(5, 32)
    assert torch.allclose(norm(states), model.model.norm(states), atol=1e-6)
    target = TransformersTarget(tmp_path, torch.float32, "cpu")
    ids = list(range(5, 25))
    [(_, last)] = target.capture([ids])
    reference, _ = references.load_reference(tmp_path, target.layers)
    assert torch.allclose(norm(reference.streams(ids).residual[-1]), last, atol=1e-4)
