"""Answers below a Predict box: covered until a reader wants them; never out of reach."""

import pytest

CHAPTER = "chapters/02-tensors-on-devices.html"
VISIBLE = "parts => parts.filter((part) => part.checkVisibility({visibilityProperty: true})).length"
OUTPUT = ".tip ~ .cell .cell_output"  # below a Predict box


@pytest.fixture
def chapter(book, page):
    address = (book / CHAPTER).as_uri()
    page.goto(address)
    return address


def covered(page):
    return page.locator(".covered").count()


def test_an_answer_is_covered_until_it_is_asked_for(chapter, page):
    box = page.locator(".tip").first
    output = box.locator("xpath=following-sibling::*[contains(@class, 'cell')][1]").locator(".cell_output pre")
    box.scroll_into_view_if_needed()
    assert not output.is_visible()
    page.get_by_role("button", name="Show the answer").first.press("Enter")
    assert output.is_visible()
    assert page.evaluate("document.activeElement.className").startswith("cell_output"), "a reader goes on from there"


def test_an_answer_opens_when_the_reader_scrolls_on(chapter, page):
    before = covered(page)
    first = page.locator(".covered").first.bounding_box()["y"]
    page.mouse.move(640, 400)
    page.mouse.wheel(0, first - 700)
    page.wait_for_timeout(100)
    assert covered(page) == before, "it has come into view, no more"
    page.mouse.wheel(0, 600)
    page.wait_for_function(f"document.querySelectorAll('.covered').length < {before}")


def test_the_choice_is_remembered(chapter, page):
    page.get_by_label("Cover answers").uncheck()
    assert covered(page) == 0
    page.reload()
    assert covered(page) == 0
    page.get_by_label("Cover answers").check()
    assert covered(page) > 10


def test_what_is_sought_or_linked_is_open(chapter, page):
    page.goto("about:blank")
    page.goto(chapter + "?find=original#compute-on-one-device")
    assert page.locator("#compute-on-one-device .covered").count() == 0
    page.goto("about:blank")
    page.goto(chapter + "#Figure-2.1")
    assert page.locator("[id='Figure-2.1']").is_visible()


def test_print_and_pages_without_scripts_show_all(chapter, page, browser):
    page.emulate_media(media="print")
    assert page.locator(".covered").evaluate_all(VISIBLE) == covered(page) > 10
    page.emulate_media(media="screen")
    plain = browser.new_context(java_script_enabled=False)
    try:
        other = plain.new_page()
        other.goto(chapter)
        assert other.locator(".covered, .open-answer").count() == 0
        assert other.locator(OUTPUT).first.is_visible()
    finally:
        plain.close()
