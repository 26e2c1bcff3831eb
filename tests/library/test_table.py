"""The book's table: what it prints, and what a notebook shows."""

from mgpu_lib.table import SENTENCE, Table

ROWS = [{"line": "a * b", "ms": 1.5, "outcome": "runs"}, {"line": "a @ b", "ms": 20, "outcome": "<" * (SENTENCE + 1)}]


def test_it_prints_columns_as_wide_as_their_longest_entry():
    assert repr(Table(ROWS[:1])) == "line   ms   outcome\na * b  1.5  runs"
    assert repr(Table([], empty="nothing was found")) == "nothing was found"


def test_a_column_with_a_sentence_is_text_and_the_others_are_not():
    """JupyterLab sets all columns at the right, which suits numbers."""
    style = " class='mgpu-words' style='text-align: left'"
    shown = Table(ROWS)._repr_html_()
    assert "<th>line</th><th>ms</th>" in shown and "<td>a @ b</td><td>20</td>" in shown
    assert f"<th{style}>outcome</th>" in shown and f"<td{style}>runs</td>" in shown
    assert f"<td{style}>{'&lt;' * (SENTENCE + 1)}</td>" in shown
    assert "mgpu-words" not in Table(ROWS[:1])._repr_html_()
