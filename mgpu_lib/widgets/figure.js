// What the interactive figures share: elements, labelled controls tied to a model, and redrawing.
// base.py joins a figure's modules to one, so there is nothing to bundle or to download.
// `model` is what anywidget hands to `render`; a static page brings one with the same five methods.

export function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
export const html = (tag, attributes = {}, ...children) => build(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) =>
  build(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// JupyterLab's command mode swallows the arrow keys of inputs that do not carry this attribute.
export const KEYS_ARE_MINE = { "data-lm-suppress-shortcuts": "true" };

export function choose(model, key, value) {
  model.set(key, value);
  model.save_changes();
}

// The model as a control sees it that shows and sets a value in other words.
export const translated = (model, get, set = (key, value) => model.set(key, value)) => ({
  get,
  set,
  save_changes: () => model.save_changes(),
});

// Each control returns [element, show]; `show` brings the element up to date with the model.
export function slider(model, key, label, values, describe) {
  const input = html("input", { type: "range", min: 0, max: values.length - 1, step: 1, ...KEYS_ARE_MINE });
  const output = html("output");
  input.addEventListener("input", () => choose(model, key, values[+input.value]));
  const show = () => {
    input.value = values.indexOf(model.get(key));
    output.textContent = describe(model.get(key));
    input.setAttribute("aria-valuetext", output.textContent);
  };
  return [html("label", { class: "mgpu-slider" }, html("span", {}, label), input, output), show];
}

// Marks under a slider's stops: `mark(value)` is [sign, class]. `also` is shown with them.
export function marked([element, show], values, mark, also = () => {}) {
  const row = html("span", { class: "mgpu-marks", "aria-hidden": "true" });
  element.append(row);
  const stop = (value) => {
    const [sign, look] = mark(value);
    return html("span", look ? { class: look } : {}, sign, html("small", {}, value));
  };
  return [
    element,
    () => {
      show();
      row.replaceChildren(...values.map(stop));
      also();
    },
  ];
}

// `possible(value)` says what goes together with the other choices. Whatever else is chosen is put back: some browsers
// let a reader choose an option that is disabled or hidden.
export function menu(model, key, label, names, possible = () => true) {
  const options = Object.entries(names).map(([value, name]) => html("option", { value }, name));
  const select = html("select", KEYS_ARE_MINE, ...options);
  const show = () => {
    for (const option of options) option.disabled = !possible(option.value);
    select.value = model.get(key);
  };
  select.addEventListener("change", () => {
    const offered = select.value in names && possible(select.value);
    if (offered && select.value !== String(model.get(key))) choose(model, key, select.value);
    else show();
  });
  return [html("label", { class: "mgpu-menu" }, html("span", {}, label), select), show];
}

// A menu whose options are called what they are.
export const named = (names) => Object.fromEntries(names.map((name) => [name, name]));

// `ways` is {value: [code, what it does]}.
export function radios(model, key, legend, ways) {
  const group = html("fieldset", { class: "mgpu-radios" }, html("legend", {}, legend));
  const inputs = Object.entries(ways).map(([value, [code, what]]) => {
    const input = html("input", { type: "radio", name: key, value, ...KEYS_ARE_MINE });
    input.addEventListener("change", () => choose(model, key, value));
    group.append(html("label", {}, input, html("span", {}, html("code", {}, code), `: ${what}`)));
    return input;
  });
  return [
    group,
    () =>
      inputs.forEach((input) => {
        input.checked = input.value === model.get(key);
      }),
  ];
}

// `idle()` says when pressing it does nothing.
export function button(label, act, idle = () => false, attributes = {}) {
  const element = html("button", { type: "button", ...attributes, ...KEYS_ARE_MINE }, label);
  element.addEventListener("click", () => idle() || act());
  // Not `disabled`: a button that is disabled while it has the focus loses it.
  return [element, () => element.setAttribute("aria-disabled", idle())];
}

// Several controls as one.
export const together = (element, controls) => [element, () => controls.forEach(([, show]) => show())];

// `entries` are lists of nodes and words.
export const legend = (entries) =>
  html("div", { class: "mgpu-legend" }, ...entries.map((parts) => html("span", {}, ...parts)));
export const swatch = (width, height, ...children) =>
  svg("svg", { width, height, "aria-hidden": "true" }, ...children);

// Put controls, picture and sentence into `el`, and draw again when a value or the width changes.
// The picture is drawn at its real width, never scaled, so that its text keeps its size on a telephone.
export function figure({ model, el, keys, controls, caption, sentence, draw, below = [] }) {
  const picture = svg("svg", { role: "img", class: "mgpu-picture" });
  const status = html("p", { class: "mgpu-sentence", role: "status" });
  // A form of its own keeps the radio buttons of two copies on one page apart.
  const form = html("form", { autocomplete: "off", class: "mgpu-controls" }, ...controls.map(([element]) => element));
  form.addEventListener("submit", (event) => event.preventDefault());
  const words = html("div", { class: "mgpu-below" }, ...below, status);
  const root = html("figure", { class: "mgpu" }, form, picture, words, html("figcaption", {}, caption));
  el.replaceChildren(root);

  let width = 0,
    waiting;
  const redraw = () => {
    if (!width) return;
    picture.replaceChildren();
    const height = draw(picture, width);
    build(picture, { width, height, viewBox: `0 0 ${width} ${height}`, "aria-label": sentence() }, []);
  };
  const update = () => {
    controls.forEach(([, show]) => show());
    redraw();
    // While a slider is dragged a screen reader would hear every step; it hears where the slider came to rest.
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      const words = sentence();
      if (status.textContent !== words) status.textContent = words; // or a screen reader says it again
    }, 200);
  };
  const observer = new ResizeObserver(() => {
    const now = Math.floor(words.clientWidth);
    if (now !== width) {
      width = now;
      redraw();
    }
  });
  update();
  status.textContent = sentence();
  observer.observe(words);
  keys.forEach((key) => model.on(`change:${key}`, update));
  return () => {
    observer.disconnect();
    clearTimeout(waiting);
    keys.forEach((key) => model.off(`change:${key}`, update));
  };
}

export const valuesOf = (model, keys) => Object.fromEntries(keys.map((key) => [key, model.get(key)]));
export const upTo = (last, first = 1) => Array.from({ length: last - first + 1 }, (_, i) => first + i);
export const sum = (values) => values.reduce((a, b) => a + b, 0);
export const list = (words) =>
  words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;

// Three digits, in the unit nvidia-smi uses and the next larger one.
export function size(bytes) {
  if (bytes === 0) return "0 B";
  const [value, unit] =
    bytes < 2 ** 20 ? [bytes / 2 ** 10, "KiB"] : bytes < 2 ** 30 ? [bytes / 2 ** 20, "MiB"] : [bytes / 2 ** 30, "GiB"];
  return `${value.toFixed(value >= 100 ? 0 : value >= 10 ? 1 : 2)} ${unit}`;
}

export function percent(part, whole) {
  const value = Math.round((100 * part) / whole);
  return value === 0 && part > 0 ? "under 1%" : `${value}%`;
}

// Text only where there is room for it, in the font that the page gives the picture.
const pen = document.createElement("canvas").getContext("2d");
export function textWidth(picture, words, weight = 600) {
  const { fontSize, fontFamily } = getComputedStyle(picture);
  pen.font = `${weight} ${fontSize} ${fontFamily}`;
  return pen.measureText(words).width;
}
