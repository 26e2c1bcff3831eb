// A training step on one GPU and on several, on one scale of time: what each GPU does, and what the step waits for.
// The cells are those of experiments/why_slower.py; `row` there says how a GPU's step is written.

import { figure, legend, marked, menu, named, percent, slider, svg, swatch, textWidth } from "./figure.js";
import { translated, valuesOf } from "./figure.js";
import { duration, timeScale } from "./time.js";

const STATES = {
  f: ["F", "forward pass", "mgpu-forward"],
  b: ["B", "backward pass", "mgpu-backward"],
  u: ["U", "update", "mgpu-update"],
  c: ["C", "communication", "mgpu-communication"],
  w: ["W", "waits for the host", "mgpu-waits"],
  o: ["G", "waits for another GPU", "mgpu-away"],
};
const STRATEGIES = { manual: "by hand", data_parallel: "nn.DataParallel", ddp: "DDP" };
const HOST_IS_SLOW = {
  one: "which launches kernels more slowly than the GPU runs them",
  manual: "which launches the work of all GPUs, one after the other",
  data_parallel: "where one process copies the network and launches the work of all GPUs",
  ddp: "which launches kernels more slowly than the GPU runs them",
};
const BOUND = 750; // thousandths of a step in which kernels run: from here on it is bound by them
const LENGTHS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";

// A GPU without NVLink has PCIe only.
const linkOf = ({ links }, { gpu, link }) => (link in links[gpu] ? link : "pcie");

// {ticks, kernels, communication, host, rows}, the shares in thousandths of the step; null where it doesn't fit.
function stepOf(data, at, gpus) {
  const parts = [at.gpu, linkOf(data, at), at.network, at.strategy, gpus];
  const name = gpus === 1 ? `${at.gpu}/${at.network}` : parts.join("/");
  const [ticks, kernels, communication, host, ...rows] =
    data.cells[name][data.batch_sizes.indexOf(at.batch_size)].split(" ");
  if (!rows.length) return null;
  return {
    ticks: +ticks,
    kernels: +kernels,
    communication: +communication,
    host: +host,
    rows: Array.from({ length: gpus }, (_, gpu) => rows[rows.length === 1 ? 0 : gpu].match(/.../g)),
  };
}

// How many times as fast, in whole units of 1 / `unit`; null unless both fit.
const faster = (one, many, unit) =>
  one && many ? Math.floor((2 * unit * one.ticks + many.ticks) / (2 * many.ticks)) : null;

const times = (one, many) => `${(faster(one, many, 100) / 100).toFixed(2)} times as fast`;

function bottleneck({ kernels, communication, host }, { strategy, num_gpus }, hundredths) {
  if (kernels >= BOUND) {
    const pays = hundredths > 100 ? `, so ${num_gpus} GPUs pay` : ", which smaller shards hardly shorten";
    const more = num_gpus > 1 && hundredths ? pays : "";
    return `Compute bound: kernels run for ${percent(kernels, 1000)} of the step${more}.`;
  }
  if (host >= communication) {
    const reason = HOST_IS_SLOW[num_gpus === 1 ? "one" : strategy];
    return `The bottleneck is launching: a GPU waits ${percent(host, 1000)} of the step for the host, ${reason}.`;
  }
  const part = percent(communication, 1000);
  return `The bottleneck is communication: for ${part} of the step a GPU only sends, receives, or waits for another.`;
}

function whySentence(data, at) {
  const { gpu, network, batch_size, num_gpus } = at,
    one = stepOf(data, at, 1),
    many = stepOf(data, at, num_gpus),
    where =
      num_gpus === 1
        ? `modelled on one ${gpu}`
        : `modelled on ${num_gpus} ${gpu} (${data.links[gpu][linkOf(data, at)]})`,
    start = `${network} at batch ${batch_size}, ${where}`;
  if (!many) return `${start}, does not fit into the memory.`;
  const hundredths = faster(one, many, 100);
  const result =
    num_gpus === 1
      ? ""
      : !one
        ? ", and does not fit into the memory of one"
        : `, one takes ${duration(one.ticks)}: ${hundredths < 100 ? "slower, " : ""}${times(one, many)}`;
  return `${start}: ${duration(many.ticks)} per step${result}. ${bottleneck(many, at, hundredths)}`;
}

// What one GPU does in a step that takes `wide` pixels. The filled part of a piece says in how much of its time.
function drawStep(picture, runs, x, y, wide, bins) {
  const high = 20;
  for (const [name, length, level] of runs) {
    const [letter, , look] = STATES[name.toLowerCase()],
      width = (wide * LENGTHS.indexOf(length)) / bins,
      box = { x, width: Math.max(width - 0.6, 0.2) };
    if (name === "w" || name === "o") {
      picture.append(svg("rect", { ...box, y, height: high, class: `${look} mgpu-run` }));
    } else {
      const full = (high * level) / 9;
      picture.append(
        svg("rect", { ...box, y, height: high, class: `${look} mgpu-pale mgpu-run` }),
        svg("rect", { ...box, y: y + high - full, height: full, class: `${look} mgpu-full-part` }),
      );
    }
    if (name !== name.toLowerCase()) {
      picture.append(svg("rect", { ...box, y: y + high - 5, height: 5, class: "mgpu-communication mgpu-beside" }));
    }
    if (width >= 20) {
      const middle = x + width / 2;
      picture.append(
        svg("rect", { x: middle - 7, y: y + 3, width: 14, height: 14, rx: 3, class: "mgpu-plate" }),
        svg("text", { x: middle, y: y + 14.5, "text-anchor": "middle", class: "mgpu-letter" }, letter),
      );
    }
    x += width;
  }
}

function drawWhy(picture, width, data, at) {
  const one = stepOf(data, at, 1),
    many = at.num_gpus > 1 ? stepOf(data, at, at.num_gpus) : undefined,
    left = Math.ceil(textWidth(picture, "cuda:0", 400)) + 8,
    right = width - 1,
    longest = Math.max(one?.ticks ?? 0, many?.ticks ?? 0, 1),
    x = (tick) => left + ((right - left) * tick) / longest;
  const behind = svg("g");
  picture.append(behind);
  let y = 14;
  const block = (gpus, cell, words) => {
    const heading = { x: 0, y, class: "mgpu-strong mgpu-haloed" };
    picture.append(svg("text", heading, `${gpus} ${gpus === 1 ? "GPU" : "GPUs"}: ${words}`));
    y += 8;
    for (let gpu = 0; gpu < (cell ? gpus : 1); gpu++) {
      if (!cell) {
        picture.append(svg("rect", { x: left, y, width: right - left, height: 20, class: "mgpu-box mgpu-idle" }));
      } else {
        picture.append(svg("text", { x: 0, y: y + 14 }, `cuda:${gpu}`));
        drawStep(picture, cell.rows[gpu], left, y, x(cell.ticks) - left, data.bins);
      }
      y += 24;
    }
    y += 18;
  };
  const words = (cell) => (cell ? `${duration(cell.ticks)} per step` : "does not fit into the memory");
  block(1, one, words(one));
  const top = y;
  if (many !== undefined) block(at.num_gpus, many, words(many) + (one && many ? `, ${times(one, many)}` : ""));
  if (one && many) {
    const ideal = x(one.ticks / at.num_gpus);
    picture.append(svg("line", { x1: ideal, x2: ideal, y1: top + 5, y2: y - 16, class: "mgpu-ideal" }));
  }
  if (!one && !many) return y;
  const name = at.num_gpus === 1 ? at.gpu : `${at.gpu}, ${data.links[at.gpu][linkOf(data, at)]}`;
  const scale = (unit) => `${unit} (modelled, ${name})`;
  return timeScale(behind, { x, from: 0, to: longest, left, right, top: 22, bottom: y - 16, words: scale });
}

function whyLegend() {
  const box = { width: 22, height: 20 },
    plate = { x: 4, y: 3, width: 14, height: 14, rx: 3, class: "mgpu-plate" },
    middle = { x: 11, y: 14.5, "text-anchor": "middle", class: "mgpu-letter" };
  const state = ([letter, name, look]) => [
    swatch(22, 20, svg("rect", { ...box, class: look }), svg("rect", plate), svg("text", middle, letter)),
    name,
  ];
  const ideal = swatch(22, 20, svg("line", { x1: 11, x2: 11, y1: 0, y2: 20, class: "mgpu-ideal" }));
  return legend([...Object.values(STATES).map(state), [ideal, "one GPU’s time, divided by their number"]]);
}

// PCIe is always there; NVLink is not.
function linkMenu(model, data, at) {
  const names = { nvlink: "NVLink", pcie: "PCIe" },
    shown = translated(model, () => linkOf(data, at()));
  return menu(shown, "link", "Link", names, (value) => value in data.links[at().gpu]);
}

export function render({ model, el }) {
  const data = model.get("data"),
    keys = ["gpu", "link", "network", "strategy", "num_gpus", "batch_size"],
    at = () => valuesOf(model, keys);
  const both = (batch_size) => [1, model.get("num_gpus")].map((gpus) => stepOf(data, { ...at(), batch_size }, gpus));
  const describe = (batch) => {
    const [one, many] = both(batch);
    if (!many) return `${batch}, does not fit`;
    return model.get("num_gpus") > 1 && one ? `${batch}, ${times(one, many)}` : `${batch}`;
  };
  // Under the slider's stops: how many times as fast several GPUs are as one.
  const mark = (batch) => {
    const [one, many] = both(batch),
      tenths = faster(one, many, 10);
    if (!many) return ["×", "mgpu-fails"];
    return [model.get("num_gpus") === 1 || tenths === null ? "●" : (tenths / 10).toFixed(1)];
  };
  return figure({
    model,
    el,
    caption: model.get("caption"),
    keys,
    controls: [
      menu(model, "gpu", "GPU", named(Object.keys(data.links))),
      linkMenu(model, data, at),
      menu(model, "network", "Network", named(data.networks)),
      menu(model, "strategy", "Strategy", STRATEGIES),
      slider(model, "num_gpus", "Number of GPUs", data.counts, (n) => `${n} ${n === 1 ? "GPU" : "GPUs"}`),
      marked(slider(model, "batch_size", "Batch size", data.batch_sizes, describe), data.batch_sizes, mark),
    ],
    below: [whyLegend()],
    sentence: () => whySentence(data, at()),
    draw: (picture, width) => drawWhy(picture, width, data, at()),
  });
}
