"""SGLang's server: one that is started here and ends with its block, or one that runs already.

Whatever answers is checked before anything is asked of it: another target's text, a drafter that does not fit, a server
that drafts otherwise than thought, or not at all, would give figures that look right.
"""

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from eagle3nb.drafter import export
from eagle3nb.errors import UserError
from eagle3nb.files import resolve, shown, xxh3_file
from eagle3nb.parent import environment as around
from eagle3nb.progress import progress
from eagle3nb.states.sglang import CPU_TOKENS, SPARE, environment, extra, stored_dtype
from eagle3nb.states.sglang_process import finish, new_log, python, sockets, states_folder, why
from eagle3nb.states.target import TargetFacts, captured_layers, facts_of, target_identity

HERE = "127.0.0.1"
OURS = ("model_path", "host", "port", "skip_tokenizer_init", "disable_radix_cache", "tp_size", "dtype", "device",
        "speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps", "speculative_eagle_topk",
        "speculative_num_draft_tokens")
LOOK, LINE = 1.0, 60  # seconds between looks at a server that starts; characters of its log's last line that are shown
REACH = (OSError, urllib.error.URLError, TimeoutError)


@dataclass(frozen=True)
class Server:
    """A server that answers at `url` with the text of the target in `target`.

    `steps` drafted tokens a verify, 0 without speculation. `longest`: tokens that a prompt and its answer may have
    together. `identity`: all that its answers and counts depend on. `load_s`: seconds that its start took; `log`
    (`log_bytes` long by then) and `process` of one that was started here, else None.
    """

    url: str
    target: Path
    facts: TargetFacts
    steps: int
    longest: int
    version: str
    dtype: str
    identity: dict = field(hash=False)
    settings: dict = field(hash=False)
    load_s: float | None = None
    log: Path | None = None
    log_bytes: int = 0
    process: subprocess.Popen | None = None

    @property
    def ended(self) -> bool:
        """It was started here, and its process is gone."""
        return self.process is not None and over(self.process)

    def why(self) -> str:
        """One line on a server that does not answer any more."""
        if self.ended:
            return why(self.log, since=self.log_bytes)
        return f"the server at {self.url} does not answer any more"


@contextmanager
def start(target_dir: str | Path, *, drafter_dir: str | Path | None = None, steps: int = 0, engine_args=(),
          port: int = 0, dtype: str = "", tensor_parallel: int = 1, text: bool = False, timeout_s: float = 3600):
    """A Server of the target for the length of a block: `with server.start(folder, drafter_dir=…, steps=3) as served:`

    With drafter_dir (an export) it drafts chains of `steps` tokens. port 0: a free one; it listens to this machine
    alone. dtype as SGLang spells it ("float32", "bfloat16"); empty: SGLang's choice, on a CPU float32. engine_args:
    more of SGLang's arguments, "name=value". text: with its tokenizer, so that it chats too. Prompts do not help one
    another (no radix cache). It ends with the block, and with this process, however that ends. UserError where the
    drafter does not fit, or with SGLang's own reason and the place of its log where the server does not start.
    """
    target, cpu = Path(target_dir).resolve(), not torch.cuda.is_available()
    check_drafter(drafter_dir, target, steps)
    arguments = launch_arguments(target, drafter_dir, steps, free_port(port), dtype or ("float32" if cpu else ""),
                                 tensor_parallel, cpu)
    arguments |= {"skip_tokenizer_init": not text} | extra(engine_args, OURS, "the comparison itself")
    url, interpreter = f"http://{HERE}:{arguments['port']}", python()
    folder, handle = states_folder()
    log = new_log(f"server-{folder.name.removeprefix('states-')}")
    began = time.perf_counter()
    with open(log, "wb") as told:
        process = subprocess.Popen(
            [interpreter, "-m", "eagle3nb.acceptance.server_worker", *flags(arguments)], stdin=subprocess.PIPE,
            stdout=told, stderr=subprocess.STDOUT, start_new_session=True,
            env=around(**sockets(folder), **environment("cpu" if cpu else "cuda")))
    try:
        wait(url, process, log, timeout_s)
        found = described(url, target, drafter_dir)
        yield Server(**found, load_s=time.perf_counter() - began, log=log, log_bytes=log.stat().st_size,
                     process=process)
    finally:
        finish(os.getpid(), process, folder, handle, log)


def attach(url: str, target_dir: str | Path, *, drafter_dir: str | Path | None = None,
           steps: int | None = None) -> Server:
    """A server that runs, wherever. `steps`: drafted tokens that it must draft a verify (0: none; None: as it does).

    drafter_dir: the export that it drafts with; its hash then stands in `identity`, so that answers can be kept beyond
    the server's life. UserError where nothing answers, or it serves another target, or drafts otherwise.
    """
    found = Server(**described(url.rstrip("/"), Path(target_dir), drafter_dir))
    if steps and not found.steps:
        raise UserError(f"the server at {found.url} does not speculate; start it with --speculative-algorithm EAGLE3 "
                        f"--speculative-draft-model-path DIR --speculative-num-steps {steps} --speculative-eagle-topk "
                        f"1 --speculative-num-draft-tokens {steps + 1}")
    if steps is not None and steps != found.steps:
        raise UserError(f"the server at {found.url} drafts {found.steps} tokens a verify, not {steps}; start it with "
                        "the other number, or set steps")
    return found


# ------------------------------------------------------------------------------------------------ before the start


def check_drafter(drafter_dir, target_dir: Path, steps: int) -> None:
    """UserError where the export is not whole, or was made for another target's sizes or layers than these."""
    if (drafter_dir is None) != (steps == 0):
        raise UserError(f"steps is {steps} and drafter_dir {drafter_dir and shown(drafter_dir)}: to speculate takes "
                        "both, to serve the target alone neither")
    if drafter_dir is None:
        return
    config, facts = export.check(drafter_dir), facts_of(target_dir)
    wanted = {"vocab_size": facts.vocab, "hidden size": facts.hidden,
              "captured layers": list(captured_layers(facts.layers))}
    found = {"vocab_size": config["vocab_size"], "hidden size": config.get("target_hidden_size", config["hidden_size"]),
             "captured layers": config.get("eagle3nb", {}).get("captured_layers", wanted["captured layers"])}
    for name, value in wanted.items():
        if found[name] != value:
            raise UserError(f"the drafter in {shown(drafter_dir)} does not fit the target {shown(target_dir)}: its "
                            f"{name} is {found[name]}, the target's {value}; export the drafter of this target")


def launch_arguments(target: Path, drafter_dir, steps: int, port: int, dtype: str, tensor_parallel: int,
                     cpu: bool) -> dict:
    """SGLang's arguments by name. The context has room for drafts behind the target's last position."""
    facts = facts_of(target)
    found = {"model_path": str(target), "host": HERE, "port": port, "skip_tokenizer_init": True,
             "disable_radix_cache": True, "tp_size": tensor_parallel, "random_seed": 0,
             "context_length": facts.max_positions + SPARE + steps + 1, "log_level": "warning"}
    if dtype:
        found["dtype"] = dtype
    if steps:
        found |= {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(Path(drafter_dir).resolve()),
                  "speculative_num_steps": steps, "speculative_eagle_topk": 1,
                  "speculative_num_draft_tokens": steps + 1}
    if cpu:  # the one backend that verifies drafts there; without speculation too, so that the two compare
        found |= {"device": "cpu", "mem_fraction_static": 0.2, "max_total_tokens": CPU_TOKENS,
                  "max_running_requests": 16, "prefill_attention_backend": "intel_amx",
                  "decode_attention_backend": "intel_amx"}
        found |= {"speculative_draft_attention_backend": "intel_amx"} if steps else {}
    return found


def flags(arguments: dict) -> list[str]:
    """["--dtype", "float32", "--disable-radix-cache"] of {"dtype": "float32", "disable_radix_cache": True}."""
    found = []
    for name, value in arguments.items():
        values = value if isinstance(value, list) else [] if value is True else [value]
        if value is not False:
            found += [f"--{name.replace('_', '-')}",
                      *(json.dumps(v) if isinstance(v, dict) else str(v) for v in values)]
    return found


def free_port(port: int) -> int:
    """`port`, or any that is free for 0. UserError where another process listens there."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((HERE, port))
        except OSError as error:
            raise UserError(f"port {port}: {error.strerror}; name another, or 0 for any free one") from None
        return trial.getsockname()[1]


def wait(url: str, process, log: Path, timeout_s: float) -> None:
    """Until the server answers. UserError with its own reason where it ends, or does not within timeout_s."""
    until = time.monotonic() + timeout_s
    with progress(1, "SGLang's server starts", "start") as bar:
        while not over(process) and time.monotonic() < until:
            try:
                fetch(url + "/health", timeout=30)
                bar.advance(1, "it answers")
                return
            except REACH:
                bar.advance(0, last_line(log))
                time.sleep(LOOK)
    if not over(process):
        raise UserError(f"SGLang did not start within {timeout_s:,.0f} s; its log is {shown(log)}")
    raise UserError(why(log))


def over(process: subprocess.Popen) -> bool:
    """Has it ended? It is not reaped by asking: until `finish` has ended its group no other can have that number."""
    seen = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return process.returncode is not None or os.waitid(os.P_PID, process.pid, seen) is not None


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.is_file() else []
    return next((line.strip()[-LINE:] for line in reversed(lines) if line.strip()), "")


# ------------------------------------------------------------------------------------------------ what it serves


def fetch(url: str, body: dict | None = None, timeout: float = 60):
    """The JSON that answers (None for an empty answer): GET, or POST of `body`. One of REACH where nothing does,
    ValueError where it is no JSON. This machine's own servers are asked past any proxy."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    near = urllib.parse.urlsplit(url).hostname in (HERE, "localhost", "::1")
    opener = urllib.request.build_opener(*[urllib.request.ProxyHandler({})] if near else [])
    with opener.open(request, timeout=timeout) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def described(url: str, target: Path, drafter_dir) -> dict:
    """The fields of a Server, from what it says of itself. UserError where that is not what is wanted."""
    try:
        model, info = fetch(url + "/model_info"), fetch(url + "/server_info")
        name, served, version = info["speculative_algorithm"], model["model_path"], info["version"]
        longest = info["max_req_input_len"] - (info["speculative_num_draft_tokens"] or 0)  # reserved for a verify
    except (urllib.error.HTTPError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"what answers at {url} is no SGLang 0.5.23 (/model_info, /server_info: {error!r}); give the "
                        "address of its server, without a path") from None
    except REACH as error:
        raise UserError(f"no server answers at {url} ({getattr(error, 'reason', error)}); start it, or let it be "
                        "started here") from None
    check_target(url, served, model.get("architectures"), target)
    topk, steps = info.get("speculative_eagle_topk"), info.get("speculative_num_steps") if name else 0
    if name and (name, topk) != ("EAGLE3", 1):
        raise UserError(f"the server at {url} speculates with {name} and speculative_eagle_topk {topk}, which no walk "
                        "counts; start it with EAGLE3 and 1")
    settings = {key: info.get(key) for key in (
        "version", "dtype", "quantization", "kv_cache_dtype", "tp_size", "prefill_attention_backend",
        "decode_attention_backend", "disable_radix_cache", "max_running_requests", "max_total_num_tokens")}
    identity = {"target": target_identity(target), "settings": settings, "steps": steps,
                "arguments": without_places(info.get("launch_command") or ""),
                "drafter": identity_of(url, info, drafter_dir) if steps else None}
    return {"url": url, "target": target, "facts": facts_of(target), "steps": steps, "longest": longest,
            "version": version, "dtype": dtype_of(info, target), "identity": identity, "settings": settings}


def dtype_of(info: dict, target: Path) -> str:
    return str(stored_dtype(target)).removeprefix("torch.") if info.get("dtype") == "auto" else str(info.get("dtype"))


def check_target(url: str, served: str, architectures, target: Path) -> None:
    """UserError where the server's model is another than `target`'s: by content where its directory is seen from here,
    else by its architecture (and in the end by its text)."""
    folder, facts = Path(served), facts_of(target)
    if (folder / "config.json").is_file() and folder.is_absolute():
        same = folder.resolve() == target.resolve() or target_identity(folder) == target_identity(target)
    else:
        same = not architectures or facts.architecture in (*architectures, "unknown")
    if not same:
        raise UserError(f"the server at {url} serves another model ({folder.name}, {', '.join(architectures or ())}) "
                        f"than {shown(target)}; start it with this one, or set target")


def identity_of(url: str, info: dict, drafter_dir):
    """Hashes of the export that a server drafts with; where it is not seen from here, when the server was started."""
    served = Path(info["speculative_draft_model_path"] or "")
    there = drafter_identity(served) if served.is_absolute() and (served / "config.json").is_file() else None
    if drafter_dir is None:
        return there or info.get("startup_time")
    wanted = drafter_identity(Path(drafter_dir))
    if there not in (None, wanted):
        raise UserError(f"the server at {url} drafts with {shown(served)}, which is another drafter than "
                        f"{shown(drafter_dir)}; start it with that one")
    return wanted


def drafter_identity(folder: Path) -> dict:
    return {file.name: xxh3_file(file) for file in sorted(resolve(folder).glob("*"))
            if file.name == "config.json" or file.suffix == ".safetensors"}


def without_places(command: str) -> list[str]:
    """A server's arguments without its port and the paths of its models, which say nothing of what it answers."""
    words, found = command.split(), []
    while words:
        word = words.pop(0)
        if word in ("--port", "--host", "--model-path", "--model", "--speculative-draft-model-path"):
            words = words[1:]
        else:
            found.append(word)
    return found
