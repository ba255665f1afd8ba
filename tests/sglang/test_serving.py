"""SGLang's real server on a CPU, in float32, with the demo's drafter, against the offline walk: count for count.

No tolerance: both sides choose among the same logits up to rounding, some 1e-4, and a margin that small is met once in
some ten thousand drafts. The server forms batches of four requests.
"""

import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import psutil
import pytest
import torch
from waiting import gone

from eagle3nb.acceptance import benchmarks, offline, pair, server, serving
from eagle3nb.errors import UserError
from eagle3nb.files import project_root
from eagle3nb.states import target as targets

WORK = project_root() / "outputs" / "demo" / "work"
DEMO = [WORK / "export" / "model.safetensors", WORK / "drafter" / "model.safetensors"]
pytestmark = [pytest.mark.skipif(torch.cuda.is_available(), reason="written for the CPU; on a GPU stage 5 is the test"),
              pytest.mark.skipif(not all(file.is_file() for file in DEMO), reason="no drafter yet: make demo")]
STEPS, PROMPTS, TOKENS, AT_ONCE = 3, 12, 40, 4
CONTEXT = 400  # instead of the target's 8192, so that its end can be reached
STOPS = (2, 198)  # the target's end of turn, and a newline, which about every third answer has within 40 tokens


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo's drafter and its export as they stand now, 12 held-out prompts, the target's answers, the chains."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("demo")
    for name in ("export", "drafter"):
        shutil.copytree(WORK / name, folder / name, ignore=shutil.ignore_patterns("checkpoints"))
    directory = targets.target_dir("embedded")
    target, drafter = pair.load_target(directory, "transformers"), pair.load_drafter(folder / "drafter", directory)
    asked = benchmarks.spread(benchmarks.load_prompts("data/heldout.jsonl"), PROMPTS)
    asked = benchmarks.render(asked, targets.load_tokenizer(directory))
    taken = benchmarks.answers(target, asked, max_new_tokens=TOKENS, beyond=STEPS + 1, stop_ids=STOPS,
                               cache_dir=folder / "answers")
    return SimpleNamespace(directory=directory, export=folder / "export", target=target, drafter=drafter, prompts=asked,
                           chains=offline.chains(target, drafter, taken, STEPS))


@pytest.fixture(scope="module")
def servers(demo, times, tmp_path_factory):
    """Two at once, `.drafting` and `.plain`, since a start is one core's work; an idle one then must not poll.

    `.asked(name)` are the answers to the prompts; `.stack` ends both.
    """
    options = {"drafting": {"drafter_dir": demo.export, "steps": STEPS}, "plain": {}}
    kept = {name: tmp_path_factory.mktemp(name) for name in options}
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        arguments = ["sleep_on_idle=true", f"context_length={CONTEXT}"]
        starts = {name: pool.submit(stack.enter_context, server.start(demo.directory, engine_args=arguments, **given))
                  for name, given in options.items()}
        running = SimpleNamespace(**{name: start.result() for name, start in starts.items()}, stack=stack, kept=kept)
        running.asked = lambda name: serving.serve(getattr(running, name), demo.prompts, max_new_tokens=TOKENS,
                                                   stop_ids=STOPS, kept_dir=kept[name], concurrency=AT_ONCE)
        times.append(f"SGLang {running.plain.version}: {running.drafting.load_s:.0f} s until both servers stand")
        yield running


@pytest.fixture(scope="module")
def drafting(servers):
    return servers.asked("drafting")


@pytest.fixture(scope="module")
def plain(servers):
    return servers.asked("plain")


def test_counts_are_the_walks_prompt_by_prompt(demo, drafting, times):
    rows = serving.beside(drafting, demo.chains, STEPS)
    known = serving.explained(rows, demo.chains, STEPS, demo.target, demo.drafter, TOKENS, STOPS)
    times.append(serving.verdict(known, drafting.dtype))
    total = serving.summary(rows)
    assert [row for row in rows if not row["equal"]] == []
    assert total["prompts"] == total["equal"] == PROMPTS and total["verifies"] > 100 < total["accepted"]
    for reply in drafting.replies:
        assert reply.proposed == STEPS * reply.verifies and sum(reply.histogram) == reply.verifies
        assert 0 <= reply.past_end <= STEPS


def test_chains_run_past_an_answers_end(drafting):
    """Otherwise capped and uncapped counts are the same and the equality above says less."""
    ended = [reply for reply in drafting.replies if reply.past_end]
    assert ended and all(reply.verifies + reply.accepted > len(reply.ids) - 1 for reply in ended)
    assert {reply.finish for reply in drafting.replies} == {"stop", "length"}


def test_figures_add_up(drafting):
    tau, prefill, past, completion = [row["value"] for row in serving.figures(drafting)][:4]
    assert completion == pytest.approx(tau + prefill + past) and past < 0 < prefill and 1.2 < tau < 3


def test_the_same_text_without_drafts(drafting, plain, times):
    rows = serving.speeds({"without": plain, "with": drafting})
    times.append(f"{rows[0]['tokens_per_s']:.1f} tokens/s without drafts, {rows[1]['tokens_per_s']:.1f} with")
    assert [row["same_text"] for row in rows] == [PROMPTS, PROMPTS]
    assert all(reply.verifies == reply.past_end == 0 for reply in plain.replies)


def test_kept_answers_are_not_asked_again(servers, drafting):
    again = servers.asked("drafting")
    assert (drafting.asked, again.asked) == (PROMPTS, 0) and again.replies == drafting.replies


def test_a_server_that_runs_is_the_one_that_was_started(servers, demo):
    running = servers.drafting
    attached = server.attach(running.url, demo.directory, drafter_dir=demo.export, steps=STEPS)
    for name in ("url", "target", "steps", "longest", "version", "dtype", "identity"):
        assert getattr(attached, name) == getattr(running, name), name


@pytest.mark.parametrize("says, attach", [
    ("drafts 3 tokens a verify, not 2", lambda s, d: server.attach(s.drafting.url, d.directory, steps=2)),
    ("does not speculate; start it with .*-num-steps 3", lambda s, d: server.attach(s.plain.url, d.directory, steps=3)),
    ("is no SGLang 0.5.23", lambda s, d: server.attach(s.plain.url + "/v1", d.directory))])
def test_another_server_than_is_wanted(servers, demo, says, attach):
    with pytest.raises(UserError, match=says):
        attach(servers, demo)


def test_prompts_at_the_end_of_the_context(servers):
    """What we let through is answered whole, with its drafts behind it; beyond, the server has its own word."""
    running = servers.drafting
    fits, more = (benchmarks.Prompt("p", "s", ids=(5, 6) * ((running.longest - 8) // 2) + (7,) * n) for n in (0, 1))
    reply, = serving.serve(running, [fits], max_new_tokens=8, kept_dir=servers.kept["drafting"]).replies
    assert len(fits.ids) + 8 == running.longest and len(reply.ids) == 8
    with pytest.raises(UserError, match=f"8 to answer pass the {running.longest} that the server has room for"):
        serving.check_lengths(running, [more], 8)
    with pytest.raises(UserError, match=f"refuses a prompt of {CONTEXT} tokens: HTTP 400 The input .* is longer than"):
        serving.ask(running, [5] * CONTEXT, {"max_new_tokens": 1}, 60)


def test_an_answer_of_one_token_has_no_verify(servers, demo):
    served = serving.serve(servers.drafting, demo.prompts[:1], max_new_tokens=1, kept_dir=servers.kept["drafting"])
    reply, = served.replies
    assert (len(reply.ids), reply.verifies, reply.past_end) == (1, 0, 0)


def test_a_death_midway_and_nothing_left_behind(servers, demo):
    """Last, since it is the servers' end: one loses its scheduler, the other is closed."""
    families = [[psutil.Process(s.process.pid), *psutil.Process(s.process.pid).children(recursive=True)]
                for s in (servers.drafting, servers.plain)]
    scheduler, = (process for process in families[1] if "schedul" in " ".join([process.name(), *process.cmdline()]))
    os.kill(scheduler.pid, signal.SIGKILL)
    with pytest.raises(UserError, match=r"SGLang ended: Subprocess scheduler_0 .*crashed.*; 0 answers are kept"):
        serving.serve(servers.plain, demo.prompts, max_new_tokens=20, kept_dir=servers.kept["plain"])
    servers.stack.close()
    assert all(gone(process.pid) for family in families for process in family)
    assert not servers.drafting.log.exists()
    servers.plain.log.unlink(missing_ok=True)
