"""SGLang's real server on a CPU, in float32, with the demo's drafter, against the offline walk: count for count.

No tolerance: both sides choose among the same logits up to rounding, some 1e-4, and a margin that small is met once in
some ten thousand drafts. The server forms batches of four requests.
"""

import os
import re
import shutil
import signal
from types import SimpleNamespace

import psutil
import pytest
import torch

from eagle3nb.acceptance import benchmarks, offline, pair, server, serving
from eagle3nb.errors import UserError
from eagle3nb.files import project_root
from eagle3nb.states import target as targets

WORK = project_root() / "outputs" / "demo" / "work"
DEMO = [WORK / "export" / "model.safetensors", WORK / "drafter" / "model.safetensors"]
pytestmark = [pytest.mark.skipif(torch.cuda.is_available(), reason="written for the CPU; on a GPU stage 5 is the test"),
              pytest.mark.skipif(not all(file.is_file() for file in DEMO), reason="no drafter yet: make demo")]
STEPS, PROMPTS, TOKENS, AT_ONCE = 3, 12, 40, 4
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
def drafting(demo, times, tmp_path_factory):
    """What the server with drafts answered, and what else was asked of it while it ran."""
    kept = tmp_path_factory.mktemp("kept")
    with server.start(demo.directory, drafter_dir=demo.export, steps=STEPS) as running:
        times.append(f"SGLang {running.version} serves with drafts: {running.load_s:.0f} s to its start")
        served, again = (serving.serve(running, demo.prompts, max_new_tokens=TOKENS, stop_ids=STOPS, kept_dir=kept,
                                       concurrency=AT_ONCE) for _ in range(2))
        attached = server.attach(running.url, demo.directory, drafter_dir=demo.export, steps=STEPS)
        refusals = {name: refusal(name, running, demo) for name in REFUSED}
        alone = serving.serve(running, demo.prompts[:1], max_new_tokens=1, kept_dir=kept)
        pid = running.process.pid
        family = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return SimpleNamespace(served=served, again=again, running=running, attached=attached, refusals=refusals,
                           alone=alone, family=family)


REFUSED = {
    "another number": (r"drafts 3 tokens a verify, not 2", lambda s, d: server.attach(s.url, d.directory, steps=2)),
    "a path": (r"is no SGLang 0.5.23", lambda s, d: server.attach(s.url + "/v1", d.directory)),
    "too long": (r"the server at .* refuses a prompt of 9000 tokens: HTTP 400 .*9000 tokens.* is longer than",
                 lambda s, d: serving.ask(s, [5] * 9000, {"max_new_tokens": 1}, 60))}


def refusal(name: str, running, demo) -> str:
    with pytest.raises(UserError) as told:
        REFUSED[name][1](running, demo)
    return str(told.value)


def test_counts_are_the_walks_prompt_by_prompt(demo, drafting, times):
    rows = serving.beside(drafting.served, demo.chains, STEPS)
    total = serving.summary(rows)
    known = serving.explained(rows, demo.chains, STEPS, demo.target, demo.drafter, TOKENS, STOPS)
    times.append(serving.verdict(known, drafting.running.dtype))
    assert [row for row in rows if not row["equal"]] == []
    assert total["prompts"] == total["equal"] == PROMPTS and total["verifies"] > 100 < total["accepted"]
    for reply in drafting.served.replies:
        assert reply.proposed == STEPS * reply.verifies and sum(reply.histogram) == reply.verifies
        assert 0 <= reply.past_end <= STEPS


def test_chains_run_past_an_answers_end(drafting):
    """Otherwise capped and uncapped counts are the same and the equality above says less."""
    ended = [reply for reply in drafting.served.replies if reply.past_end]
    assert ended and all(reply.verifies + reply.accepted > len(reply.ids) - 1 for reply in ended)
    assert {reply.finish for reply in drafting.served.replies} == {"stop", "length"}


def test_figures_add_up(drafting):
    tau, prefill, past, completion = [row["value"] for row in serving.figures(drafting.served)][:4]
    assert completion == pytest.approx(tau + prefill + past) and past < 0 < prefill and 1.2 < tau < 3


def test_kept_answers_are_not_asked_again(drafting):
    assert (drafting.served.asked, drafting.again.asked) == (PROMPTS, 0)
    assert drafting.again.replies == drafting.served.replies


def test_a_server_that_runs_is_the_one_that_was_started(drafting):
    for name in ("url", "target", "steps", "longest", "version", "dtype", "identity"):
        assert getattr(drafting.attached, name) == getattr(drafting.running, name), name


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(drafting, name):
    assert re.search(REFUSED[name][0], drafting.refusals[name])


def test_an_answer_of_one_token_has_no_verify(drafting):
    reply, = drafting.alone.replies
    assert (len(reply.ids), reply.verifies, reply.past_end) == (1, 0, 0)


def test_nothing_of_it_is_left(drafting):
    assert not any(psutil.pid_exists(pid) for pid in drafting.family)


def test_without_drafts_the_same_text_and_a_death_midway(demo, drafting, times, tmp_path):
    """The scheduler is killed once the texts are compared: what was kept is counted in the error."""
    with server.start(demo.directory, engine_args=["max_running_requests=4"]) as running:
        plain = serving.serve(running, demo.prompts, max_new_tokens=TOKENS, stop_ids=STOPS, kept_dir=tmp_path,
                              concurrency=AT_ONCE)
        rows = serving.speeds({"without": plain, "with": drafting.served})
        with pytest.raises(UserError, match="does not speculate; start it with .*--speculative-num-steps 3"):
            server.attach(running.url, demo.directory, steps=STEPS)
        scheduler, = (child for child in psutil.Process(running.process.pid).children(recursive=True)
                      if "schedul" in child.name() or "schedul" in " ".join(child.cmdline()))
        os.kill(scheduler.pid, signal.SIGKILL)
        with pytest.raises(UserError, match=r"SGLang ended: .*; 0 answers are kept in .*: run again"):
            serving.serve(running, demo.prompts, max_new_tokens=20, kept_dir=tmp_path, concurrency=AT_ONCE)
    times.append(f"{rows[0]['tokens_per_s']:.1f} tokens/s without drafts, {rows[1]['tokens_per_s']:.1f} with")
    assert [row["same_text"] for row in rows] == [PROMPTS, PROMPTS]
    assert all(reply.verifies == reply.past_end == 0 for reply in plain.replies)
    running.log.unlink(missing_ok=True)
