// A timeline's picture: the rows with their names, the bars, what marks the chosen one, and the legend.

import { firstAfter } from "./events.js";
import { legend, svg, swatch, textWidth } from "./figure.js";
import { timeScale } from "./time.js";

const LOOKS = {
  forward: ["forward pass (high)", 0],
  backward: ["backward pass (low)", 6],
  other: ["other kernels", 3],
  communication: ["copies and collectives", 3],
  host: ["work of the host", 3],
};
export const PITCH = 20; // from row to row
const BAR = 12; // a bar's height

// The bars of a row in the window, one path for each colour: thousands of bars are a few elements. Bars narrower than
// a pixel are drawn at their true width, so that their shade says how busy the row is; one that stands alone is
// widened, and a wide one ends a hairline early, to stand apart from the next.
function drawLane(picture, { items }, y, { x, from, to }) {
  const paths = {};
  for (let i = firstAfter(items, from); i < items.length && items[i].start < to; i++) {
    const { part, start, end } = items[i],
      left = x(Math.max(start, from)),
      room = x(Math.min(items[i + 1]?.start ?? to, to)) - left;
    const wide = Math.max(x(Math.min(end, to)) - left, Math.min(room / 2, 0.6)),
      top = y + LOOKS[part][1];
    const drawn = (wide > 3 ? wide - 0.8 : wide).toFixed(2);
    (paths[part] ??= []).push(`M${left.toFixed(2)},${top}h${drawn}v${BAR}h${-drawn}z`);
    const name = items[i].of?.name ?? items[i].name;
    if (wide > 34 && textWidth(picture, name, 400) + 4 < wide) {
      const words = { x: left + 4, y: top + 10.5, class: `mgpu-in mgpu-in-${part}` };
      (paths.words ??= []).push(svg("text", words, name));
    }
  }
  for (const [part, path] of Object.entries(paths)) {
    if (part !== "words") picture.append(svg("path", { d: path.join(""), class: `mgpu-${part} mgpu-bars` }));
  }
  picture.append(...(paths.words ?? []));
}

// The names of the rows, the GPU's once: [[row's y, GPU or "host" or "", name], …], and the width they need.
function labels(picture, lanes) {
  const names = lanes.map(({ gpu, name }, row) => {
    const group = gpu === null ? "host" : `cuda:${gpu}`,
      first = row === 0 || lanes[row - 1].gpu !== gpu;
    const short = gpu !== null ? name : name === "host" ? "main" : name.replace(/(^| )host(, |$)/, "$1").trim();
    return [first ? group : "", short];
  });
  const width = (column, weight) => Math.max(...names.map((name) => textWidth(picture, name[column], weight)));
  const second = Math.ceil(width(0, 600)) + 7;
  return { names, second, left: second + Math.ceil(width(1, 400)) + 8 };
}

export function drawTimeline(picture, width, { data, lanes, from, to }) {
  const { names, second, left } = labels(picture, lanes),
    right = width - 1,
    x = (tick) => left + ((tick - from) / (to - from)) * (right - left),
    gaps = lanes.map((lane, row) => (row && lanes[row - 1].gpu !== lane.gpu ? 7 : 0)),
    tops = gaps.map((_, row) => 2 + PITCH * row + gaps.slice(0, row + 1).reduce((a, b) => a + b)),
    bottom = tops.at(-1) + PITCH;
  lanes.forEach((lane, row) => {
    const y = tops[row];
    picture.append(
      svg("text", { x: 0, y: y + 14, class: "mgpu-strong" }, names[row][0]),
      svg("text", { x: second, y: y + 14 }, names[row][1]),
      svg("rect", { x: left, y, width: right - left, height: PITCH - 2, class: "mgpu-lane" }),
    );
  });
  const words = (unit) => `${unit} (modelled, ${data.gpu}, ${data.link})`;
  const height = timeScale(picture, { x, from, to, left, right, top: 2, bottom, words });
  lanes.forEach((lane, row) => drawLane(picture, lane, tops[row], { x, from, to }));
  return { height, x, tops, left, right };
}

// A frame around the chosen bar, and a line from the host's call to what it launched.
export function mark(layer, item, { x, tops }, from, to) {
  layer.replaceChildren();
  if (!item || item.end < from || item.start > to) return;
  const start = x(Math.max(item.start, from)),
    wide = Math.max(x(Math.min(item.end, to)) - start, 2);
  const frame = {
    x: start - 2,
    y: tops[item.lane.row] + LOOKS[item.part][1] - 2,
    width: wide + 4,
    height: BAR + 4,
    class: "mgpu-chosen",
  };
  layer.append(svg("rect", frame));
  const [call, kernel] = item.of ? [item, item.of] : [item.call, item];
  if (!call || call.end < from || call.end > to || kernel.start < from || kernel.start > to) return;
  const ends = { x1: x(call.end), y1: tops[call.lane.row] + BAR + 4, x2: x(kernel.start), y2: tops[kernel.lane.row] };
  layer.append(svg("line", { ...ends, class: "mgpu-thread" }));
}

// The marks of the parts that occur.
export function timelineLegend(items) {
  const there = new Set(items.map(({ part }) => part));
  const entry = ([part, [name, top]]) => [
    swatch(
      22,
      18,
      svg("rect", { width: 22, height: 18, class: "mgpu-lane" }),
      svg("rect", { x: 3, y: top, width: 16, height: BAR, class: `mgpu-${part}` }),
    ),
    name,
  ];
  return legend(
    Object.entries(LOOKS)
      .filter(([part]) => there.has(part))
      .map(entry),
  );
}
