"""A server's life and answers around a fake one that speaks SGLang's HTTP: faults, kept answers, counts side by side.

tests/sglang/test_serving.py runs the real one (`make test-sglang`).
"""

import importlib.util
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from waiting import gone, until

from eagle3nb.acceptance import server, serving
from eagle3nb.acceptance.benchmarks import Answer, Prompt
from eagle3nb.acceptance.offline import Chains
from eagle3nb.drafter import export
from eagle3nb.drafter.model import DraftConfig, DraftModel
from eagle3nb.errors import UserError
from eagle3nb.states.target import embedding, facts_of

FAKE = Path(__file__).parent / "fake_server"
spec = importlib.util.spec_from_file_location("fake_launch_server", FAKE / "sglang" / "launch_server.py")
fake = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fake)

STEPS, LIMIT, STOP = 3, 20, 2
SEVENTH = pow(7, -1, fake.VOCABULARY)


def before_stop(tokens: int) -> int:
    """The token behind which the fake's answer has `tokens` tokens, the stop id its last."""
    token = STOP
    for _ in range(tokens):
        token = (token - 3) * SEVENTH % fake.VOCABULARY
    return token


# Every second answer is ended by the stop id, after 3, 5, … tokens; the others by the limit.
PROMPTS = [Prompt(f"p{i}", "even" if i % 2 == 0 else "odd", ids=(9, before_stop(i + 3) if i % 2 == 0 else 9 + i))
           for i in range(12)]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(serving, "WAITS", (0, 0, 0))


@pytest.fixture
def running(tiny_target):
    with fake.Fake(str(tiny_target), steps=STEPS) as made:
        yield made


@pytest.fixture
def ask(running, tiny_target, tmp_path):
    """Serves PROMPTS, or others, from the fake that runs."""
    def served(prompts=PROMPTS, **options):
        options = {"max_new_tokens": LIMIT, "kept_dir": tmp_path, "concurrency": 3} | options
        return serving.serve(server.attach(running.url, tiny_target), prompts, **options)
    return served


def text_of(prompt: Prompt, tokens: int) -> list[int]:
    found = [fake.follows(prompt.ids[-1])]
    while len(found) < tokens:
        found.append(fake.follows(found[-1]))
    return found


def answer_of(prompt: Prompt) -> Answer:
    text = text_of(prompt, LIMIT + STEPS + 1)
    end = text.index(STOP) + 1 if STOP in text[:LIMIT] else LIMIT
    return Answer(prompt.id, prompt.source, prompt.ids, tuple(text[:end]), tuple(text[end:end + STEPS + 1]),
                  end < LIMIT, False)


def chains_of(prompt: Prompt) -> Chains:
    """What a drafter with the fake's rule would have drafted: at slot t, right(x[t+1]) leading hits."""
    answer = answer_of(prompt)
    ids = answer.sequence
    hits = np.zeros((STEPS, len(ids)), dtype=bool)
    for t in range(answer.start - 1, answer.end - 2):
        hits[:fake.right(int(ids[t + 1]), STEPS), t] = True
    return Chains(answer, hits)


CHAINS = [chains_of(prompt) for prompt in PROMPTS]


# ------------------------------------------------------------------------------------------------ answers, counts


def test_answers_in_the_order_of_the_prompts_and_counts_of_the_walk(ask):
    served = ask()
    assert [reply.ids for reply in served.replies] == [answer_of(prompt).ids for prompt in PROMPTS]
    rows = serving.beside(served, CHAINS, STEPS)
    assert all(row["equal"] for row in rows) and [row["source"] for row in rows][:2] == ["even", "odd"]
    total = serving.summary(rows)
    walks = [chain.walk(STEPS) for chain in CHAINS]
    assert total["accepted"] == sum(walk.accepted for walk in walks) and total["verifies"] > 40
    assert total["tau"] == 1 + total["accepted"] / total["verifies"] == total["walk_tau"]
    assert serving.verdict(rows, "float32").startswith("the server gave the same text and counts")
    assert {reply.finish for reply in served.replies} == {"stop", "length"}


def test_tokens_past_the_end_are_those_that_a_simulation_throws_away(ask):
    for prompt, reply in zip(PROMPTS, ask().replies, strict=True):
        made, last = 1, fake.follows(prompt.ids[-1])
        while made < len(reply.ids):
            n = fake.right(last, STEPS) + 1
            made, last = made + n, text_of(prompt, made + n)[-1]
        assert reply.past_end == made - len(reply.ids)


def test_figures_are_the_acceptance_length_and_its_differences(ask):
    served = ask()
    found = {row["figure"]: row["value"] for row in serving.figures(served)}
    tau, prefill, past, completion, mean, rate = found.values()
    verifies = sum(r.verifies for r in served.replies)
    assert completion == pytest.approx(tau + prefill + past) == sum(len(r.ids) for r in served.replies) / verifies
    assert past < 0 and mean == pytest.approx(np.mean([len(r.ids) / r.verifies for r in served.replies]))
    assert rate == pytest.approx((tau - 1) / STEPS)


def test_answers_that_were_not_drafted_have_no_acceptance_length(ask):
    served = ask(max_new_tokens=1)
    assert [(r.verifies, r.past_end, len(r.ids)) for r in served.replies] == [(0, 0, 1)] * len(PROMPTS)
    assert [row["value"] for row in serving.figures(served)] == [1, 0, 0, 0, None, 0]


def test_speeds_count_every_session_from_its_first_request_to_its_last_answer(ask):
    served = ask()
    times = [(0.0, 2.0), (1.0, 4.0), (10.0, 11.0)]
    replies = tuple(replace(reply, began=a, ended=b, session=float(a > 5)) for reply, (a, b)
                    in zip(served.replies, times, strict=False))
    first = replace(served, replies=replies, steps=0)
    second = replace(first, replies=tuple(replace(r, ended=r.began + 0.5, ids=(*r.ids[:-1], 0)) for r in replies))
    assert first.seconds == 5.0
    rows = serving.speeds({"without": first, "with": second})
    assert rows[0]["tokens_per_s"] == first.tokens / 5 and (rows[0]["same_text"], rows[1]["same_text"]) == (3, 0)
    assert rows[1]["seconds"] == 2.0 and rows[1]["speedup"] == pytest.approx(2.5)


# ------------------------------------------------------------------------------------------------ where they differ


@pytest.mark.parametrize("change, where", [
    (lambda r: replace(r, ids=(*r.ids[:4], 250, *r.ids[5:])), "answer token 4"),
    (lambda r: replace(r, ids=r.ids[:-1]), "answer token"),
    (lambda r: replace(r, accepted=r.accepted + 1), "counts"),
    (lambda r: replace(r, verifies=r.verifies - 1), "counts"),
    (lambda r: replace(r, histogram=(0, *r.histogram)), "counts")])
def test_what_differs_is_named_explained_and_refused(ask, monkeypatch, change, where):
    served = ask()
    served = replace(served, replies=(*served.replies[:3], change(served.replies[3]), *served.replies[4:]))
    rows = serving.beside(served, CHAINS, STEPS)
    assert [row["where"].startswith(where) for row in rows if not row["equal"]] == [True]
    assert rows[3]["equal"] is False and all(row["where"] == "" for row in rows[:3] + rows[4:])
    with pytest.raises(UserError, match=f"prompt p3: server and walk differ at {where}.*margin None.*report it"):
        serving.verdict(rows, "float32")
    assert "same on 11 of 12 prompts, the others differ, as they may in bfloat16" in serving.verdict(rows, "bfloat16")
    for margin, says in ((0.002, "parted at a near tie"), (0.5, None)):
        here = SimpleNamespace(margins=[0.3] * 4 + [margin] * LIMIT, accepted=(0, 2),
                               draft_margins=((0.9, 1e-9, 1e-9), (0.8, margin, 0.7)))  # behind a miss nothing counts
        monkeypatch.setattr(serving, "decode", lambda *a, here=here, **b: here)
        known = serving.explained(rows, CHAINS, STEPS, None, None, LIMIT)
        assert known[3]["margin"] == margin and known[2]["margin"] is None
        if says:
            assert says in serving.verdict(known, "float32")
        else:
            with pytest.raises(UserError, match="which no rounding explains"):
                serving.verdict(known, "float32")


def test_a_walk_of_other_prompts_or_steps_is_not_compared(ask):
    served = ask()
    with pytest.raises(UserError, match="the server drafts 3 tokens a verify, the walk 2"):
        serving.beside(served, CHAINS, 2)
    with pytest.raises(ValueError, match="p0 was served, the walk's is p1"):
        serving.beside(served, [*CHAINS[1:], CHAINS[0]], STEPS)


# ------------------------------------------------------------------------------------------------ faults, kept answers


@pytest.mark.parametrize("faults", [[500], [429, 503, 500], ["drop"], ["drop", 502]])
def test_a_fault_that_passes_is_asked_again(ask, running, faults):
    running.faults = list(faults)
    served = ask()
    assert [reply.ids for reply in served.replies] == [answer_of(prompt).ids for prompt in PROMPTS]
    assert len(running.asked) == 1 + len(PROMPTS) + len(faults) and served.asked == len(PROMPTS)


def test_an_answer_that_does_not_come_in_time_is_asked_for_again(ask, running, monkeypatch):
    """The second request, behind the warm-up, alone has a time limit, since a slow machine would pass it elsewhere; and
    the third comes once the second is held, since a busy server may take them in another order."""
    asked, fetch = [], serving.fetch

    def counted(url, body, timeout_s):
        asked.append(timeout_s)
        if len(asked) == 3:
            until(lambda: not running.faults)
        return fetch(url, body, timeout_s if len(asked) == 2 else serving.TIMEOUT)

    monkeypatch.setattr(serving, "fetch", counted)
    running.faults = ["slow"]
    served = ask(timeout_s=0.3, concurrency=1)
    assert [reply.ids for reply in served.replies] == [answer_of(prompt).ids for prompt in PROMPTS]
    assert asked == [0.3] * len(running.asked) and served.asked == len(PROMPTS)
    assert len(running.asked) == 1 + len(PROMPTS) + 1


def test_a_refusal_is_not_asked_again_and_nothing_after_it(ask, running):
    running.faults = [400]
    with pytest.raises(UserError, match=r"refuses a prompt of 2 tokens: HTTP 400 fault 400; \d answers are kept in"):
        ask(concurrency=1)
    assert len(running.asked) == 2  # the warm-up, and the refused one


def test_a_fault_that_stays_is_told(ask, running):
    running.faults = [500] * 100
    with pytest.raises(UserError, match=r"does not answer any more \(HTTP 500 fault 500\); 0 answers are kept"):
        ask(concurrency=1)


def test_a_server_that_dies_costs_only_what_was_under_way(ask, running, tiny_target, tmp_path):
    running.faults = [None] * 5 + ["die"]
    with pytest.raises(UserError, match=r"does not answer any more .*; 5 answers are kept in .*: run again"):
        ask(concurrency=1)
    with fake.Fake(str(tiny_target), steps=STEPS, startup_time=running.url) as another:
        made = server.attach(another.url, tiny_target)
        served = serving.serve(made, PROMPTS, max_new_tokens=LIMIT, kept_dir=tmp_path, concurrency=1)
        assert served.asked == 7 and len(another.asked) == 1 + 7
    assert [reply.ids for reply in served.replies] == [answer_of(prompt).ids for prompt in PROMPTS]
    assert len({reply.session for reply in served.replies}) == 2


def test_a_torn_line_is_asked_again_and_spoils_no_other(ask, running, tmp_path):
    first = ask()
    file, = tmp_path.glob("*.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]) + lines[-1][:40])
    assert (again := ask()).asked == 1
    assert [r.ids for r in again.replies] == [r.ids for r in first.replies] and ask().asked == 0


@pytest.mark.parametrize("other", [{"max_new_tokens": 19}, {"concurrency": 2}, {"stop_ids": (2, 5)}])
def test_answers_under_other_settings_are_others(ask, other):
    ask()
    assert ask().asked == 0 and ask(**other).asked == len(PROMPTS)


def test_answers_of_another_start_of_a_drafter_that_is_not_seen_are_others(ask, running):
    ask()
    running.info = {"startup_time": "later"}
    assert ask().asked == len(PROMPTS)


@pytest.mark.parametrize("fault, says", [
    ("mute", r"answers do not say spec_verify_ct, .* \(SGLang 0.5.23\); serve with 0.5.23, and with speculation"),
    ("cut", r"prompt p\d+: the server ended its answer after \d+ tokens: length")])
def test_answers_that_lack_something(ask, running, fault, says):
    running.faults = [fault] * 3
    with pytest.raises(UserError, match=says):
        ask([prompt for prompt in PROMPTS if len(answer_of(prompt).ids) == LIMIT], concurrency=1)


def test_what_the_server_has_no_room_for_is_not_asked(ask, running):
    long = replace(PROMPTS[0], ids=(5,) * (fake.CONTEXT - LIMIT + 1))
    with pytest.raises(UserError, match="prompt p0: 181 tokens and 20 to answer pass the 196 that the server has room"):
        ask([*PROMPTS[1:], long])
    with pytest.raises(UserError, match=r"at the target's own ids \[2\] too, which stop_ids leaves out"):
        ask(stop_ids=(5,))
    assert running.asked == []


# ------------------------------------------------------------------------------------------------ which server


def test_nothing_answers_there_and_something_else_does(running, tiny_target):
    with pytest.raises(UserError, match="no server answers at http://127.0.0.1:9 .*refused.*; start it"):
        server.attach("http://127.0.0.1:9", tiny_target)
    with pytest.raises(UserError, match="is no SGLang 0.5.23 .*without a path"):
        server.attach(running.url + "/v1", tiny_target)


@pytest.mark.parametrize("info, says", [
    ({"speculative_algorithm": None, "speculative_num_steps": None}, "does not speculate; start it with .*steps 3 .*4"),
    ({"speculative_num_steps": 5}, "drafts 5 tokens a verify, not 3"),
    ({"speculative_algorithm": "NGRAM", "speculative_eagle_topk": None}, "speculates with NGRAM and .* None"),
    ({"speculative_eagle_topk": 4}, "speculative_eagle_topk 4, which no walk counts")])
def test_a_server_that_drafts_otherwise(running, tiny_target, info, says):
    running.info = info
    with pytest.raises(UserError, match=says):
        server.attach(running.url, tiny_target, steps=STEPS)


def test_another_model(running, tiny_target, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for file in tiny_target.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    running.model = str(other)
    server.attach(running.url, tiny_target)  # the same content elsewhere
    (other / "config.json").write_text((other / "config.json").read_text().replace('"rms_norm_eps": 1e-05', "\"x\": 1"))
    with pytest.raises(UserError, match=r"serves another model \(other, LlamaForCausalLM\) than"):
        server.attach(running.url, tiny_target)
    running.model = "/models/on/another/machine"
    server.attach(running.url, tiny_target)  # the text will tell


@pytest.fixture(scope="module")
def drafter(tiny_target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    return made_export(folder, facts_of(tiny_target), embedding(tiny_target))


def made_export(folder, facts, table, layers: int = 8):
    torch.manual_seed(0)
    model = DraftModel(DraftConfig.from_target(facts, 64), table, torch.arange(64))
    export.export(model, folder, target_layers=layers, eos=(2,))
    return folder


def test_another_drafter_than_the_servers(running, tiny_target, drafter, tmp_path):
    running.draft = str(drafter)
    seen = server.attach(running.url, tiny_target)
    assert seen.identity == server.attach(running.url, tiny_target, drafter_dir=drafter).identity
    other = made_export(tmp_path, facts_of(tiny_target), embedding(tiny_target), layers=12)
    with pytest.raises(UserError, match="which is another drafter than"):
        server.attach(running.url, tiny_target, drafter_dir=other)


# ------------------------------------------------------------------------------------------------ its life


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """The fake is what a server's process finds as sglang."""
    monkeypatch.syspath_prepend(str(FAKE))
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    monkeypatch.setenv("EAGLE3NB_SCRATCH", str(tmp_path))
    monkeypatch.delenv("EAGLE3NB_SGLANG_PYTHON", raising=False)
    monkeypatch.setattr(server, "LOOK", 0.05)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]


def test_a_started_server_answers_and_ends_with_its_block(installed, tiny_target, drafter, tmp_path):
    with server.start(tiny_target, drafter_dir=drafter, steps=STEPS, engine_args=["mem_fraction_static=0.3"]) as made:
        served = serving.serve(made, PROMPTS, max_new_tokens=LIMIT, kept_dir=tmp_path)
        child, = psutil.Process(made.process.pid).children()
        log, arguments = made.log, psutil.Process(made.process.pid).cmdline()
        assert made.steps == STEPS and made.load_s > 0 and not made.ended
        assert server.attach(made.url, tiny_target, drafter_dir=drafter).identity == made.identity
    assert all(row["equal"] for row in serving.beside(served, CHAINS, STEPS))
    assert gone(child.pid) and made.ended and list(tmp_path.glob("eagle3nb-*/states-*")) == []
    assert not log.exists()  # it ended well
    given = dict(zip(arguments, arguments[1:], strict=False))
    assert given["--speculative-num-draft-tokens"] == "4" and given["--mem-fraction-static"] == "0.3"
    assert "--disable-radix-cache" in arguments and given["--context-length"] == "524"


def test_an_error_in_the_block_ends_the_server_too(installed, tiny_target):
    with pytest.raises(ZeroDivisionError), server.start(tiny_target) as made:
        assert made.steps == 0
        raise ZeroDivisionError
    assert made.ended


def test_a_started_server_that_dies_tells_its_own_reason(installed, tiny_target, tmp_path):
    with server.start(tiny_target) as made:
        child, = psutil.Process(made.process.pid).children()
        os.kill(made.process.pid, signal.SIGKILL)
        until(lambda: made.ended)
        earlier = "OSError: of the start\n".rjust(made.log_bytes)
        made.log.write_text(earlier + "[01:02] Responses disabled (NoError: no module)\n"
                            "RuntimeError: the scheduler is gone\nOSError: later\n")
        with pytest.raises(UserError, match="SGLang ended: RuntimeError: the scheduler is gone; its log .*; 0 answers"):
            serving.serve(made, PROMPTS, max_new_tokens=LIMIT, kept_dir=tmp_path)
    assert gone(child.pid)
    made.log.unlink()


def test_a_server_that_does_not_start(installed, tiny_target):
    for options, says in (({"engine_args": ["fail=no room"]}, "SGLang ended: RuntimeError: no room"),
                          ({"engine_args": ["slow=1"], "timeout_s": 1}, "SGLang did not start within 1 s")):
        with pytest.raises(UserError, match=f"{says}; its log is .cache/sglang/server-") as told:
            with server.start(tiny_target, **options):
                pass
        server.resolve(str(told.value).rsplit("its log is ")[1]).unlink(missing_ok=True)


def test_a_killed_parent_leaves_no_server(installed, tiny_target):
    """The process that started it is killed while it runs: neither the server nor its child survives."""
    told, tell = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            with server.start(tiny_target) as made:
                os.write(tell, f"{made.process.pid} {made.log}\n".encode())
                time.sleep(600)
        finally:
            os._exit(1)
    os.close(tell)
    with os.fdopen(told) as lines:
        pid, log = lines.readline().split(maxsplit=1)
    child, = psutil.Process(int(pid)).children()
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert gone(int(pid)) and gone(child.pid)
    Path(log.strip()).unlink(missing_ok=True)


def test_shared_memory_that_is_swept_is_sglangs():
    from eagle3nb.acceptance.server_worker import is_shared

    assert is_shared("/dev/shm/sglang_loads_ab_0") and is_shared("/dev/shm/sgl_shm_x_12_ab")
    assert not is_shared("/dev/shm/other") and not is_shared("/dev/shm/eagle3nb/sgl_shm_x") and not is_shared("[heap]")


@pytest.mark.parametrize("change, says", [
    ({"vocab": 300}, "its vocab_size is 256, the target's 300"),
    ({"hidden": 128}, "its hidden size is 64, the target's 128"),
    ({"layers": 12}, r"its captured layers is \[2, 4, 5\], the target's \[2, 6, 9\]")])
def test_a_drafter_that_does_not_fit_is_refused_before_the_start(installed, tiny_target, drafter, monkeypatch, change,
                                                                 says):
    facts = replace(facts_of(tiny_target), **change)
    monkeypatch.setattr(server, "facts_of", lambda folder: facts)
    monkeypatch.setattr(server.subprocess, "Popen", None)
    with pytest.raises(UserError, match=f"does not fit the target .*: {says}"):
        with server.start(tiny_target, drafter_dir=drafter, steps=STEPS):
            pass


@pytest.mark.parametrize("options, says", [
    ({"steps": 3}, "steps is 3 and drafter_dir None: to speculate takes both"),
    ({"engine_args": ["dtype=float16"]}, "dtype is set by the comparison itself; leave it out"),
    ({"engine_args": ["tp"]}, "is not name=value")])
def test_options_that_contradict(installed, tiny_target, options, says):
    with pytest.raises(UserError, match=says), server.start(tiny_target, **options):
        pass


def test_a_port_that_is_taken(installed, running, tiny_target):
    port = running.server_address[1]
    with pytest.raises(UserError, match=f"port {port}: .*in use; name another"):
        with server.start(tiny_target, port=port):
            pass


def test_flags():
    assert server.flags({"dtype": "float32", "a_b": True, "c": False, "d": [1, 2], "e": {"x": 1}}) == [
        "--dtype", "float32", "--a-b", "--d", "1", "2", "--e", json.dumps({"x": 1})]
