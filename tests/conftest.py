"""What tests share: which chapters run, and a real browser: Chromium, headless, with the network blocked."""

import os
import re

import build_book
import chromium
import matplotlib
import pytest

matplotlib.use("Agg")  # no window for a figure that a test draws; kernels under test are not touched by this

pytest_plugins = ["sweeps"]  # which cases of a test run

SHORT_CHAPTERS = {  # the others take more than half a minute each
    "01-meet-your-gpus.ipynb",
    "02-tensors-on-devices.ipynb",
    "03-what-fills-the-memory.ipynb",
    "05-dataparallel.ipynb",
    "appendix-clock.ipynb",
}
VIEWPORT = {"width": 1280, "height": 900}
INSIDE = ("file:", "data:", "blob:", "about:")


def pytest_collection_modifyitems(config, items):
    """`make test` leaves out the chapters that take long, and `make test ALL=1` (MGPU_ALL=1) runs them."""
    if os.environ.get("MGPU_ALL") == "1":
        return
    left = [item for item in items if item.path.suffix == ".ipynb" and item.path.name not in SHORT_CHAPTERS]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


def give_up(reason):
    """Skip on a reader's machine; fail in CI, where a check that didn't run must not look like one that passed."""
    if os.environ.get("CI"):
        pytest.fail(f"{reason} (in CI this is a failure)")
    pytest.skip(reason)


@pytest.fixture
def uncompiled():
    """For training that is over before its compiler would be."""
    import torch  # here, for it takes seconds, and most tests of pages do without

    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.fixture(scope="session")
def book():
    """Folder of the built book's pages; builds it first where it isn't up to date. `make book` makes the same one."""
    return build_book.build(quiet=True)


@pytest.fixture(scope="session")
def browser():
    """Headless Chromium, driven by Playwright. `browser.new_context(...)` makes what `page` doesn't offer."""
    try:
        with chromium.browser() as browser:
            yield browser
    except chromium.Missing as reason:
        give_up(str(reason))


@pytest.fixture(scope="session")
def tabs():
    """The page that tests use one after the other, in a list, or none: to make one takes longer than most tests."""
    return []


@pytest.fixture
def page(browser, tabs, request):
    """A page that can reach files only, as fresh as a new one, which it is after a test that failed or that says
    `page.spent = True`, because it changes what can't be put back.

    `page.outside` lists the requests that wanted to leave (they were blocked), `page.errors` the console's errors and
    uncaught exceptions. The test fails at its end if either holds anything; a test that provokes some clears the list.
    """
    failed = request.session.testsfailed
    page = tabs.pop() if tabs else new_page(browser)
    page.outside, page.errors, page.spent = [], [], False
    yield page
    if page.spent or request.session.testsfailed > failed:
        page.context.close()
    else:
        freshen(page)
        tabs.append(page)
    assert not page.outside, f"requests that left the page: {page.outside}"
    assert not page.errors, f"errors in the browser: {page.errors}"


def freshen(page):
    """Leave nothing of a test to the next one."""
    page.evaluate("try { localStorage.clear(); sessionStorage.clear(); } catch { }")  # about:blank has none
    page.unroute_all()
    page.goto("about:blank")
    page.mouse.move(0, 0)
    page.emulate_media(color_scheme="light")  # as a new page has it
    page.set_viewport_size(VIEWPORT)


def new_page(browser):
    context = browser.new_context(viewport=VIEWPORT)
    page = context.new_page()
    page.set_default_timeout(60_000)
    load = page.goto

    def goto(*args, **kwargs):
        """Figures are drawn when the browser has told them their width, in the frame after the page is loaded."""
        response = load(*args, **kwargs)
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))")
        return response

    page.goto = goto

    def block(route):
        page.outside.append(route.request.url)
        route.abort()

    context.route(lambda url: not url.startswith(INSIDE), block)
    context.route_web_socket(re.compile(".*"), lambda socket: page.outside.append(socket.url))
    page.on("console", lambda message: page.errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    return page
