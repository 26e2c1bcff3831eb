"""What the interactive figures share: one piece of JavaScript, shown live by Jupyter and static by a page.

Live, anywidget runs the script and keeps its values and Python's in step. Static, the same script lies in the
output's `text/html` together with its data, so the figure works from a folder on disk, offline. Where no script
may run (a browser without JavaScript, a notebook that isn't trusted), the page shows a picture and a caption. The
script draws that picture, too: `make pictures` keeps it for the starting values of every figure of the book.
"""

import base64
import hashlib
import json
import re
from html import escape
from pathlib import Path
from xml.etree import ElementTree

import anywidget
import traitlets

HERE = Path(__file__).parent
TICK = 1e-8  # seconds: 10 ns, the unit of time in the pages
PICTURES = HERE / "pictures"
IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w-]+\.js)";\n', re.MULTILINE)
DECLARATION = re.compile(r"^(?:async )?(?:function\*?|const|let|class) ([\w$]+)", re.MULTILINE)
EXPORTED = re.compile(r"^export (?=async |function|const|let|class)", re.MULTILINE)
OTHER = re.compile(r"^(?:import|export)\b.*", re.MULTILINE)
EXPORT = "export default { render };\n"
CSS = (HERE / "widgets.css").read_text(encoding="utf-8")

# Scripts run once per copy of the output, and each fills the places that are still empty.
STATIC = """<div data-mgpu="{uid}"><figure class="mgpu mgpu-fallback">
{picture}<figcaption>{caption} ({why} JavaScript, and in a notebook your trust.)</figcaption></figure></div>
<style>
{css}</style>
<script type="application/json" data-mgpu-state="{uid}">{state}</script>
<script>(() => {{
{script}
const start = JSON.parse(document.querySelector('[data-mgpu-state="{uid}"]').textContent);
for (const el of document.querySelectorAll('[data-mgpu="{uid}"]:not([data-ready])')) {{
  el.dataset.ready = "";
  const state = {{ ...start }}, heard = new EventTarget();
  render({{ el, model: {{
    get: (key) => state[key],
    set(key, value) {{
      if (state[key] === value) return;
      state[key] = value;
      heard.dispatchEvent(new Event(`change:${{key}}`));
    }},
    on: (name, listener) => heard.addEventListener(name, listener),
    off: (name, listener) => heard.removeEventListener(name, listener),
    save_changes() {{}},
  }} }});
}}
}})();</script>"""


def module(name, **made):
    """One ES module of the file `name` and of all that it imports, each file once and after those that it imports.

    `made`: {name without .js: text} of files that aren't in this folder.
    A file imports with `import { a, b } from "./other.js";` and exports with `export` before a declaration. ValueError
    for other ways to do either, for files that import each other in a circle, and for a name that is declared at the
    top of two files: they share one scope.
    """
    texts = {}

    def add(name, importers=()):
        if name in importers:
            raise ValueError(f"{' → '.join([*importers, name])}: files import each other in a circle")
        if name in texts:
            return
        text = made.get(name.removesuffix(".js")) or (HERE / name).read_text(encoding="utf-8")
        for other in IMPORT.findall(text):
            add(other, (*importers, name))
        texts[name] = EXPORTED.sub("", IMPORT.sub("", text))

    add(name)
    refuse_what_cannot_be_joined(texts)
    return "".join(texts.values()) + EXPORT


def refuse_what_cannot_be_joined(texts):
    """ValueError for {name: text} of files that would not be one module."""
    owner = {}
    for name, text in texts.items():
        if other := OTHER.search(text):
            raise ValueError(
                f'{name}: {other[0]!r}; write import {{ a }} from "./file.js"; or export before a function'
            )
        for word in DECLARATION.findall(text):
            if owner.setdefault(word, name) != name:
                raise ValueError(f"{word} is declared in {owner[word]} and in {name}: give one of them another name")


def as_json(state):
    """A figure's values as text that may stand in a script element. ValueError for NaN and infinity."""
    # "<" occurs inside strings only; written this way no text in the data can close the script or open a comment.
    return json.dumps(state, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def picture_name(figure, state):
    """The file name of the picture of a figure, such as "BatchSplitter", with these values and data.

    A caption isn't part of a picture.
    """
    shown = {name: value for name, value in state.items() if name != "caption"}
    return f"{figure}-{digest(as_json(shown))}.svg"


class InteractiveFigure(anywidget.AnyWidget):
    """An interactive figure. A subclass names its `controls` (traits) and gives its script, `_esm`."""

    _css = CSS
    controls = ()
    data = traitlets.Dict().tag(sync=True)
    caption = traitlets.Unicode().tag(sync=True)

    def __repr__(self):  # anywidget's own holds an address, which differs from run to run
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.controls)
        return f"{type(self).__name__}({values})"

    def static_html(self):
        """The figure as it stands now, as HTML that needs nothing else. Equal figures give equal HTML.

        Without JavaScript it shows the picture that was taken of the figure with these values and data, if there is
        one, and its caption.
        """
        values = {name: getattr(self, name) for name in ("caption", "data", *self.controls)}
        path = PICTURES / picture_name(type(self).__name__, values)
        state, script = as_json(values), self._esm.removesuffix(EXPORT)
        return STATIC.format(
            uid=digest(script + state),
            caption=escape(self.caption),
            picture=image(path.read_text(encoding="utf-8")) if path.exists() else "",
            why="The controls need" if path.exists() else "This figure needs",
            css=self._css,
            state=state,
            script=script,
        )

    def _repr_mimebundle_(self, **kwargs):
        data, metadata = super()._repr_mimebundle_(**kwargs)
        return {**data, "text/plain": repr(self), "text/html": self.static_html()}, metadata


def image(picture):
    """An SVG as an element that holds it; its title becomes the alternative text."""
    title = ElementTree.fromstring(picture).findtext("{http://www.w3.org/2000/svg}title")
    source = base64.b64encode(picture.encode()).decode()
    return f'<img alt="{escape(title)}" width="480" src="data:image/svg+xml;base64,{source}">\n'
