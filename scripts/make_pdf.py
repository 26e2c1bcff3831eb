"""Make a PDF of the whole book: python scripts/make_pdf.py

An installed Chromium prints each page that `make book` has built, solutions open, and the pages are joined in the order
of the contents, as _build/book.pdf. A link from one page to another leads to it within the PDF.
"""

import io
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import build_book
import chromium
import pypdf
import yaml
from pypdf.generic import ArrayObject, NameObject

TIME_LIMIT = 120_000  # milliseconds for each page
FOOTER = """<div style="font:7pt sans-serif;width:100%;margin:0 15mm;display:flex;justify-content:space-between">
<span class="title"></span><span class="pageNumber"></span></div>"""
READY = """() => {
    for (const details of document.querySelectorAll("article details")) details.open = true;
    for (const image of document.images) image.loading = "eager";
    const pictures = [...document.images].map((image) => image.decode().catch(() => null));
    return Promise.all([document.fonts.ready, ...pictures]);
}"""


def names(source=build_book.ROOT):
    """The names of the book's pages in the order of its contents."""
    contents = yaml.safe_load((source / "_toc.yml").read_text(encoding="utf-8"))
    parts = contents.get("parts", [contents])
    return [contents["root"], *(entry["file"] for part in parts for entry in part["chapters"])]


def printed(tab, path):
    """The page in the file `path` as a PDF."""
    tab.goto(path.as_uri())
    tab.evaluate(READY)
    options = {"prefer_css_page_size": True, "display_header_footer": True, "header_template": "<span></span>"}
    return pypdf.PdfReader(io.BytesIO(tab.pdf(footer_template=FOOTER, outline=True, tagged=True, **options)))


def lead_within(writer, starts):
    """Let links to files of the book, which nobody has who has the PDF, lead to their first pages in it."""
    for page in writer.pages:
        for link in page.get("/Annots", ()):
            link = link.get_object()
            address = urlsplit(str(link.get("/A", {}).get("/URI", "")))
            if address.scheme == "file":
                target = starts.get(Path(unquote(address.path)))
                del link["/A"]
                if target is not None:
                    link[NameObject("/Dest")] = ArrayObject(
                        [writer.pages[target].indirect_reference, NameObject("/Fit")]
                    )


def join(browser, pages, folder, book, title):
    """Write the PDF `book` of the built `pages`, files of `folder`; returns how many pages it has."""
    writer, starts = pypdf.PdfWriter(), {}
    tab = browser.new_page(viewport={"width": 760, "height": 1000})  # figures are drawn about as wide as a sheet
    tab.set_default_timeout(TIME_LIMIT)
    for name in pages:
        path = folder / f"{name}.html"
        starts[path] = len(writer.pages)
        writer.append(printed(tab, path), outline_item=tab.title().rsplit(" — ", 1)[0], import_outline=False)
    tab.close()
    lead_within(writer, starts)
    writer.add_metadata({"/Title": title})
    unfinished = book.with_suffix(".unfinished")
    writer.write(unfinished)
    unfinished.replace(book)
    return len(writer.pages)


def main():
    folder = build_book.build()
    book = folder.parent / "book.pdf"
    title = yaml.safe_load((build_book.ROOT / "_config.yml").read_text(encoding="utf-8"))["title"]
    try:
        with chromium.browser() as browser:
            count = join(browser, names(), folder, book, title)
    except chromium.Missing as reason:
        sys.exit(str(reason))
    print(f"{book}: {count} pages, {book.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
