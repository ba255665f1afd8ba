"""The SGLang backend's own work, around a fake of SGLang: two processes, files between them, and how either may end.

tests/sglang runs the real one (`make test-sglang`).
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import load_file
from waiting import gone, until

from eagle3nb.errors import UserError
from eagle3nb.states import open_target, sglang_plugin, sglang_process
from eagle3nb.states import sglang as backend
from eagle3nb.states.sglang import SGLangTarget

FAKE = Path(__file__).parent / "fake_sglang"
ROWS = [[5, 6, 7], [40], list(range(100)), [9, 9, 9, 9], [7, 8]]


@pytest.fixture(scope="module", autouse=True)
def fake(tmp_path_factory):
    """The fake is what this process and the engine's find as sglang; states lie in a folder of the test's.

    No engine is ended by force because the machine stood still while it ended by itself.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FAKE))
        patch.setenv("PYTHONPATH", str(FAKE))
        patch.setenv("EAGLE3NB_SCRATCH", str(tmp_path_factory.mktemp("scratch")))
        patch.delenv("EAGLE3NB_SGLANG_PYTHON", raising=False)
        patch.setattr(sglang_process, "GRACE", 300)
        yield
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def engine(fake, tiny_target):
    made = SGLangTarget(tiny_target, tensor_parallel=2, device="cpu")
    yield made
    made.close()


def kept(target) -> list:
    return list(target.process.folder.glob("*.safetensors"))


# ------------------------------------------------------------------------------------------------ states, text


def test_states_come_in_the_order_of_the_rows_and_leave_no_file(engine):
    for ids, (aux, last) in zip(ROWS, engine.capture(ROWS), strict=True):
        x = torch.tensor(ids, dtype=torch.float32)[:, None].expand(-1, 64)
        assert torch.equal(aux, torch.cat([x + 1000 * (layer - 1) for layer in (2, 4, 5)], dim=-1))
        assert torch.equal(last, 2 * x)
    assert kept(engine) == []


@pytest.mark.parametrize("stop_ids, beyond", [((), 0), ((2,), 0), ((2, 94), 0), ((2, 94), 3), ((94,), 2)])
def test_greedy_text_ends_at_the_first_stop_id_and_nowhere_else(engine, stop_ids, beyond):
    """The fake stops at the config's end of turn (2) wherever it may, as SGLang does."""
    told = {}
    found = engine.generate(ROWS, max_new_tokens=40, stop_ids=stop_ids, beyond=beyond,
                            done=lambda i, ids: told.update({i: ids}))
    for row, answer in zip(ROWS, found, strict=True):
        text = [row[-1]]
        while len(text) < 60:
            text.append((3 * text[-1] + 1) % 256)
        ends = [i for i, token in enumerate(text[1:41], 1) if token in stop_ids]
        assert answer == text[1 : (ends or [40])[0] + 1 + beyond]
    assert told == dict(enumerate(found)) and engine.generate([], max_new_tokens=3) == []


def test_logits_are_the_checkpoints_head(engine, tiny_target):
    last = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(engine.logits(last), last @ load_file(tiny_target / "model.safetensors")["lm_head.weight"].T)


def test_what_cannot_be_asked_is_said_before_it_is(engine, monkeypatch):
    with pytest.raises(UserError, match="a row has 514 tokens, SGLang takes 513 here"):
        engine.capture([[1], [1] * 514])
    with pytest.raises(UserError, match="answers greedily"):
        engine.generate([[1]], max_new_tokens=2, temperature=0.7)
    with pytest.raises(UserError, match="prompt 1 is empty"):
        engine.generate([[1], []], max_new_tokens=2)
    monkeypatch.setattr(backend, "disk_free", lambda _: 3 * 4 * 64 * 4 - 1)
    with pytest.raises(UserError, match="states of 1 rows need 0.00 GB.*name a larger disk in EAGLE3NB_SCRATCH"):
        engine.capture([[1, 2, 3]])


def test_a_refused_row_is_said_and_the_engine_goes_on(engine):
    with pytest.raises(UserError, match="SGLang refuses a row of 2 tokens: too much$"):
        engine.capture([[5, 6, 7], [202, 1]])
    assert kept(engine) == [] and len(engine.capture([[3]])) == 1


def test_an_interrupted_call_leaves_nothing_to_the_next(engine):
    """It comes while the engine is at work, whose answer is there, or still to come, when the next call is made."""
    def interrupt(*_):
        raise KeyboardInterrupt

    def during():
        until(busy.exists)
        os.kill(os.getpid(), signal.SIGUSR1)

    busy, before = engine.process.folder / "busy", signal.signal(signal.SIGUSR1, interrupt)
    interrupting, later = threading.Thread(target=during), threading.Timer(0.2, busy.unlink)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupting.start()
            engine.capture([[201, 1, 2]])
        assert busy.exists()
        later.start()
        (_, last), = engine.capture([[11, 12]])
    finally:
        interrupting.join()
        signal.signal(signal.SIGUSR1, before)
        busy.unlink(missing_ok=True)
    assert last[:, 0].tolist() == [22, 24] and kept(engine) == []


# ------------------------------------------------------------------------------------------------ starts, ends


@pytest.mark.parametrize("argument, said", [
    ("fail=no such model", "SGLang ended: ValueError: no such model; its log is "),
    ("fail=scheduler", "SGLang ended: torch.OutOfMemoryError: 9 GiB; its log is "),
    ("unknown_to_the_tests=1", None),
    ("without_plugin=true", "SGLang did not load the plugin eagle3nb; install this package"),
    ("narrow=4", r"SGLang's aux has shape \[4, 180\] in torch.float32, not \[4, 192\]")])
def test_an_engine_that_is_of_no_use_is_ended_with_its_reason(tiny_target, argument, said):
    root = Path(os.environ["EAGLE3NB_SCRATCH"]) / f"eagle3nb-{os.getuid()}"
    before = set(root.glob("states-*"))
    if said is None:
        SGLangTarget(tiny_target, device="cpu", engine_args=[argument]).close()
    else:
        with pytest.raises(UserError, match=said) as caught:
            SGLangTarget(tiny_target, device="cpu", engine_args=[argument])
        assert "\n" not in str(caught.value)
    assert set(root.glob("states-*")) == before


def test_an_engine_that_dies_is_one_error_and_its_states_go(tiny_target):
    target = SGLangTarget(tiny_target, device="cpu")
    (target.process.folder / "7-0.safetensors").write_bytes(b"half a")
    child = psutil.Process(target.process.process.pid).children()[0].pid
    for _ in range(2):  # and whoever asks again hears it again
        with pytest.raises(UserError, match="SGLang ended: ValueError: a row of 200; its log is "):
            target.capture([[200, 1]])
    folder = target.process.folder
    target.close()
    assert not folder.exists() and gone(child)
    target.close()
    Path(f"/dev/shm/sglang_loads_fake{target.process.process.pid}_0.shm").unlink()


def test_an_engine_whose_owner_is_killed_goes_with_its_states(tiny_target):
    code = ("import sys, time\nfrom eagle3nb.states.sglang import SGLangTarget\n"
            "t = SGLangTarget(sys.argv[1], device='cpu')\n(t.process.folder / '7-0.safetensors').write_bytes(b'x')\n"
            "print(t.process.process.pid, t.process.folder, flush=True)\ntime.sleep(600)")
    with subprocess.Popen([sys.executable, "-c", code, str(tiny_target)], stdout=subprocess.PIPE, text=True) as owner:
        try:
            pid, folder = owner.stdout.readline().split()
            child = psutil.Process(int(pid)).children()[0].pid
        finally:
            owner.kill()
    assert gone(int(pid)) and gone(child) and not Path(folder).exists()


def test_a_target_that_nobody_holds_ends(tiny_target):
    target = SGLangTarget(tiny_target, device="cpu")
    pid, folder, log = target.process.process.pid, target.process.folder, target.process.log
    shared = Path(f"/dev/shm/sglang_loads_fake{pid}_0.shm")  # which SGLang would leave
    assert log.is_file() and shared.exists()
    del target
    assert not any([psutil.pid_exists(pid), folder.exists(), log.exists(), shared.exists()])


def test_what_ended_processes_left_is_removed_and_what_is_in_use_is_not(tmp_path):
    code = ("import sys, time\nfrom eagle3nb.states.sglang_process import states_folder\n"
            "print(states_folder(sys.argv[1])[0], flush=True)\ntime.sleep(600)")
    dead, alive = (subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
                   for _ in range(2))
    left, used = (Path(process.stdout.readline().strip()) for process in (dead, alive))
    (left / "1-0.safetensors").write_bytes(b"x" * 100)
    dead.kill()
    dead.wait()
    try:
        folder, handle = sglang_process.states_folder(tmp_path)
        os.close(handle)
        assert not left.exists() and used.is_dir() and folder.is_dir()
    finally:
        alive.kill()
        alive.wait()


def test_a_log_or_folder_that_its_owner_removes_meanwhile_stops_nobody(tmp_path, monkeypatch):
    """Several engines share a folder of logs and one for states: what one saw there may be gone when it looks."""
    monkeypatch.setattr(sglang_process, "LOGS", 2)
    monkeypatch.setattr(sglang_process, "resolve", lambda path: tmp_path / path)
    folder = tmp_path / ".cache/sglang"
    folder.mkdir(parents=True)
    old, new, gone_by_now = (folder / f"{name}.log" for name in ("old", "new", "gone"))
    for number, log in enumerate((old, new)):
        log.touch()
        os.utime(log, (number, number + 1))
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([new, gone_by_now, old]))
    assert sglang_process.new_log("x") == folder / "x.log" and [new.exists(), old.exists()] == [True, False]
    assert sglang_process.locked(tmp_path / "gone") is None


def test_tmpfs_is_taken_where_it_has_room(tmp_path, monkeypatch):
    monkeypatch.delenv("EAGLE3NB_SCRATCH")
    monkeypatch.setattr(sglang_process, "TMPFS", tmp_path / "shm")
    monkeypatch.setattr(sglang_process.tempfile, "gettempdir", lambda: str(tmp_path / "disk"))
    (tmp_path / "shm").mkdir()
    for free, place in ((sglang_process.ROOM - 1, "disk"), (sglang_process.ROOM, "shm")):
        monkeypatch.setattr(sglang_process, "disk_free", lambda _, free=free: free)
        folder, handle = sglang_process.states_folder()
        os.close(handle)
        assert folder.parent.parent == tmp_path / place


# ------------------------------------------------------------------------------------------------ options


def test_which_engine_and_which_options(tiny_target, monkeypatch):
    with pytest.raises(UserError, match="engine 'vllm' is unknown; choose transformers or sglang"):
        open_target("vllm", tiny_target)
    with pytest.raises(UserError, match="are for engine sglang"):
        open_target("transformers", tiny_target, tensor_parallel=2)
    monkeypatch.setattr(sglang_process.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="needs SGLang, which this environment has not"):
        open_target("sglang", tiny_target)
    monkeypatch.setenv("EAGLE3NB_SGLANG_PYTHON", "/no/such/python")
    with pytest.raises(UserError, match="EAGLE3NB_SGLANG_PYTHON names /no/such/python"):
        open_target("sglang", tiny_target)


def test_engine_args_are_names_with_values():
    found = backend.extra(["mem_fraction_static=0.8", "--attention-backend = triton", "enable_x=true", "a=[1]"])
    assert found == {"mem_fraction_static": 0.8, "attention_backend": "triton", "enable_x": True, "a": [1]}
    with pytest.raises(UserError, match="'tp' is not name=value"):
        backend.extra(["tp"])
    with pytest.raises(UserError, match="chunked_prefill_size is set by the extraction itself"):
        backend.extra(["--chunked-prefill-size=4096"])


@pytest.mark.parametrize("config, dtype", [
    ({"dtype": "bfloat16"}, torch.bfloat16), ({"torch_dtype": "float16"}, torch.float16),
    ({"text_config": {"dtype": "float16"}}, torch.float16), ({"dtype": "float32"}, torch.bfloat16),
    ({}, torch.bfloat16)])
def test_the_dtype_of_a_gpu_is_the_checkpoints(tmp_path, config, dtype):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert backend.stored_dtype(tmp_path) == dtype


# ------------------------------------------------------------------------------------------------ the plugin


def test_sglang_finds_the_plugin_under_its_name(monkeypatch):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["sglang.srt.plugins"]["eagle3nb"].partition(":")
    register = getattr(importlib.import_module(module), name)
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooks.registered.clear()
    monkeypatch.delenv(sglang_plugin.FOLDER, raising=False)
    register()
    assert hooks.registered == []  # in a server that this project did not start
    monkeypatch.setenv(sglang_plugin.FOLDER, "/dev/null")
    register()
    assert hooks.registered == [(".".join(sglang_plugin.APPEND), sglang_plugin.append, "around")]
    owner = importlib.import_module(sglang_plugin.APPEND[0]).SchedulerBatchResultProcessor
    monkeypatch.setattr(owner, "_append_prefill_hidden_states", lambda self, req, states: None)
    with pytest.raises(RuntimeError, match="takes self, req, states; this SGLang is not 0.5.23"):
        register()


@pytest.mark.parametrize("full, wanted, store, rank, written", [
    (True, True, True, 0, True), (True, True, True, 1, False), (True, True, False, 0, False),
    (True, False, True, 0, False), (True, "last", True, 0, False), (False, True, True, 0, False)])
def test_one_rank_writes_and_other_requests_are_sglangs(tmp_path, monkeypatch, full, wanted, store, rank, written):
    context = importlib.import_module("sglang.srt.runtime_context")
    monkeypatch.setattr(context, "rank", rank)
    monkeypatch.setenv(sglang_plugin.FOLDER, str(tmp_path))
    states = torch.arange(60.0).view(10, 6)
    req, passed = SimpleNamespace(rid="3-1", hidden_states=[], return_hidden_states=wanted), []
    batch = SimpleNamespace(hidden_states=states, last_hidden_states=states[:, :2])

    def original(self, **named):
        passed.append(named["store"])
        return named["hidden_state_offset"] + named["extend_input_len"]

    end = sglang_plugin.append(original, None, req=req, logits_output=batch, hidden_state_offset=4, extend_input_len=3,
                               capture_hidden_mode=SimpleNamespace(is_full=lambda: full), store=store)
    assert end == 7
    if not written:  # what nobody may turn into JSON is not stored; what is not ours is as it was
        assert passed == [store and not (full and wanted is True)] and list(tmp_path.iterdir()) == []
        return
    file, = tmp_path.iterdir()
    assert req.hidden_states == [f"path {file}"] and file.name == "3-1.safetensors" and not passed
    found = load_file(file)
    assert torch.equal(found["aux"], states[4:7]) and torch.equal(found["last"], states[4:7, :2])
    assert file.stat().st_size < 3 * 8 * 4 + 300  # these rows, not the batch's


def test_a_file_that_cannot_be_written_does_not_end_the_engine(tmp_path, monkeypatch):
    monkeypatch.setenv(sglang_plugin.FOLDER, str(tmp_path / "missing"))
    states = SimpleNamespace(hidden_states=torch.ones(2, 6), last_hidden_states=torch.ones(2, 2))
    said = sglang_plugin.written("1-0", states, slice(0, 2))
    assert said.startswith("error ") and "No such file" in said
    with pytest.raises(UserError, match="SGLang could not hand over its states: .*No such file"):
        SGLangTarget.read(SimpleNamespace(), said, 2)
    states.last_hidden_states = None
    assert "no last hidden states" in sglang_plugin.written("1-0", states, slice(0, 2))
