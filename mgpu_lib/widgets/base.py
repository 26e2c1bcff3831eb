"""What the interactive figures share: one piece of JavaScript, shown live by Jupyter and static by a page.

Live, anywidget runs the script and keeps its values and Python's in step. Static, the same script lies in the
output's `text/html` together with its data, so the figure works from a folder on disk, offline. Where no script
may run (a browser without JavaScript, a notebook that isn't trusted), the page shows a picture and a caption.
"""

import base64
import hashlib
import json
from decimal import ROUND_HALF_UP, Decimal
from html import escape
from pathlib import Path

import anywidget
import traitlets

HERE = Path(__file__).parent
EXPORT = "export default { render };\n"
CSS = (HERE / "widgets.css").read_text(encoding="utf-8")

# Scripts run once per copy of the output, and each fills the places that are still empty.
STATIC = """<div data-mgpu="{uid}"><figure class="mgpu mgpu-fallback">
<img alt="{alt}" width="480" src="data:image/svg+xml;base64,{picture}">
<figcaption>{caption} (The controls need JavaScript, and in a notebook your trust.)</figcaption></figure></div>
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


def module(*names):
    """The text of one figure's ES module: what all figures share, the figure's own files, and the export."""
    return "".join((HERE / part).read_text(encoding="utf-8") for part in ("figure.js", *names)) + EXPORT


class InteractiveFigure(anywidget.AnyWidget):
    """An interactive figure. A subclass names its `controls` (traits) and says itself in a sentence and a picture.

    `sentence()` is the picture's alternative text, word for word what the script writes below it;
    `picture()` is a list of SVG elements in a space 360 wide, and the height they need.
    """

    _css = CSS
    controls = ()
    data = traitlets.Dict().tag(sync=True)
    caption = traitlets.Unicode().tag(sync=True)

    def __repr__(self):  # anywidget's own holds an address, which differs from run to run
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.controls)
        return f"{type(self).__name__}({values})"

    def static_html(self):
        """The figure as it stands now, as HTML that needs nothing else. Equal figures give equal HTML."""
        state = {name: getattr(self, name) for name in ("caption", "data", *self.controls)}
        # "<" occurs inside strings only; written this way no text in the data can close the script or open a comment.
        state = json.dumps(state, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
        script = self._esm.removesuffix(EXPORT)
        return STATIC.format(
            uid=hashlib.sha256((script + state).encode()).hexdigest()[:12],
            alt=escape(self.sentence()),
            caption=escape(self.caption),
            picture=base64.b64encode(svg(*self.picture()).encode()).decode(),
            css=self._css,
            state=state,
            script=script,
        )

    def _repr_mimebundle_(self, **kwargs):
        data, metadata = super()._repr_mimebundle_(**kwargs)
        return {**data, "text/plain": repr(self), "text/html": self.static_html()}, metadata


def size(n_bytes):
    """Bytes to three digits, as figure.js writes them (which rounds halves up, where Python rounds them to even)."""
    if n_bytes == 0:
        return "0 B"
    power, unit = (10, "KiB") if n_bytes < 2**20 else (20, "MiB") if n_bytes < 2**30 else (30, "GiB")
    value = Decimal(n_bytes) / 2**power
    digits = "1" if value >= 100 else "0.1" if value >= 10 else "0.01"
    return f"{value.quantize(Decimal(digits), ROUND_HALF_UP)} {unit}"


def percent(part, whole):
    """A share as figure.js writes it: whole percents, and "under 1%" for what would round to nothing."""
    value = int(100 * part / whole + 0.5)
    return "under 1%" if value == 0 and part > 0 else f"{value}%"


def svg(elements, height):
    """A picture 360 wide on a sheet of its own, readable on light and dark pages alike."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 360 {height}" font-family="sans-serif" font-size="14">'
        f'<rect width="360" height="{height}" rx="6" fill="#fff"/>{"".join(elements)}</svg>'
    )


def rect(x, y, width, height, fill, stroke="none"):
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{fill}" stroke="{stroke}"/>'
    )


def text(x, y, words, anchor="start", weight=400):
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" fill="#1b1f24">'
        f"{escape(str(words))}</text>"
    )
