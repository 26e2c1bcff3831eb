// A map of final accuracy over batch size (columns) and learning rate (rows): a grid to click and to walk through.
// The scaling rules are lines over it, through the chosen cell.

import { amount, bestOf, cellOf, endOf, gpuName, nearestRatio } from "./cells.js";
import { netOf, percents, ratesOf, rounded, timesOf } from "./cells.js";
import { KEYS_ARE_MINE, build, html, legend, sum, svg, swatch } from "./figure.js";

const LEVELS = [2000, 4000, 6000, 7000, 7700, 8200, 8500, 8800, 9000, 9200]; // 0.01 %: from here on the next darker
const levelOf = ({ finals }) => LEVELS.filter((limit) => sum(finals) >= limit * finals.length).length;

// Where `lr` lies among ascending `rates`: 0 for the first; between them, and beyond, by ratio.
function place(lr, rates) {
  if (rates.length === 1) return Math.log(lr / rates[0]);
  const i = Math.min(Math.max(rates.filter((other) => other <= lr).length - 1, 0), rates.length - 2);
  return i + Math.log(lr / rates[i]) / Math.log(rates[i + 1] / rates[i]);
}

const seconds = (ticks) => (ticks / 1e8).toFixed(ticks >= 1e10 ? 0 : ticks >= 1e9 ? 1 : 2);

function cellWords(net, at, batch, lr, isBest) {
  const { finals, diverged, seeds } = cellOf(net, batch, lr, at.budget);
  const found = finals.length ? percents(rounded({ finals }, 10), 10) : "diverged";
  const some = finals.length && diverged.length ? `, ${diverged.length} of ${seeds} seeds diverged` : "";
  return `batch size ${batch}, learning rate ${lr}: ${found}${some}${isBest ? ", best of this batch size" : ""}`;
}

const at = (row, column) => `grid-area:${row}/${column}`;

// The empty map: the grid, and its cells by "batch size/rate". Rates rise upwards; batch sizes stand below them.
function mapGrid(net, rates) {
  const places = new Map(),
    sizes = net.batch_sizes,
    below = rates.length + 1;
  const grid = html("div", { role: "grid", "aria-label": "final accuracy", ...KEYS_ARE_MINE });
  grid.style.setProperty("--columns", sizes.length);
  const head = ["batch", ...sizes].map((words, i) =>
    html("span", { role: "columnheader", style: at(below, i + 1) }, words),
  );
  grid.append(html("div", { role: "row" }, ...head));
  for (const lr of [...rates].reverse()) {
    const row = rates.length - rates.indexOf(lr),
      cells = sizes.map((_, i) => html("div", { role: "gridcell", style: at(row, i + 2) }, html("span")));
    cells.forEach((cell, i) => {
      if (net.rates[i].includes(lr)) places.set(`${sizes[i]}/${lr}`, cell);
      else build(cell, { "aria-disabled": "true", "aria-label": "not recorded" }, []);
    });
    grid.append(html("div", { role: "row" }, html("span", { role: "rowheader", style: at(row, 1) }, lr), ...cells));
  }
  const rules = svg("svg", {
    viewBox: `0 0 ${sizes.length} ${rates.length}`,
    preserveAspectRatio: "none",
    class: "mgpu-rules",
    "aria-hidden": "true",
    style: `grid-area:1/2/${below}/${sizes.length + 2}`,
  });
  grid.append(rules, html("div", { class: "mgpu-times", "aria-hidden": "true" }));
  return [grid, places];
}

// Where a key leads from the chosen cell: [batch size, rate], or undefined for a key that is not the map's.
function nextCell(net, { batch_size, lr }, key) {
  const column = net.batch_sizes.indexOf(batch_size),
    rates = net.rates[column],
    row = rates.indexOf(lr) + ({ ArrowUp: 1, ArrowDown: -1 }[key] ?? 0),
    last = net.batch_sizes.length - 1;
  if (key === "ArrowUp" || key === "ArrowDown")
    return [batch_size, rates[Math.min(Math.max(row, 0), rates.length - 1)]];
  const to = { ArrowLeft: Math.max(column - 1, 0), ArrowRight: Math.min(column + 1, last), Home: 0, End: last }[key];
  return to === undefined ? undefined : [net.batch_sizes[to], nearestRatio(lr, net.rates[to])];
}

function showCell(element, net, now, batch, lr, best) {
  const cell = cellOf(net, batch, lr, now.budget),
    chosen = batch === now.batch_size && lr === now.lr,
    gone = !cell.finals.length,
    looks = [gone ? "mgpu-gone" : `mgpu-level${levelOf(cell)}`];
  if (lr === best) looks.push("mgpu-best");
  if (chosen) looks.push("mgpu-here");
  element.className = looks.join(" ");
  const shown = gone ? "×" : `${rounded(cell, 100)}${cell.diverged.length ? "×" : ""}`,
    label = `${shown}: ${cellWords(net, now, batch, lr, lr === best)}`; // begins with what is seen, for those who say it
  element.firstChild.textContent = shown;
  build(element, { "aria-label": label, "aria-selected": chosen, tabindex: chosen ? 0 : -1 }, []);
}

// The rates that the two rules give to every batch size, through the chosen cell.
function drawRules(rules, { batch_sizes }, rates, { batch_size, lr }) {
  const line = (power) =>
    batch_sizes
      .map((b, i) => `${i + 0.5},${rates.length - 0.5 - place(lr * (b / batch_size) ** power, rates)}`)
      .join(" ");
  const looks = { 1: "mgpu-linear", 0.5: "mgpu-root" };
  rules.replaceChildren(
    ...[1, 0.5].flatMap((power) =>
      ["mgpu-casing", looks[power]].map((look) =>
        svg("polyline", { points: line(power), class: look, "vector-effect": "non-scaling-stroke" }),
      ),
    ),
  );
}

// Returns [element, show]; `pick(batch, lr)` chooses a cell.
export function heatMap(data, state, pick) {
  const root = html("div", { class: "mgpu-map" });
  let drawn, rates, grid, places;

  function move(batch, lr) {
    pick(batch, lr);
    places.get(`${batch}/${lr}`).focus({ preventScroll: true });
  }
  function lay(net) {
    drawn = net;
    rates = [...new Set(net.rates.flat())].sort((a, b) => a - b);
    [grid, places] = mapGrid(net, rates);
    for (const [name, cell] of places) cell.addEventListener("click", () => move(...name.split("/").map(Number)));
    grid.addEventListener("keydown", (event) => {
      const next = !event.altKey && !event.ctrlKey && !event.metaKey && nextCell(drawn, state(), event.key);
      if (!next) return;
      event.preventDefault();
      event.stopPropagation();
      move(...next);
    });
    const axes = html("span", {}, "learning rate upwards, batch size to the right");
    const title = html("div", { class: "mgpu-map-title", "aria-hidden": "true" }, html("b"), html("br"), axes);
    root.replaceChildren(title, grid, mapLegend());
  }
  function show() {
    const now = state(),
      net = netOf(data, now);
    if (net !== drawn) lay(net);
    for (const batch of net.batch_sizes) {
      const best = bestOf(net, now.budget, batch)?.[1];
      for (const lr of ratesOf(net, batch)) showCell(places.get(`${batch}/${lr}`), net, now, batch, lr, best);
    }
    drawRules(grid.querySelector(".mgpu-rules"), net, rates, now);
    const [whole] = amount(net, now, endOf(net, now.batch_size, now.budget)).split(" (");
    root.querySelector("b").textContent = `accuracy after ${whole}, in %`;
    root.querySelector(".mgpu-modelled").textContent = `s/epoch: modelled, on ${gpuName(data, now)}`;
    const times = ["s/epoch", ...net.batch_sizes.map((b) => seconds(timesOf(data, net, now, b)[1]))];
    const spans = times.map((words, i) => html("span", { style: at(rates.length + 2, i + 1) }, words));
    grid.querySelector(".mgpu-times").replaceChildren(...spans);
  }
  return [root, show];
}

function mapLegend() {
  const line = (look) => swatch(28, 12, svg("line", { x1: 0, x2: 28, y1: 6, y2: 6, class: look }));
  return legend([
    [line("mgpu-linear"), "linear rule"],
    [line("mgpu-root"), "square-root rule"],
    [html("i", { class: "mgpu-dot" }), "best of its batch size"],
    [html("strong", {}, "×"), "diverged"],
    [html("span", { class: "mgpu-modelled" })],
  ]);
}
