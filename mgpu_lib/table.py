"""The table of the book: prints in a terminal, shows in a notebook."""

import html


class Table:
    """Rows (dicts with the same keys) that print as a table, in a terminal and in a notebook.

    `empty` is what to say where there are no rows.
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
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.rows[0])
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(str(v))}</td>" for v in row.values()) + "</tr>" for row in self.rows
        )
        return f"<table class='mgpu-table'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
