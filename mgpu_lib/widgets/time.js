// Times on the modelled clock: whole ticks of 10 ns, and how they are written.

import { svg, textWidth } from "./figure.js";

export const TICKS = { µs: 100, ms: 1e5, s: 1e8 };

// Three digits, rounded in whole numbers.
export function duration(ticks) {
  if (ticks === 0) return "0 µs";
  const unit = ticks < TICKS.ms ? "µs" : ticks < TICKS.s ? "ms" : "s",
    each = TICKS[unit],
    digits = ticks >= 100 * each ? 0 : ticks >= 10 * each ? 1 : 2,
    scaled = Math.floor((2 * ticks * 10 ** digits + each) / (2 * each));
  return `${(scaled / 10 ** digits).toFixed(digits)} ${unit}`;
}

// Round numbers 1, 2 or 5 times a power of ten apart, at least `least` ticks.
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return [1, 2, 5, 10].find((times) => times * power >= least) * power;
}

// A scale below `top`: lines up through the rows and numbers under them. Returns the height it needs.
export function timeScale(picture, { x, from, to, left, right, top, bottom, words }) {
  const step = roundStep(((to - from) * 62) / (right - left)),
    unit = step >= TICKS.s / 10 ? "s" : step >= TICKS.ms / 10 ? "ms" : "µs",
    digits = Math.max(0, -Math.floor(Math.log10(step / TICKS[unit]) + 1e-9));
  for (let tick = Math.ceil(from / step) * step; tick <= to; tick += step) {
    const at = x(tick),
      number = (tick / TICKS[unit]).toFixed(digits),
      half = textWidth(picture, number, 400) / 2;
    picture.append(svg("line", { x1: at, x2: at, y1: top, y2: bottom + 4, class: "mgpu-scale" }));
    const inside = Math.min(Math.max(at, half), right - half);
    picture.append(svg("text", { x: inside, y: bottom + 18, "text-anchor": "middle" }, number));
  }
  picture.append(svg("text", { x: right, y: bottom + 36, "text-anchor": "end", class: "mgpu-quiet" }, words(unit)));
  return bottom + 42;
}
