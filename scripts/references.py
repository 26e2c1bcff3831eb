"""Write references.md anew from references.bib: python scripts/references.py

The page is plain Markdown, with an anchor at each entry, so that a link such as
[Goyal et al., 2017](../references.md#goyal2017accurate) leads to it in the book, in JupyterLab and on GitHub.
"""

import re
from pathlib import Path

from pybtex.backends.markdown import Backend
from pybtex.database import parse_file
from pybtex.richtext import Text
from pybtex.style.formatting.unsrt import Style

ROOT = Path(__file__).resolve().parent.parent
HEAD = "# References\n\n<!-- Made from references.bib: python scripts/references.py -->\n\n"


class Markdown(Backend):
    def format_str(self, text):
        """Only what Markdown takes for markup is escaped: the page is read as a file, too."""
        return re.sub(r"([\\`*_\[\]<])", r"\\\1", text)

    def format_href(self, url, text, *external):
        return f"<{url}>"


def plain(text):
    """`text` of a field without TeX: accents as letters, no braces."""
    return str(Text.from_latex(text))


def label(entry):
    """What the text calls a source: its field `shorttitle`, else authors and year, as in "Smith and Le, 2018".

    Raises ValueError for an entry of `references.bib` that has neither.
    """
    if "shorttitle" in entry.fields:
        return plain(entry.fields["shorttitle"])
    authors = [plain(" ".join(person.last_names)) for person in entry.persons.get("author", [])]
    if not authors or "year" not in entry.fields:
        raise ValueError(f"references.bib, {entry.key}: wants author and year, or a shorttitle to call it by")
    names = f"{authors[0]} et al." if len(authors) > 2 else " and ".join(authors)
    return f"{names}, {entry.fields['year']}"


def labels(path=ROOT / "references.bib"):
    """The label of each entry of the bibliography at `path`, by key."""
    return {key: label(entry) for key, entry in parse_file(path).entries.items()}


def page(path=ROOT / "references.bib"):
    """The page of references for the bibliography at `path`, as Markdown, sorted by label."""
    entries = parse_file(path).entries.values()
    texts = {entry.key: entry.text.render(Markdown()) for entry in Style().format_entries(entries)}
    lines = []
    for entry in sorted(entries, key=lambda entry: label(entry).casefold()):
        name = Text(f"{label(entry)}.").render(Markdown())
        text = " ".join(texts[entry.key].split()).replace("URL: <", "<").removeprefix(name + " ")
        lines.append(f'- <a id="{entry.key}"></a>**{name}** {text}\n')
    return HEAD + "".join(lines)


if __name__ == "__main__":
    (ROOT / "references.md").write_text(page(), encoding="utf-8")
