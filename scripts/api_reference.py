"""A Sphinx extension: a reference made of docstrings, from the source as text: the book is built without PyTorch.

```{api} mgpu_lib.plots
use_book_style
LiveAccuracy redraw
```

in a page describes two names of a module, and one method of the second. A name may be one that the module imports;
__doc__ stands for what the module says of itself.
```{printed} virtual-gpus plan --help``` shows what a command prints.
Docstrings are plain text: paragraphs, `code`, rows of a name and what it means, indented programs, sessions of >>>.
Below each stands the section of a chapter that first defines or uses the name. A name that isn't there is an error of
the build.
"""

import ast
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from textwrap import dedent

import yaml
from docutils import nodes
from docutils.statemachine import StringList
from sphinx import addnodes
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ROOT, ROOT / "virtual-gpus"
ROW = re.compile(r"(\S.*?) {2,}(\S.*)")
MARKED = re.compile(r"`([^`]+)`|arXiv:(\d{4}\.\d{5})")
QUOTES = "'"  # around a type that is defined further down
PROPERTIES = {"property", "cached_property", "functools.cached_property"}


# The source


@cache
def source(module):
    """(text, syntax tree) of a module. LookupError without."""
    path = module.replace(".", "/")
    files = [folder / name for folder in FOLDERS for name in (f"{path}.py", f"{path}/__init__.py")]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise LookupError(f"there is no module {module}")
    text = file.read_text(encoding="utf-8")
    return text, ast.parse(text)


def find(module, name):
    """(module, syntax node) of what `module` calls `name`, which it defines or imports. LookupError without."""
    for node in source(module)[1].body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == name for target in node.targets):
            return module, node
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return find(node.module, alias.name)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "HOMES":  # what virtual_gpus imports late
            for home, names in ast.literal_eval(node.value).items():
                if name in names:
                    return find(f"{module}.{home}", name)
    raise LookupError(f"{module} has no {name}")


def member(node, name):
    """The syntax node of a class's method or property. LookupError without."""
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef) and inner.name == name:
            return inner
    raise LookupError(f"{node.name} has no {name}")


def fields(node):
    """The annotated fields of a NamedTuple or a dataclass."""
    return [inner for inner in node.body if isinstance(inner, ast.AnnAssign)]


def signature(node):
    """The arguments of a function, without `self`; those of a class are its __init__'s, or its fields."""
    if isinstance(node, ast.Assign):
        return ""
    if isinstance(node, ast.ClassDef):
        try:
            return signature(member(node, "__init__"))
        except LookupError:
            return f"({', '.join(map(ast.unparse, fields(node)))})" if fields(node) else ""
    arguments = re.sub(r"^(self|cls)(, |$)", "", ast.unparse(node.args))
    return f"({arguments})" + (f" -> {ast.unparse(node.returns).strip(QUOTES)}" if node.returns else "")


def description(module, node):
    """A docstring, with the comments at a class's fields as rows; of a constant, the comment above it."""
    lines = source(module)[0].splitlines()
    if isinstance(node, ast.Assign):
        above = []
        while (line := lines[node.lineno - 2 - len(above)]).startswith("# "):
            above.insert(0, line[2:])
        return "\n".join(above)
    text = ast.get_docstring(node) or ""
    if isinstance(node, ast.ClassDef):
        comments = [(field.target.id, lines[field.end_lineno - 1].partition("  # ")[2]) for field in fields(node)]
        text += "\n\n" + "\n".join(f"{name}  {comment}" for name, comment in comments if comment)
    return text


# The page


def written(text, module):
    """Nodes of a line of text; `code` that is a name of the module leads to it."""
    position = 0
    for mark in MARKED.finditer(text):
        yield nodes.Text(text[position : mark.start()])
        code, paper = mark.groups()
        if paper:
            yield nodes.reference("", mark[0], refuri=f"https://arxiv.org/abs/{paper}")
        else:
            about = {"refdomain": "py", "reftype": "obj", "reftarget": code, "py:module": module}
            yield addnodes.pending_xref("", nodes.literal(code, code), **about)
        position = mark.end()
    yield nodes.Text(text[position:])


def paragraph(lines, module):
    return nodes.paragraph("", "", *written(" ".join(lines), module), support_smartquotes=False)


def block(lines, module):
    """Nodes of lines without an empty one between them: paragraphs, and lists of rows."""
    session = lines[0].startswith(">>> ")
    if session or all(line.startswith("    ") for line in lines):
        code = dedent("\n".join(lines))
        return [nodes.literal_block(code, code, language="pycon" if session else "python")]
    groups = []  # a list of lines is a paragraph, a list of pairs (name, lines) a list of rows
    for line in lines:
        row = ROW.fullmatch(line)
        in_rows = bool(groups) and isinstance(groups[-1][-1], tuple)
        if row and not in_rows:
            groups.append([])
        if row:
            groups[-1].append((row[1], [row[2]]))
        elif in_rows and line.startswith(" "):
            groups[-1][-1][1].append(line.strip())
        elif groups and not in_rows:
            groups[-1].append(line)
        else:
            groups.append([line])
    return [rows(group, module) if isinstance(group[0], tuple) else paragraph(group, module) for group in groups]


def rows(pairs, module):
    """A list of names and what they mean."""
    items = [
        nodes.definition_list_item(
            "", nodes.term("", "", nodes.literal(name, name)), nodes.definition("", paragraph(lines, module))
        )
        for name, lines in pairs
    ]
    return nodes.definition_list("", *items, classes=["rows"])


@cache
def cells():
    """The code of all chapters in their order: (file, title of the chapter, of the section, code)."""
    parts = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))["parts"]
    names = [entry["file"] for part in parts for entry in part["chapters"] if entry["file"].startswith("chapters/")]
    found = []
    for name in names:
        titles = []
        for cell in json.loads((ROOT / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]:
            text = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                titles += re.findall(r"^##? (.+)", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
            else:
                found.append((f"{name}.ipynb", titles[0], titles[-1], text))
    return found


def introduction(module, name):
    """Markdown that links to the section that first defines, imports or uses a name; empty if none does."""
    package, _, part = module.rpartition(".")
    use = rf"\b{part.replace('mgpu_lib', 'mgpu')}\.{name}\b|\bimport [^\n]*\b{name}\b"
    if not package:  # other modules have names that programs often give to what is their own
        use += rf"|\b(def|class) {name}\b"
    for file, title, section, code in cells():
        if re.search(use, code):
            anchor = re.sub(r"[`*]", "", section).replace(" ", "-")
            where = title if section == title else f"{title}: {section}"
            return f"In the book: [{where}](<{file}#{anchor}>)"
    return ""


class Printed(SphinxDirective):
    """What a module that is run as a program prints, with the command that a reader types for it."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self):
        command = self.arguments[0]
        module, *arguments = command.replace("-", "_", 1).split()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, FOLDERS)), "COLUMNS": "80"}
        program = [sys.executable, "-m", module, *arguments]
        done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise self.error(f"{command}: {done.stderr}")
        text = f"$ {command}\n{done.stdout}"
        return [nodes.literal_block(text, text, language="text")]


class Api(SphinxDirective):
    """The names of a module, one a line, each with the members that are described, too."""

    required_arguments = 1
    has_content = True

    def run(self):
        try:
            return [node for line in self.content if line.strip() for node in self.entry(*line.split())]
        except LookupError as error:
            raise self.error(str(error)) from error

    def entry(self, name, *members):
        module = self.arguments[0]
        if name == "__doc__":
            return self.body(module, module, source(module)[1])
        home, node = find(module, name)
        inner = [member(node, one) for one in members]
        found = self.described(module, name, kind(node), signature(node))
        content = found[-1][-1]
        content += self.body(module, home, node)
        for one in inner:
            of_class = "property" if is_property(one) else "method"
            part = self.described(module, f"{name}.{one.name}", of_class, "" if is_property(one) else signature(one))
            part[-1][-1].extend(self.body(module, home, one))
            content += part
        chapter = introduction(module, name)
        content += self.parsed(chapter) if chapter else []
        return found

    def body(self, module, home, node):
        text = description(home, node)
        if not text.strip():
            raise self.error(f"{home}: {getattr(node, 'name', ast.unparse(node)[:20])} has no docstring")
        blocks = [lines.split("\n") for lines in re.split(r"\n\s*\n", text) if lines.strip()]
        return [made for lines in blocks for made in block(lines, module)]

    def described(self, module, name, of_kind, arguments):
        """Sphinx's own node of a Python object, whose content is still empty: it knows anchors and the index."""
        return self.parsed(f"```{{py:currentmodule}} {module}\n```\n\n```{{py:{of_kind}}} {name}{arguments}\n```")

    def parsed(self, text):
        holder = nodes.Element()
        self.state.nested_parse(StringList(text.split("\n"), source=self.env.docname), self.content_offset, holder)
        return holder.children


def kind(node):
    return {ast.FunctionDef: "function", ast.ClassDef: "class", ast.Assign: "data"}[type(node)]


def is_property(node):
    return any(ast.unparse(decorator) in PROPERTIES for decorator in node.decorator_list)


def setup(app):
    app.add_directive("api", Api)
    app.add_directive("printed", Printed)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
