// What crosses between GPUs in one training step, for three ways to share the work: bars, and which moves least.

import { figure, marked, menu, named, size, slider, svg, textWidth, upTo, valuesOf } from "./figure.js";

// Letter, name, what lies where, and the class of the bar.
const WAYS = {
  pipeline: ["P", "pipeline parallelism", "some layers on each GPU", "layer_wise"],
  tensor: ["T", "tensor parallelism", "a part of each layer on each GPU", "in_layer"],
  data: ["D", "data parallelism", "a part of the batch on each GPU", "data_parallel"],
};
const BATCH_SIZES = upTo(12, 0).map((power) => 2 ** power);

// Bytes per step for each way (null: not possible), the way that moves least, and where that changes.
function compare(net, gpus, batch) {
  const each = Object.fromEntries(Object.keys(WAYS).map((way) => [way, net[way][gpus - 1]]));
  const times = { pipeline: batch, tensor: batch, data: 1 };
  const moved = Object.fromEntries(
    Object.entries(each).map(([way, bytes]) => [way, bytes === null ? null : bytes * times[way]]),
  );
  const [rival] = ["pipeline", "tensor"].filter((way) => each[way] !== null).sort((a, b) => each[a] - each[b]);
  // The smallest batch at which data parallelism moves no more than its rival.
  const change = rival && each[rival] ? Math.ceil(each.data / each[rival]) : null;
  const least = rival && (change === null || batch < change) ? rival : "data";
  return { moved, rival, change, least };
}

function splitsSentence(networks, network, batch, gpus) {
  const net = networks[network],
    { moved, rival, change, least } = compare(net, gpus, batch),
    name = (way) => WAYS[way][1];
  const others = Object.entries(moved)
    .filter(([way]) => way !== least)
    .map(([way, bytes]) =>
      bytes === null ? `${name(way)} is not possible, with ${net.limits[way]}` : `${name(way)} ${size(bytes)}`,
    );
  const start =
    `${network} at batch ${batch} on ${gpus} GPUs: ${name(least)} moves least, ` +
    `${size(moved[least])} per step (${others.join("; ")}).`;
  if (!rival || change === null || change <= 1) return `${start} That is so at every batch size.`;
  if (least === "data") return `${start} Below a batch of ${change}, ${name(rival)} moves least.`;
  return `${start} From a batch of ${change} on, data parallelism moves least.`;
}

function drawSplits(picture, width, { moved, least }) {
  const most = Math.max(...Object.values(moved), 1);
  const lines = Object.entries(moved).map(([way, bytes]) => {
    const [letter, name, what, fill] = WAYS[way],
      value = bytes === null ? "not possible" : `${size(bytes)}${way === least ? ", least" : ""}`;
    return { way, fill, bytes, value, name: `${name} (${letter})`, words: `${name} (${letter}): ${what}` };
  });
  const fits = ({ words, value }) => textWidth(picture, words) + textWidth(picture, value) + 16 < width;
  const roomy = lines.every(fits);
  lines.forEach(({ way, fill, bytes, value, name, words }, line) => {
    const y = 14 + 54 * line,
      box = { x: 0.5, y: y + 8, height: 20 },
      weight = way === least ? { class: "mgpu-strong" } : {};
    picture.append(
      svg("text", { x: 0, y, ...weight }, roomy ? words : name),
      svg("text", { x: width, y, "text-anchor": "end", ...weight }, value),
      svg("rect", { ...box, width: width - 1, class: bytes === null ? "mgpu-box mgpu-idle" : "mgpu-room" }),
      svg("rect", { ...box, width: ((width - 1) * bytes) / most, class: `mgpu-bar mgpu-${fill}` }),
    );
  });
  return 14 + 54 * 2 + 30;
}

export function render({ model, el }) {
  const { networks } = model.get("data"),
    keys = ["network", "batch_size", "num_gpus"],
    most = Object.values(networks)[0].data.length;
  const at = (batch = model.get("batch_size")) => compare(networks[model.get("network")], model.get("num_gpus"), batch);
  const describe = (batch) => `${batch}, ${WAYS[at(batch).least][1]} moves least`;
  const batch = slider(model, "batch_size", "Batch size", BATCH_SIZES, describe);
  return figure({
    model,
    el,
    caption: model.get("caption"),
    keys,
    controls: [
      menu(model, "network", "Network", named(Object.keys(networks))),
      slider(model, "num_gpus", "Number of GPUs", upTo(most, 2), (n) => `${n} GPUs`),
      // Under the stops: the way that moves least there.
      marked(batch, BATCH_SIZES, (size) => [WAYS[at(size).least][0]]),
    ],
    sentence: () => splitsSentence(networks, ...Object.values(valuesOf(model, keys))),
    draw: (picture, width) => drawSplits(picture, width, at()),
  });
}
