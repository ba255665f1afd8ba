"""A project, a user's folders and the programs around them, in which the blocks of a page are run by bash.

What only touches files (cp, ln, mkdir, …) or waits is the real thing. Every other program is a stand-in on PATH, and
the only one there: it notes its words, and does as much as the next command of the page needs (ssh and srun run what
they are given). So a block with a program that is not known here fails. test_commands.py then judges each noted
command.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from pages import ROOT, blocks

FILES = ("cat", "cp", "ln", "ls", "mkdir", "seq", "sleep", "tail")  # real
NOTED = ("conda", "eagle3nb", "make", "nohup", "papermill", "pip", "python", "python3.11", "rsync", "sbatch",
         "scontrol", "squeue", "srun", "ssh", "vllm")
ENVIRONMENT = ("EAGLE3NB_SGLANG_PYTHON", "OPENROUTER_API_KEY")
STAND_IN = """#!{bash}
printf '%s\\x1f' {name} "$PWD" "$EAGLE3NB_SGLANG_PYTHON" "$OPENROUTER_API_KEY" "$@" >> {log}
printf '\\x1e' >> {log}
{action}
"""
ACTIONS = {
    "nohup": 'exec "$@"',
    # A line and then, in its own time, another: whoever closes the pipe after the first has it end by SIGPIPE.
    "scontrol": 'if [ "$1" = show ]; then printf "node0\\n"; sleep 0.2; printf "node1\\n"; fi',
    "ssh": """if [ "$1" = -N ]; then exit; fi  # a tunnel alone
cd "$HOME"; shift; exec {bash} -euc "$*
wait\"""",
    "srun": """nodes=$SLURM_JOB_NUM_NODES
while [ "${{1#-}}" != "$1" ]; do case "$1" in --nodes=*) nodes=${{1#*=}};; esac; shift; done
for ((i = 0; i < nodes; i++)); do SLURM_PROCID=$i "$@" || exit; done""",
    "sbatch": """export SLURM_SUBMIT_DIR=$PWD SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=2 SLURM_JOB_NODELIST='node[0-1]'
exec {bash} "$1\"""",
}
KEEP = "kill() { :; }; export -f kill"  # pages end processes that have ended here already
LINE = '{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}\n'
KIMI = ("A1_deepswekimi", "A2_kimik25", "B1_glaive", "B8_sweagent")


@dataclass(frozen=True)
class Command:
    """One command that a block gave, as its stand-in saw it."""

    name: str
    words: tuple[str, ...]
    cwd: str
    environment: dict
    where: str  # the block


def build(root: Path) -> Path:
    """The folders of a user who has followed the pages so far: the clone, data of his own, models, a large volume."""
    project = root / "project"
    for name in ("notebooks", "params", "data", "tools", "Makefile", "pyproject.toml", "environment.yml"):
        copy(ROOT / name, project / name)
    copy(ROOT / "outputs/specimen-demo", project / "outputs/specimen-demo")
    (root / "home").mkdir()
    (root / "home/eagle3nb").symlink_to(project)
    for name in ("mine/A_chat", "mine/B_code"):
        write(project / "data" / name / "part-000.jsonl", LINE)
    for name in ("mine-heldout", "mine-prompts"):
        write(project / f"data/{name}.jsonl", json.dumps({"id": "1", "source": "x", "messages": [
            {"role": "user", "content": "Hello?"}]}) + "\n")
    write(project / "data/their-states/data_0.safetensors", "")
    copy(ROOT / "params/demo", project / "params/mine")
    for block in (b for b in blocks("docs/how-to/own-data.md") if b.language == "yaml"):
        write(project / block.text.split()[1], block.text)
    model(project / "models/my-model")
    model(project / "models/published-drafter")
    model(root / "large/models/Kimi-K2.5")
    for name in KIMI:
        write(root / "large/data/kimi-k2.5" / name / "part.jsonl", LINE)
    for folder in (project / ".venv/bin", project / ".venv-sglang/bin", root / "bin"):
        folder.mkdir(parents=True)
    write(project / ".venv/bin/activate", f'export PATH="{project}/.venv/bin:$PATH"\n')
    (project / ".venv-sglang/bin/python").symlink_to(sys.executable)
    packages(root / "site")
    return root


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "work"))
    else:
        shutil.copy2(source, target)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def model(folder: Path) -> None:
    """What a model's folder looks like from outside: Kimi's config stands for any."""
    copy(ROOT / "params/kimi-k2.5/target/config.json", folder / "config.json")
    write(folder / "tokenizer_config.json", "{}")
    write(folder / "model.safetensors", "")


def packages(site: Path) -> None:
    """The packages that carry sets of prompts, as installed: their metadata and their file."""
    import gzip

    from eagle3nb.acceptance.prompts import PACKAGES

    for package, path in PACKAGES.values():
        write(site / f"{package.replace('-', '_')}-1.0.dist-info/METADATA",
              f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        data = json.dumps({"id": "1", "task_id": "1", "question_id": 1, "prompt": "Why?", "turns": ["Why?"]}).encode()
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(gzip.compress(data) if path.endswith(".gz") else data)


class World:
    """A copy of `base` for one page."""

    def __init__(self, base: Path, folder: Path):
        shutil.copytree(base, folder, symlinks=True)
        self.folder, self.project, self.log = folder, folder / "project", folder / "commands"
        (folder / "home/eagle3nb").unlink()
        (folder / "home/eagle3nb").symlink_to(self.project)
        write(self.project / ".venv/bin/activate", f'export PATH="{self.project}/.venv/bin:$PATH"\n')
        write(folder / "environment", KEEP)
        self.bash = shutil.which("bash")
        for name in FILES:
            (folder / "bin" / name).symlink_to(shutil.which(name))
        (folder / "bin/bash").symlink_to(self.bash)
        for name in NOTED:
            self.stand_in(folder / "bin" / name)
        for name in ("eagle3nb", "papermill", "pip", "python"):
            self.stand_in(self.project / ".venv/bin" / name)

    def stand_in(self, path: Path) -> None:
        action = ACTIONS.get(path.name, "").format(bash=self.bash)
        write(path, STAND_IN.format(bash=self.bash, name=path.name, log=self.log, action=action))
        path.chmod(0o755)

    def placed(self, text: str) -> str:
        """The large volume of the pages is a folder of this world."""
        return text.replace("/large/", f"{self.folder}/large/")

    def run(self, block) -> list[Command]:
        """Runs a block from the project's root; its commands, in order. AssertionError where bash fails."""
        self.log.write_text("")
        environment = {"PATH": str(self.folder / "bin"), "HOME": str(self.folder / "home"), "LC_ALL": "C.UTF-8",
                       "BASH_ENV": str(self.folder / "environment")}
        text = self.placed(block.text) + "wait\n"  # for what it left in the background
        done = subprocess.run([self.bash, "-euc", text], cwd=self.project, env=environment,
                              capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{block.where}: bash ends with {done.returncode}: {done.stderr}"
        listed = []
        for entry in self.log.read_text(encoding="utf-8").split("\x1e")[:-1]:
            name, cwd, *rest = entry.split("\x1f")[:-1]
            given = {k: v for k, v in zip(ENVIRONMENT, rest, strict=False) if v}
            listed.append(Command(name, tuple(rest[len(ENVIRONMENT):]), os.path.realpath(cwd), given, block.where))
        return listed

    def write_file(self, name: str, text: str) -> Path:
        path = self.project / name
        write(path, self.placed(text))
        return path

    def finish(self, run: str, work: Path, stages, store: Path) -> None:
        """What the run would have left, as far as later commands ask for it: records, and the first file of each."""
        for stage, files in (("merge", ("corpus/merge.json",)), ("extraction", ()),
                             ("training", ("drafter/config.json", "drafter/model.safetensors")),
                             ("evaluation", ("evaluation/acceptance.json", "export/config.json", "export/README.md"))):
            for file in files if stage in stages else ():
                write(work / file, "{}")
        if "extraction" in stages and not (work / "states/manifest.json").exists():
            shutil.copytree(store, work / "states", dirs_exist_ok=True)
        folder = self.project / "outputs" / run
        for record in (ROOT / "outputs/specimen-demo").glob("[1-5]_*"):
            if record.stem.split("_")[1] in stages and not (folder / record.name).exists():
                copy(record, folder / record.name)
                if record.suffix == ".json":
                    twin = json.loads(record.read_text(encoding="utf-8"))
                    twin["parameters"]["run"] = run
                    (folder / record.name).chmod(0o644)
                    write(folder / record.name, json.dumps(twin))
