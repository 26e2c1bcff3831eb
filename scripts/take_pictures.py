"""Take the pictures that figures show where no JavaScript runs: python scripts/take_pictures.py

Every interactive figure of the chapters' stored outputs is drawn by its own script in Chromium, and what it shows is
kept as an SVG in mgpu_lib/widgets/pictures/. A chapter that is run afterwards puts it into its output. So, after a
change to a figure's script or style: take the pictures, then run the chapters. After a change to its values or data:
run the chapters first, so that there is something to take, then do both.

Pictures are the same on every machine: the letters are measured in a font that comes with matplotlib.
"""

import base64
import json
import re
from html import escape
from pathlib import Path

import chromium
import matplotlib

from mgpu_lib import widgets
from mgpu_lib.widgets.base import PICTURES, digest, picture_name
from virtual_gpus import replacing

ROOT = Path(__file__).resolve().parent.parent
FLATTEN = (ROOT / "scripts" / "flatten.js").read_text(encoding="utf-8")
STATE = re.compile(r'<script type="application/json" data-mgpu-state="\w+">(.*?)</script>', re.DOTALL)
WIDTH, MARGIN = 360, 10  # units of the picture; pages show it 480 pixels wide at most, and telephones narrower
FONT = "DejaVu Sans"
PAGE = "<!doctype html><style>{fonts} body{{margin:0;font-family:'" + FONT + "';color:#1b1f24}} {css}</style>"
PAGE += "<div style='width:{width}px'></div>"
DRAW = """async ([source, state]) => {
    Math.random = () => 0.5;
    await Promise.all([...document.fonts].map((font) => font.load()));
    const model = { get: (key) => state[key], set() {}, on() {}, off() {}, save_changes() {} };
    const { default: widget } = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
    widget.render({ model, el: document.querySelector("div") });
    while (!document.querySelector(".mgpu-picture[viewBox]")) await new Promise(requestAnimationFrame);
    const title = document.querySelector(".mgpu-picture").ariaLabel;
    return { title, ...flatten(document.querySelector("figure.mgpu")) };
}"""


def figures_shown(folder=ROOT / "chapters"):
    """(class name, values) of every interactive figure in the stored outputs of the notebooks in `folder`."""
    for path in sorted(folder.glob("*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            for output in cell.get("outputs", []):
                found = STATE.search("".join(output.get("data", {}).get("text/html", "")))
                if found:
                    yield "".join(output["data"]["text/plain"]).partition("(")[0], json.loads(found[1])


def fonts():
    """Style rules that bring the font along."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    rule = "@font-face{{font-family:'{}';font-weight:{};src:url(data:font/ttf;base64,{})}}"
    files = {"400": "DejaVuSans.ttf", "600 700": "DejaVuSans-Bold.ttf"}
    return "".join(
        rule.format(FONT, weight, base64.b64encode((folder / name).read_bytes()).decode())
        for weight, name in files.items()
    )


def script_digest(figure):
    """What a picture was made with: the script and the style of its class."""
    return digest(figure._esm + figure._css)


def take(page, name, state):
    """The picture of the figure class `name` with these values, drawn in a page of a browser."""
    figure = getattr(widgets, name)
    page.set_content(PAGE.format(fonts=fonts(), css=figure._css, width=WIDTH))
    page.evaluate(f"() => {{{FLATTEN}}}")
    taken = page.evaluate(DRAW, [figure._esm, state])
    wide, high = WIDTH + 2 * MARGIN, taken["height"] + 2 * MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" data-script="{script_digest(figure)}"'
        f' font-family="{FONT}, Verdana, sans-serif" font-size="13"><title>{escape(taken["title"])}</title>'
        f'<rect width="{wide}" height="{high}" rx="6" fill="#ffffff"/>'
        f'<g transform="translate({MARGIN} {MARGIN})">{taken["content"]}</g></svg>\n'
    )


def main():
    wanted = {picture_name(name, state): (name, state) for name, state in figures_shown()}
    with chromium.browser() as browser:
        page = browser.new_page()
        for file, figure in wanted.items():
            with replacing(PICTURES / file) as new:
                new.write_text(take(page, *figure), encoding="utf-8")
    for path in set(PICTURES.iterdir()) - {PICTURES / file for file in wanted}:
        path.unlink()
    print(f"{len(wanted)} pictures are in {PICTURES.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
