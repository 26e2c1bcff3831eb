"""JupyterLab for the tests that look at live figures: a server of their own, and a notebook driven as a reader does."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

REPO = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A JupyterLab server of our own: (address, token, its folder)."""
    folder = tmp_path_factory.mktemp("lab")
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={folder}"]
    with serving(lambda options: [*command, *options], folder) as (address, token):
        yield address, token, folder


@contextlib.contextmanager
def serving(command, folder):
    """JupyterLab as `command(options)` starts it in the repository, with settings of its own in `folder`.

    Yields its address and its token.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    places = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
    places += ("JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR")
    environment = {**os.environ, **{name: str(folder / name) for name in places}}
    environment["PYTHONPATH"] = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
    options = ["--no-browser", "--allow-root", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    options += [f"--IdentityProvider.token={token}", "--LabApp.news_url=None", "--LabApp.extension_manager=readonly"]
    options += ["--expose-app-in-browser"]
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(
            command(options), cwd=REPO, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        await_server(f"{address}/api?token={token}", server, folder / "log")
        yield address, token
    finally:
        for sign in (signal.SIGTERM, signal.SIGKILL):  # the whole group: the server's kernels with it
            try:
                os.killpg(server.pid, sign)
                server.wait(timeout=10)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass


@contextlib.contextmanager
def browsing(browser, address, height):
    """A page that can reach this server only, and has time for it."""
    context = browser.new_context(viewport={"width": 1280, "height": height})
    context.set_default_timeout(120_000)
    context.route(lambda url: not url.startswith((address, "data:", "blob:")), lambda route: route.abort())
    try:
        yield context.new_page()
    finally:
        context.close()


def await_server(url, server, log, seconds=180):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and server.poll() is None:
        try:
            return urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"JupyterLab did not start within {seconds} s:\n{log.read_text()[-3000:]}")


def accept(dialog):
    """As a reader does when JupyterLab asks something first: for the kernel again, where its server was slow to say."""
    print("JupyterLab asked:", dialog.inner_text())  # pytest shows it where the test fails
    dialog.locator(".jp-mod-accept").click()


def run_cell(page, number, shown):
    """Run one cell of the open notebook until `shown` is there. Until a notebook has a kernel, JupyterLab drops what is
    to run, in silence."""
    page.wait_for_function("window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel")
    page.locator(".jp-Notebook .jp-CodeCell .cm-content").nth(number).click()
    page.keyboard.press("Shift+Enter")
    shown.wait_for()
