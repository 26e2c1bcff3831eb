"""The table of the book: prints in a terminal, shows in a notebook."""

import html

SENTENCE = 45  # characters; what is longer isn't a name or a number


class Table:
    """Rows (dicts with the same keys) that print as a table, in a terminal and in a notebook.

    `empty` is what to say where there are no rows. A notebook shows columns of sentences, such as error messages, as
    text: they begin at the left, also in JupyterLab, and wrap on a telephone (`mgpu-words` in the book's style).
    """

    def __init__(self, rows, empty=""):
        self.rows, self.empty = rows, empty

    def __repr__(self):
        if not self.rows:
            return self.empty
        cells = [list(self.rows[0]), *([str(v) for v in row.values()] for row in self.rows)]
        widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells)

    def _repr_html_(self):
        if not self.rows:
            return f"<p>{html.escape(self.empty)}</p>"
        words = {name for row in self.rows for name, value in row.items() if len(str(value)) > SENTENCE}

        def cell(tag, name, value):
            style = " class='mgpu-words' style='text-align: left'" if name in words else ""
            return f"<{tag}{style}>{html.escape(str(value))}</{tag}>"

        head = "".join(cell("th", name, name) for name in self.rows[0])
        body = "".join("<tr>" + "".join(cell("td", *item) for item in row.items()) + "</tr>" for row in self.rows)
        return f"<table class='mgpu-table'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
