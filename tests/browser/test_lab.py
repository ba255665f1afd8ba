"""JupyterLab as `make lab` starts it, in a real browser: the launcher, a notebook run by Run All, a record opened."""

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress

import nbformat
import pytest
import waiting
import workplace
from ports import free_port

from eagle3nb.files import read_json
from eagle3nb.record import figures, report, tables

sys.path.insert(0, str(workplace.ROOT / "tools"))
TOKEN = "not-a-secret"  # of a server on 127.0.0.1 that lives for these tests


@pytest.fixture(scope="module")
def project(tmp_path_factory, tiny_target):
    """With one run's record, written as the runner writes them."""
    root = workplace.make(tmp_path_factory.mktemp("lab") / "project", tiny_target)
    fig, ax = figures.new()
    ax.plot([1, 2])
    outputs = [{"output_type": "display_data", "metadata": {}, "data": data} for data in (
        {"text/html": tables.table([{"tau": 1.5}], "Recorded"), "text/plain": ""}, {"image/png": figures.png(fig)[0]})]
    code = {"cell_type": "code", "source": "1", "metadata": {}, "outputs": outputs, "execution_count": 1, "id": "b"}
    text = {"cell_type": "markdown", "source": "# 2 · Merge\n\n## A section", "metadata": {}, "id": "a"}
    book = {"cells": [text, code], "nbformat": 4, "nbformat_minor": 5, "metadata": {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}}
    folder = root / "outputs/kept"
    report.write_records(folder, book, {"stage": "merge", "status": "ok", "parameters": {"run": "kept"}, "cost": {},
                                        "result": {"verdict": "kept"}, "provenance": {}})
    return root


@pytest.fixture(scope="module")
def address(browser, project, tmp_path_factory):  # `browser` first: without one no server is started
    """A server on a free port; its settings, workspaces and runtime files lie in a folder of their own."""
    import lab

    port = free_port()
    place = tmp_path_factory.mktemp("jupyter")
    names = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime",
             "JUPYTERLAB_WORKSPACES_DIR": "workspaces", "JUPYTERLAB_SETTINGS_DIR": "settings", "IPYTHONDIR": "ipython"}
    options = ["--no-browser", "--ServerApp.ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0",
               f"--IdentityProvider.token={TOKEN}"]
    with open(place / "log", "wb") as log:
        server = subprocess.Popen(lab.command(options, project), stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                                  env=lab.surroundings() | {name: str(place / to) for name, to in names.items()})
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            urllib.request.urlopen(f"{url}/api?token={TOKEN}", timeout=60).close()
        except OSError:
            assert server.poll() is None, (place / "log").read_text()[-2000:]
            return False
        return True

    try:
        waiting.until(answers, pause=0.5)
        yield url
        server.terminate()  # it ends its kernels
        server.wait(waiting.PATIENCE)
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def window(browser, address):
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    context.set_default_timeout(1000 * waiting.PATIENCE)
    page = context.new_page()
    page.goto(f"{address}/lab?token={TOKEN}")
    page.wait_for_selector(".jp-LauncherCard")
    yield page
    context.close()


def menu(page, *words):
    """Clicks through the menu bar."""
    page.locator(".lm-MenuBar-itemLabel", has_text=words[0]).first.click()
    page.locator(".lm-Menu-itemLabel", has_text=words[1]).first.click()


def test_the_launcher_opens_a_notebook_and_run_all_draws_its_figures(window, project):
    window.wait_for_selector(".jp-Launcher-sectionTitle:has-text('eagle3nb')")
    cards = window.locator(".jp-Launcher-section", has_text="eagle3nb").locator(".jp-LauncherCard-label")
    stages = [path.stem.split("_")[1] for path in sorted((project / "notebooks").glob("*.ipynb"))]
    assert cards.all_inner_texts() == [*stages, "runs"] and stages[-5:] == [
        "audit", "merge", "extraction", "training", "evaluation"]
    cards.get_by_text("merge", exact=True).click()
    window.wait_for_selector(".jp-Notebook .jp-Cell")
    assert window.locator(".lm-TabBar-tabLabel", has_text="2_merge.ipynb").count() == 1

    contents = window.locator("#table-of-contents")  # stands open, without a click
    contents.get_by_text("Is the shuffle global?").wait_for()
    assert contents.locator(".jp-tocItem-content").first.inner_text() == "2 · Merge"

    # Lab forgets what it is told to run while it still connects to the kernel; whoever sees nothing run tells it again.
    window.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]")
    begun = window.locator(".jp-InputPrompt", has_text=re.compile(r"\[(\*|\d+)\]"))
    for _ in range(3):
        menu(window, "Run", "Run All Cells")
        with suppress(AssertionError):
            waiting.until(begun.count, 60, 0.1)
            break
    window.wait_for_function("""() => {
      const verdict = document.querySelector(".jp-Notebook [role=status]");
      return verdict && !verdict.textContent.includes("running");
    }""")
    said = window.locator(".jp-Notebook [role=status]").first.text_content()
    assert said.startswith("✔ ok") and "Merge complete. 48 records" in said
    drawn = window.locator(".jp-Notebook .jp-RenderedImage img")
    assert drawn.count() == 3
    drawn.first.scroll_into_view_if_needed()
    window.wait_for_function("() => document.querySelector('.jp-RenderedImage img').naturalWidth > 1000")  # 220 dpi
    box = drawn.first.bounding_box()
    assert 300 < box["width"] <= 770 and 0.2 < box["height"] / box["width"] < 1  # in its own proportions
    assert window.locator(".jp-RenderedHTMLCommon table caption").count() >= 5
    twin = read_json(project / "outputs/t/2_merge.json")
    assert twin["status"] == "ok" and twin["provenance"]["versions"]["python"] == sys.version.split()[0]

    menu(window, "File", "New Launcher")
    with window.expect_popup() as opened:
        window.locator(".jp-LauncherCard-label", has_text="runs").click()
    opened.value.get_by_role("link", name="t", exact=True).first.wait_for()  # this run, in the index of all
    assert opened.value.locator("h1").inner_text() == "Runs"


def put(address: str, path: str) -> int:
    """Lab's own way of saving a notebook, an empty one here; the answer's status."""
    model = {"type": "notebook", "format": "json", "content": nbformat.v4.new_notebook()}
    request = urllib.request.Request(f"{address}/api/contents/{path}", json.dumps(model).encode(), method="PUT",
                                     headers={"Authorization": f"token {TOKEN}"})
    try:
        with urllib.request.urlopen(request, timeout=waiting.PATIENCE) as answer:
            return answer.status
    except urllib.error.HTTPError as refused:
        return refused.code


def test_a_record_opened_in_lab_stays_what_it_is(browser, window, address, project):
    """Read-only for Lab although root may write any file: no autosave, no Save, and the server refuses as well."""
    record = project / "outputs/kept/2_merge.ipynb"
    before, changed = record.read_bytes(), os.stat(record).st_mtime_ns
    page = window.context.new_page()
    page.goto(f"{address}/lab/workspaces/record/tree/outputs/kept/2_merge.ipynb")
    page.wait_for_selector(".jp-Notebook .jp-RenderedImage img")
    page.wait_for_selector(".jp-Notebook caption:has-text('Recorded')")
    page.get_by_text("notebook is read-only").wait_for()
    page.keyboard.press("Control+s")
    page.locator(".jp-toast-message, .Toastify__toast, .jp-Dialog").first.wait_for()  # Lab says that it does not save
    assert put(address, "outputs/kept/2_merge.ipynb") == 403
    assert put(address, "notebooks/new.ipynb") == 201  # others are saved as ever
    assert record.read_bytes() == before and os.stat(record).st_mtime_ns == changed
    assert record.stat().st_mode & 0o777 == 0o444
