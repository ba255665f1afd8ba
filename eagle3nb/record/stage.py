"""The first and the last cell of every notebook.

    stage = record.start("merge", globals())
    ...
    stage.finish("37,312 records, 87.8M tokens", result={...}, inputs=[...], outputs=[stage.paths.corpus])

`start` checks the parameters against the types that the notebook declares, shows them with the provenance, seeds the
random generators and writes outputs/<run>/<n>_<stage>.json as "failed: did not finish", so that a killed kernel leaves
a failure behind. `finish` makes it "ok" and puts the verdict on top of the record. Works outside a notebook too.
"""

import os
import random
import re
import resource
import sys
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

from eagle3nb.errors import UserError
from eagle3nb.files import project_root, read_json, resolve, shown, write_json
from eagle3nb.record import index, tables
from eagle3nb.record.declared import STAGES, check, declared, notebook_hash, notebook_of, stem
from eagle3nb.record.keys import refuse_keys
from eagle3nb.record.provenance import (
    entries,
    gpus,
    label,
    parameters_hash,
    plain,
    provenance,
    scrubbed,
    scrubber,
    shareable,
)

# IPython asks an exception for its own rendering: this one line, and the cell still counts as failed.
UserError._render_traceback_ = lambda error: [f"\x1b[31m{error}\x1b[0m"]


@dataclass(frozen=True)
class Paths:
    """Absolute folders of a run. None is made here: whoever writes makes its own."""

    run: Path
    work: Path
    audit: Path
    corpus: Path
    states: Path
    drafter: Path
    export: Path
    evaluation: Path


def paths_of(run: str, work_dir: str = "") -> Paths:
    """The folders of run `run`; UserError for a name that is no plain file name."""
    if not isinstance(run, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", run):
        raise UserError(f"parameter run must be a name of letters, digits, dash, underscore and dot, not {run!r}")
    folder = project_root() / "outputs" / run
    work = resolve(work_dir) if work_dir else folder / "work"
    return Paths(folder, work, *(work / n for n in ("audit", "corpus", "states", "drafter", "export", "evaluation")))


def start(stage: str, values: dict) -> "Stage":
    """Opens the stage: `values` is the notebook's globals(). Raises UserError for an ill-typed parameter."""
    if stage not in STAGES:
        raise UserError(f"no stage {stage!r}; the stages are {', '.join(STAGES)}")
    opened = Stage(stage, values)
    opened.begin()
    return opened


def shell():
    """The IPython shell, or None in plain Python."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


def show(html: str, text: str, *, display_id: str = "", update: bool = False, role: str = "") -> None:
    """HTML in a notebook; nothing outside one."""
    if shell() is None:
        return
    from IPython.display import display

    more = {"display_id": display_id, "update": update} if display_id else {}
    metadata = {"eagle3nb": {"role": role}} if role else None
    display({"text/html": html, "text/plain": text}, raw=True, metadata=metadata, **more)


class Live:
    """One figure in the record that is redrawn in place: `live.update(fig)`."""

    def __init__(self, alt: str):
        self.alt, self.handle = alt, None

    def update(self, fig, alt: str = "") -> None:
        from eagle3nb.record import figures  # matplotlib takes a second, which `status` need not wait for

        self.alt = alt or self.alt
        picture, width = figures.png(fig)
        if shell() is None:
            return
        from IPython.display import display

        bundle = {"image/png": picture, "text/plain": self.alt}
        metadata = {"image/png": {"alt": self.alt, "width": width}}
        if self.handle is None:
            self.handle = display(bundle, raw=True, metadata=metadata, display_id=True)
        else:
            self.handle.update(bundle, raw=True, metadata=metadata)


class Stage:
    """A stage that runs. `paths`: the run's folders. `parameters`: the declared ones with their present values."""

    def __init__(self, name: str, values: dict):
        self.name, self.notebook = name, notebook_of(name)
        self.declared = declared(self.notebook)
        missing = [n for n in self.declared if n not in values]
        if missing:
            raise UserError(f"parameter {missing[0]} is not set; run the notebook's parameters cell before this one")
        self.parameters = {n: values[n] for n in self.declared}
        self.paths = paths_of(self.parameters.get("run", "demo"), self.parameters.get("work_dir", ""))
        self.twin_path = self.paths.run / f"{stem(name)}.json"
        self.title = f"{STAGES.index(name)} {name} · run {self.parameters.get('run', 'demo')}"
        self.scrub = scrubber(self.parameters)
        self.meter, self.finished = Meter(), False
        self.twin = {"stage": name, "status": "failed", "error": "did not finish", "parameters": {}, "provenance": {},
                     "inputs": [], "outputs": [], "result": {}, "cost": {}}

    def begin(self) -> None:
        watch(self)
        refuse_keys(self.parameters)
        self.show_verdict("running", "has not finished yet", update=False)
        self.twin["parameters"] = shareable(self.parameters)
        self.twin["provenance"] = provenance(self.name) | {
            "notebook": shown(self.notebook), "notebook_xxh3": notebook_hash(self.notebook),
            "parameters_xxh3": parameters_hash(self.parameters), "command": os.environ.get("EAGLE3NB_COMMAND", ""),
            "started": datetime.now(UTC).isoformat(timespec="seconds")}
        self.write()
        for name, parameter in self.declared.items():
            self.parameters[name] = check(parameter, self.parameters[name])
        self.twin["parameters"] = shareable(self.parameters)
        self.twin["provenance"]["parameters_xxh3"] = parameters_hash(self.parameters)
        self.write()
        seed_all(self.parameters.get("seed", 0))
        self.show_parameters()
        self.show_provenance()

    def record_of(self, stage: str) -> dict:
        """Another stage of this run: its parameters, result, provenance; nothing unless it ended well."""
        path = self.paths.run / f"{stem(stage)}.json"
        found = read_json(path) if path.is_file() else {}
        return found if found.get("status") == "ok" else {"parameters": {}, "result": {}}

    def figure(self, fig, alt: str) -> None:
        """The figure as a PNG (about 110 dpi) with alt text: one sentence that says what is to be seen."""
        Live(alt).update(fig)

    def live(self, alt: str) -> Live:
        """A figure that is redrawn in place (training's curve): `.update(fig, alt)` as often as one likes."""
        return Live(alt)

    def table(self, data, caption: str) -> None:
        """A DataFrame or a list of dicts as an accessible table with thousands separators."""
        rows = data.to_dict(orient="records") if hasattr(data, "to_dict") else list(data)
        show(tables.table(rows, caption), tables.table_text(rows, caption))

    def html(self, html: str, text: str) -> None:
        """HTML of one's own, everything in it escaped and its styles inline, with its twin as plain text."""
        if html:
            show(html, text)

    def finish(self, verdict: str, result: dict, inputs=(), outputs=()) -> None:
        """Closes the stage as ok: one sentence, its figures, and the files it read and wrote (folders are expanded).

        `result` may hold `console`, a list of lines that the runner prints after the stage. Raises UserError where a
        named file does not exist.
        """
        files = {"inputs": list(map(resolve, inputs)), "outputs": list(map(resolve, outputs))}
        self.twin |= {kind: entries(paths, self.parameters) for kind, paths in files.items()}
        self.twin["provenance"]["folders"] = {kind: [label(p, self.parameters) for p in paths if p.is_dir()]
                                              for kind, paths in files.items()}
        self.twin["result"] = scrubbed(plain({"verdict": verdict} | dict(result)), self.scrub)
        self.twin["provenance"]["gpus"] = gpus()
        self.twin["cost"] = self.meter.read()
        self.twin["status"], self.finished = "ok", True
        self.twin.pop("error", None)
        self.write()
        index.write_index(self.paths.run)  # in Lab, and under papermill alone, nobody else does
        for name in ("inputs", "outputs"):
            rows = [{"file": e["path"], "size": tables.size(e["bytes"]), "xxh3": e["xxh3"][:12]}
                    for e in self.twin[name]]
            if rows:
                self.table(rows, name.capitalize())
        cost = self.twin["cost"]
        self.table([{"wall time": tables.span(cost["wall_s"]), "CPU time": tables.span(cost["cpu_s"]),
                     "peak memory": tables.size(cost["peak_rss_bytes"])}], "Cost")
        self.show_verdict("ok", verdict)

    def fail(self, error: str) -> None:
        """Notes why the stage fails. Called when a cell raises; a stage that has finished stays ok."""
        if self.finished:
            return
        self.twin.update(status="failed", error=self.scrub(error), cost=self.meter.read())
        self.write()
        index.write_index(self.paths.run)
        self.show_verdict("failed", self.twin["error"])

    def write(self) -> None:
        write_json(self.twin_path, self.twin)

    def show_verdict(self, status: str, sentence: str, update: bool = True) -> None:
        show(tables.banner(status, self.title, sentence), f"{status}: {sentence}", display_id=f"eagle3nb-{self.name}",
             update=update, role="verdict")
        if shell() is None and update:
            print(f"{self.title}: {status}: {sentence}")

    def show_parameters(self) -> None:
        rows, changed = [], []
        for name, parameter in self.declared.items():
            differs = self.parameters[name] != parameter.default
            changed += [len(rows)] if differs else []
            rows.append({"parameter": name, "value": repr(self.twin["parameters"][name]),
                         "default": repr(parameter.default), "set": "● set" if differs else "",
                         "what it means": parameter.meaning})
        show(tables.table(rows, "Parameters", strong=changed), tables.table_text(rows, "Parameters"))

    def show_provenance(self) -> None:
        facts = self.twin["provenance"]
        state = {None: "no git", True: " with local changes", False: ""}[facts["dirty"]]
        machine = f"{facts['system']}, {facts['cores']} cores, {tables.size(facts['ram_bytes'])} RAM"
        values = {"commit": (facts["commit"] or "")[:12] + state,
                  "notebook, code": f"{facts['notebook_xxh3'][:12]}, {facts['code_xxh3'][:12]}",
                  "versions": ", ".join(f"{k} {v}" for k, v in facts["versions"].items()),
                  "machine": machine, "started": facts["started"]}
        rows = [{"what": k, "value": v} for k, v in values.items()]
        show(tables.table(rows, "Provenance"), tables.table_text(rows, "Provenance"))


class Meter:
    """Wall time, CPU time and peak memory of this process and all it starts; memory is sampled once a second."""

    def __init__(self):
        self.started, self.cpu, self.peak = time.monotonic(), cpu_seconds(), 0
        threading.Thread(target=self.sample, daemon=True).start()

    def sample(self) -> None:
        me = psutil.Process()
        while True:
            held = 0
            for process in (me, *me.children(recursive=True)):
                try:
                    held += process.memory_info().rss
                except psutil.Error:
                    continue
            self.peak = max(self.peak, held)
            time.sleep(1.0)

    def read(self) -> dict:
        unit = 1 if sys.platform == "darwin" else 1024
        own = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) * unit
        cost = {"wall_s": round(time.monotonic() - self.started, 3), "cpu_s": round(cpu_seconds() - self.cpu, 3),
                "peak_rss_bytes": max(self.peak, own)}
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            cost["peak_gpu_bytes"] = max(torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count()))
        return cost


def cpu_seconds() -> float:
    """User and system time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def seed_all(seed: int) -> None:
    """random, numpy, and torch where it is loaded already. What must be reproducible takes its own seeded generator."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


watched: list = []  # the stage whose cells run now; one hook serves it, however often `start` is run again


def watch(stage: Stage) -> None:
    """From here on a cell that raises marks this stage as failed, with the error's line."""
    if shell() is not None and not watched:
        shell().events.register("post_run_cell", after_cell)
    watched[:] = [stage]


def after_cell(result) -> None:
    error = result.error_before_exec or result.error_in_exec
    if error is not None and watched:
        line = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        watched[0].fail(" ".join(line.split()))
