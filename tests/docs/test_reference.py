"""The generated pages equal what tools/reference.py writes now, and hold what they are to hold."""

import ast
import re
from functools import cache

import examples
import pages
import pytest
import reference
import specimen

from eagle3nb.corpus import audit
from eagle3nb.record.declared import declared, notebook_of

HOW = "run `.venv/bin/python tools/reference.py`, which writes it anew"


GENERATED = [f"docs/reference/{name}.md" for name in ("parameters", "cli", "audit-rules")]
GENERATED += [page for page in pages.names() if specimen.REGION.search(pages.text_of(page))]
made = cache(reference.pages)


@pytest.mark.parametrize("page", GENERATED)
def test_generated_pages_are_up_to_date(page):
    assert pages.text_of(page) == made()[page], f"{page} is out of date: {HOW}"


def test_no_page_is_generated_that_is_not_looked_at():
    assert set(made()) == set(GENERATED)


def test_every_parameter_of_every_notebook_is_in_it():
    text = pages.text_of("docs/reference/parameters.md")
    sections = {m[1]: m[2] for m in re.finditer(r"^## (?:\d · )?([\w ]+)\n(.*?)(?=^## |\Z)", text, re.M | re.S)}
    shared = reference.common({stage: declared(notebook_of(stage)) for stage in reference.stages()})
    for stage in reference.stages():
        for name, parameter in declared(notebook_of(stage)).items():
            inside = sections["Common to all stages"] if name in shared and stage != "synthesis" else sections[stage]
            mentioned = f"`{name}`" in inside
            assert mentioned, f"{stage}: {name} is missing: {HOW}"
            if f"| `{name}` |" in inside:
                row = next(line for line in inside.splitlines() if line.startswith(f"| `{name}` |"))
                assert reference.cell(f"`{parameter.kind}`") in row and reference.cell(parameter.meaning) in row


def test_every_rule_and_every_command_is_in_it():
    rules = pages.text_of("docs/reference/audit-rules.md")
    assert sorted(re.findall(r"^\| `(\w+)`", rules, re.M)) == sorted(audit.RULES)
    assert set(reference.WHOLE) == set(audit.OTHER)
    told = pages.text_of("docs/reference/cli.md")
    for name, (command, _) in reference.commands().items():
        assert f"## `eagle3nb {name}`" in told
        for action in reference.arguments(command):
            for option in action.option_strings:
                assert f"`{option}`" in told


def test_every_variable_of_the_environment_is_in_it():
    used = {name for path in (pages.ROOT / "eagle3nb").rglob("*.py")
            for name in re.findall(r"EAGLE3NB_[A-Z_]+", path.read_text(encoding="utf-8"))}
    known = {name for name in reference.ENVIRONMENT if name.startswith("EAGLE3NB_")}
    assert used == known | {f"EAGLE3NB_{name}" for name in reference.INTERNAL}


def test_numbers_of_rules_that_pages_tell():
    for page in pages.names():
        if page == "docs/LOG.md":
            continue
        for found in re.findall(r"(\d+) \[?(?:audit )?rules", pages.prose(page)):
            assert int(found) == len(audit.RULES), page


def test_a_remedy_that_no_rule_gives_any_more_is_found(monkeypatch):
    monkeypatch.setitem(reference.WHOLE, "disk_short", ("red", "x", "buy a disk"))
    with pytest.raises(SystemExit, match="disk_short"):
        reference.rules_page()


def test_regions_are_filled_and_known():
    used = set()
    for page in pages.names():
        text = pages.text_of(page)
        assert text.count("<!-- made: ") == text.count("<!-- end -->") == len(specimen.REGION.findall(text)), page
        used |= {name for _, name, _, _ in specimen.REGION.findall(text)}
    assert used <= set(specimen.REGIONS) and set(examples.REGIONS) <= used
    wrong = "<!-- made: demo-table -->\n| 1 | 9.99 |\n<!-- end -->\n"
    assert "9.99" not in specimen.filled(wrong) and "**" in specimen.filled(wrong)


def test_lines_of_failures_are_the_codes():
    """What `when a stage fails` quotes stands in the package's own messages, joined as Python joins them."""
    texts = []
    for path in (pages.ROOT / "eagle3nb").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(p.value if isinstance(p, ast.Constant) else "{}" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    table = pages.text_of("docs/how-to/when-it-fails.md").split("| the line has |")[1].split("\n\n")[0]
    quoted = re.findall(r"^\| `([^`]+)` \|", table, re.M)
    assert len(quoted) >= 10
    for line in quoted:
        assert any(line in text for text in texts), f"no message says {line!r} any more"


def test_sources_in_the_log_are_there():
    """Each figure that is said to stand in the log: the section that is named, and the tables' own numbers."""
    log = pages.text_of("docs/LOG.md")
    headings = re.findall(r"^## (.*)$", log, re.M)
    for page in set(pages.names()) - {"docs/LOG.md"}:
        for quoted in re.findall(r"\[log\]\([^)]*\),\s+((?:\"[^\"]+\"(?: and )?)+)", pages.prose(page)):
            for name in re.findall(r'"([^"]+)"', quoted):
                assert any(" ".join(name.split()) in heading for heading in headings), f"{page}: no {name!r} in the log"
    for page, least in (("docs/explanation/walk.md", 8), ("docs/explanation/hidden-states.md", 6)):
        rows = [line for line in specimen.REGION.sub("", pages.text_of(page)).splitlines() if line.startswith("|")]
        numbers = [n for row in rows for n in re.findall(r"\d[\d,]*\.?\d+", row) if not re.fullmatch(r"\d\d", n)]
        missing = [number for number in numbers if number not in log]
        assert len(numbers) >= least and not missing, (page, missing)


def test_the_examples_are_what_the_definition_says():
    """The mask's example by the definition written out once more, the walk's by hand."""
    l, x, K = examples.MASK, examples.TOKENS, examples.K  # noqa: E741 (the paper's)
    rows = [line.split(" | ") for line in examples.mask().splitlines()[2:]]
    for t, row in enumerate(rows):
        for column, outside in ((3, set()), (5, {examples.OUTSIDE})):
            counted = [k for k in range(K) if t + 2 + k < len(x) and all(l[t + 1 + i] for i in range(k + 2))
                       and not outside & set(range(t + 2, t + 2 + k))]
            assert row[column].strip(" |") == (", ".join(map(str, counted)) or "–")
    assert "4 verifies accept 5 drafts: τ = 1 + 5 / 4 = 2.25" in examples.walk()
