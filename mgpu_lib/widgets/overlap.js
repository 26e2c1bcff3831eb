// One step of DistributedDataParallel on one of several GPUs: kernels, all-reduces, and which of these cost time.
// The cells are those of experiments/ddp_step.py; `cell` and `packed` there say how a step is written.

import {
  figure,
  legend,
  marked,
  menu,
  named,
  percent,
  size,
  slider,
  sum,
  svg,
  swatch,
  textWidth,
  translated,
  valuesOf,
} from "./figure.js";
import { TICKS, duration, timeScale } from "./time.js";

const KEYS = ["network", "num_gpus", "link", "between", "host", "bucket_cap_mb"];
const PHASES = {
  forward: ["F", "forward pass", "mgpu-forward"],
  backward: ["B", "backward pass", "mgpu-backward"],
  update: ["U", "update", "mgpu-update"],
};
const SHORT = { each: "each parameter", all: "all in one" }; // names of bucket sizes, where they are not MiB
const HOSTS = { fitted: "of 2018 to 2022", fast: "three times as fast" };
const BOUND = 750; // thousandths of a step in which kernels run: from here on they set the pace
const WORTH = 0.02; // how much shorter a step must be with another bucket size to be worth a word

const nameOf = (names, value) => Object.keys(names).find((name) => names[name] === value);
const severalNodes = ({ node }, { num_gpus }) => num_gpus > node;

// Times as `packed` writes them: [{start, end, level}] in ticks, the level being the part that is covered.
function unpackTimes(text) {
  let last = 0;
  if (text === "-") return [];
  return text.split(",").map((word) => {
    const [gap, length, covered = length] = word.split(".").map((digits) => (digits ? parseInt(digits, 36) : 0)),
      start = last + gap * TICKS.µs;
    last = start + length * TICKS.µs;
    return { start, end: last, level: length ? covered / length : 1 };
  });
}

function unpackStep(cell) {
  const words = cell.split(" "),
    [ticks, kernels, exposed, idle, hidden] = words.slice(0, 5).map(Number),
    [forward, backward, update, alone, broadcasts, reduces] = words.slice(5).map(unpackTimes);
  return { ticks, kernels, exposed, idle, hidden, forward, backward, update, alone, broadcasts, reduces };
}

const bucketIndex = (data, at) => Object.values(data.buckets).indexOf(at.bucket_cap_mb);

function cellsOf(data, at) {
  const { network, link, num_gpus } = at,
    between = severalNodes(data, at) ? [at.between] : [];
  return data.cells[[network, nameOf(data.hosts, at.host), link, ...between, num_gpus].join("/")];
}
const oneStep = (data, at) => unpackStep(data.cells[`${at.network}/${nameOf(data.hosts, at.host)}`][0]);
const manyStep = (data, at) => unpackStep(cellsOf(data, at)[bucketIndex(data, at)]);
const ticksOf = (data, at) => cellsOf(data, at).map((cell) => parseInt(cell));
const bytesOf = (data, at) => data.bytes[at.network][bucketIndex(data, at)].split(" ").map(Number);

// The bucket size with the shortest step, the smallest of them: [its name, ticks].
function bestBucket(data, at) {
  const ticks = ticksOf(data, at),
    least = Math.min(...ticks);
  return [Object.keys(data.buckets)[ticks.indexOf(least)], least];
}

function bucketWords(name) {
  if (name === "each") return "a bucket for each parameter";
  return name === "all" ? "one bucket for all gradients" : `buckets of ${name}`;
}

function where(data, at) {
  const { links, node } = data,
    nodes = at.num_gpus / node;
  return severalNodes(data, at) ? `${links[at.link]}; ${nodes} nodes on ${at.between}` : links[at.link];
}

function pace({ kernels, exposed, idle }) {
  if (kernels >= BOUND) return `The GPU sets the pace: kernels run for ${percent(kernels, 1000)} of the step.`;
  if (exposed >= idle) {
    return `The link sets the pace: for ${percent(exposed, 1000)} of the step a GPU only communicates.`;
  }
  return `The host sets the pace: for ${percent(idle, 1000)} of the step a GPU waits for kernels to be launched.`;
}

// What to change, for a step that takes `one` on one GPU.
function advice(data, at, many, one) {
  const [name, least] = bestBucket(data, at);
  if (least <= many.ticks * (1 - WORTH)) return `With ${bucketWords(name)} the step would take ${duration(least)}.`;
  if (many.kernels >= BOUND) {
    const rest = 100 - Math.round(many.kernels / 10); // adds up with what `pace` says
    return `A faster link and a faster host together could save ${rest || "under 1"}% at most.`;
  }
  if (many.exposed < many.idle) return "A faster host would help, or more images on each GPU.";
  const sent = sum(many.reduces.map(({ start, end }) => end - start)),
    behind = one.backward.at(-1).end - one.backward[0].start;
  return sent > behind
    ? `Other buckets hardly help: the all-reduces take ${duration(sent)}, and the backward pass lasts only ` +
        `${duration(behind)}. Send fewer bytes, send less often, or over a faster link.`
    : "Other buckets hardly help; fewer bytes or a faster link would.";
}

function overlapSentence(data, at) {
  const { network, num_gpus } = at,
    one = oneStep(data, at),
    many = manyStep(data, at),
    bytes = bytesOf(data, at),
    all = bytes.length === 1 ? "1 all-reduce carries" : `${bytes.length} all-reduces carry`;
  return (
    `${network} on ${num_gpus} ${data.gpu} (${where(data, at)}), ${data.images[network]} images each: ` +
    `${duration(many.ticks)} per step, modelled. One GPU takes ${duration(one.ticks)}, so the efficiency is ` +
    `${percent(one.ticks, many.ticks)}. ${all} ${size(sum(bytes))}; ${percent(many.hidden, 1000)} of the ` +
    `communication is hidden. ${pace(many)} ${advice(data, at, many, one)}`
  );
}

// A letter or a number in the middle of a box, if there is room for it.
function plate(picture, words, x, width, y) {
  const wide = Math.max(14, textWidth(picture, words) + 6);
  if (width < wide + 4) return;
  const middle = x + width / 2;
  picture.append(
    svg("rect", { x: middle - wide / 2, y: y + 3, width: wide, height: 14, rx: 3, class: "mgpu-plate" }),
    svg("text", { x: middle, y: y + 14.5, "text-anchor": "middle", class: "mgpu-letter" }, words),
  );
}

// A span of time as a box, pale, and filled from below up to its level.
function box(picture, x, { start, end, level }, y, look, full) {
  const high = 20,
    left = x(start),
    width = Math.max(x(end) - left, 0.3);
  if (look) picture.append(svg("rect", { x: left, y, width, height: high, class: look }));
  if (full) {
    const filled = { x: left, y: y + high * (1 - level), width, height: high * level, class: full };
    picture.append(svg("rect", filled));
  }
}

function drawKernels(picture, x, step, y) {
  for (const [phase, [letter, , look]] of Object.entries(PHASES)) {
    for (const run of step[phase]) {
      box(picture, x, run, y, `${look} mgpu-pale mgpu-run`, `${look} mgpu-full-part`);
      plate(picture, letter, x(run.start), x(run.end) - x(run.start), y);
    }
  }
}

function drawSent(picture, x, { broadcasts, reduces, alone }, y) {
  for (const call of broadcasts) box(picture, x, call, y, "mgpu-communication mgpu-hidden mgpu-broadcast");
  for (const call of reduces) box(picture, x, call, y, "mgpu-communication mgpu-hidden mgpu-reduce");
  for (const run of alone) box(picture, x, run, y, undefined, "mgpu-exposed");
  for (const { start, end } of reduces) {
    const cut = { x1: x(start), x2: x(start), y1: y, y2: y + 20, class: "mgpu-cut" };
    if (x(end) - x(start) > 3) picture.append(svg("line", cut));
  }
  reduces.forEach(({ start, end }, i) => plate(picture, `${i + 1}`, x(start), x(end) - x(start), y));
}

function drawOverlap(picture, width, data, at) {
  const one = oneStep(data, at),
    many = manyStep(data, at),
    left = Math.ceil(textWidth(picture, "all-reduce", 400)) + 8,
    right = width - 1,
    // The same scale for all bucket sizes, so that the step is seen to grow and to shrink.
    longest = Math.max(one.ticks, ...ticksOf(data, at)),
    x = (tick) => left + ((right - left) * tick) / longest,
    behind = svg("g");
  picture.append(behind);
  const row = (name, y) => {
    picture.append(svg("text", { x: 0, y: y + 14 }, name));
    picture.append(svg("rect", { x: left, y, width: right - left, height: 20, class: "mgpu-lane" }));
  };
  const heading = (y, words) => picture.append(svg("text", { x: 0, y, class: "mgpu-strong mgpu-haloed" }, words));
  heading(14, `1 GPU: ${duration(one.ticks)} per step`);
  row("kernels", 22);
  drawKernels(picture, x, one, 22);
  const step = `${at.num_gpus} GPUs: ${duration(many.ticks)} per step`,
    efficiency = `, ${percent(one.ticks, many.ticks)} efficient`;
  heading(68, step + (textWidth(picture, step + efficiency) < width ? efficiency : ""));
  row("kernels", 76);
  drawKernels(picture, x, many, 76);
  row("all-reduce", 100);
  drawSent(picture, x, many, 100);
  const end = { x1: x(one.ticks), x2: x(one.ticks), class: "mgpu-ideal" }; // in two parts, around the heading
  picture.append(svg("line", { ...end, y1: 18, y2: 46 }), svg("line", { ...end, y1: 73, y2: 126 }));
  const words = (unit) => `${unit} (modelled, ${data.gpu})`;
  return timeScale(behind, { x, from: 0, to: longest, left, right, top: 22, bottom: 124, words });
}

function overlapLegend() {
  const whole = { width: 22, height: 20 };
  const phase = ([letter, name, look]) => {
    const middle = { x: 11, y: 14.5, "text-anchor": "middle", class: "mgpu-letter" },
      white = svg("rect", { x: 4, y: 3, width: 14, height: 14, rx: 3, class: "mgpu-plate" });
    return [swatch(22, 20, svg("rect", { ...whole, class: look }), white, svg("text", middle, letter)), name];
  };
  const hidden = svg("rect", { ...whole, class: "mgpu-communication mgpu-hidden" }),
    exposed = svg("rect", { x: 0.5, y: 0.5, width: 21, height: 19, class: "mgpu-exposed" }),
    end = svg("line", { x1: 11, x2: 11, y1: 0, y2: 20, class: "mgpu-ideal" });
  return legend([
    ...Object.values(PHASES).map(phase),
    [swatch(22, 20, hidden), "communication, hidden"],
    [swatch(22, 20, exposed), "not hidden"],
    [swatch(22, 20, end), "end of one GPU’s step"],
  ]);
}

// The model with names in the place of a control's values: `names` is {name: value}.
const byName = (model, names) =>
  translated(
    model,
    (key) => nameOf(names, model.get(key)),
    (key, name) => model.set(key, names[name]),
  );

// Within one node there is nothing to choose.
function betweenMenu(model, data, at) {
  const several = () => severalNodes(data, at()),
    shown = translated(model, (key) => (several() ? model.get(key) : "")),
    names = { "": "only one node", ...named(data.between) };
  return menu(shown, "between", "Between nodes", names, (value) => several() === (value !== ""));
}

export function render({ model, el }) {
  const data = model.get("data"),
    at = () => valuesOf(model, KEYS),
    names = Object.keys(data.buckets),
    atBucket = (name) => ({ ...at(), bucket_cap_mb: data.buckets[name] });
  const gpus = (k) => `${k} GPUs${k > data.node ? ` in ${k / data.node} nodes` : ""}`;
  const describe = (name) => {
    const n = bytesOf(data, atBucket(name)).length;
    return `${SHORT[name] ?? name}: ${n} all-reduce${n > 1 ? "s" : ""}`;
  };
  // Under the slider's stops: milliseconds per step.
  const mark = (name) => {
    const signs = ticksOf(data, at()).map((ticks) => (ticks / TICKS.ms).toFixed(ticks < 99.95 * TICKS.ms ? 1 : 0)),
      sign = signs[names.indexOf(name)];
    return [sign, +sign === Math.min(...signs) ? "mgpu-least" : ""];
  };
  const bucket = slider(byName(model, data.buckets), "bucket_cap_mb", "Bucket size", names, describe);
  const leave = figure({
    model,
    el,
    caption: model.get("caption"),
    keys: KEYS,
    controls: [
      menu(model, "network", "Network", named(data.networks)),
      menu(byName(model, data.hosts), "host", "Host", HOSTS),
      menu(model, "link", "In a node", data.links),
      betweenMenu(model, data, at),
      slider(model, "num_gpus", "Number of GPUs", data.counts, gpus),
      marked(bucket, names, mark),
    ],
    below: [overlapLegend()],
    sentence: () => overlapSentence(data, at()),
    draw: (picture, width) => drawOverlap(picture, width, data, at()),
  });
  el.firstChild.classList.add("mgpu-overlap");
  return leave;
}
