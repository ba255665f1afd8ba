"""What a server really does with the same prompts: its text, its counts of drafts, its speed.

SGLang tells, for each request, how often it verified and how many drafts were right (uncapped: those behind an
answer's end too). The acceptance length is a ratio of their sums, 1 + Σ right / Σ verifies; never a mean of the
requests' ratios, nor the server's gauge, which blends all that it ever served. Answers are kept as they come: a server
that dies costs those that were under way.
"""

import json
import threading
import time
import urllib.error
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from eagle3nb.acceptance.decode import NEAR_TIE, decode, first_difference
from eagle3nb.acceptance.server import REACH, Server, attach, fetch, start
from eagle3nb.drafter.metrics import acceptance_length
from eagle3nb.errors import UserError
from eagle3nb.files import resolve, shown
from eagle3nb.progress import progress
from eagle3nb.states.target import digest

WAITS = (0.5, 2, 8)  # seconds before a request is sent once more
AGAIN = (408, 429, 500, 502, 503, 504)  # HTTP's answers that may be another the next time
TIMEOUT = 1800  # seconds for one answer, however many are before it
SKIPPED = object()  # in place of an answer: another request had failed before this one was sent
COUNTS = ("spec_verify_ct", "spec_num_correct_drafts", "spec_num_proposed_drafts")


@dataclass(frozen=True)
class Reply:
    """A server's answer to one prompt. Of drafts: verifies, how many were right, how many were made, and
    `histogram`[n], the verifies in which n were right; zeros and nothing without speculation."""

    prompt: str  # hash of its ids
    ids: tuple[int, ...]
    finish: str  # "stop" or "length"
    verifies: int
    accepted: int
    proposed: int
    histogram: tuple[int, ...]
    began: float  # seconds since its session began
    ended: float
    session: float  # when that was, seconds since 1970

    @property
    def past_end(self) -> int:
        """Tokens that were verified behind the answer's end: the prefill gives one token, a verify its right drafts
        and one more; what is too many was thrown away."""
        return 1 + self.verifies + self.accepted - len(self.ids) if self.verifies else 0


@dataclass(frozen=True)
class Served:
    """Answers to prompts in their order."""

    prompts: tuple  # benchmarks.Prompt
    replies: tuple[Reply, ...]
    steps: int
    dtype: str
    concurrency: int
    asked: int  # of them, now; the others were kept

    @property
    def tokens(self) -> int:
        return sum(len(reply.ids) for reply in self.replies)

    @property
    def seconds(self) -> float:
        """From the first request of a session to its last answer, all sessions together."""
        sessions = {reply.session for reply in self.replies}
        spans = [[(r.began, r.ended) for r in self.replies if r.session == session] for session in sessions]
        return sum(max(ended for _, ended in span) - min(began for began, _ in span) for span in spans)


def serve(server: Server, prompts, *, max_new_tokens: int, kept_dir: str | Path, stop_ids=None, concurrency: int = 8,
          timeout_s: float = TIMEOUT) -> Served:
    """The server's greedy answers to rendered prompts, `concurrency` at a time; what lies in `kept_dir` is not asked.

    Ends as `benchmarks.answers` do: at one of stop_ids (default: the target's) or at max_new_tokens. A request that
    fails in a way that may pass is sent again, up to three times. UserError, with the number of answers that are kept,
    where the server dies; where a prompt is too long for it; where it says nothing of its drafts.
    """
    sampling = sampling_of(server, max_new_tokens, stop_ids)
    check_lengths(server, prompts, max_new_tokens)
    keys = [digest(list(prompt.ids)) for prompt in prompts]
    file = resolve(kept_dir) / f"{digest([server.identity, sampling, concurrency])}.jsonl"
    kept = read(file)
    missing = [i for i, key in enumerate(keys) if key not in kept]
    if missing:
        with kept_counted(kept, file):
            ask_missing(server, prompts, keys, missing, sampling, concurrency, timeout_s, kept, file)
    return Served(tuple(prompts), tuple(kept[key] for key in keys), server.steps, server.dtype, concurrency,
                  len(missing))


def measure(target_dir: Path, drafter_dir: Path, steps: int, prompts, *, url: str = "", options: dict | None = None,
            **asking) -> dict[str, Served]:
    """{"without drafts", "with drafts"}: the same prompts, asked of a server of each kind, started here in turn.

    Of a server that runs at `url` with this export, the second alone. options: more of server.start's; asking: serve's.
    """
    if url:
        return {"with drafts": serve(attach(url, target_dir, drafter_dir=drafter_dir, steps=steps), prompts, **asking)}
    found = {}
    for name, drafts in (("without drafts", {}), ("with drafts", {"drafter_dir": drafter_dir, "steps": steps})):
        with start(target_dir, **drafts, **(options or {})) as running:
            found[name] = serve(running, prompts, **asking)
    return found


def ask_missing(server: Server, prompts, keys, missing: list[int], sampling: dict, concurrency: int, timeout_s: float,
                kept: dict, file: Path) -> None:
    """Ask for the missing answers; each goes to `kept` and to the file as it comes."""
    # What the first request alone pays, half a minute on a CPU, is no answer's time.
    ask(server, list(prompts[missing[0]].ids), sampling | {"max_new_tokens": server.steps + 2}, timeout_s)
    session, began = time.time(), time.perf_counter()

    def one(i: int) -> Reply:
        start = time.perf_counter() - began
        answer = ask(server, list(prompts[i].ids), sampling, timeout_s)
        times = start, time.perf_counter() - began, session
        return reply_of(answer, server, prompts[i], keys[i], sampling["max_new_tokens"], times)

    with progress(len(missing), f"served, {server.steps} drafted tokens", "answers") as bar, appended(file) as add:
        for reply in each(one, missing, concurrency):
            add(reply)
            kept[reply.prompt] = reply
            bar.advance(1)


# ------------------------------------------------------------------------------------------------ asking


def sampling_of(server: Server, max_new_tokens: int, stop_ids) -> dict:
    """SGLang's parameters for a greedy answer with these ends. UserError where the server would end elsewhere."""
    stops = sorted(server.facts.eos if stop_ids is None else stop_ids)
    if more := sorted(set(server.facts.eos) - set(stops)):
        raise UserError(f"a server ends answers at the target's own ids {more} too, which stop_ids leaves out; add "
                        "them, or the two texts differ")
    return {"temperature": 0, "max_new_tokens": max_new_tokens, "stop_token_ids": stops}


def check_lengths(server: Server, prompts, max_new_tokens: int) -> None:
    """SGLang would cut a long prompt's answer in silence."""
    for prompt in prompts:
        if not prompt.ids:
            raise ValueError(f"prompt {prompt.id} is not rendered: call render first")
        if len(prompt.ids) + max_new_tokens > server.longest:
            raise UserError(f"prompt {prompt.id}: {len(prompt.ids)} tokens and {max_new_tokens} to answer pass the "
                            f"{server.longest} that the server has room for; shorten it, lower max_new_tokens, or "
                            "raise context_length or max_total_tokens of the server")


def ask(server: Server, ids: list[int], sampling: dict, timeout_s: float) -> dict:
    """One answer, {"output_ids", "meta_info"}; up to three more tries. UserError says why there is none."""
    for pause in (*WAITS, None):
        try:
            return fetch(server.url + "/generate", {"input_ids": ids, "sampling_params": sampling}, timeout_s)
        except urllib.error.HTTPError as error:
            found = f"HTTP {error.code} {message(error)}"
            if error.code not in AGAIN:
                raise UserError(f"the server at {server.url} refuses a prompt of {len(ids)} tokens: {found}") from None
        except (*REACH, ValueError) as error:
            found = str(getattr(error, "reason", error)) or type(error).__name__
        if server.ended or pause is None:
            raise UserError(f"{server.why()} ({found})")
        time.sleep(pause)


def message(error: urllib.error.HTTPError) -> str:
    """The reason in an HTTP error's body, in one line; SGLang puts it under error.message."""
    text = error.read(4000).decode(errors="replace")
    with suppress(ValueError, KeyError, TypeError):
        text = json.loads(text)["error"]["message"]
    return (text.strip() or error.reason).splitlines()[0][:300]


def each(work, items: list, at_once: int) -> Iterable:
    """What `work` makes of the items, as it is done. After the first error no further item is begun; what is under way
    still comes, then the error."""
    failed, pool, fault = None, ThreadPoolExecutor(at_once), threading.Event()

    def unless_failed(item):
        if fault.is_set():
            return SKIPPED
        try:
            return work(item)
        except BaseException:
            fault.set()  # before this thread takes the next item
            raise

    try:
        for future in as_completed([pool.submit(unless_failed, item) for item in items]):
            if future.exception():
                failed = failed or future.exception()
            elif (found := future.result()) is not SKIPPED:
                yield found
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    if failed:
        raise failed


def reply_of(answer: dict, server: Server, prompt, key: str, limit: int, times: tuple) -> Reply:
    """What stands in SGLang's answer. UserError where it says nothing of drafts, or ends where nothing should."""
    ids, meta = tuple(answer["output_ids"]), answer["meta_info"]
    ended = meta["finish_reason"] or {}
    told = [meta.get(name) for name in COUNTS]
    if server.steps and None in told and len(ids) > 1:  # a single token is the prefill's: nothing was verified
        raise UserError(f"the server's answers do not say {', '.join(COUNTS)} (SGLang {server.version}); serve with "
                        "0.5.23, and with speculation")
    if ended.get("type") != "stop" and (ended.get("type"), len(ids)) != ("length", limit):
        raise UserError(f"prompt {prompt.id}: the server ended its answer after {len(ids)} tokens: "
                        f"{ended.get('message') or ended.get('type') or 'no reason given'}")
    verifies, accepted, proposed = (number or 0 for number in told)
    return Reply(key, ids, ended["type"], verifies, accepted, proposed,
                 tuple(meta.get("spec_correct_drafts_histogram") or ()), *times)


# ------------------------------------------------------------------------------------------------ kept answers


def read(file: Path) -> dict[str, Reply]:
    """The kept answers by their prompts; a line that a kill tore is none."""
    found = {}
    for line in file.read_bytes().splitlines() if file.is_file() else []:
        try:
            row = json.loads(line)
            row = {f.name: tuple(row[f.name]) if f.name in ("ids", "histogram") else row[f.name] for f in fields(Reply)}
        except (ValueError, KeyError, TypeError):
            continue
        found[row["prompt"]] = Reply(**row)
    return found


@contextmanager
def kept_counted(kept: dict, file: Path):
    """An error in the block says what it did not cost."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{error}; {len(kept)} answers are kept in {shown(file)}: run again, and the rest is "
                        "asked") from None


@contextmanager
def appended(file: Path):
    """`with appended(file) as add: add(reply)`: a line each, out of this process before the next is waited for."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "ab+") as handle:
        if handle.tell() and not file.read_bytes().endswith(b"\n"):
            handle.write(b"\n")  # behind a torn line

        def add(reply: Reply) -> None:
            handle.write(json.dumps(asdict(reply)).encode() + b"\n")
            handle.flush()

        yield add


# ------------------------------------------------------------------------------------------------ side by side


def beside(served: Served, chains, steps: int) -> list[dict]:
    """A row a prompt: the server's text and counts beside the walk's over `chains` (offline.chains, same order).

    `equal` in everything: text, verifies, right drafts, and how many verifies had how many of them. `past_end`: tokens
    verified behind the answer's end.
    """
    if served.steps != steps:
        raise UserError(f"the server drafts {served.steps} tokens a verify, the walk {steps}; compare like with like")
    rows = []
    for prompt, reply, chain in zip(served.prompts, served.replies, chains, strict=True):
        answer, walk = chain.answer, chain.walk(steps)
        if answer.prompt != prompt.ids:
            raise ValueError(f"prompt {prompt.id} was served, the walk's is {answer.id}")
        same_text, histogram = reply.ids == answer.ids, np.bincount(walk.lengths, minlength=steps + 1)
        same_counts = ((reply.verifies, reply.accepted) == (walk.verifies, walk.accepted)
                       and np.array_equal(np.trim_zeros(histogram, "b"), np.trim_zeros(reply.histogram, "b")))
        where = f"answer token {first_difference(reply.ids, answer.ids)}" if not same_text else ""
        rows.append({"id": prompt.id, "source": prompt.source, "tokens": len(reply.ids), "verifies": reply.verifies,
                     "accepted": reply.accepted, "past_end": reply.past_end, "walk_verifies": walk.verifies,
                     "walk_accepted": walk.accepted, "same_text": same_text, "same_counts": same_counts,
                     "equal": same_text and same_counts, "where": where or ("" if same_counts else "counts"),
                     "margin": None})
    return rows


def explained(rows: list[dict], chains, steps: int, target, drafter, max_new_tokens: int, stop_ids=None) -> list[dict]:
    """The rows with `margin` where server and walk differ: how far the best logit is above the second best there.

    From a decode of the prompt on this machine (float32): the target's at the first token that differs, or, where only
    counts do, the drafter's least at any draft that was verified. Under decode.NEAR_TIE two orders of the same sums
    may choose differently. Only for a target that can be run step by step (`target.engine` "transformers").
    """
    found = []
    for row, chain in zip(rows, chains, strict=True):
        if not row["equal"]:
            here = decode(target, drafter, chain.answer.prompt, steps=steps, max_new_tokens=max_new_tokens,
                          stop_ids=stop_ids)
            if row["same_text"]:
                margins = [m for n, verify in zip(here.accepted, here.draft_margins, strict=True)
                           for m in verify[:n + 1]]
            else:
                margins = here.margins[int(row["where"].split()[-1]):][:1]
            row = row | {"margin": min(margins, default=None)}
        found.append(row)
    return found


def summary(rows: list[dict]) -> dict:
    """Sums over the prompts and both acceptance lengths."""
    names = ("tokens", "verifies", "accepted", "past_end", "walk_verifies", "walk_accepted", "same_text", "same_counts",
             "equal")
    total = {name: sum(int(row[name]) for row in rows) for name in names}
    return {"prompts": len(rows), "tau": acceptance_length(total["verifies"], total["accepted"]),
            "walk_tau": acceptance_length(total["walk_verifies"], total["walk_accepted"]), **total}


def verdict(rows: list[dict], dtype: str) -> str:
    """One sentence. Raises UserError where a float32 server and the walk differ and no near tie explains it.

    In other dtypes rounding alone moves texts apart: then the sentence says how many, and what both count.
    """
    total = summary(rows)
    if total["equal"] == total["prompts"]:
        return (f"the server gave the same text and counts as the walk on all {total['prompts']} prompts: "
                f"{total['accepted']:,} accepted in {total['verifies']:,} verifies, τ {total['tau']:.2f}")
    for row in rows:
        if dtype == "float32" and not row["equal"] and (row["margin"] is None or row["margin"] > NEAR_TIE):
            raise UserError(f"prompt {row['id']}: server and walk differ at {row['where']} (margin {row['margin']}), "
                            "which no rounding explains; do not trust the figures, report it")
    parted = "parted at a near tie" if dtype == "float32" else f"differ, as they may in {dtype}"
    return (f"the server's τ is {total['tau']:.2f}, the walk's {total['walk_tau']:.2f}; text and counts are the same "
            f"on {total['equal']} of {total['prompts']} prompts, the others {parted}")


def figures(served: Served) -> list[dict]:
    """The acceptance length, and what makes other figures of the same answers differ from it: {figure, value, what}.

    A prompt's first token is the prefill's, and right drafts behind an answer's end are counted though thrown away:
    completion tokens / verifies = τ + (prompts − past the end) / verifies.
    """
    drafted = [reply for reply in served.replies if reply.verifies]
    verifies, accepted, past, tokens = (sum(numbers) for numbers in zip(
        *((r.verifies, r.accepted, r.past_end, len(r.ids)) for r in drafted), strict=True)) if drafted else (0, 0, 0, 0)
    per = max(verifies, 1)
    stopped = sum(reply.finish == "stop" for reply in served.replies)
    return [
        {"figure": "1 + Σ right drafts / Σ verifies", "value": acceptance_length(verifies, accepted),
         "what": "the acceptance length"},
        {"figure": "Σ prefill tokens / Σ verifies", "value": len(drafted) / per,
         "what": f"{len(drafted)} first tokens that no verify made, of {len(served.replies)} answers"},
        {"figure": "− Σ tokens past the end / Σ verifies", "value": -past / per,
         "what": f"{past} tokens verified behind an end ({stopped} stopped by a stop id, "
                 f"{len(served.replies) - stopped} by the limit), thrown away"},
        {"figure": "Σ completion tokens / Σ verifies", "value": tokens / per, "what": "the three above, summed"},
        {"figure": "mean of spec_accept_length",
         "value": float(np.mean([len(r.ids) / r.verifies for r in drafted])) if drafted else None,
         "what": "the same, request by request; short answers weigh as much as long ones"},
        {"figure": "Σ right drafts / Σ drafts", "value": accepted / max(sum(r.proposed for r in drafted), 1),
         "what": "spec_accept_rate"}]


def speeds(runs: dict[str, Served]) -> list[dict]:
    """Rows of tokens a second, one a run of the same prompts; speed-up and same texts against the first run.

    From the first request to the last answer, prompts' prefill included.
    """
    rows = []
    for name, served in runs.items():
        seconds, first = served.seconds, next(iter(runs.values()))
        rate = served.tokens / seconds if seconds else 0.0
        base = rows[0]["tokens_per_s"] if rows else rate
        rows.append({"run": name, "steps": served.steps, "prompts": len(served.replies),
                     "at once": served.concurrency, "tokens": served.tokens, "seconds": seconds, "tokens_per_s": rate,
                     "speedup": rate / base if base else None,
                     "same_text": sum(a.ids == b.ids for a, b in zip(served.replies, first.replies, strict=True))})
    return rows
