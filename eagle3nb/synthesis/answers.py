"""Answers: a dataset's prompts → its tokenised records, a file a part, answered by the target or by a server.

What was answered goes to a journal as soon as it is there, so a killed run goes on where it stopped; a part's file
appears whole. What came of each answer is counted by reason. A text of the target's own depends on its prompt, seed and
attempt only. What stands there already, and is still right, is not made again.
"""

import glob
import gzip
import json
import os
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from eagle3nb.errors import UserError
from eagle3nb.files import atomic_write, project_root, read_json, shown, write_json, xxh3_file
from eagle3nb.lock import only_one
from eagle3nb.progress import progress
from eagle3nb.states.target import target_identity
from eagle3nb.synthesis.answerer import Answerer
from eagle3nb.synthesis.budget import Spent
from eagle3nb.synthesis.endpoint import GOOD, Answer, Ask, Counts, Sampling
from eagle3nb.synthesis.journal import Journal, known_in, lasts, opened, print_of, spent_before
from eagle3nb.synthesis.sources import Dataset
from eagle3nb.synthesis.talks import ALONE, ATTEMPTS, DROPPED, Language, Talk, begun, numbered, records, take

FORMAT = 1  # raise it when the same recipe would give other rows
SEED_STEP = 1_000_003  # between the attempts' seeds; prime, so that neighbouring seeds do not share samples


@dataclass(frozen=True)
class Part:
    """One file of a dataset and what came of it. `report`: as beside the file. `now`: Counts of this start.

    `state`: "made"; "kept", it stood there; "incomplete", more is to be asked; "older kept", which is incomplete too,
    while the file is still that of an earlier whole one.
    """

    dataset: Dataset
    number: int
    report: dict
    now: Counts
    state: str

    @property
    def name(self) -> str:
        return numbered(self.dataset.name, self.number)

    @property
    def incomplete(self) -> bool:
        return self.state in ("incomplete", "older kept")


def file_of(out_dir: Path, name: str, part: int) -> Path:
    return out_dir / name / f"part-{part:03d}.jsonl.gz"


def report_of(out_dir: Path, name: str, part: int) -> Path:
    return out_dir / f"{numbered(name, part)}.json"


def journal_of(out_dir: Path, name: str, part: int, here: bool) -> Path:
    """Hidden, and with an ending that no reader of datasets takes for rows."""
    return out_dir / name / f".part-{part:03d}.{'journal.partial' if here else 'answers.journal'}"


def spent(datasets: list[Dataset], parts: int, out_dir: Path) -> Spent:
    """What an endpoint's answers to these datasets cost so far, over all starts."""
    return sum((spent_before(journal_of(out_dir, dataset.name, part, False))
                for dataset in datasets for part in range(parts)), Spent())


def make_all(datasets: list[Dataset], parts: int, answerer: Answerer, language: Language, out_dir: Path, seed: int,
             folder: Path) -> list[Part]:
    """Every part of every dataset, with seeds from `seed` on; a line each tells what came of it. folder: the target's.

    UserError where nothing is usable, or no further answer can come (see Endpoint.answer); what was answered is kept.
    """
    if parts < 1:
        raise UserError(f"parts is {parts}; choose 1 or more")
    identity = target_identity(folder) if answerer.here else {}
    made = []
    for part in range(parts):
        for dataset in datasets:
            try:
                made.append(make(dataset, answerer, language, out_dir, seed + part, identity, part))
            except OSError as error:
                raise UserError(f"cannot write {shown(out_dir / dataset.name)}: {error.strerror or error}; what was "
                                "answered is kept, so free space or allow writing, and start again") from error
            print(line(made[-1]), flush=True)
    return made


def make(dataset: Dataset, answerer: Answerer, language: Language, out_dir: Path, seed: int, identity: dict,
         part: int = 0) -> Part:
    """One part: `out_dir/<name>/part-<part>.jsonl.gz`, and its report in `out_dir/<name>[.<part>].json`."""
    talks = begun(dataset.prompts(seed), language.tokenizer, numbered(dataset.name, part))
    mark = fingerprint(dataset, talks, seed, identity, answerer)
    older = stood(out_dir, dataset.name, part)
    if older and (older["fingerprint"] == mark or (dataset.limit and not older.get("limit"))):
        return Part(dataset, part, older, Counts(), "kept")  # or it is whole, and this a rehearsal
    check_ours(dataset.name, out_dir)
    (out_dir / dataset.name).mkdir(parents=True, exist_ok=True)
    with alone(file_of(out_dir, dataset.name, part)):
        return answered(dataset, talks, answerer, language, out_dir, seed, mark, part, older)


def answered(dataset: Dataset, talks: list[Talk], answerer: Answerer, language: Language, out_dir: Path, seed: int,
             mark: str, part: int, older: dict | None) -> Part:
    """Ask, judge, write. An incomplete part never takes the place of a whole one (`older`)."""
    sampling = Sampling(dataset.max_new_tokens, dataset.temperature, dataset.top_p, language.eos)
    path = journal_of(out_dir, dataset.name, part, answerer.here)
    kept = {"mark": mark} if answerer.here else {"asked": print_of(answerer.model, answerer.extra, sampling)}
    with opened(path, **kept) as journal:
        work = Work(talks, answerer, language, seed, sampling, journal)
        first = work.first()
        expected = sum(1 + len(talk.prompt.later) - talk.turn for talk in talks if not talk.over)
        now = answerer.endpoint.answer(first, sampling, work.done, what=numbered(dataset.name, part), expected=expected)
    complete, some = not work.lost and not now.stopped, any(talk.rows for talk in talks)
    if complete and not some:
        ended = Counter(talk.why for talk in talks if talk.why)
        raise UserError(f"synthesis {dataset.name}: no answer was usable ({dict(work.counts or ended)}); "
                        "change its prompts or its temperature")
    rows = (row for talk in talks for row in records(talk, language.tokenizer, part, work.facts(talk)))
    stays = not some or (older and not complete)
    sizes = sizes_of(rows) if stays else write(rows, file_of(out_dir, dataset.name, part))
    report = summary(dataset, sizes, work, complete, mark)
    if not stays:
        report["xxh3"] = xxh3_file(file_of(out_dir, dataset.name, part))
        write_json(report_of(out_dir, dataset.name, part), report)
    if answerer.here:
        path.unlink()
    return Part(dataset, part, report, now, "made" if complete else "older kept" if older else "incomplete")


def seed_of(seed: int, key: tuple) -> int:
    """A server's seed for one ask, 31 bits: another for each prompt, turn and attempt, so that none share a sample."""
    return xxhash.xxh3_64_intdigest(json.dumps([seed, *key]).encode()) >> 33


def ask_of(talk: Talk, answerer: Answerer, seed: int) -> Ask:
    """With ids alone, or with messages and the ids that their tokens are counted by."""
    if answerer.here:  # whose own generator takes the prompt's ids into account
        return Ask(talk.key, input_ids=tuple(talk.asked), seed=seed + SEED_STEP * talk.attempt)
    if answerer.exact:
        return Ask(talk.key, input_ids=tuple(talk.asked), seed=seed_of(seed, talk.key))
    return Ask(talk.key, tuple(talk.said), talk.prompt.tools, tuple(talk.asked), seed_of(seed, talk.key))


def known_turns(dataset: Dataset, part: int, talks: list[Talk], answerer: Answerer, language: Language, out_dir: Path,
                seed: int) -> int:
    """Turns of these talks, before their first answer, that a journal has answers to. An endpoint's talk counts where
    its first ask is known as it would be asked now, by model, sampling and all: those of other settings are kept too,
    and are no answers to it. Later turns are taken to be as known as they were then."""
    known = known_in(journal_of(out_dir, dataset.name, part, answerer.here))
    sampling = Sampling(dataset.max_new_tokens, dataset.temperature, dataset.top_p, language.eos)
    asked = print_of(answerer.model, answerer.extra, sampling)
    turns = {key[:2] for key in known}
    if answerer.here:
        return len(turns)
    own = {talk.prompt.id: len(talk.prompt.later) for talk in talks if not talk.over
           and (*talk.key, *asked(ask_of(talk, answerer, seed))) in known}
    return sum(turn <= own.get(key, -1) for key, turn in turns)


class Work:
    """A part's talks under way. `counts`: answers by what came of them. `asks`: given = succeeded + failed + skipped,
    over all starts. `lost`: what failed or was skipped this time, and is asked again by the next start."""

    def __init__(self, talks: list[Talk], answerer: Answerer, language: Language, seed: int, sampling: Sampling,
                 journal: Journal):
        self.talks = {talk.prompt.id: talk for talk in talks}
        self.answerer, self.language, self.seed, self.sampling = answerer, language, seed, sampling
        self.journal, self.counts, self.asks, self.lost = journal, Counter(), Counts(), Counter()

    def first(self) -> list[Ask]:
        """What is to be asked first of each talk."""
        known = len(self.journal.known)
        with progress(known, "answers of earlier starts", "answers") if known else nullcontext() as bar:
            found = []
            for talk in self.talks.values():
                before = self.asks.given
                found.append(self.next(talk))
                if bar:
                    bar.advance(self.asks.given - before)
        return [ask for ask in found if ask]

    def next(self, talk: Talk) -> Ask | None:
        """What is to be asked next of a talk, after all answers that are known; None: it is over."""
        while not talk.over:
            room = self.answerer.room
            if room and len(talk.asked) + self.sampling.max_new_tokens > room:
                talk.over, talk.why = True, "longer than the context"
                break
            ask = self.ask(talk)
            found = self.journal.find(ask)
            if found is None:
                return ask
            self.asks.take(found)
            take(talk, found, self.language, self.counts)
        return None

    def ask(self, talk: Talk) -> Ask:
        return ask_of(talk, self.answerer, self.seed)

    def done(self, ask: Ask, answer: Answer) -> list[Ask]:
        """An answer that has come: noted, judged; the next ask of its talk."""
        self.journal.note(ask, answer)
        self.asks.take(answer)
        talk = self.talks[ask.key[0]]
        if not lasts(answer):
            talk.over, talk.why = True, f"{answer.outcome}: {answer.reason}"
            self.lost[talk.why] += 1
            return []
        take(talk, answer, self.language, self.counts)
        following = self.next(talk)
        return [following] if following else []

    def facts(self, talk: Talk) -> dict | None:
        """What every record of an endpoint's says of it."""
        if self.answerer.here:
            return None
        return {"model": talk.model or self.answerer.model, "on_policy": self.answerer.on_policy}


# ---------------------------------------------------------------------------------------------------- files


def fingerprint(dataset: Dataset, talks: list[Talk], seed: int, identity: dict, answerer: Answerer) -> str:
    """What a part's rows depend on, as a hash: the prompts' ids, how they are sampled, the seed, who answers."""
    prompts = [[talk.prompt.id, talk.asked, [turn[0] if len(turn) == 1 else turn for turn in talk.prompt.later]]
               for talk in talks]
    sampling = [dataset.max_new_tokens, dataset.temperature, dataset.top_p, ATTEMPTS, seed]
    if answerer.here:
        parts = [FORMAT, prompts, sampling, identity["config"], identity["weights"]]
    else:
        tools = [talk.prompt.tools for talk in talks]
        parts = [FORMAT, prompts, sampling, tools, answerer.model, answerer.exact, answerer.on_policy, answerer.extra]
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode())


def standing(out_dir: Path, name: str, mark: str, part: int = 0) -> dict | None:
    """The report of a part that stands whole under this fingerprint, its file unharmed; None otherwise."""
    report = stood(out_dir, name, part)
    return report if report and report["fingerprint"] == mark else None


def stood(out_dir: Path, name: str, part: int = 0) -> dict | None:
    """The report of a part that stands complete, whatever it was made of; None otherwise."""
    file, path = file_of(out_dir, name, part), report_of(out_dir, name, part)
    if not path.is_file() or not file.is_file():
        return None
    report = read_json(path)
    if not isinstance(report, dict) or "fingerprint" not in report:
        return None
    return report if report.get("complete", True) and report.get("xxh3") == xxh3_file(file) else None


def check_ours(name: str, out_dir: Path) -> None:
    """UserError where the dataset's folder holds files, and neither a report nor a journal says that this stage made
    them: somebody's own rows, which a file of prompts of the same name must not replace."""
    folder = out_dir / name
    there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    rows = [file for file in there if not file.startswith(".")]
    if rows and len(rows) == len(there) and not any(out_dir.glob(f"{glob.escape(name)}*.json")):
        raise UserError(f"{shown(folder)} holds {rows[0]}, which synthesis did not make; rename the file of "
                        "prompts, or move that dataset away")


def alone(path: Path):
    """Holds a part: two starts that make the same one would pay for it twice."""
    lock = project_root() / ".cache" / "synthesis" / f"{xxhash.xxh3_64_hexdigest(os.path.realpath(path).encode())}.lock"
    return only_one(lock, wait=False, busy=f"{shown(path)} is being made by another run; wait for it")


def write(rows, path: Path) -> dict:
    """The part's file, the same bytes for the same rows; their sizes."""
    with atomic_write(path, "wb") as handle, gzip.GzipFile("", "wb", 9, handle, mtime=0) as packed:
        def written(row: dict) -> dict:
            packed.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
            return row
        return sizes_of(map(written, rows))


def sizes_of(rows) -> dict:
    """Sums over rows, one at a time: records, tokens, supervised ones, and rows that end where their answer was cut."""
    sizes = {"records": 0, "tokens": 0, "supervised": 0, "cut_at_limit": 0}
    for row in rows:
        added = (1, len(row["input_ids"]), sum(row["loss_mask"]), row["finish"] == "length")
        sizes = {name: size + more for (name, size), more in zip(sizes.items(), added, strict=True)}
    return sizes


def summary(dataset: Dataset, sizes: dict, work: Work, complete: bool, mark: str) -> dict:
    """The part's report, without its file's hash. What an endpoint or a fault adds stands after the plain figures."""
    report = {"prompts": len(work.talks), **sizes, "answers": dict(sorted(work.counts.items())), "fingerprint": mark}
    ended = Counter(talk.why for talk in work.talks.values() if talk.why)
    more = {"limit": dataset.limit, "left_out": dataset.left_out, "ended_early": dict(sorted(ended.items()))}
    if not work.answerer.here:
        more |= {"model": work.answerer.model, "on_policy": work.answerer.on_policy,
                 "asks": {name: getattr(work.asks, name) for name in ("given", "succeeded", "failed", "skipped")},
                 "lost": dict(sorted(work.lost.items())), "spent": asdict(work.journal.spent), "complete": complete}
    return report | {name: value for name, value in more.items() if value or isinstance(value, bool)}


def line(part: Part) -> str:
    """What came of a part, in one line."""
    report, kept = part.report, {*GOOD, "given up", ALONE, DROPPED}
    faults = ", ".join(f"{count} {reason}" for reason, count in report["answers"].items() if reason not in kept)
    lost = "".join(f", {count} {reason}" for reason, count in report.get("lost", {}).items())
    return (f"  {part.name:<14} {report['records']:>4} records of {report['prompts']} prompts, "
            f"{report['tokens']:>6,} tokens, {report['supervised']:>6,} supervised; "
            f"{report['cut_at_limit']} cut at the limit; answers not kept: {faults or 'none'}"
            f"{f'; incomplete{lost}' if part.incomplete else ''}")
