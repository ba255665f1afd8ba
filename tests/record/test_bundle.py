"""A bundle holds what it is to hold and nothing else; every kind of secret in every form it can take in a file is found
and stops it; unpacked elsewhere it reads, runs and compares."""

import base64
import html
import json
import os
import re
import socket
import zipfile
import zlib
from pathlib import Path
from urllib.parse import quote

import made_runs
import psutil
import pytest
import xxhash

from eagle3nb.cli import main
from eagle3nb.lock import only_one
from eagle3nb.record import leaks, runs
from eagle3nb.record.params import load

TOLD = "the-secret-value-of-a-variable"
KEY = "sk-or-v1-0123456789abcdef0123456789abcdef"
# Put together here, so that nobody's scanner takes this file for a leak.
OTHERS = {"hf": "hf_" + "aB3" * 8, "github": "ghp_" + "x1Y2" * 9, "pat": "github_pat_" + "11A" * 9,
          "aws": "AKIA" + "Q" * 16, "google": "AIza" + "b" * 35, "slack": "xoxb-" + "12345-abcde",
          "gitlab": "glpat-" + "a_b" * 7,
          "bearer": "Authorization: Bearer " + "abc.DEF" * 4, "jwt": "eyJhbGciOiJI.eyJzdWIiOiIx.x",
          "pem": "-----BEGIN RSA PRIVATE " + "KEY-----", "url": "https://me:hunter2@host.example/x"}


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A project in a folder of its own, on a machine and for a user whose names are telling."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-box-17.cluster")
    monkeypatch.setattr(psutil.Process, "username", lambda self: "mara.lindqvist")
    for name in ("USER", "LOGNAME", "HOSTNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SOME_API_KEY", TOLD)
    return made_runs.project(tmp_path)


def unpacked(root, name="demo") -> dict[str, bytes]:
    with zipfile.ZipFile(root / f"outputs/{name}.zip") as archive:
        return {entry: archive.read(entry) for entry in archive.namelist()}


def test_what_is_in_it_and_what_is_not(root, capsys):
    folder = made_runs.make(root)
    for other in ("weights.safetensors", ".env", "notes.txt", "1_audit.ipynb.partial", "6_more.json",
                  "work/corpus/merged.jsonl", "work/states/shard-0.safetensors", "work/export/model.safetensors",
                  "work/.runner/5_evaluation.log"):
        (folder / other).parent.mkdir(parents=True, exist_ok=True)
        (folder / other).write_text("not to be handed on")
    assert main(["bundle", "demo"]) == 0
    assert "outputs/demo.zip: 25 files" in capsys.readouterr().out
    files = unpacked(root)
    assert set(files) == {f"demo/{name}" for name in (
        *(f"{stem}.{ending}" for stem in made_runs.STEMS.values() for ending in ("html", "ipynb", "json")),
        *(f"params/{stage}.yml" for stage in made_runs.STEMS), "index.html", "MANIFEST.json", "work/export/README.md",
        "work/evaluation/acceptance.json", "work/drafter/metrics.jsonl")}
    told = json.loads(files["demo/MANIFEST.json"])
    assert told["stages"] == dict.fromkeys(made_runs.STEMS, "ok") and told["run"] == "demo"
    assert {f"demo/{e['path']}": (e["bytes"], e["xxh3"]) for e in told["files"]} == {
        name: (len(content), xxhash.xxh3_128_hexdigest(content)) for name, content in files.items()
        if name != "demo/MANIFEST.json"}
    for name, content in files.items():
        path = folder / name.removeprefix("demo/")
        assert "params/" in name or "MANIFEST" in name or name == "demo/index.html" or path.read_bytes() == content


def test_the_same_record_gives_the_same_bytes(root):
    folder = made_runs.make(root)
    assert main(["bundle", "demo"]) == main(["bundle", "demo", "--out", "elsewhere/two.zip"]) == 0
    for path in folder.rglob("*"):
        os.utime(path, (1, 1))
    assert main(["bundle", "demo", "--out", "three.zip"]) == 0
    assert len({Path(root / name).read_bytes() for name in ("outputs/demo.zip", "elsewhere/two.zip", "three.zip")}) == 1
    with zipfile.ZipFile(root / "three.zip") as archive:
        names = [entry.filename for entry in archive.infolist()]
        assert names == sorted(names) and {entry.date_time[0] for entry in archive.infolist()} == {1980}


def test_unpacked_elsewhere_it_reads_runs_and_compares(root, tmp_path_factory, monkeypatch):
    made_runs.make(root, learning_rate=0.001, exclude=["A1", "B2"])
    assert main(["bundle", "demo"]) == 0
    true = load("demo", tuple(made_runs.STEMS), [("learning_rate", "0.001"), ("exclude", "A1,B2")], "demo")
    other = made_runs.project(tmp_path_factory.mktemp("other"))
    monkeypatch.chdir(other)
    with zipfile.ZipFile(root / "outputs/demo.zip") as archive:
        archive.extractall(other / "outputs")
    folder = other / "outputs/demo"
    for page in folder.glob("*.html"):
        text = page.read_text()
        assert not re.search(r"""(src|href)=["']?(https?:|/)""", text)
        for link in re.findall(r'href="([^"#]+)"', text):
            assert (folder / link).is_file(), (page.name, link)
    for stage, settings in load(str(folder / "params"), tuple(made_runs.STEMS)).items():
        assert settings.full == true[stage].full
    made_runs.make(other, "mine", seed=1)
    assert main(["compare", "demo", "mine"]) == 0
    assert "not at hand" not in (other / "outputs/compare-demo-mine.html").read_text()


# ------------------------------------------------------------------------------------------ what must not be in it


def png(text: str, kind: bytes = b"tEXt") -> str:
    """A picture that carries the text beside its pixels."""
    body = b"Comment\0" + (b"\0" + zlib.compress(text.encode()) if kind == b"zTXt" else text.encode())
    chunk = len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR" + b"\0" * 17 + chunk).decode()


def secrets(root) -> dict[str, tuple[str, str]]:
    """kind → (what stands in the file, how the find is told)."""
    return {
        "root": (f"read {root}/data/x", "a path of this machine"),
        "home": (f"{Path.home()}/models", "a path of this machine"),
        "another's home": ("see /home/otto/run", "a home folder"), "Mac": ("/Users/otto/run", "a home folder"),
        "Windows": ("C:\\Users\\otto", "a user's folder"), "volume": ("/mnt/big7/states", "a volume"),
        "host": ("on gpu-box-17 it ran", "this machine's name"),
        "host, whole": ("GPU-BOX-17.cluster", "this machine's name"),
        "user": ("mara.lindqvist ran it", "the user's name"),
        "variable": (f"={TOLD};", "the value of SOME_API_KEY"), "node": ("http://node7:30000", "an address inside"),
        "address": ("http://10.1.2.3:30000/v1", "an address inside"),
        "key": (f"key {KEY}.", "a key (sk- …)"), **{name: (text, "") for name, text in OTHERS.items()}}


KINDS = ("root", "home", "another's home", "Mac", "Windows", "volume", "host", "host, whole", "user", "variable",
         "address", "node", "key", *OTHERS)
FORMS = {  # where a text stands, in a way that the file's reader would undo
    "verdict": lambda folder, text: twin_with(folder, result={"verdict": text}),
    "JSON key": lambda folder, text: twin_with(folder, result={"verdict": "", "deep": [{text: 1}]}),
    "JSON in JSON": lambda folder, text: twin_with(
        folder, result={"verdict": json.dumps({"x": text.replace("/", "\x00")}).replace("\\u0000", "\\/")}),
    "stream": lambda folder, text: output(folder, {"output_type": "stream", "text": ["a\n", *text]}),
    "HTML output": lambda folder, text: output(folder, {"data": {"text/html": f"<td>{html.escape(text)}</td>"}}),
    "HTML entities": lambda folder, text: output(
        folder, {"data": {"text/html": "".join(f"&#{ord(c)};" for c in text)}}),
    "tags within": lambda folder, text: output(
        folder, {"data": {"text/html": "".join(f"<i>{html.escape(c)}</i>" for c in text)}}),
    "colours within": lambda folder, text: output(
        folder, {"traceback": [text[:3] + "\x1b[31m" + text[3:7] + "\x1b[0m" + text[7:]]}),
    "picture's note": lambda folder, text: output(folder, {"data": {"image/png": png(text)}}),
    "packed note": lambda folder, text: output(folder, {"data": {"image/png": png(text, b"zTXt")}}),
    "page": lambda folder, text: page_with(folder, f"<p>\n<b>{html.escape(text)}</b>"),
    "page's picture": lambda folder, text: page_with(folder, f'<img src="data:image/png;base64,{png(text)}">'),
    "address": lambda folder, text: page_with(folder, f'<a href="?x={quote(text, safe="")}">'),
    "card": lambda folder, text: card_with(folder, text)}


def twin_with(folder, **parts):
    made_runs.change(folder, "merge", **parts)
    return "2_merge.json"


def output(folder, cell):
    twin = json.loads((folder / "2_merge.json").read_text())
    made_runs.save(folder, "merge", twin, [{"cell_type": "code", "metadata": {}, "source": "", "outputs": [cell]}])
    return "2_merge.ipynb"


def page_with(folder, text):
    (folder / "2_merge.html").write_text(f"<!DOCTYPE html>\n<main>{text}</main>")
    return "2_merge.html"


def card_with(folder, text):
    twin = json.loads((folder / "5_evaluation.json").read_text())
    text = f"# Card\n\nof {text}\n"
    (folder / "work/export/README.md").write_text(text)
    twin["outputs"] = [e for e in twin["outputs"] if "README" not in e["path"]]
    made_runs.change(folder, "evaluation", outputs=[*twin["outputs"], made_runs.entry("x/work/export/README.md", text)])
    return "work/export/README.md"


@pytest.mark.parametrize("form", FORMS)
def test_every_kind_of_secret_is_found_in_every_form(root, form):
    """Straight through the seeker, which the command uses: a bundle a secret would take minutes."""
    folder = made_runs.make(root)
    run = runs.run_named("demo")
    seeker, known = leaks.Seeker.of(run), secrets(root)
    assert set(KINDS) == set(known)
    for kind, (text, what) in known.items():
        file = FORMS[form](folder, text)
        found = seeker.leaks(file, (folder / file).read_bytes())
        assert any(leak.what.startswith(what) for leak in found), (kind, form, text)
        assert all(secret not in leak.what for leak in found for secret in (TOLD, KEY, *OTHERS.values()))


@pytest.mark.parametrize(("kind", "form"), [("key", "stream"), ("user", "HTML entities"), ("root", "verdict"),
                                            ("variable", "packed note"), ("host", "card")])
def test_a_find_stops_the_bundle_and_names_the_place(root, kind, form, capsys):
    folder = made_runs.make(root)
    (root / "outputs/demo.zip").write_text("an older one")
    text, what = secrets(root)[kind]
    file = FORMS[form](folder, text)
    assert main(["bundle", "demo"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("eagle3nb: outputs/demo.zip is not written, ")
    assert re.search(rf"\n  demo/{file}, [^\n]+: {re.escape(what)}", captured.err)
    assert KEY not in captured.err and TOLD not in captured.err
    assert (root / "outputs/demo.zip").read_text() == "an older one" and not list(root.rglob("*.partial"))


def test_the_place_is_exact(root):
    folder = made_runs.make(root)
    output(folder, {"data": {"text/html": [f"<p>\n{KEY}</p>"]}})
    (folder / "x.html").write_text(f"one\ntwo\n<p>{KEY}</p>")
    seeker = leaks.Seeker.of(runs.run_named("demo"))
    assert [leak.place for leak in seeker.leaks("2_merge.ipynb", (folder / "2_merge.ipynb").read_bytes())] == [
        "cells[2].outputs[0].data.text/html[0]", "cells[2].outputs[0].data.text/html"]
    assert [leak.place for leak in seeker.leaks("x.html", (folder / "x.html").read_bytes())] == ["line 3"]
    assert [leak.place for leak in seeker.leaks(f"{KEY}.html", b"")] == ["its name"]
    assert [leak.place for leak in seeker.leaks("m.jsonl", json.dumps({}).encode() + b'\n{"a": ["' + KEY.encode()
                                                + b'"]}\n{"torn')][:1] == ["line 2.a[0]"]


def test_folders_that_the_run_was_given_are_looked_for(root, tmp_path_factory):
    """A record shows `…/big/rows` for a data_root elsewhere: whatever path ends so is found, and a profile's own."""
    folder = made_runs.make(root, data_root="…/big/rows")
    (root / "params").unlink()
    (root / "params/mine").mkdir(parents=True)
    (root / "params/mine/common.yml").write_text("target: /srv/q9/target-of-mine\n")
    for stage in made_runs.STEMS:
        twin = made_runs.change(folder, stage)
        made_runs.change(folder, stage, provenance=twin["provenance"] | {"command": "eagle3nb run mine"})
    (folder / "work/.runner/status.json").write_text('{"work": "/q9/of-this-run"}')
    seeker = leaks.Seeker.of(runs.run_named("demo"))
    for text in ("/q7/big/rows/A2", "in /big/rows.", "<td>/q7/big/rows</td>", "/srv/q9/target-of-mine/config.json",
                 "/q9/of-this-run/states"):
        assert len(seeker.leaks("x.md", text.encode())) == 1, text
    for text in ("…/big/rows", "<data_root>/big/rows", "data/big/rows", "https://example.org/big/rows",
                 "/q7/big/rowser", "/srv/q9/target-of-mine-too", "s3://big/rows",
                 "<td>outputs/&lt;run&gt;/work</td><td>data_root</td><td>'…/big/rows'</td>"):
        assert seeker.leaks("x.md", text.encode()) == [], text


def test_what_is_harmless_is_no_find(root, monkeypatch):
    """Ordinary text, hashes, code, public addresses; a user or machine with an ordinary word for a name."""
    monkeypatch.setattr(psutil.Process, "username", lambda self: "root")
    monkeypatch.setattr(socket, "gethostname", lambda: "vm")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    made_runs.make(root)
    seeker = leaks.Seeker.of(runs.run_named("demo"))
    for text in ("the root of a tree; a VM; √2 is a root", "task-force-with-a-long-hyphenated-name",
                 "/usr/bin/env python", "https://github.com/org/repo/home/page", "0123456789abcdef" * 8, "~/models",
                 "the bearer of this letter",
                 "hf_hub", "http://localhost:30000/v1", "http://127.0.0.1:8000", "Basic facts about something",
                 "https://openrouter.ai/api/v1", "/chat/completions", "false", "docs.python.org: user@example.org"):
        assert seeker.leaks("x.md", text.encode()) == [], text
    for text in ("root@10.0.0.1", "ssh me@vm"):
        assert len(seeker.leaks("x.md", text.encode())) == 1, text


def test_a_harmless_find_can_be_vouched_for_but_no_key(root, capsys):
    folder = made_runs.make(root)
    twin_with(folder, result={"verdict": "an answer about /home/user and mara.lindqvist"})
    assert main(["bundle", "demo"]) == 1
    said = capsys.readouterr().err
    for told in ("a home folder: /home/user\n", "the user's name: mara.lindqvist\n", "--allow TEXT"):
        assert told in said
    assert main(["bundle", "demo", "--allow", "/home/user", "--allow", "mara.lindqvist"]) == 0
    twin_with(folder, result={"verdict": KEY})
    assert main(["bundle", "demo", "--allow", KEY]) == 1


def test_the_specimen_is_clean(monkeypatch):
    """The real record in the repository, every file: with the patterns of this very machine."""
    monkeypatch.chdir(made_runs.REPOSITORY)
    run = runs.run_named("specimen-demo")
    seeker = leaks.Seeker.of(run)
    for path in sorted(run.folder.glob("*.*")):
        assert seeker.leaks(path.name, path.read_bytes()) == [], path.name


def test_wrong_use(root, capsys):
    folder = made_runs.make(root)
    assert main(["bundle", "dmo"]) == 2 and "did you mean demo?" in capsys.readouterr().err
    assert main(["bundle", "demo", "--out", "outputs"]) == 2
    assert "give the name of a .zip file" in capsys.readouterr().err
    (folder / "2_merge.json").write_text("{")
    assert main(["bundle", "demo"]) == 2 and "2_merge.json is not valid JSON" in capsys.readouterr().err
    with only_one(folder / "work/.runner/lock"):
        assert main(["bundle", "demo"]) == 2 and "is under way" in capsys.readouterr().err
    assert not list(root.rglob("*.zip"))


def test_a_run_of_a_few_stages_says_what_it_lacks(root, capsys):
    made_runs.make(root, "half", stages=("audit", "training"))
    (root / "outputs/half/1_audit.html").unlink()
    (root / "outputs/half/work/drafter/metrics.jsonl").unlink()
    assert main(["bundle", "half"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "left out: 1_audit.html is not there", "left out: drafter/metrics.jsonl: drafter/metrics.jsonl is not here"]
    files = unpacked(root, "half")
    assert "half/1_audit.html" not in files and b"1_audit.html" not in files["half/index.html"]
