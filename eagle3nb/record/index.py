"""The two indexes: outputs/index.html over all runs, newest first, and outputs/<run>/index.html over a run's stages.

Both are whole without their script, which only adds sorting and a filter. They follow the reader's light or dark
setting, and a telephone shows a run as a card.
"""

import base64
import hashlib
import json
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from urllib.parse import quote

from eagle3nb.files import atomic_write
from eagle3nb.lock import only_one
from eagle3nb.record import page, report, runs, tables
from eagle3nb.record.declared import STAGES, USUAL, stem
from eagle3nb.record.runs import STEPS, Run, at

CARD = "work/export/README.md"
STYLE = """
.bad { color: #b3261e; } .good { color: #1d6b41; }
@media (prefers-color-scheme: dark) { .bad { color: #ff8a80; } .good { color: #6fcf97; } }
table.list { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .92rem; }
table.list caption { text-align: left; padding-bottom: .5rem; }
table.list th, table.list td { text-align: left; vertical-align: top; padding: .4rem .8rem .4rem 0;
  border-bottom: 1px solid rgba(128,128,128,.35); overflow-wrap: break-word; }
table.list thead th { vertical-align: bottom; }
table.list td.settings { overflow-wrap: anywhere; min-width: 9rem; }
table.list .number { text-align: right; } table.list td.number { white-space: nowrap; }
th button { font: inherit; font-weight: 600; color: inherit; background: none; border: 0; padding: .2rem 0;
  cursor: pointer; text-align: inherit; }
th button:hover, th button:focus-visible { text-decoration: underline; }
th[aria-sort=ascending] button::after { content: " ▲"; } th[aria-sort=descending] button::after { content: " ▼"; }
label.filter { display: block; margin: .8rem 0; }
label.filter input { font: inherit; padding: .3rem .5rem; width: 18rem; max-width: 100%; box-sizing: border-box; }
summary { cursor: pointer; }
dl.facts { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .6rem 0; }
dl.facts dt { color: inherit; opacity: .75; } dl.facts dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 44rem) {
  table.list, table.list tbody, table.list tr, table.list td, table.list tbody th { display: block; width: auto; }
  table.list caption { display: block; }
  table.list thead { display: block; margin-bottom: .5rem; }
  table.list thead tr { display: flex; flex-wrap: wrap; gap: 0 1rem; }
  table.list thead th { border: 0; padding: .2rem 0; }
  table.list tbody tr { border: 1px solid rgba(128,128,128,.45); border-radius: 8px; padding: .5rem .8rem;
    margin: 0 0 .8rem; }
  table.list tbody th, table.list tbody td, table.list tbody td.number { border: 0; padding: .1rem 0;
    text-align: left; white-space: normal; }
  table.list tbody td::before { content: attr(data-label) ": "; opacity: .75; }
  table.list tbody th { font-size: 1.05rem; } table.list td.none { display: none; }
  dl.facts { grid-template-columns: 1fr; } dl.facts dd { margin-bottom: .35rem; }
}
table.list tr[hidden] { display: none; }
@media print { label.filter { display: none; } table.list tr { break-inside: avoid; } }
"""

# Sorts by the cells' data-key, a number or a text; what has none stays last. The filter wants every word in a row.
SCRIPT = """
(() => {
  const table = document.querySelector("table.list"), body = table.tBodies[0], rows = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  const key = (row, i) => row.cells[i].dataset.key;
  heads.forEach((head, i) => {
    const button = document.createElement("button"), numeric = head.classList.contains("number");
    button.type = "button"; button.textContent = head.textContent; head.replaceChildren(button);
    button.addEventListener("click", () => {
      const old = head.getAttribute("aria-sort");
      const down = old ? old === "ascending" : numeric || head.dataset.first === "down";
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      rows.sort((a, b) => {
        const x = key(a, i), y = key(b, i);
        if (x === "" || y === "") return (x === "") - (y === "");
        const order = numeric ? x - y : x.localeCompare(y, "en", {numeric: true});
        return down ? -order : order;
      });
      body.append(...rows);
    });
  });
  const [label, input, told] = ["label", "input", "span"].map(name => document.createElement(name));
  label.className = "filter"; input.type = "search"; told.setAttribute("role", "status");
  label.append("Only rows with ", input, " ", told); table.before(label);
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\\s+/).filter(Boolean);
    rows.forEach(row => { row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word)); });
    told.textContent = words.length ? `${rows.filter(row => !row.hidden).length} of ${rows.length}` : "";
  });
})();
"""


def styled(title: str, links, body: str, script: str = "") -> str:
    """The records' own shell with the style of lists; `script`, which the page can do without, is all that may run."""
    html = page.shell(title, links, body).replace("</style>", STYLE + "</style>", 1)
    if not script:
        return html
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    html = html.replace(page.POLICY, f"{page.POLICY}; script-src 'sha256-{digest}'", 1)
    return html.replace("</body>", f"<script>{script}</script></body>", 1)


def write_index(folder: Path) -> Path:
    """outputs/<run>/index.html, which is returned, and outputs/index.html."""
    path = folder / "index.html"
    with atomic_write(path) as handle:
        run = runs.read_run(folder)
        handle.write(run_page(run, home=not run.origin, card=CARD if (folder / CARD).is_file() else ""))
    write_runs(folder.parent)
    return path


def write_runs(folder: Path) -> Path:
    """outputs/index.html. One process at a time reads and writes: the last one has seen what all others wrote."""
    path = folder / "index.html"
    with only_one(folder / ".index.lock"), atomic_write(path) as handle:
        handle.write(runs_page(runs.all_runs(), sorted(folder.glob("compare-*.html"))))
    return path


# ------------------------------------------------------------------------------------------ all runs


def runs_page(found: list[Run], comparisons: list[Path]) -> str:
    normal = runs.normals(found)
    heads = (("Run", ""), ("Verdict", ""), ("Target", ""), ("Started (UTC)", "first"), ("Commit", ""),
             (f"Acceptance length, {STEPS} drafted", "number"), ("Tokens", "number"), ("Time", "number"),
             ("Profile, and what was set otherwise", ""))
    body = "<h1>Runs</h1>"
    body += '<p>No run yet: <code>eagle3nb run demo</code> makes one.</p>' if not found else ""
    if found:
        body += ('<table class="list" role="table"><caption>Newest first. Acceptance length: tokens that one pass of '
                 "the target yields, with its 95 % interval over prompts. Time: all stages, each as last run.</caption>"
                 f'<thead role="rowgroup"><tr role="row">{"".join(head(*h) for h in heads)}</tr></thead>'
                 f'<tbody role="rowgroup">{"".join(row(run, normal, heads) for run in found)}</tbody></table>')
    if comparisons:
        items = "".join(f'<li><a href="{quote(p.name)}">{escape(p.stem)}</a></li>' for p in comparisons)
        body += f"<h2>Comparisons</h2><ul>{items}</ul>"
    now = datetime.now(UTC)
    body += f'<p class="quiet">As of {now:%Y-%m-%d %H:%M} UTC; written anew at the start and end of a stage.</p>'
    return styled("Runs · eagle3nb", [], body, SCRIPT if found else "")


def head(text: str, kind: str) -> str:
    if kind == "number":
        return f'<th scope="col" role="columnheader" class="number">{escape(text)}</th>'
    more = ' data-first="down" aria-sort="descending"' if kind == "first" else ""
    return f'<th scope="col" role="columnheader"{more}>{escape(text)}</th>'


def row(run: Run, normal: dict, heads) -> str:
    """One run; `data-key` is what its cells are sorted by."""
    length, tokens, spent = runs.acceptance(run), runs.data(run)["tokens"], runs.seconds(run)
    there = (run.folder / "index.html").exists()
    name = f'<a href="{quote(run.name)}/index.html">{escape(run.name)}</a>' if there else escape(run.name)
    name += f'<br><small class="quiet">kept record of run {escape(run.origin)}</small>' if run.origin else ""
    order = {"failed": "1", "running": "2", "ok": "3"}[runs.status(run)]
    commits = runs.commits(run)
    earlier = f'<br><small class="quiet">and {len(commits) - 1} earlier</small>' if len(commits) > 1 else ""
    cells = [(order + runs.verdict(run), verdict(run), ""), (runs.target(run), escape(runs.target(run)), ""),
             (runs.started(run), runs.started(run), ""),
             (commits[0] if commits else "", escape(commits[0]) + earlier if commits else "", ""),
             ("" if length is None else length["tau"], runs.length(length), "number"),
             ("" if tokens is None else tokens, tables.number(tokens), "number"),
             (spent or "", tables.span(spent) if spent else "–", "number"),
             (settings_key(run, normal), settings(run, normal), "settings")]
    text = "".join(f'<td role="cell" class="{kind}{"" if key != "" else " none"}" data-label="{escape(label)}" '
                   f'data-key="{escape(str(key))}">{html}</td>'
                   for (key, html, kind), (label, _) in zip(cells, heads[1:], strict=True))
    return f'<tr role="row"><th scope="row" role="rowheader" data-key="{escape(run.name)}">{name}</th>{text}</tr>'


def verdict(run: Run) -> str:
    """The word, and which stages ran or what went wrong; a long error folds."""
    state, said = runs.status(run), runs.verdict(run)
    colour = {"ok": "good", "failed": "bad", "running": "quiet"}[state]
    word = f'<strong class="{colour}">{tables.WORD[state]}</strong>'
    if len(said) <= 120:
        return f"{word} {escape(said)}"
    return f"<details><summary>{word} {escape(said[:100])}…</summary>{escape(said)}</details>"


def settings(run: Run, normal: dict, most: int = 5) -> str:
    """Its profile, and what differs from it; beyond `most` they fold."""
    changed = [f"{escape(k)} {escape(short(v))}" for k, v in runs.changed(run, normal).items()]
    text = escape(", ".join(profiles(run))) + (": " + ", ".join(changed[:most]) if changed else "")
    if len(changed) > most:
        text += f"<details><summary>and {len(changed) - most} more</summary>{', '.join(changed[most:])}</details>"
    return text


def settings_key(run: Run, normal: dict) -> str:
    return " ".join([*profiles(run), *(f"{k} {short(v)}" for k, v in runs.changed(run, normal).items())])


def profiles(run: Run) -> list[str]:
    return list(dict.fromkeys(runs.profile(twin) or "notebooks’ defaults" for twin in run.twins.values()))


def short(value, most: int = 28) -> str:
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= most else text[:most - 1] + "…"


# ------------------------------------------------------------------------------------------ one run


def run_page(run: Run, home: bool = True, card: str = "") -> str:
    """A run's stages. `home`: with a link to the index of all runs, which bundles and kept records lack. `card`: the
    drafter's."""
    body = f"<h1>Run {escape(run.name)}</h1>{facts(run, card)}<h2>Stages</h2>"
    for stage in STAGES:
        if stage in run.damaged:
            body += tables.banner("failed", stem(stage).replace("_", " "),
                                  f"{run.damaged[stage]}; delete it and run the stage again")
        elif stage in run.twins:
            body += stage_part(run, stage)
        elif stage in USUAL:
            body += f'<p class="quiet">{stem(stage).replace("_", " ")}: not run</p>'
    body += acceptance_part(run)
    return styled(f"Run {run.name}", [("../index.html", "all runs")] if home else [], body)


def facts(run: Run, card: str) -> str:
    """Target, data, date, commit, time and settings, as a list of terms."""
    data = runs.data(run)
    told = [f"{tables.number(data['records'])} records, {tables.number(data['tokens'])} tokens"
            if data["tokens"] is not None else "", f"{len(data['sources'])} sources" if data["sources"] else "",
            f"left out: {data['left out']}" if data["left out"] else ""]
    spent = runs.seconds(run)
    rows = [("Target", escape(runs.target(run))),
            ("Data", escape(f"{data['root']}: " * bool(data["root"]) + ", ".join(filter(None, told)))),
            ("Last started", f"{runs.started(run)} UTC" if runs.started(run) else ""),
            ("Commit", escape(", before that ".join(runs.commits(run)))),
            ("Time of all stages", tables.span(spent) if spent else ""),
            ("Settings", settings(run, runs.normals([run]), most=40)),
            ("Acceptance length", f"{runs.length(runs.acceptance(run))} with {STEPS} drafted tokens"
             if runs.acceptance(run) else ""),
            ("Drafter", f'<a href="{card}">its card</a>' if card else ""),
            ("Not run again", escape("; ".join(runs.outdated(run)))),
            ("Kept", f"a record of run {escape(run.origin)}, under another name" if run.origin else "")]
    return '<dl class="facts">' + "".join(f"<dt>{k}</dt><dd>{v}</dd>" for k, v in rows if v) + "</dl>"


def stage_part(run: Run, stage: str) -> str:
    """The stage's banner, its figures, and what can be opened."""
    twin, name = run.twins[stage], stem(stage)
    if twin["status"] == "failed" and twin.get("error") == "did not finish" and runs.status(run) == "running":
        body = tables.banner("running", name.replace("_", " "),
                             f"has not ended yet; `eagle3nb status {run.name}` tells whether it still runs")
    else:
        body = report.verdict_html(twin, "")
    files = [f'<a href="{name}.{ending}">{word}</a>' for ending, word in
             (("html", "report"), ("ipynb", "notebook"), ("json", "data (JSON)"))
             if (run.folder / f"{name}.{ending}").exists()]
    figures = [f"{escape(what)} <b>{escape(value)}</b>" for what, value in runs.key_figures(run, stage)]
    return body + f"<p>{' · '.join(files)}{' &nbsp; ' if figures else ''}{' · '.join(figures)}</p>"


def acceptance_part(run: Run) -> str:
    """The total by drafted tokens, and the sources at the evaluation's own number of them."""
    twin = run.twins.get("evaluation")
    rows = [r for r in at(twin, "result.acceptance", list) or [] if at(r, "tau", float) and at(r, "steps", int)]
    total, steps = [r for r in rows if r.get("source") == "all"], at(twin, "parameters.steps", int) or STEPS
    apart = [r for r in rows if r.get("source") != "all" and r["steps"] == steps]
    if not total:
        return ""
    body = "<h2>Acceptance length</h2>" + tables.table(
        [{"drafted tokens": r["steps"], **told(r)} for r in total], "All sources, by drafted tokens a verify")
    return body + (framed([{"source": r.get("source"), **told(r)} for r in apart],
                          f"By source, {steps} drafted tokens") if apart else "")


def framed(rows: list[dict], caption: str) -> str:
    """A table in a strip that scrolls by itself where the page is narrow."""
    return page.strip(tables.table(rows, caption))


def told(row: dict) -> dict:
    between = runs.length(row).partition(" ")[2].strip("[]").replace(",", " to")
    return {"acceptance length": round(row["tau"], 2), "95 % interval": between or "–", "prompts": row.get("prompts"),
            "verifies": row.get("verifies"), "accepted": row.get("accepted"),
            "delivered a verify": at(row, "delivered_per_verify", float)}
