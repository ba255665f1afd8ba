"""What is left for people after a stage: the finished notebook, its page without code, and index.html over the five.

The pages need nothing from the network, no script, and follow the reader's light or dark setting. Everything in them
comes from the executed notebook and its JSON twin.
"""

import json
import os
import re
from html import escape
from pathlib import Path

from eagle3nb.files import atomic_write, read_json, shown
from eagle3nb.record import tables
from eagle3nb.record.declared import STAGES, notebook_of, stem
from eagle3nb.record.provenance import scrubbed

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{title}</title><style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 1.5rem auto; padding: 0 1rem; }}
nav {{ font-size: .9rem; margin-bottom: 1rem; }} nav a {{ margin-right: 1rem; }}
img, svg {{ max-width: 100%; height: auto; }} img {{ background: #fff; }}
pre {{ overflow-x: auto; font-size: .85rem; white-space: pre-wrap; }}
main div {{ overflow-x: auto; }} .anchor-link {{ display: none; }}
.ansi-red-fg {{ color: #d0312d; }} .ansi-bold {{ font-weight: bold; }}
</style></head><body><nav aria-label="records">{links}</nav><main>{body}</main></body></html>
"""


def finish_notebook(partial: Path, stage: str, twin: dict, again: str, scrub) -> dict:
    """The executed notebook (plain JSON) made a record: verdict on top, true cell states, no path of this machine.

    `partial`: what papermill wrote, if it got that far. `again`: the command that resumes.
    """
    book = read_json(partial if partial.exists() else notebook_of(stage))
    cells = [c for c in book["cells"] if "papermill-error-cell-tag" not in c["metadata"].get("tags", [])]
    for cell in cells:
        if "outputs" in cell:
            cell["outputs"] = [o for o in cell["outputs"] if role(o) != "verdict"]
    if twin["status"] != "ok":
        mark_unfinished(cells)
    banner = {"cell_type": "markdown", "id": "verdict", "metadata": {"tags": ["eagle3nb-verdict"]},
              "source": verdict_html(twin, again)}
    record = partial.with_name(f"{stem(stage)}.ipynb")
    book["cells"] = [banner, *cells]
    book["metadata"]["papermill"] = book["metadata"].get("papermill", {}) | {
        "input_path": shown(notebook_of(stage)), "output_path": shown(record), "exception": twin["status"] != "ok"}
    return scrubbed(book, scrub)


def role(output: dict) -> str:
    return output.get("metadata", {}).get("eagle3nb", {}).get("role", "")


def mark_unfinished(cells: list[dict]) -> None:
    """papermill calls every cell "completed" once its kernel is dead; the one that failed is the last started."""
    code = [c for c in cells if c["cell_type"] == "code"]
    started = [c for c in code if c["metadata"].get("papermill", {}).get("start_time")]
    for cell in code:
        if cell not in started:
            cell["metadata"]["papermill"] = {"status": "pending"}
    if started:
        started[-1]["metadata"]["papermill"] |= {"status": "failed", "exception": True}


def verdict_html(twin: dict, again: str) -> str:
    """The banner of a stage; a failed one says how to resume."""
    wall = twin["cost"].get("total_s") or twin["cost"].get("wall_s")
    title = f"{stem(twin['stage']).replace('_', ' ')} · run {twin['parameters'].get('run', '')}"
    title += f" · {tables.span(wall)}" if wall else ""
    sentence = twin["result"].get("verdict", "") if twin["status"] == "ok" else twin.get("error", "did not finish")
    if twin["status"] != "ok":
        sentence += f" — to resume: {again}" if again else ""
    return tables.banner(twin["status"], title, sentence)


def page(book: str, twin: dict) -> str:
    """The notebook (its JSON text) as HTML without code. Figures keep their alt text; scripts are left out."""
    import nbformat  # seconds to import, all three; `status` and a run of nothing new have no need of them
    from nbconvert.exporters import HTMLExporter
    from nbconvert.preprocessors import CoalesceStreamsPreprocessor

    exporter = HTMLExporter(template_name="basic", exclude_input=True, exclude_input_prompt=True,
                            exclude_output_prompt=True)
    exporter.register_preprocessor(CoalesceStreamsPreprocessor, enabled=True)
    body, _ = exporter.from_notebook_node(nbformat.reads(book, as_version=4))
    body = re.sub(r"<script\b.*?</script>", "", body, flags=re.DOTALL | re.IGNORECASE)
    name = stem(twin["stage"])
    links = "".join(f'<a href="{target}">{text}</a>' for target, text in (
        ("index.html", "all stages"), (f"{name}.ipynb", "notebook"), (f"{name}.json", "data (JSON)")))
    return PAGE.format(title=f"{name} · {escape(str(twin['parameters'].get('run', '')))}", links=links, body=body)


def write_records(folder: Path, book: dict, twin: dict) -> None:
    """<n>_<stage>.html and .ipynb, each whole or not at all, and write-protected: opening one must not change it."""
    source = json.dumps(book, indent=1, ensure_ascii=False) + "\n"
    for suffix, text in ((".html", page(source, twin)), (".ipynb", source)):
        path = folder / (stem(twin["stage"]) + suffix)
        with atomic_write(path) as handle:
            handle.write(text)
        os.chmod(path, 0o444)


def twins(folder: Path) -> dict[str, dict]:
    """{stage: twin} of the stages that have one."""
    found = {stage: folder / f"{stem(stage)}.json" for stage in STAGES}
    return {stage: read_json(path) for stage, path in found.items() if path.exists()}


def key_figures(result: dict) -> str:
    """The first numbers of a result, as they stand: `records 820 · tokens 84,512`."""
    numbers = {k: v for k, v in result.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    return " · ".join(f"{k.replace('_', ' ')} {tables.number(v)}" for k, v in list(numbers.items())[:5])


def write_index(folder: Path) -> Path:
    """index.html over the stages: status, verdict, time, key figures, links, and the acceptance lengths."""
    known = twins(folder)
    body = f"<h1>Run {escape(folder.name)}</h1>"
    for stage in STAGES:
        if stage not in known:
            body += f'<p style="opacity:.6">{stem(stage).replace("_", " ")}: not run</p>'
            continue
        twin, name = known[stage], stem(stage)
        body += verdict_html(twin, "")
        body += f'<p><a href="{name}.html">report</a> · ' if (folder / f"{name}.html").exists() else "<p>"
        body += f'<a href="{name}.ipynb">notebook</a> · ' if (folder / f"{name}.ipynb").exists() else ""
        body += f'<a href="{name}.json">data (JSON)</a> &nbsp; {escape(key_figures(twin["result"]))}</p>'
    rows = known.get("evaluation", {}).get("result", {}).get("acceptance", [])
    total = [row for row in rows if row.get("source") == "all"]
    body += tables.table(total, "Acceptance length by draft steps") if total else ""
    path = folder / "index.html"
    with atomic_write(path) as handle:
        handle.write(PAGE.format(title=f"Run {escape(folder.name)}", links="", body=body))
    return path
