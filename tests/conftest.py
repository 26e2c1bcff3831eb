"""A real browser for the tests that look at pages: Chromium, headless, with the network blocked."""

import os
import re
import shutil
from pathlib import Path

import build_book
import live
import matplotlib
import pytest

matplotlib.use("Agg")  # no window for a figure that a test draws; kernels under test are not touched by this

lab = live.lab  # a fixture: a JupyterLab for the tests of one file

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
INSIDE = ("file:", "data:", "blob:", "about:")


def find_chromium():
    """Path of the Chromium to use: the environment's CHROME, or the first one on the PATH; None when there is none."""
    chosen = os.environ.get("CHROME")
    if chosen:
        found = shutil.which(chosen)
        if found is None:
            raise FileNotFoundError(f"CHROME={chosen!r} is not a program: name a Chromium or Chrome, or unset it")
        return found
    mac = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")
    return next(filter(None, map(shutil.which, CHROMIUM_NAMES)), str(mac) if mac.exists() else None)


def give_up(reason):
    """Skip on a reader's machine; fail in CI, where a check that didn't run must not look like one that passed."""
    if os.environ.get("CI"):
        pytest.fail(f"{reason} (in CI this is a failure)")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def book():
    """Folder of the built book's pages; builds it first where it isn't up to date. `make book` makes the same one."""
    return build_book.build(quiet=True)


@pytest.fixture(scope="session")
def browser():
    """Headless Chromium, driven by Playwright. `browser.new_context(...)` makes what `page` doesn't offer."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        give_up("no playwright: pip install -r requirements-dev.txt")
    chromium = find_chromium()
    if chromium is None:
        give_up(f"no Chromium found (looked for {', '.join(CHROMIUM_NAMES)}); install one or set CHROME to its path")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_ARGS, timeout=60_000)
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """A fresh page that can reach files only.

    `page.outside` lists the requests that wanted to leave (they were blocked), `page.errors` the console's errors and
    uncaught exceptions. The test fails at its end if either holds anything; a test that provokes some clears the list.
    """
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(20_000)
    page.outside, page.errors = [], []

    def block(route):
        page.outside.append(route.request.url)
        route.abort()

    context.route(lambda url: not url.startswith(INSIDE), block)
    context.route_web_socket(re.compile(".*"), lambda socket: page.outside.append(socket.url))
    page.on("console", lambda message: page.errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    yield page
    context.close()
    assert not page.outside, f"requests that left the page: {page.outside}"
    assert not page.errors, f"errors in the browser: {page.errors}"
