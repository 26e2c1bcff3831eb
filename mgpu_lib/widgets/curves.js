// The training curves of one cell: accuracy on held-out images and training loss, all seeds, and a run made here.

import { endOf, netOf, perEpoch, runsOf } from "./cells.js";
import { legend, sum, svg, swatch, textWidth, upTo } from "./figure.js";

const GUESSING = 2303; // thousandths: the loss, ln 10, of giving each of ten classes the same probability

const CURVES = [
  {
    key: "accuracy",
    title: "accuracy on held-out images",
    // By the logarithm of the error, so that 89 and 90 % can be told apart.
    at: (value) => Math.log(0.95 / Math.min(Math.max(1 - value / 10000, 0.05), 0.95)) / Math.log(19),
    ticks: [1000, 5000, 8000, 9000, 9500],
    write: (value) => `${value / 100}%`,
  },
  {
    key: "loss",
    title: "training loss",
    at: (value) => Math.log(Math.min(Math.max(value, 100), 10000) / 100) / Math.log(100),
    ticks: [100, 300, 1000, GUESSING, 10000],
    write: (value) => (value === GUESSING ? "2.3" : value / 1000),
  },
];

const points = (pairs) => pairs.map((pair) => pair.map((v) => v.toFixed(1)).join()).join(" ");

function drawPanel(picture, panel, top, { runs, marks, left, right, high, x, own }) {
  const y = (value) => top + 20 + high * (1 - panel.at(value));
  picture.append(svg("text", { x: 0, y: top + 9, class: "mgpu-strong" }, panel.title));
  for (const tick of panel.ticks) {
    const look = tick === GUESSING ? "mgpu-scale mgpu-guess" : "mgpu-scale";
    picture.append(
      svg("line", { x1: left, x2: right, y1: y(tick), y2: y(tick), class: look }),
      svg("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end", class: "mgpu-quiet" }, panel.write(tick)),
    );
  }
  const curve = (run, look, steps = marks) => {
    const pairs = run[panel.key].map((value, i) => [x(steps[i]), y(value)]);
    picture.append(svg("polyline", { points: points(pairs), class: look }));
    return pairs;
  };
  const sound = runs.filter(({ ended }) => !ended),
    each = (f) => marks.map((mark, i) => [x(mark), y(f(sound.map((run) => run[panel.key][i])))]);
  if (sound.length) {
    const band = [...each((all) => Math.max(...all)), ...each((all) => Math.min(...all)).reverse()];
    picture.append(
      svg("polygon", { points: points(band), class: "mgpu-band" }),
      svg("polyline", { points: points(each((all) => sum(all) / all.length)), class: "mgpu-mean" }),
    );
  }
  for (const run of runs.filter(({ ended }) => ended)) cross(picture, curve(run, "mgpu-lost").at(-1), "mgpu-lost");
  if (own) {
    const pairs = curve(own, `mgpu-own${own.same ? "" : " mgpu-other-data"}`, own.marks);
    pairs.forEach(([cx, cy]) => picture.append(svg("circle", { cx, cy, r: 3, class: "mgpu-own-mark" })));
    if (own.diverged) cross(picture, pairs.at(-1), "mgpu-own");
  }
}

function cross(picture, at, look) {
  if (!at) return;
  const [x, y] = at;
  picture.append(svg("path", { d: `M${x - 5},${y - 5}l10,10m0,-10l-10,10`, class: `${look} mgpu-cross` }));
}

// Steps on a scale of powers of two where steps are equal, else epochs.
function curveScale(net, at, end, left, right) {
  if (at.budget === "steps") {
    const ticks = [2, 8, 32, 128].filter((tick) => tick < 0.5 * end);
    return {
      x: (step) => left + ((right - left) * Math.log2(Math.max(step, 1))) / Math.log2(end),
      ticks: [1, ...ticks, end].map((tick) => [tick, tick]),
      unit: "steps",
    };
  }
  const { epochs } = net.budgets,
    each = end / epochs;
  const shown = upTo(epochs, 0).map((i) => [i * each, i]);
  return { x: (step) => left + ((right - left) * step) / end, ticks: shown, unit: "epochs" };
}

// `own` is a run made here, or undefined. Its epochs may have another length.
export function drawCurves(picture, width, data, at, own) {
  const net = netOf(data, at),
    end = endOf(net, at.batch_size, at.budget),
    marks = net.marks[net.batch_sizes.indexOf(at.batch_size)].filter((mark) => mark <= end),
    left = Math.ceil(textWidth(picture, "95%", 400)) + 8,
    right = width - 4,
    high = 104,
    { x, ticks, unit } = curveScale(net, at, end, left, right);
  const cut = ({ accuracy, loss, ended }) => ({
    accuracy: accuracy.slice(0, marks.length),
    loss: loss.slice(0, marks.length),
    ended: ended <= end ? ended : 0,
  });
  const runs = runsOf(net, at.batch_size, at.lr).map(cut);
  const stretch = own && at.budget === "epochs" ? perEpoch(net, at.batch_size) / own.per_epoch : 1;
  const shown = own?.marks.length && { ...own, marks: own.marks.map((mark) => mark * stretch) };
  let top = 4;
  for (const panel of CURVES) {
    drawPanel(picture, panel, top, { runs, marks, left, right, high, x, own: shown });
    top += high + 34;
  }
  for (const [step, number] of ticks) {
    const half = textWidth(picture, `${number}`, 400) / 2,
      inside = Math.min(Math.max(x(step), half), width - half);
    picture.append(
      svg("line", { x1: x(step), x2: x(step), y1: top - 14, y2: top - 9, class: "mgpu-scale" }),
      svg("text", { x: inside, y: top + 4, "text-anchor": "middle", class: "mgpu-quiet" }, number),
    );
  }
  picture.append(svg("text", { x: right, y: top + 21, "text-anchor": "end", class: "mgpu-quiet" }, unit));
  return top + 26;
}

export function curveLegend(live) {
  const line = (look) => svg("line", { x1: 0, x2: 28, y1: 7, y2: 7, class: look });
  const band = svg("rect", { width: 28, height: 14, class: "mgpu-band" });
  const entries = [[swatch(28, 14, band, line("mgpu-mean")), "recorded: mean and range of the seeds"]];
  const lost = swatch(28, 14, line("mgpu-lost"));
  cross(lost, [14, 7], "mgpu-lost");
  entries.push([lost, "diverged"], [swatch(28, 14, line("mgpu-scale mgpu-guess")), "the loss of guessing"]);
  if (live) {
    const mark = svg("circle", { cx: 14, cy: 7, r: 3, class: "mgpu-own-mark" });
    entries.push([swatch(28, 14, line("mgpu-own"), mark), "trained here"]);
  }
  return legend(entries);
}
