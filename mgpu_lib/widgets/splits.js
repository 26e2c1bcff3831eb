// What crosses between GPUs in one training step, for three ways to share the work: bars, and which moves least.

const WAYS = {
  layer_wise: ["L", "splitting by layers", "some layers on each GPU"],
  in_layer: ["I", "splitting inside layers", "a part of each layer on each GPU"],
  data_parallel: ["D", "data parallelism", "a part of the batch on each GPU"],
};
const BATCH_SIZES = Array.from({ length: 13 }, (_, i) => 2 ** i);

// Bytes per step for each way (null: not possible), the way that moves least, and where that changes.
function compare(net, gpus, batch) {
  const each = Object.fromEntries(Object.keys(WAYS).map((way) => [way, net[way][gpus - 1]]));
  const times = { layer_wise: batch, in_layer: batch, data_parallel: 1 };
  const moved = Object.fromEntries(
    Object.entries(each).map(([way, bytes]) => [way, bytes === null ? null : bytes * times[way]]),
  );
  const [rival] = ["layer_wise", "in_layer"].filter((way) => each[way] !== null).sort((a, b) => each[a] - each[b]);
  // The smallest batch at which data parallelism moves no more than its rival.
  const change = rival && each[rival] ? Math.ceil(each.data_parallel / each[rival]) : null;
  const least = rival && (change === null || batch < change) ? rival : "data_parallel";
  return { moved, rival, change, least };
}

function splitsSentence(networks, network, batch, gpus) {
  const net = networks[network],
    { moved, rival, change, least } = compare(net, gpus, batch),
    name = (way) => WAYS[way][1];
  const others = Object.entries(moved)
    .filter(([way]) => way !== least)
    .map(([way, bytes]) =>
      bytes === null ? `${name(way)} is not possible, with ${net.layers} layers` : `${name(way)} ${size(bytes)}`,
    );
  const start =
    `${network} at batch ${batch} on ${gpus} GPUs: ${name(least)} moves least, ` +
    `${size(moved[least])} per step (${others.join("; ")}).`;
  if (!rival || change === null || change <= 1) return `${start} That is so at every batch size.`;
  if (least === "data_parallel") return `${start} Below a batch of ${change}, ${name(rival)} moves least.`;
  return `${start} From a batch of ${change} on, data parallelism moves least.`;
}

function drawSplits(picture, width, { moved, least }) {
  const most = Math.max(...Object.values(moved), 1);
  const lines = Object.entries(moved).map(([way, bytes]) => {
    const [letter, name, what] = WAYS[way],
      value = bytes === null ? "not possible" : `${size(bytes)}${way === least ? ", least" : ""}`;
    return { way, bytes, value, name: `${name} (${letter})`, words: `${name} (${letter}): ${what}` };
  });
  const fits = ({ words, value }) => textWidth(picture, words) + textWidth(picture, value) + 16 < width;
  const roomy = lines.every(fits);
  lines.forEach(({ way, bytes, value, name, words }, line) => {
    const y = 14 + 54 * line,
      box = { x: 0.5, y: y + 8, height: 20 },
      weight = way === least ? { class: "mgpu-strong" } : {};
    picture.append(
      svg("text", { x: 0, y, ...weight }, roomy ? words : name),
      svg("text", { x: width, y, "text-anchor": "end", ...weight }, value),
      svg("rect", { ...box, width: width - 1, class: bytes === null ? "mgpu-box mgpu-idle" : "mgpu-room" }),
      svg("rect", { ...box, width: ((width - 1) * bytes) / most, class: `mgpu-bar mgpu-${way}` }),
    );
  });
  return 14 + 54 * 2 + 30;
}

function render({ model, el }) {
  const { networks } = model.get("data"),
    names = Object.fromEntries(Object.keys(networks).map((name) => [name, name])),
    most = Object.values(networks)[0].in_layer.length;
  const at = (batch = model.get("batch_size")) => compare(networks[model.get("network")], model.get("num_gpus"), batch);
  const describe = (batch) => `${batch}, ${WAYS[at(batch).least][1]} moves least`;
  const [batch, showBatch] = slider(model, "batch_size", "Batch size", BATCH_SIZES, describe);
  // Under the slider's stops: the way that moves least there.
  const marks = html("span", { class: "mgpu-marks", "aria-hidden": "true" });
  const showMarks = () =>
    marks.replaceChildren(
      ...BATCH_SIZES.map((size) => html("span", {}, WAYS[at(size).least][0], html("small", {}, size))),
    );
  batch.append(marks);
  const counts = Array.from({ length: most - 1 }, (_, i) => i + 2);
  return figure({
    model,
    el,
    caption: model.get("caption"),
    keys: ["network", "batch_size", "num_gpus"],
    controls: [
      menu(model, "network", "Network", names),
      slider(model, "num_gpus", "Number of GPUs", counts, (n) => `${n} GPUs`),
      [
        batch,
        () => {
          showBatch();
          showMarks();
        },
      ],
    ],
    sentence: () => splitsSentence(networks, ...["network", "batch_size", "num_gpus"].map((key) => model.get(key))),
    draw: (picture, width) => drawSplits(picture, width, at()),
  });
}
