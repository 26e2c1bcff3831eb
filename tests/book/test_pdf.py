"""The book as a PDF: its pages in their order, with an outline, and links that need no other file."""

import build_book
import make_pdf
import pypdf
import pytest

PAGE = "<!doctype html><title>{0} — A book</title><article><h1>{0}</h1>{1}</article>"
BODIES = {
    "one": '<a href="two.html#there">on</a> <a href="https://example.org/">out</a> <a href="../lost.html">off</a>',
    "two": "<details><summary>Solution</summary><p>It is shown</p></details>",
}


@pytest.mark.slow
def test_pages_become_one_pdf(tmp_path, browser):
    for name, body in BODIES.items():
        (tmp_path / f"{name}.html").write_text(PAGE.format(name.title(), body), encoding="utf-8")
    book = tmp_path / "book.pdf"
    assert make_pdf.join(browser, BODIES, tmp_path, book, "A book") == 2
    made = pypdf.PdfReader(book)
    assert [entry.title for entry in made.outline] == ["One", "Two"] and made.metadata.title == "A book"
    assert "It is shown" in made.pages[1].extract_text()
    links = [link.get_object() for link in made.pages[0]["/Annots"]]
    assert [link["/Dest"][0].get_object() for link in links if "/Dest" in link] == [made.pages[1]]
    assert [link["/A"]["/URI"] for link in links if "/A" in link] == ["https://example.org/"]
    assert str(tmp_path).encode() not in book.read_bytes()


def test_the_pdf_has_every_page_of_the_contents():
    names = make_pdf.names()
    assert (
        names[0] == "index"
        and len(names) == len(set(names)) == (build_book.ROOT / "_toc.yml").read_text().count("file:") + 1
    )
