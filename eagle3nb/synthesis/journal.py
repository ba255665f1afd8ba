"""What was answered, on disk as it comes: a start after a kill pays for nothing twice.

The target's own answers are kept until their part is written, for one fingerprint of the whole part: they cost time
alone. An endpoint's are kept for good, each under the fingerprint of what was asked: a prompt that is added or changed
asks for itself alone, and what was paid for is never thrown away. What failed is noted too, where it cost anything: the
budget counts over all starts.
"""

import fcntl
import json
import os
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import xxhash

from eagle3nb.errors import UserError
from eagle3nb.files import disk_free, shown
from eagle3nb.synthesis.budget import Spent
from eagle3nb.synthesis.endpoint import GOOD, Answer, Ask, Sampling

ROOM = 1 << 20  # bytes that the disk of an endpoint's journal must have free before anything is asked
HEAD = b'"answers of an endpoint, 1"'
# Reasons of "failed" that stand: asking once more would not change them.
LASTING = ("empty", "half a character", "longer than the context")
KEPT = ("message", "ids", "prompt_tokens", "completion_tokens", "cost", "model", "seconds")


class Journal:
    """`known`: answers of earlier starts by (id, turn, attempt[, fingerprint of what was asked]), until they are found.
    `spent`: what all of its lines cost."""

    def __init__(self, handle, known: dict, spent: Spent, asked):
        self.handle, self.known, self.spent, self.asked = handle, known, spent, asked

    def find(self, ask: Ask) -> Answer | None:
        """The answer that is known, under this ask's key; it is asked for once, and then not held any longer."""
        found = self.known.pop((*ask.key, *self.asked(ask)), None)
        return replace(found, key=ask.key) if found else None

    def note(self, ask: Ask, answer: Answer) -> None:
        """Keep it: durably once this returns. What failed in passing is only counted, where it cost anything."""
        if not lasts(answer) and answer.spent == Spent():
            return
        key = (*ask.key, *self.asked(ask))
        value = list(answer.ids) if len(key) == 3 else packed(answer)
        self.handle.write(json.dumps([*key, value], ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
        self.handle.flush()
        os.fsync(self.handle.fileno())
        self.spent += answer.spent


def lasts(answer: Answer) -> bool:
    """Whether it need not be asked for again."""
    return answer.outcome in (*GOOD, "refused") or answer.outcome == "failed" and answer.reason in LASTING


def packed(answer: Answer) -> dict:
    """An answer as a line has it: what is not empty. Its ids and messages come back as they were."""
    value = {"outcome": answer.outcome, "reason": answer.reason} | {name: getattr(answer, name) for name in KEPT}
    return {name: entry for name, entry in value.items() if entry} | {"spent": asdict(answer.spent)}


def unpacked(key: tuple, value) -> Answer:
    if isinstance(value, list):
        return Answer(key, "", ids=tuple(value))
    fields = {**value, "ids": tuple(value.get("ids", ())), "spent": Spent(**value["spent"])}
    return Answer(key, **fields)


def print_of(model: str, extra: dict, sampling: Sampling):
    """Ask → (fingerprint of all that its answer depends on,)."""
    def asked(ask: Ask) -> tuple[str]:
        drawn = [sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.stop_ids, ask.seed]
        parts = [model, extra, drawn, (ask.messages, ask.tools) if ask.messages else ask.input_ids]
        return (xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode()),)
    return asked


@contextmanager
def opened(path: Path, mark: str = "", asked=None):
    """The Journal of a part. With `mark`: one fingerprint for all of it, and what stands there under another goes. With
    `asked` (print_of): one for each answer, and everything stays. A last line that a kill cut off is not counted."""
    head = mark.encode() if mark else HEAD
    if asked and disk_free(path) < ROOM:  # what cannot be noted would be paid for again by the next start
        raise UserError(f"the disk of {shown(path)} is full; free space, then start again: nothing was asked")
    with open(path, "ab") as handle:
        hold(handle, path)
        lines = path.read_bytes().split(b"\n")
        if lines[0] == head and len(lines) > 1:
            os.truncate(path, path.stat().st_size - len(lines[-1]))
        else:
            if asked and lines[0] and len(lines) > 1:
                raise UserError(f"{shown(path)} is no journal of this version; move it away, or use the version that "
                                "wrote it: its answers were paid for")
            lines = [head, b""]
            path.write_bytes(head + b"\n")
        known, spent = entries(lines[1:-1], path)
        yield Journal(handle, known, spent, asked or (lambda ask: ()))


def hold(handle, path: Path) -> None:
    """Holds the journal until its file is closed: another checkout, or another name of the folder, has other locks than
    this one's. UserError where somebody else does; nothing where the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{shown(path)} is being written by another run; wait for it") from None
    except OSError:
        return


def entries(lines: list[bytes], path: Path) -> tuple[dict, Spent]:
    """(known answers, what all cost). UserError for a line that cannot be read: a damaged disk, or an editor."""
    known, spent = {}, Spent()
    for number, line in enumerate(lines, start=2):
        try:
            *key, value = json.loads(line)
            answer = unpacked(tuple(key[:3]), value)
            spent += answer.spent
            known |= {tuple(key): answer} if not answer.outcome or lasts(answer) else {}
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{shown(path)} line {number} is damaged ({type(error).__name__}); restore the file, or "
                            "delete the line: its answer is then asked for again") from None
    return known, spent


def spent_before(path: Path) -> Spent:
    """What a part's answers cost so far, whatever was asked."""
    return entries(path.read_bytes().split(b"\n")[1:-1], path)[1] if path.is_file() else Spent()


def known_in(path: Path) -> dict:
    """The answers that a part's journal holds, whatever was asked."""
    return entries(path.read_bytes().split(b"\n")[1:-1], path)[0] if path.is_file() else {}
