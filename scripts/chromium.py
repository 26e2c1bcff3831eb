"""The browser that tests and pictures use: a Chromium or Chrome that is installed, headless."""

import contextlib
import os
import shutil
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


class Missing(Exception):
    """There is no browser, or nothing to drive it with; the message says what would do."""


def find():
    """Path of the Chromium to use: the environment's CHROME, or the first one on the PATH; None when there is none."""
    chosen = os.environ.get("CHROME")
    if chosen:
        found = shutil.which(chosen)
        if found is None:
            raise FileNotFoundError(f"CHROME={chosen!r} is not a program: name a Chromium or Chrome, or unset it")
        return found
    mac = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")
    return next(filter(None, map(shutil.which, NAMES)), str(mac) if mac.exists() else None)


@contextlib.contextmanager
def browser():
    """Headless Chromium, driven by Playwright. Raises Missing."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise Missing("no playwright: pip install -r requirements-dev.txt") from error
    path = find()
    if path is None:
        raise Missing(f"no Chromium found (looked for {', '.join(NAMES)}); install one or set CHROME to its path")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGS, timeout=60_000)
        yield browser
        browser.close()
