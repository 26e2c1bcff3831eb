"""What a reader has read of a chapter is in the sidebar, on every page."""


def test_a_section_counts_as_read_once_its_end_was_on_the_screen(book, page):
    page.goto((book / "chapters/02-tensors-on-devices.html").as_uri())
    marks = page.locator(".bd-docs-nav .read")
    assert marks.count() == 0
    page.locator("#a-tensor-is-born-on-a-device > :last-child").scroll_into_view_if_needed()
    marks.wait_for(state="attached")
    page.goto((book / "index.html").as_uri())
    assert page.get_by_role("img", name="1 of 9 sections read").count() == 1
    assert marks.locator("xpath=..").all_inner_texts() == ["2 Tensors on devices1/9"]
