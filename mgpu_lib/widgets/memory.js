// What fills a GPU's memory: the parts of one training step's peak against what a GPU holds.

import { figure, html, marked, menu, named, percent, size, slider, sum, svg, swatch, textWidth } from "./figure.js";

const OPTIMIZERS = { sgd: "SGD", momentum: "SGD with momentum", adam: "Adam" };
const PRECISIONS = { fp32: "FP32", amp: "mixed precision" };
const PARTS = {
  parameters: "Parameters",
  gradients: "Gradients",
  optimizer: "Optimizer state",
  activations: "Activations",
  scratch: "Rest of the peak",
};

function need(model, batch = model.get("batch_size")) {
  const net = model.get("data").networks[model.get("network")];
  const parts = {
    parameters: net.parameters,
    gradients: net.gradients,
    optimizer: net.optimizer[model.get("optimizer")],
    activations: net.activations[model.get("precision")][batch],
    scratch: net.scratch[model.get("precision")][model.get("optimizer")][batch],
  };
  return { parts, total: sum(Object.values(parts)) };
}

const capacity = (model) => model.get("data").gpus[model.get("gpu")];
const fits = (model, batch) => need(model, batch).total <= capacity(model);
const batchSizes = (model) =>
  Object.keys(model.get("data").networks[model.get("network")].activations.fp32)
    .map(Number)
    .sort((a, b) => a - b);

function memorySentence(model) {
  const { parts, total } = need(model),
    room = capacity(model),
    gpu = model.get("gpu");
  const start =
    `${model.get("network")} with ${OPTIMIZERS[model.get("optimizer")]} at batch ${model.get("batch_size")} in ` +
    `${PRECISIONS[model.get("precision")]} needs ${size(total)}`;
  if (total <= room) {
    return (
      `${start}, ${percent(total, room)} of the memory of one ${gpu}; ` +
      `${percent(parts.activations, total)} of that is activations.`
    );
  }
  const fitting = batchSizes(model).filter((batch) => fits(model, batch));
  const advice = fitting.length ? `the largest batch that fits is ${fitting.at(-1)}` : "no batch size fits";
  return `${start}. That does not fit: ${size(total - room)} too much for one ${gpu}; ${advice}.`;
}

// Colour is never alone: each part also has its own pattern.
const STRIPES = "M-2,10 10,-2M6,10 10,6M-2,2 2,-2";
const PATTERNS = {
  parameters: "",
  gradients: STRIPES,
  optimizer: "M4,2v4M2,4h4",
  activations: "M0,4h8",
  scratch: "M4,0v8",
  over: STRIPES,
};

function patterns(prefix) {
  return svg(
    "defs",
    {},
    ...Object.entries(PATTERNS).map(([part, path]) =>
      svg(
        "pattern",
        { id: `${prefix}-${part}`, width: 8, height: 8, patternUnits: "userSpaceOnUse" },
        svg("rect", { width: 8, height: 8, class: `mgpu-${part}` }),
        svg("path", { d: path, class: "mgpu-pattern" }),
      ),
    ),
  );
}

function axis(picture, scale, whole, y) {
  const unit = whole >= 2 ** 30 ? 2 ** 30 : 2 ** 20;
  let step = 2 ** Math.ceil(Math.log2(whole / unit / 4));
  if (whole <= step * 2 * unit) step /= 2;
  for (let tick = 0; tick * unit <= whole; tick += step) {
    const x = scale(tick * unit),
      last = (tick + step) * unit > whole;
    const anchor = tick === 0 ? "start" : scale(whole) - x < 40 ? "end" : "middle";
    picture.append(
      svg("line", { x1: x, x2: x, y1: y + 4, y2: y + 9, class: "mgpu-line" }),
      svg("text", { x, y, "text-anchor": anchor }, last ? `${tick} ${unit === 2 ** 30 ? "GiB" : "MiB"}` : tick),
    );
  }
}

function stack(picture, parts, prefix, { scale, y, height, labelled }) {
  let start = 0;
  const total = sum(Object.values(parts));
  for (const [part, bytes] of Object.entries(parts)) {
    const x = scale(start),
      width = scale(start + bytes) - x,
      share = percent(bytes, total);
    picture.append(svg("rect", { x, y, width, height, fill: `url(#${prefix}-${part})`, class: "mgpu-part" }));
    const room = textWidth(picture, PARTS[part]) + 12;
    if (labelled && room + 12 <= width) {
      picture.append(
        svg("rect", { x: x + 6, y: y + 6, width: room, height: height - 12, rx: 3, class: "mgpu-plate" }),
        svg("text", { x: x + 12, y: y + 21, class: "mgpu-strong" }, PARTS[part]),
        svg("text", { x: x + 12, y: y + 37 }, share),
      );
    }
    start += bytes;
  }
}

function drawMemory(model, prefix, picture, width) {
  const { parts, total } = need(model),
    room = capacity(model),
    whole = Math.max(total, room);
  const scale = (bytes) => 1 + ((width - 2) * bytes) / whole,
    magnified = (bytes) => 1 + ((width - 2) * bytes) / total;
  const end = scale(room),
    top = 24,
    high = 34,
    lower = 122;
  picture.append(patterns(prefix));
  axis(picture, scale, whole, 13);
  picture.append(
    svg("rect", { x: 1, y: top, width: end - 1, height: high, class: "mgpu-room" }),
    svg("path", {
      d: `M1,${top + high} L1,${lower} H${width - 1} L${scale(total)},${top + high} Z`,
      class: "mgpu-lens",
    }),
  );
  stack(picture, parts, prefix, { scale, y: top, height: high });
  const word = { x: width - 12, y: top + 22, "text-anchor": "end" };
  const spare = total > room ? `${size(total - room)} too much` : `${size(room - total)} free`;
  if (total > room) {
    picture.append(
      svg("rect", {
        x: end,
        y: top,
        width: width - 1 - end,
        height: high,
        fill: `url(#${prefix}-over)`,
        class: "mgpu-over",
      }),
    );
  }
  if (textWidth(picture, spare) + 24 <= width - scale(Math.min(total, room))) {
    picture.append(svg("text", { ...word, class: total > room ? "mgpu-strong mgpu-haloed" : "mgpu-quiet" }, spare));
  }
  const name = `${model.get("gpu")} holds ${size(room)}`,
    left = end > textWidth(picture, name) + 8;
  picture.append(
    svg("line", { x1: end, x2: end, y1: top - 6, y2: top + high + 22, class: "mgpu-capacity" }),
    svg(
      "text",
      { x: left ? end - 6 : end + 6, y: top + high + 18, "text-anchor": left ? "end" : "start", class: "mgpu-strong" },
      name,
    ),
    svg("text", { x: 6, y: lower - 10 }, `${size(total)} needed, magnified:`),
  );
  stack(picture, parts, prefix, { scale: magnified, y: lower, height: 48, labelled: true });
  return lower + 50;
}

function table(model, prefix) {
  const body = html("tbody");
  const row = ([part, bytes], total) => {
    const box = { x: 0.5, y: 0.5, width: 21, height: 15, fill: `url(#${prefix}-${part})`, class: "mgpu-part" };
    return html(
      "tr",
      {},
      html("th", { scope: "row" }, swatch(22, 16, svg("rect", box)), PARTS[part]),
      html("td", {}, size(bytes)),
      html("td", {}, percent(bytes, total)),
    );
  };
  const show = () => {
    const { parts, total } = need(model);
    body.replaceChildren(...Object.entries(parts).map((entry) => row(entry, total)));
  };
  const head = html("tr", {}, ...["Part", "Size", "Share"].map((name) => html("th", { scope: "col" }, name)));
  return [html("table", {}, html("thead", {}, head), body), show];
}

export function render({ model, el }) {
  const { networks, gpus } = model.get("data"),
    prefix = `mgpu-${Math.random().toString(36).slice(2)}`,
    describe = (batch) => `${batch}, ${fits(model, batch) ? "fits" : "does not fit"}`,
    mark = (batch) => (fits(model, batch) ? ["●", "mgpu-fits"] : ["×", "mgpu-fails"]),
    sizes = batchSizes(model),
    batch = slider(model, "batch_size", "Batch size", sizes, describe),
    [parts, showParts] = table(model, prefix);
  return figure({
    model,
    el,
    caption: model.get("caption"),
    below: [parts],
    keys: ["batch_size", "network", "optimizer", "precision", "gpu"],
    controls: [
      menu(model, "network", "Network", named(Object.keys(networks))),
      menu(model, "optimizer", "Optimizer", OPTIMIZERS),
      menu(model, "precision", "Precision", PRECISIONS),
      menu(model, "gpu", "GPU", named(Object.keys(gpus))),
      marked(batch, sizes, mark, showParts),
    ],
    sentence: () => memorySentence(model),
    draw: (picture, width) => drawMemory(model, prefix, picture, width),
  });
}
