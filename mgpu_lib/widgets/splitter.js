// Who gets which rows of a batch: the rows as numbered cells, and the GPUs they go to.

import { figure, list, radios, slider, svg, upTo, valuesOf } from "./figure.js";

const WAYS = {
  split_batch: ["split_batch", "sizes differ by at most one"],
  scatter: ["nn.parallel.scatter", "equal pieces until the rows run out"],
};

// The first row and the number of rows of each GPU.
function shards(rows, gpus, way) {
  const each = Math.ceil(rows / gpus),
    spare = rows % gpus;
  let start = 0;
  return Array.from({ length: gpus }, (_, gpu) => {
    const count = way === "scatter" ? Math.min(each, rows - start) : Math.floor(rows / gpus) + (gpu < spare ? 1 : 0);
    start += count;
    return { gpu, first: start - count, count };
  });
}

const plural = (count) => `${count} row${count === 1 ? "" : "s"}`;

function splitSentence(rows, gpus, way) {
  const all = shards(rows, gpus, way),
    busy = all.filter((shard) => shard.count),
    idle = all.filter((shard) => !shard.count);
  const range = ({ first, count }) => (count === 1 ? `row ${first}` : `rows ${first}–${first + count - 1}`);
  const moves = list(
    busy.map((shard, i) => `${range(shard)} ${i ? "" : shard.count === 1 ? "goes " : "go "}to GPU ${shard.gpu}`),
  );
  const nothing = idle.length
    ? ` GPU${idle.length > 1 ? "s" : ""} ${list(idle.map(({ gpu }) => gpu))} get${idle.length > 1 ? "" : "s"} nothing.`
    : "";
  const equal = busy.every(({ count }) => count === busy[0].count);
  const each = equal
    ? `Each of these shards weighs ${busy[0].count}/${rows}`
    : `The shards weigh ${list(busy.map(({ count }) => `${count}/${rows}`))}`;
  const weights = busy.length > 1 ? ` ${each} in the mean over the batch.` : "";
  return `${moves[0].toUpperCase()}${moves.slice(1)}.${nothing}${weights}`;
}

const ROW = 22;

function cell(picture, gpu, x, y, width, height, text) {
  picture.append(svg("rect", { x, y, width, height, rx: 2, class: `mgpu-cell mgpu-gpu${gpu}` }));
  if (text !== "")
    picture.append(
      svg("text", { x: x + width / 2, y: y + height / 2 + 4.5, "text-anchor": "middle", class: `mgpu-on${gpu}` }, text),
    );
}

function drawGpu(picture, { gpu, first, count }, rows, { x, y, width, height, columns }) {
  const middle = x + width / 2,
    words = { x: middle, "text-anchor": "middle" };
  picture.append(
    svg("rect", { x, y, width, height, rx: 5, class: count ? "mgpu-box" : "mgpu-box mgpu-idle" }),
    svg("text", { ...words, y: y + 17, class: "mgpu-strong" }, width < 46 ? `#${gpu}` : `GPU ${gpu}`),
  );
  const wide = Math.min(34, (width - 8) / columns),
    left = middle - (wide * Math.min(columns, count || 1)) / 2;
  for (let i = 0; i < count; i++) {
    cell(
      picture,
      gpu,
      left + wide * (i % columns) + 1,
      y + 24 + ROW * Math.floor(i / columns),
      wide - 2,
      ROW - 2,
      first + i,
    );
  }
  const counted = width < 52 ? count : plural(count);
  picture.append(svg("text", { ...words, y: y + height + 16 }, count ? counted : width < 56 ? "none" : "nothing"));
  if (count) picture.append(svg("text", { ...words, y: y + height + 32, class: "mgpu-quiet" }, `${count}/${rows}`));
}

function drawSplit(picture, width, rows, gpus, way) {
  const all = shards(rows, gpus, way),
    gap = gpus > 4 && width < 500 ? 3 : 10,
    box = (width - gap * (gpus - 1)) / gpus;
  const wide = Math.min(40, width / rows),
    left = (width - wide * rows) / 2,
    strip = 20,
    top = 106;
  const columns = Math.max(1, Math.floor((box - 8) / 26)),
    lines = Math.ceil(all[0].count / columns);
  const height = 30 + ROW * lines;
  picture.append(
    svg("text", { x: width / 2, y: 13, "text-anchor": "middle", class: "mgpu-strong" }, `the batch: ${plural(rows)}`),
  );
  for (const shard of all) {
    const x = shard.gpu * (box + gap),
      from = left + wide * shard.first,
      to = from + wide * shard.count;
    if (shard.count) {
      picture.append(
        svg("path", {
          class: `mgpu-flow mgpu-gpu${shard.gpu}`,
          d:
            `M${from},${strip + 26} C${from},${strip + 60} ${x},${top - 34} ${x},${top} ` +
            `H${x + box} C${x + box},${top - 34} ${to},${strip + 60} ${to},${strip + 26} Z`,
        }),
      );
    }
    for (let i = 0; i < shard.count; i++) {
      const number = shard.first + i;
      cell(picture, shard.gpu, left + wide * number + 0.5, strip, wide - 1, 24, wide >= 20 ? number : "");
    }
    drawGpu(picture, shard, rows, { x: x + 0.75, y: top, width: box - 1.5, height, columns });
  }
  return top + height + 40;
}

export function render({ model, el }) {
  const keys = ["batch_size", "num_gpus", "way"],
    state = () => Object.values(valuesOf(model, keys));
  return figure({
    model,
    el,
    caption: model.get("caption"),
    keys,
    controls: [
      slider(model, "batch_size", "Batch size", upTo(64), plural),
      slider(model, "num_gpus", "Number of GPUs", upTo(8), (n) => `${n} GPU${n === 1 ? "" : "s"}`),
      radios(model, "way", "Split by", WAYS),
    ],
    sentence: () => splitSentence(...state()),
    draw: (picture, width) => drawSplit(picture, width, ...state()),
  });
}
