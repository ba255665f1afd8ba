"""The settings of a training run, strict: a misspelt key or a wrong type is an error, never a default."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, fields

from eagle3nb.errors import UserError
from eagle3nb.files import resolve

CHOICES = ("fitted", "target", "head", "random")  # where training starts: initialise.py
INTERRUPTED = "interrupted; the next start goes on from its checkpoint"  # the last line of a run that was
ONE_READER = ("states that stream are read by one training process; set processes to 1, or keep_bytes to 0 in stage 3, "
              "which then stores them all")
VERIFIED = ("all", "each", "first", "never")  # when a store's checksums are read


@dataclass(frozen=True)
class Settings:
    """Everything a run depends on. Folders are absolute; the rest decides the result, so it is the run's identity."""

    states: str                      # the store
    drafter: str                     # where the drafter, metrics and checkpoints go; holds vocabulary.json
    target: str                      # the target's model directory: sizes, final norm, last layer
    corpus: str = ""                 # the merged corpus: sources of rows, and states that stream (states/stream.py)
    seed: int = 1
    ttt_steps: int = 3
    ttt_decay: float = 0.8
    epochs: int = 1
    minutes: float = 0.0             # the schedule is cut after the warm-up to end in this time; 0: all epochs
    learning_rate: float = 3e-4
    warmup_share: float = 0.05
    weight_decay: float = 0.01
    clip: float = 1.0
    pack_tokens: int = 1024
    accumulate: int = 1              # packs an optimiser step
    validation_share: float = 0.05
    held_out_from: int = 0           # first row of the corpus's own validation part, its end; 0: the share decides
    patience: int = 0                # evaluations without a better acceptance that end the run; 0: it goes on
    evaluate_every: int = 0          # optimiser steps; 0: at the end of every epoch
    checkpoint_every: int = 0        # optimiser steps; 0: at every evaluation
    initialise: str = "fitted"       # or the folder of a checkpoint to go on from: finetune.py
    loss_average: str = "slot"
    norm_output: bool = False
    fc_norm: bool = False
    intermediate: int = 0            # of the drafter's MLP; 0: the target's
    freeze_head: bool = False        # keep lm_head as initialised: a third less work on the head
    verify_states: str = "first"     # a row of states against its checksum: each time it is read, the first, or never;
                                     # all: every shard before training begins (the notebook does), then as "first"
    compute: str = "fp32"            # of a step's products and activations; weights, AdamW and loss are fp32 also in
                                     # "bf16", which is for GPUs: on a CPU it is the slower one

    @classmethod
    def from_json(cls, values: dict) -> "Settings":
        """Strict: UserError for an unknown or missing key, a wrong type, or a value that cannot be."""
        settings = strict(cls, values, "training settings")
        settings.check()
        return settings

    @classmethod
    def of(cls, parameters: dict, held_out_from: int = 0, **folders: str) -> "Settings":
        """From a notebook's parameters, those that are settings; pack_tokens 0 means max_seq_len."""
        names = {field.name for field in fields(cls)}
        values = {name: value for name, value in parameters.items() if name in names - {"target"}}
        values["pack_tokens"] = values.get("pack_tokens") or parameters["max_seq_len"]
        return cls.from_json({**values, **{name: str(path) for name, path in folders.items()},
                              "held_out_from": held_out_from})

    @property
    def finetunes(self) -> bool:
        """Does training start from a checkpoint?"""
        return self.initialise not in CHOICES

    def check(self) -> None:
        wrong = [(self.ttt_steps >= 1, "ttt_steps must be 1 or more"), (self.epochs >= 1, "epochs must be 1 or more"),
                 (self.learning_rate > 0, "learning_rate must be positive"),
                 (self.accumulate >= 1, "accumulate must be 1 or more"),
                 (self.pack_tokens >= 1, "pack_tokens must be 1 or more"),
                 (0 <= self.validation_share < 1, "validation_share must lie in 0 … 1"),
                 (0 <= self.warmup_share < 1, "warmup_share must lie in 0 … 1"),
                 (self.clip > 0, "clip must be positive"), (self.minutes >= 0, "minutes must not be negative"),
                 (self.patience >= 0, "patience must be 0 or more"),
                 (self.loss_average in ("slot", "document"), "loss_average must be slot or document"),
                 (not self.finetunes or (resolve(self.initialise) / "config.json").is_file(),
                  f"initialise must be one of {', '.join(CHOICES)}, or the folder of an EAGLE-3 checkpoint, which "
                  f"{self.initialise!r} is not"),
                 (self.verify_states in VERIFIED, f"verify_states must be one of {', '.join(VERIFIED)}"),
                 (self.compute in ("fp32", "bf16"), "compute must be fp32 or bf16")]
        refuse(wrong)


@dataclass(frozen=True)
class Machines:
    """Where a run computes. Nothing here decides its result: a run may go on with other processes than it began with.

    On several machines the same command runs on each with its own node_rank; all reach `rendezvous`.
    """

    processes: int = 0               # on this machine; 0: one a GPU, one on a CPU
    nodes: int = 1                   # machines
    node_rank: int = 0               # this machine's number; 0 leads: it writes drafter, metrics and checkpoints
    rendezvous: str = ""             # host:port of one machine, the same on all; needed where nodes > 1
    max_restarts: int = 0            # times that all processes start again from a checkpoint after one has failed

    @classmethod
    def of(cls, parameters: dict) -> "Machines":
        """From a notebook's parameters, those that are of machines."""
        names = {field.name for field in fields(cls)}
        machines = strict(cls, {name: value for name, value in parameters.items() if name in names}, "machines")
        machines.check()
        return machines

    def check(self) -> None:
        host, _, port = self.rendezvous.rpartition(":")
        wrong = [(self.processes >= 0, "processes must be 0 or more"), (self.nodes >= 1, "nodes must be 1 or more"),
                 (self.max_restarts >= 0, "max_restarts must be 0 or more"),
                 (0 <= self.node_rank < self.nodes, f"node_rank is {self.node_rank}; it must lie in 0 … nodes − 1"),
                 (self.nodes == 1 or host and port.isdigit(),
                  f"rendezvous is {self.rendezvous!r}; on {self.nodes} nodes it must be host:port of one of them")]
        refuse(wrong)


def strict(cls, values: dict, what: str):
    """The dataclass of these values; UserError for an unknown or missing key and for a wrong type."""
    known = {field.name: field.type for field in fields(cls)}
    if unknown := sorted(set(values) - set(known)):
        raise UserError(f"{what} have unknown keys {unknown}; known are {', '.join(known)}")
    try:
        made = cls(**values)
    except TypeError as error:
        raise UserError(f"{what} are incomplete: {error}") from None
    for name, kind in known.items():
        value, accepted = getattr(made, name), (int, float) if kind is float else kind
        if not isinstance(value, accepted) or isinstance(value, bool) != (kind is bool):
            raise UserError(f"training setting {name} is {value!r}; it must be {kind.__name__}")
    return made


def refuse(checks: list[tuple[bool, str]]) -> None:
    """checks: (it is right, what to say if it is not)."""
    for right, message in checks:
        if not right:
            raise UserError(f"{message}; see the parameters of notebook 4")


def warmup_steps(settings: Settings, planned: int) -> int:
    """Optimiser steps of the linear warm-up, of `planned` ones."""
    return max(1, round(settings.warmup_share * planned))


def learning_rate(settings: Settings, step: int, total: int, warmup: int) -> float:
    """Of optimiser step 0…total − 1: linear warm-up, then a cosine to zero."""
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def run_identity(settings: Settings, ids: list[int], fingerprint, checkpoint: str = "") -> str:
    """Hash of all that decides the result; where folders lie and how often to save do not. checkpoint: the content of
    the one that is fine-tuned (finetune.content), which counts in place of its folder."""
    free = ("states", "drafter", "target", "corpus", "checkpoint_every", "verify_states")
    decides = {name: value for name, value in asdict(settings).items() if name not in free}
    decides["initialise"] = checkpoint or settings.initialise
    whole = json.dumps([decides, ids, fingerprint], sort_keys=True, default=str)
    return hashlib.sha256(whole.encode()).hexdigest()[:16]
