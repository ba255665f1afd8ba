"""A project of two small notebooks in a folder of its own, whose merge can fail in every way asked for."""

import os

import nbformat
import pytest

COMMON = """run: str = "mini"  # name of the run
work_dir: str = ""  # where the work lies
data_root: str = "data"  # what the audit reads
seed: int = 1  # seed
"""
AUDIT = """source = resolve(data_root)
seen = stage.paths.audit / "seen.json"
write_json(seen, {"names": sorted(p.name for p in source.iterdir())})
print("read from", source, "in", stage.paths.work)
with progress(40, "audit", "rows") as bar:
    for _ in range(40): bar.advance(1)
fig, ax = figures.new()
ax.plot([1, 2])
figures.label(ax, "row", "tokens")
stage.figure(fig, "Tokens rise with the row")
live = stage.live("Rows so far")
for n in (1, 2): live.update(fig, f"Rows: {n}")
stage.table([{"rows": 12345, "share": 0.25, "source": "A & B"}], "Rows by source")"""
MERGE = """out = stage.paths.corpus / "merged.txt"
out.parent.mkdir(parents=True, exist_ok=True)
out.write_text((stage.paths.audit / "seen.json").read_text() * copies)
if act == "user": raise UserError("data/A2 is empty; put rows there")
if act == "error": {}["lost"]
if act in ("killed", "sleep"):
    code = '''import pathlib, sys, subprocess, time
subprocess.Popen(['sleep', '900'], start_new_session=True)
pathlib.Path(sys.argv[1]).touch()
time.sleep(900)'''
    import subprocess, sys, os, signal, time
    both = stage.paths.run / "both"
    both.unlink(missing_ok=True)
    subprocess.Popen([sys.executable, "-c", code, str(both)], start_new_session=True)
    while not both.exists(): time.sleep(0.05)
    (stage.paths.run / "kernel").write_text(str(os.getpid()))
    if act == "killed": os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(900)"""
OPENING = """from eagle3nb import record
from eagle3nb.errors import UserError
from eagle3nb.files import resolve, write_json
from eagle3nb.progress import progress
from eagle3nb.record import figures
stage = record.start("{}", globals())"""


def save(path, title, parameters, *cells):
    kernel = {"name": "no-such-env", "display_name": "x", "language": "python"}  # somebody else's; not taken
    book = nbformat.v4.new_notebook(metadata={"kernelspec": kernel})
    tagged = nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]})
    book.cells = [nbformat.v4.new_markdown_cell(title), tagged, *map(nbformat.v4.new_code_cell, cells)]
    nbformat.write(book, path)


@pytest.fixture(scope="module")
def mini(tmp_path_factory):
    """The project's folder, which is the working folder while the module's tests run."""
    root = tmp_path_factory.mktemp("project").resolve()
    for folder in ("notebooks", "params/mini", "data/A2"):
        (root / folder).mkdir(parents=True)
    (root / "data/A2/part.txt").write_text("rows")
    save(root / "notebooks/1_audit.ipynb", "# Audit", COMMON, OPENING.format("audit"), AUDIT,
         'stage.finish("2 rows", {"rows": 2, "bad": float("nan"), "console": ["  A2  2 records"]}, '
         'inputs=[data_root], outputs=[seen])')
    save(root / "notebooks/2_merge.ipynb", "# Merge", COMMON + 'act: str = ""  # how to fail\ncopies: int = 1\n',
         OPENING.format("merge"), MERGE,
         'if act != "silent": stage.finish("merged", {"rows": copies}, [stage.paths.audit / "seen.json"], [out])')
    (root / "params/mini/common.yml").write_text("seed: 3\n")
    before = os.getcwd()
    os.chdir(root)
    yield root
    os.chdir(before)
