"""What the tests of the interactive figures share: pages that hold figures, and what is read from them."""

import json
import re

HOSTILE = ["</script><script>window.hacked=1</script>", "<!--<script>", "\"'&amp; {0} \\ \u2028"]

# The words that lie on others, and what leaves its picture, on the whole page.
CLASHES = """() => [...document.querySelectorAll(".mgpu-picture")].flatMap((picture) => {
    const frame = picture.getBoundingClientRect();
    const words = [...picture.querySelectorAll("text")].map((e) => [e.textContent, e.getBoundingClientRect()]);
    const drawn = [...picture.querySelectorAll("*")].filter((e) => e.getBBox && !e.closest("defs"));
    const out = drawn.map((e) => [e.textContent || e.tagName, e.getBoundingClientRect()]).filter(([, b]) =>
        b.left < frame.left - 1 || b.right > frame.right + 1 || b.top < frame.top - 1 || b.bottom > frame.bottom + 1);
    const on = words.filter(([, a], i) => words.some(([, b], j) => i < j
        && a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 5 && b.top < a.bottom - 5));
    return [...out, ...on].map(([word]) => word);
})"""
# The smallest letters of all figures, in pixels of the screen.
SMALLEST = """() => Math.min(...[...document.querySelectorAll(".mgpu *")]
    .filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()))
    .map((e) => parseFloat(getComputedStyle(e).fontSize) * (e.getScreenCTM ? e.getScreenCTM().a : 1)))"""
# A figure's module as anywidget loads it, with a model that notes what it is asked and whom it tells.
LIVE = """async ([source, state, sends]) => {
    const heard = {}, saved = [], sent = [];
    window.model = {
        get: (key) => state[key],
        set(key, value) { state[key] = value; (heard[`change:${key}`] || []).forEach((f) => f()); },
        on: (name, f) => (heard[name] ??= []).push(f),
        off: (name, f) => { heard[name] = heard[name].filter((other) => other !== f); },
        save_changes: () => saved.push({...state}),
    };
    if (sends) model.send = (content) => sent.push(content);
    Object.assign(window, { heard, saved, sent });
    const { default: widget } = await import(URL.createObjectURL(new Blob([source], {type: "text/javascript"})));
    window.show = () => widget.render({ model, el: document.body.appendChild(document.createElement("div")) });
    window.leave = show();
}"""
# All menus, radio buttons and sliders (of a slider five stops) are set to all their values, also those that are hidden
# or disabled, in several `orders`: with 7 every seventh, round and round. Found are [what was done, what the figure
# shows, what one made with its values shows], and [what was done, words that clash].
FORCE = """async ([source, state, orders]) => {
    const clashes = CLASHES;
    const { default: widget } = await import(URL.createObjectURL(new Blob([source], {type: "text/javascript"})));
    const make = (values, el) => {
        const heard = new EventTarget();
        el.leave = widget.render({ el, model: {
            get: (key) => values[key],
            set(key, value) {
                if (values[key] === value) return;
                values[key] = value;
                heard.dispatchEvent(new Event(`change:${key}`));
            },
            on: (name, f) => heard.addEventListener(name, f),
            off() {},
            save_changes() {},
        } });
        return el;
    };
    const frame = () => new Promise(requestAnimationFrame);
    const all = (el) => [...el.querySelectorAll("select, input")];
    const shown = (el, words) => [words, el.querySelector("form").textContent,
        ...all(el).map((e) => (e.type === "radio" ? e.checked : `${e.value} ${e.max} ${e.disabled}`))].join(" | ");
    const values = { ...state }, figure = make(values, document.body.appendChild(document.createElement("div")));
    await frame(), await frame();
    const differences = [], clashing = [], done = [];
    const check = () => {
        const again = make({ ...values }, document.createElement("div"));
        const now = shown(figure, figure.querySelector(".mgpu-picture").ariaLabel);
        const wanted = shown(again, again.querySelector("[role=status]").textContent);
        again.leave();
        const words = clashes();
        if (words.length && clashing.length < 3) clashing.push([done.slice(-4).join(), words]);
        if (now !== wanted && differences.length < 3) differences.push([done.slice(-4).join(), now, wanted]);
    };
    const steps = all(figure).flatMap((control) => {
        const put = (value, kind) => () => {
            if (control.type === "radio") return control.click();
            control.value = value;
            done.push(`${control.labels[0].textContent.slice(0, 12)}=${value}`);
            control.dispatchEvent(new Event(kind));
        };
        if (control.localName === "select") return [...control.options].map(({ value }) => put(value, "change"));
        if (control.type === "radio") return [put()];
        return [0, 0.25, 0.5, 0.75, 1].map((part) => put(Math.round(part * control.max), "input"));
    });
    for (const stride of orders) {
        for (const i of steps.keys()) steps[(i * stride) % steps.length](), check();
    }
    return [steps.length, differences, clashing];
}""".replace("CLASHES", CLASHES)
SAY = """async ([source, state, changes]) => {
    const { default: widget } = await import(URL.createObjectURL(new Blob([source], {type: "text/javascript"})));
    return changes.map((values) => {
        const now = { ...state, ...values }, el = document.createElement("div");
        widget.render({ el, model: { get: (key) => now[key], set() {}, on() {}, off() {}, save_changes() {} } })();
        return el.querySelector("[role=status]").textContent;
    });
}"""


def in_page(value):
    """As the page gets it."""
    return json.loads(json.dumps(value))


def state_of(figure):
    return in_page({name: getattr(figure, name) for name in ("caption", "data", *figure.controls)})


def sentence(figure):
    """What the live region says once the control has come to rest; the picture says it at once."""
    settled = """e => e.querySelector('.mgpu-picture')?.ariaLabel
        && e.querySelector('.mgpu-sentence').textContent === e.querySelector('.mgpu-picture').ariaLabel"""
    figure.page.wait_for_function(settled, arg=figure.element_handle())
    return figure.locator(".mgpu-sentence").text_content()


def picture(page, nth=0):
    return page.locator("svg.mgpu-picture").nth(nth)


def control(root, name):
    """A menu, a slider or a button by how its name begins: a menu's label goes on with its options."""
    return root.get_by_label(re.compile(f"^{name}"))


def drawn_boxes(page, selector):
    """(first class, x, y, width, height) of each of these boxes in a picture."""
    return page.locator(selector).evaluate_all("""(boxes) => boxes.map((box) =>
        [box.classList[0], ...["x", "y", "width", "height"].map((name) => +box.getAttribute(name))])""")


def cell(root, batch_size, lr):
    """A cell of the explorer's map."""
    name = rf"^[\d×]+: batch size {batch_size}, learning rate {re.escape(lr)}:"
    return root.get_by_role("gridcell", name=re.compile(name))


def points_of(line):
    return [tuple(map(float, point.split(","))) for point in line.get_attribute("points").split()]


def drawn(root, look):
    """The points of a picture's first curve of this look."""
    return points_of(root.locator(f".mgpu-picture polyline.{look}").first)
