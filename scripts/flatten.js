// A figure as it stands in the page, as elements of an SVG that needs no style sheet: take_pictures.py calls this.

// What an element of an SVG inherits when nothing else is said.
const INITIAL = {
  fill: "#000000",
  stroke: "none",
  "stroke-width": "1",
  "stroke-dasharray": "none",
  "stroke-linejoin": "miter",
  "fill-opacity": "1",
  "stroke-opacity": "1",
  "paint-order": "normal",
  "font-size": "13",
  "font-weight": "400",
};
const GEOMETRY = "x y x1 x2 y1 y2 cx cy r rx dx width height d points id patternUnits text-anchor".split(" ");
const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });

const short = (text) => text.replace(/-?\d+\.\d+/g, (number) => String(+(+number).toFixed(1)));
const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/"/g, "&quot;");
const tag = (name, attributes, content = "") =>
  `<${name}${Object.entries(attributes)
    .map(([key, value]) => ` ${key}="${escaped(String(value))}"`)
    .join("")}${content ? `>${content}</${name}>` : "/>"}`;

// Any colour as #rrggbb and an opacity: a colour is drawn before it is read.
function paint(color) {
  if (color === "none" || color.startsWith("url(")) return [color.replace(/"/g, ""), 1];
  pen.clearRect(0, 0, 1, 1);
  pen.fillStyle = color;
  pen.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
  return [`#${[r, g, b].map((part) => part.toString(16).padStart(2, "0")).join("")}`, Math.round(a / 2.55) / 100];
}

// The style of an SVG's element as attributes, those that differ from what it inherits.
function looks(style, inherited) {
  const now = Object.fromEntries(
    Object.keys(INITIAL).map((name) => [name, short(style.getPropertyValue(name).replace(/px/g, ""))]),
  );
  for (const name of ["fill", "stroke"]) {
    const [color, opacity] = paint(style.getPropertyValue(name));
    now[name] = color;
    now[`${name}-opacity`] = String(Math.round(100 * opacity * now[`${name}-opacity`]) / 100);
  }
  if (now.stroke === "none") for (const name in now) if (name.startsWith("stroke-")) now[name] = inherited[name];
  return [Object.fromEntries(Object.entries(now).filter(([name, value]) => value !== inherited[name])), now];
}

// Bars less than a third of a unit apart become one: thousands of them would be a long text.
function joined(path) {
  const bars = [];
  for (const [, x, y, wide, high] of path.matchAll(/M([\d.]+),([\d.]+)h([\d.]+)v([\d.]+)h-[\d.]+z/g)) {
    const last = bars.at(-1);
    if (last && +x - last.end < 0.34) last.end = Math.max(+x + +wide, last.end);
    else bars.push({ x: +x, end: +x + +wide, y, high });
  }
  const wide = (bar) => Math.max(bar.end - bar.x, 0.3).toFixed(1);
  return bars.map((bar) => `M${bar.x.toFixed(1)},${bar.y}h${wide(bar)}v${bar.high}h-${wide(bar)}z`).join("");
}

// An element inside an SVG. `scale` is not 1 where the SVG's units aren't pixels: only lines are drawn there.
function drawn(element, inherited, scale) {
  const [attributes, now] = looks(getComputedStyle(element), inherited),
    geometry = {};
  for (const name of GEOMETRY) {
    const value = element.getAttribute(name);
    if (value !== null) geometry[name] = short(value);
  }
  if (element.localName === "polyline") {
    const points = element.getAttribute("points").split(" ");
    geometry.points = short(points.map((pair) => pair.split(",").map((v, i) => v * scale[i])).join(" "));
  }
  if (element.classList.contains("mgpu-bars")) geometry.d = joined(element.getAttribute("d"));
  if (element.localName === "rect" && !(+geometry.width > 0)) return "";
  const inside = element.localName === "text" ? escaped(element.textContent) : children(element, now, scale);
  const empty = !inside && ["g", "text"].includes(element.localName);
  return empty ? "" : tag(element.localName, { ...geometry, ...attributes }, inside);
}
const children = (element, inherited, scale) =>
  [...element.children].map((child) => drawn(child, inherited, scale)).join("");

function picture(element, [x, y], width, height) {
  const [, , wide, high] = (element.getAttribute("viewBox") ?? `0 0 ${width} ${height}`).split(" ").map(Number),
    cut = getComputedStyle(element).overflow === "hidden" && element.hasAttribute("viewBox"),
    inside = children(element, INITIAL, [width / wide, height / high]);
  if (cut) return tag("svg", { x: short(String(x)), y: short(String(y)), width, height }, inside);
  return tag("g", { transform: `translate(${short(String(x))} ${short(String(y))})` }, inside);
}

// The background, and the line around or above an element of HTML. `style` may be that of what CSS puts before it.
function box(style, [x, y], width, height) {
  const [fill, opacity] = paint(style.backgroundColor),
    shadow = /^(.*?\)) 0px 0px 0px ([\d.]+)px/.exec(style.boxShadow),
    [top, left] = [parseFloat(style.borderTopWidth), parseFloat(style.borderLeftWidth)],
    found = [];
  const rect = (grow, attributes) =>
    tag("rect", {
      x: x - grow, y: y - grow, width: width + 2 * grow, height: height + 2 * grow,
      ...(parseFloat(style.borderRadius) > 0 ? { rx: Math.min(parseFloat(style.borderRadius), height / 2) } : {}),
      ...attributes,
    });
  const line = (color, wide) => {
    const [stroke, alpha] = paint(color);
    return { fill: "none", stroke, "stroke-width": wide, ...(alpha < 1 ? { "stroke-opacity": alpha } : {}) };
  };
  if (opacity) found.push(rect(0, { fill, ...(opacity < 1 ? { "fill-opacity": opacity } : {}) }));
  if (shadow) found.push(rect(shadow[2] * (style.boxShadow.includes("inset") ? -0.5 : 0.5), line(shadow[1], shadow[2])));
  if (top && left) found.push(rect(-top / 2, line(style.borderTopColor, top)));
  else if (top) found.push(tag("line", { x1: x, x2: x + width, y1: y, y2: y, ...line(style.borderTopColor, top) }));
  return short(found.join(""));
}

// The lines of a text node: [words, box] each.
function linesOf(node) {
  const lines = [],
    range = document.createRange();
  for (const { index, 0: word } of node.data.matchAll(/\S+/g)) {
    range.setStart(node, index);
    range.setEnd(node, index + word.length);
    const now = range.getBoundingClientRect(),
      last = lines.at(-1);
    if (last && Math.abs(last.top - now.top) < 2) {
      last.words += ` ${word}`;
      last.right = now.right;
    } else lines.push({ words: word, left: now.left, right: now.right, top: now.top });
  }
  return lines;
}

function text(node, [left, top]) {
  const style = getComputedStyle(node.parentElement),
    [fill] = paint(style.color),
    weight = style.fontWeight === "400" ? {} : { "font-weight": style.fontWeight },
    anchor = { center: "middle", right: "end", end: "end" }[style.textAlign];
  pen.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
  const ascent = pen.measureText("x").fontBoundingBoxAscent;
  const put = (line) => {
    const x = anchor === "middle" ? (line.left + line.right) / 2 : anchor === "end" ? line.right : line.left,
      at = { x: short((x - left).toFixed(2)), y: short((line.top + ascent - top).toFixed(2)) };
    const looks = { fill, "font-size": parseFloat(style.fontSize), ...weight };
    return tag("text", { ...at, ...looks, ...(anchor ? { "text-anchor": anchor } : {}) }, escaped(line.words));
  };
  return linesOf(node).map(put).join("");
}

// Everything that an element of HTML shows, as [z-index, SVG] in the order of the document.
function* shown(element, origin, z = 0) {
  const style = getComputedStyle(element),
    here = element.getBoundingClientRect(),
    at = [here.left - origin[0], here.top - origin[1]],
    own = style.zIndex === "auto" ? z : +style.zIndex;
  if (style.display === "none") return;
  if (element.localName === "svg") return yield [own, picture(element, at, here.width, here.height)];
  if (style.display !== "contents") yield [own, box(style, at, here.width, here.height)];
  for (const which of ["::before", "::after"]) {
    const pseudo = getComputedStyle(element, which);
    if (pseudo.content === "none" || pseudo.position !== "absolute") continue;
    const border = pseudo.boxSizing === "border-box" ? 0 : 2 * parseFloat(pseudo.borderTopWidth),
      size = [parseFloat(pseudo.width) + border, parseFloat(pseudo.height) + border];
    yield [+pseudo.zIndex, box(pseudo, [at[0] + parseFloat(pseudo.left), at[1] + parseFloat(pseudo.top)], ...size)];
  }
  for (const child of element.childNodes) {
    if (child.nodeType === Node.ELEMENT_NODE) yield* shown(child, origin, own);
    else if (child.nodeType === Node.TEXT_NODE && child.data.trim()) yield [own, text(child, origin)];
  }
}

// What of a figure says something without being moved: {content, width, height}.
window.flatten = (root) => {
  root.querySelectorAll("form > *, figcaption, .mgpu-event").forEach((element) => element.remove());
  root.querySelector("form").style.margin = 0; // the form itself keeps the others in their rows
  const { left, top, width, height } = root.getBoundingClientRect(),
    items = [...shown(root, [left, top])].sort(([a], [b]) => a - b);
  return { content: items.map(([, svg]) => svg).join(""), width, height: Math.ceil(height) };
};
