"""A real browser for this folder's tests: the system's Chromium, driven by Playwright; skipped where there is none."""

import shutil
import sys
from pathlib import Path

import pytest
import waiting

sys.path.insert(0, str(Path(__file__).parent))  # `import workplace`, under --import-mode=importlib

PATIENCE = 1000 * waiting.PATIENCE  # milliseconds that any step may take: a slow machine is no fault


def executable() -> str:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next(filter(None, map(shutil.which, names)), "")


@pytest.fixture(scope="module")
def browser():
    """For one module: Playwright's event loop, which runs while it is open, must not meet another test's."""
    api = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install 'playwright>=1.60'")
    if not executable():
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=executable(), timeout=PATIENCE, args=[
            "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
        yield opened
        opened.close()


@pytest.fixture
def tab(browser):
    """tab(**context options) → a page of a context of its own; all are closed afterwards."""
    contexts = []

    def new(**options):
        contexts.append(browser.new_context(**options))
        contexts[-1].set_default_timeout(PATIENCE)
        return contexts[-1].new_page()

    yield new
    for context in contexts:
        context.close()
