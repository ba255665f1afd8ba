"""A record as one page: no code, no script, nothing that is loaded; light or dark as its reader has it; for screens
from 400 pixels, and for paper.

    html = page(book, twin)

The notebook's cells are rendered one by one, so that the page holds what they say and nothing of a viewer's: the title
and the verdict first, long tables of settings folded, every other table in a strip of its own that scrolls.
"""

import base64
import re
import struct
from html import escape

from eagle3nb.record import tables
from eagle3nb.record.declared import source_of, stem

LIMIT = 1_900_000  # bytes of a page: mail and chat take it, and a telephone opens it
FOLDED = ("Parameters", "Provenance", "Inputs", "Outputs")  # captions of tables that few readers want first
MANY = 12  # columns that paper holds without breaking words
SHOWN = 8  # set parameters that are named while the table is folded
# Nothing in a record may run or load, whatever rows of data are shown in it.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{title}</title><style>
:root {{ color-scheme: light dark; --ink: #1b1b1b; --paper: #ffffff; --quiet: #595959; --link: #0b57d0;
  --rule: rgba(128,128,128,.35); --red: #b3261e; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e6e6e6; --paper: #161616; --quiet: #a8a8a8; --link: #8ab4f8;
  --red: #ff8f85; }} }}
@media print {{ :root {{ color-scheme: light; --ink: #000; --paper: #fff; --quiet: #444; --link: #000;
  --red: #b3261e; }} }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 1.5rem auto; padding: 0 1rem;
  color: var(--ink); background: var(--paper); overflow-wrap: break-word; }}
a {{ color: var(--link); }} nav {{ font-size: .9rem; margin-bottom: 1rem; }} nav a {{ margin-right: 1rem; }}
h1 {{ font-size: 1.7rem; line-height: 1.25; margin: .5rem 0 .75rem; }}
h2 {{ font-size: 1.25rem; line-height: 1.3; margin: 2.25rem 0 .5rem; }}
h3 {{ font-size: 1.05rem; margin: 1.5rem 0 .5rem; }}
main > table:not(.list) {{ display: block; max-width: 100%; overflow-x: auto; }}
.wide {{ overflow-x: auto; margin: .75rem 0; font-size: .9rem; }}
.wide caption > span {{ display: inline-block; position: sticky; left: 0;
  max-width: min(58rem, calc(100vw - 2.5rem)); }}
@media screen and (max-width: 44rem) {{ .wide td[style*="min-width"] {{ min-width: 24em !important; }} }}
figure {{ margin: 1rem 0; }} img, svg {{ max-width: 100%; height: auto; vertical-align: middle; }}
@media (prefers-color-scheme: dark) {{ figure {{ background: #fff; border-radius: 8px; padding: .6rem;
  width: fit-content; max-width: 100%; box-sizing: border-box; }} }}
code, pre {{ font: .88em/1.45 ui-monospace, monospace; }} code {{ overflow-wrap: anywhere; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; margin: .75rem 0; }}
pre.grid {{ white-space: pre; overflow-x: auto; }}
.quiet {{ color: var(--quiet); }} pre.error {{ border-left: 6px solid var(--red); padding-left: .75rem; }}
.ansi-red-fg, .ansi-red-intense-fg {{ color: var(--red); }} .ansi-bold {{ font-weight: bold; }}
details {{ margin: .5rem 0; }} summary {{ cursor: pointer; overflow-wrap: anywhere; }}
details > ol {{ margin: .25rem 0; line-height: 1.9; }}
@media print {{
  @page {{ margin: 12mm; }} * {{ print-color-adjust: exact; }}
  nav, .contents {{ display: none; }} body {{ max-width: none; margin: 0; padding: 0; font-size: 10pt; }}
  a {{ text-decoration: none; }} details::details-content {{ content-visibility: visible; display: block; }}
  h1, h2, h3, summary, caption, p:has(+ figure, + .wide) {{ break-after: avoid; }}
  figure, img, svg, tr, pre, main > .wide, [role=status] {{ break-inside: avoid; }} p, li {{ orphans: 3; widows: 3; }}
  .wide, main > table {{ overflow: visible; font-size: 7.5pt; }} thead {{ display: table-header-group; }}
  pre.grid {{ white-space: pre-wrap; }}
  .wide th, .wide td {{ min-width: 0 !important; padding-right: 6px !important; overflow-wrap: break-word; }}
  .wide td[style*="min-width"], .many th, .many td {{ overflow-wrap: anywhere; }}
  figure {{ background: none; padding: 0; }} figure img {{ max-width: 150mm; max-height: 220mm; width: auto; }}
}}
</style></head><body><nav aria-label="records">{links}</nav><main>{body}</main></body></html>
"""


def page(book: dict, twin: dict) -> str:
    """The record's notebook (plain JSON) as HTML, at most LIMIT bytes; of more, the largest outputs are left out."""
    verdict, parts = verdict_html(twin, twin["provenance"].get("command", "")), []
    for cell in book["cells"]:
        if cell["cell_type"] == "markdown" and "eagle3nb-verdict" not in cell["metadata"].get("tags", []):
            parts.append(prose(source_of(cell)))
        elif cell["cell_type"] == "code":
            parts += [shown(output) for output in merged(cell["outputs"])]
    title, begin = re.match(r"(<h1\b.*?</h1>)?(.*)", parts[0] if parts else "", re.DOTALL).groups()
    name, run = stem(twin["stage"]), str(twin["parameters"].get("run", ""))
    title = title or f"<h1>{escape(name)}</h1>"
    parts = within([begin, *parts[1:]], LIMIT - len((PAGE + title + verdict).encode()), f"{name}.ipynb")
    body = title + verdict + parts[0] + contents(parts) + "".join(parts[1:])
    return shell(f"{name} · {run}", (("index.html", "all stages"), (f"{name}.ipynb", "notebook"),
                                     (f"{name}.json", "data (JSON)")), body)


def verdict_html(twin: dict, again: str) -> str:
    """The banner of a stage; a failed one says how to resume."""
    wall = twin["cost"].get("total_s") or twin["cost"].get("wall_s")
    title = f"{stem(twin['stage']).replace('_', ' ')} · run {twin['parameters'].get('run', '')}"
    title += f" · {tables.span(wall)}" if wall else ""
    sentence = twin["result"].get("verdict", "") if twin["status"] == "ok" else twin.get("error", "did not finish")
    if twin["status"] != "ok":
        sentence += f" — to resume: {again}" if again else ""
    return tables.banner(twin["status"], title, sentence)


def shell(title: str, links, body: str) -> str:
    """A whole page that may neither run nor load anything. `links`: (address, text) pairs."""
    listed = "".join(f'<a href="{escape(address)}">{escape(text)}</a>' for address, text in links)
    html = PAGE.format(title=escape(title), links=listed, body=body)
    return html.replace("<title>", f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n<title>', 1)


def prose(source: str) -> str:
    """Markdown as HTML."""
    from nbconvert.filters import markdown2html  # a second to import; `status` and a run of nothing new need it not

    return re.sub(r'<a class="anchor-link".*?</a>', "", markdown2html(source), flags=re.DOTALL)


def role(output: dict) -> str:
    """What an output is to the record ("verdict"); "" of most."""
    return output.get("metadata", {}).get("eagle3nb", {}).get("role", "")


def merged(outputs: list[dict]) -> list[dict]:
    """The outputs, neighbouring texts of one stream as one; without the verdict, which stands on top."""
    found = []
    for output in outputs:
        if role(output) == "verdict":
            continue
        if output["output_type"] == "stream":
            text = "".join(output["text"])
            if found and found[-1].get("name") == output["name"]:
                found[-1]["text"] += text
                continue
            output = output | {"text": text}
        found.append(output)
    return found


def shown(output: dict) -> str:
    """One output as HTML: the richest form that a page without scripts can show."""
    from nbconvert.filters import ansi2html

    if output["output_type"] == "stream":
        text = calm(output["text"]).strip("\n")
        kinds = " ".join(["quiet"] * (output["name"] == "stderr") + ["grid"] * bool(re.search(r"\S {3,}\S", text)))
        return f'<pre class="{kinds}">{ansi2html(text)}</pre>' if text else ""
    if output["output_type"] == "error":
        return f'<pre class="error">{ansi2html(chr(10).join(output["traceback"]))}</pre>'
    data = {kind: value if isinstance(value, str) else "".join(value) for kind, value in output["data"].items()}
    if "text/html" in data:
        return framed(data["text/html"])
    for kind in ("image/png", "image/jpeg"):
        if kind in data:
            return figure(kind, data[kind], output.get("metadata", {}).get(kind, {}), data.get("text/plain", ""))
    if "text/markdown" in data:
        return prose(data["text/markdown"])
    return f'<pre>{ansi2html(data["text/plain"])}</pre>' if "text/plain" in data else ""


def calm(text: str) -> str:
    """A stream as a terminal leaves it: a line's last state, and a progress bar as its figures."""
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    done = re.compile(r"^(.*?): 100%\|.*?\| ([\d.,kMG]+)/\S+ \[([\d:]+)<[^,]*, *(.*?)\]$")
    return "\n".join(re.sub(r"(\d%)\|[^|]*\|", r"\1 ·", done.sub(r"\1: \2 in \3, \4", line)) for line in lines)


def figure(kind: str, picture: str, metadata: dict, text: str) -> str:
    """An image of the page's own, in its natural size unless the metadata states a width."""
    picture, alt = re.sub(r"\s", "", picture), escape(metadata.get("alt") or text or "figure")
    size = f' width="{metadata["width"]}"' if "width" in metadata else ""
    if kind == "image/png":
        wide, high = struct.unpack(">II", base64.b64decode(picture[:32])[16:24])
        width = metadata.get("width", wide)
        size = f' width="{width}" height="{round(width * high / wide)}"'  # the page does not jump while it is drawn
    return f'<figure><img alt="{alt}"{size} src="data:{kind};base64,{picture}"></figure>'


def framed(html: str) -> str:
    """HTML of a stage without scripts, each table in a strip that scrolls; those of FOLDED folded."""
    html = re.sub(r"<script\b.*?(</script>|$)", "", html, flags=re.DOTALL | re.IGNORECASE)
    return re.sub(r"<table\b.*?</table>", lambda found: strip(found[0]), html, flags=re.DOTALL)


def strip(table: str) -> str:
    """The table in a strip, which a reader can scroll by keyboard too; `many` columns are broken anywhere on paper."""
    caption = re.search(r"<caption\b[^>]*>(.*?)</caption>", table, re.DOTALL)
    name = caption[1] if caption else "table"
    kind = "wide many" if table.count("<th") > MANY else "wide"
    if caption:
        table = table[:caption.start(1)] + f"<span>{name}</span>" + table[caption.end(1):]
    table = f'<div class="{kind}" role="group" aria-label="{name}" tabindex="0">{table}</div>'
    return f"<details><summary>{summary(name, table)}</summary>{table}</details>" if name in FOLDED else table


def summary(name: str, table: str) -> str:
    """What a folded table holds: how many rows, and of the parameters which were set."""
    rows = [re.findall(r"<td\b[^>]*>(.*?)</td>", row, re.DOTALL) for row in table.split("<tr>")[2:]]
    if name == "Provenance":
        facts = dict(row[:2] for row in rows if len(row) > 1)
        return " · ".join([name, *(f"{k} {facts[k]}" for k in ("commit", "started") if k in facts)])
    if name != "Parameters":
        return f"{name} · {len(rows)} {'file' if len(rows) == 1 else 'files'}"
    changed = [f"{row[0]} {row[1]}" for row in rows if "● set" in row]
    more = f", and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
    return f"{name} · {len(rows)}, set: {', '.join(changed[:SHOWN])}{more}" if changed else (
        f"{name} · {len(rows)}, all as the notebook has them")


def contents(parts: list[str]) -> str:
    """The second-level headings as a folded list of links; none for fewer than three."""
    heads = re.findall(r'<h2 id="([^"]*)">(.*?)</h2>', "".join(parts), re.DOTALL)
    items = "".join(f'<li><a href="#{name}">{text}</a></li>' for name, text in heads)
    listed = f'<nav aria-label="contents"><ol>{items}</ol></nav>'
    return f'<details class="contents"><summary>Contents</summary>{listed}</details>' if len(heads) > 2 else ""


def within(parts: list[str], most: int, notebook: str) -> list[str]:
    """The parts, the largest of which make way for a line each until all are no longer than `most` bytes."""
    parts, sizes = list(parts), [len(part.encode()) for part in parts]
    while sum(sizes) > most and max(sizes) > 1000:
        largest = sizes.index(max(sizes))
        left_out = f"{sizes[largest] / 1000:,.0f} KB are left out here to keep the page small"
        parts[largest] = f'<p class="quiet">({left_out}; they stand in <a href="{notebook}">the notebook</a>.)</p>'
        sizes[largest] = len(parts[largest].encode())
    return parts
