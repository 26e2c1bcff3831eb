// The timeline viewer's controls: zooming, moving, and choosing events, with keys and with the pointer.

import { PITCH, drawTimeline, mark, timelineLegend } from "./bars.js";
import { describe, nearestItem, timelineSentence } from "./events.js";
import { KEYS_ARE_MINE, button, figure, html, slider, svg, together, upTo } from "./figure.js";
import { duration } from "./time.js";
import { clamp, viewOf } from "./window.js";

const ZOOM_KEYS = { "+": 1, "=": 1, "-": -1 };
const HINT = "Point at a bar, or choose one here: ← → along its row, ↑ ↓ to another row, + − zoom, Esc for none.";

// Keys of a slider: + and − zoom; `keys(key)` is what another key does, or nothing.
function onKeys(view, input, keys) {
  input.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const by = ZOOM_KEYS[event.key],
      action = by ? () => view.zoomTo(view.level() + by) : keys(event.key);
    if (!action) return;
    event.preventDefault();
    action();
  });
}

const range = () => html("input", { type: "range", min: 0, step: 1, ...KEYS_ARE_MINE });

function zoomSlider(view) {
  // The slider keeps the middle, or the chosen bar, where it is.
  const zooming = { get: view.level, set: (_, level) => view.zoomTo(level), save_changes() {} };
  const words = (level) => `${2 ** level}×, ${duration(view.span(level))}`;
  const [zoom, show] = slider(zooming, "zoom", "Zoom", upTo(view.levels, 0), words);
  onKeys(view, zoom.querySelector("input"), () => undefined);
  return [zoom, show];
}

function startSlider(view) {
  const { from, to, span, show, startAt } = view,
    input = range(),
    output = html("output");
  input.addEventListener("input", () => show({ start: startAt(+input.value) }));
  const by = { ArrowLeft: -1 / 8, ArrowDown: -1 / 8, ArrowRight: 1 / 8, ArrowUp: 1 / 8, PageDown: -1, PageUp: 1 };
  onKeys(view, input, (key) => by[key] && (() => show({ start: startAt(from() + by[key] * span()) })));
  return [
    html("label", { class: "mgpu-slider" }, html("span", {}, "Window starts at"), input, output),
    () => {
      input.max = view.whole - span();
      input.value = from();
      output.textContent = duration(from());
      input.setAttribute("aria-valuetext", `${duration(from())} to ${duration(to())}`);
    },
  ];
}

function zoomButtons({ level, levels, zoomTo, show }) {
  const press = (label, what, act, idle) => button(label, act, idle, { "aria-label": `${label}: ${what}` });
  const wider = () => zoomTo(level() - 1),
    closer = () => zoomTo(level() + 1),
    all = () => show({ zoom: 0, start: 0 }),
    widest = () => level() === 0;
  const buttons = [
    press("− Wider", "zoom out", wider, widest),
    press("+ Closer", "zoom in", closer, () => level() === levels),
    button("Show all", all, widest),
  ];
  return together(html("span", { class: "mgpu-buttons" }, ...buttons.map(([element]) => element)), buttons);
}

// The slider that walks through the events, and the words about the one that is pointed at, or chosen.
// Returns [element, show, say, input].
function eventSlider(view, hovered) {
  const { chosen, lane, pick, move, show } = view,
    input = range(),
    words = html("span", { class: "mgpu-words", "aria-hidden": "true" });
  input.addEventListener("input", () => pick(lane().items[+input.value]));
  onKeys(view, input, (key) => {
    if (["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"].includes(key)) return () => move(key);
    return key === "Escape" && chosen() ? () => show({ event: -1 }) : undefined;
  });
  const say = () => {
    const item = hovered() ?? chosen();
    words.textContent = item ? `${describe(item)}.` : HINT;
  };
  const update = () => {
    const item = chosen();
    input.max = lane().items.length - 1;
    input.value = item ? lane().items.indexOf(item) : 0;
    input.setAttribute("aria-valuetext", item ? describe(item) : "none chosen");
    say();
  };
  return [html("label", { class: "mgpu-event" }, html("span", {}, "Event"), input, words), update, say, input];
}

// Where the pointer is: its moment, and the bar under it or within 3 pixels.
function under({ span, from, lanes }, drawn, event, picture) {
  const box = picture.getBoundingClientRect(),
    at = event.clientX - box.left,
    y = event.clientY - box.top,
    perPixel = span() / (drawn.right - drawn.left),
    tick = from() + (at - drawn.left) * perPixel,
    row = drawn.tops.findIndex((top) => y >= top && y < top + PITCH),
    inside = row >= 0 && at >= drawn.left - 3 && at <= drawn.right + 3;
  return { tick, perPixel, item: inside ? nearestItem(lanes[row].items, tick, 3 * perPixel) : undefined };
}

// Drag to move, point to ask, click to choose. `drawn()` is the picture as it is now.
function onPointer(view, picture, drawn, hover, picked) {
  let drag;
  const at = (event) => under(view, drawn(), event, picture);
  picture.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    drag = { x: event.clientX, from: view.from(), moved: false };
    picture.setPointerCapture(event.pointerId);
  });
  picture.addEventListener("pointermove", (event) => {
    const { item, perPixel } = at(event);
    if (!drag) return hover(item);
    drag.moved ||= Math.abs(event.clientX - drag.x) > 4;
    if (drag.moved) view.show({ start: view.startAt(drag.from - (event.clientX - drag.x) * perPixel) });
  });
  picture.addEventListener("pointerup", (event) => {
    if (drag && !drag.moved) {
      view.pick(at(event).item);
      picked.focus({ preventScroll: true });
    }
    drag = undefined;
  });
  picture.addEventListener("pointercancel", () => (drag = undefined));
  picture.addEventListener("pointerleave", () => hover(undefined));
}

// Ctrl and the wheel zoom; the moment under the pointer keeps its place.
function onWheel(view, picture, drawn) {
  let turned = 0;
  const zoom = (event) => {
    if (!event.ctrlKey) return; // the page scrolls
    event.preventDefault();
    turned += event.deltaY;
    if (Math.abs(turned) < 50) return; // a trackpad sends many small turns
    const { tick } = under(view, drawn(), event, picture);
    view.zoomTo(view.level() - Math.sign(turned), clamp(tick, view.whole));
    turned = 0;
  };
  picture.addEventListener("wheel", zoom, { passive: false });
}

export function render({ model, el }) {
  const view = viewOf(model),
    { from, to } = view;
  let drawn, // of the picture as it is now: its scale and its rows
    layer,
    hovered;
  const [eventLabel, showEvent, say, picked] = eventSlider(view, () => hovered);
  const markItem = () => mark(layer, hovered ?? view.chosen(), drawn, from(), to());
  const hover = (item) => {
    if (item === hovered) return;
    hovered = item;
    markItem();
    say();
  };
  const listen = (picture) => {
    picture.classList.add("mgpu-time");
    onPointer(view, picture, () => drawn, hover, picked);
    onWheel(view, picture, () => drawn);
  };
  const [buttons, showButtons] = zoomButtons(view);
  const showBoth = () => {
    showButtons();
    showEvent();
  };
  return figure({
    model,
    el,
    caption: model.get("caption"),
    keys: ["start", "zoom", "event"],
    controls: [zoomSlider(view), startSlider(view), [buttons, showBoth]],
    below: [timelineLegend(Object.values(view.items)), eventLabel],
    sentence: () => timelineSentence(view.data, view.busy, from(), to()),
    draw(picture, width) {
      if (!drawn) listen(picture);
      drawn = drawTimeline(picture, width, { data: view.data, lanes: view.lanes, from: from(), to: to() });
      layer = svg("g");
      picture.append(layer);
      markItem();
      return drawn.height;
    },
  });
}
