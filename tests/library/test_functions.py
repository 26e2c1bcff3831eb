"""Functions fit a screen: at most 40 lines in Python, and 80 in JavaScript. (Tests may be longer.)"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def python_functions(source):
    """(name, lines) of each function in Python code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node.end_lineno - node.lineno + 1


@pytest.mark.parametrize("folder", ["mgpu_lib", "experiments", "benchmarks", "scripts"])
def test_python_functions_have_at_most_40_lines(folder):
    found = [
        (str(path.relative_to(ROOT)), *function)
        for path in sorted((ROOT / folder).rglob("*.py"))
        for function in python_functions(path.read_text(encoding="utf-8"))
    ]
    too_long = [function for function in found if function[-1] > 40]
    assert found and not too_long


# What braces and parentheses in JavaScript must not be looked for in. A slash begins a regular expression where an
# operand may stand, that is, behind an operator or an opening bracket.
SKIPPED = re.compile(
    r"""//[^\n]* | /\*.*?\*/ | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'
    | (?:(?<=[=(,:;!&|?{}\[\n])|(?<=return))\s*/(?![/*])(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n])+/[a-z]*""",
    re.DOTALL | re.VERBOSE,
)
NO_FUNCTION = re.compile(r"\b(if|for|while|switch|catch|with)\s*$")


def template_end(source, at):
    """Where the template literal that begins at `at` ends; what stands in its ${...} may hold others."""
    at += 1
    while source[at] != "`":
        if source.startswith("${", at):
            depth, at = 1, at + 2
            while depth:
                depth += {"{": 1, "}": -1}.get(source[at], 0)
                at = template_end(source, at) if source[at] == "`" else at + 1
        else:
            at += 2 if source[at] == "\\" else 1
    return at + 1


def bare(source):
    """JavaScript without comments, strings, regular expressions and templates; the lines stay."""
    found, at = [], 0
    while at < len(source):
        skipped = SKIPPED.match(source, at)
        end = template_end(source, at) if source[at] == "`" else skipped.end() if skipped else at + 1
        found.append(source[at] if end == at + 1 else "_" + "\n" * source.count("\n", at, end))
        at = end
    return "".join(found)


def function_start(before, parenthesis, brace):
    """Where the function begins whose body opens with `brace`, or None if that opens something else.

    `before` is the code before it, `parenthesis` where the last pair of them began, None behind an `if` and the like.
    """
    if before.endswith("=>"):
        return parenthesis if before.removesuffix("=>").rstrip().endswith(")") else brace
    return parenthesis if before.endswith(")") else None


def javascript_functions(source):
    """(how it begins, lines) of each function in JavaScript code whose body stands in braces."""
    source, opened, parenthesis = bare(source), [], None
    for at, character in enumerate(source):
        if character in "([":
            opened.append((character, at))
        elif character == "{":
            opened.append((character, function_start(source[:at].rstrip(), parenthesis, at)))
        elif character in ")]}":
            opening, start = opened.pop()
            assert opening + character in ("()", "[]", "{}"), f"line {source.count(chr(10), 0, at) + 1}"
            if character == ")":
                parenthesis = None if NO_FUNCTION.search(source[:start]) else start
            elif character == "}" and start is not None:
                line = source.rfind("\n", 0, start) + 1
                yield source[line:start].strip(), source.count("\n", start, at) + 1
    assert not opened


def test_functions_are_found_in_javascript():
    source = """
function first(a = ")") {  // {
  if (a) { return /[/{]/.test(`${a.map((b) => `{${b}`)}{`); }
  const inner = (x) => {
    return 1;
  };
}
const object = { method({ a, b }) { return "}"; }, async other() {
  for (const x of []) { }
} };
x.on("change", async (event) => {
});
"""
    assert list(javascript_functions(source)) == [
        ("const inner =", 3),
        ("function first", 6),
        ("const object = { method", 1),
        ("const object = { method({ a, b }) { return _; }, async other", 3),
        ("x.on(_, async", 2),
    ]


def test_javascript_functions_have_at_most_80_lines():
    found = [
        (path.name, *function)
        for path in sorted((ROOT / "mgpu_lib" / "widgets").glob("*.js"))
        for function in javascript_functions(path.read_text(encoding="utf-8"))
    ]
    too_long = [function for function in found if function[-1] > 80]
    assert found and not too_long
