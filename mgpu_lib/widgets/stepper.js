// An all-reduce, round by round: what each GPU holds, what was just sent, and what each link has carried.
// The schedules come from mgpu_lib/collectives.py: lists of rounds of [source, target, chunk or null, reduce].

import { button, choose, figure, html, list, radios, size, slider, sum, svg, together, upTo } from "./figure.js";

const KINDS = {
  star: ["star", "all to GPU 0 and back"],
  ring: ["ring", "chunks around a circle"],
  tree: ["tree", "in pairs, then pairs of pairs"],
};

// Everything the figure shows after `step` rounds.
function follow({ nbytes, schedules }, kind, gpus, step) {
  const rounds = schedules[kind][gpus - 2],
    now = Math.min(step, rounds.length),
    numbers = nbytes / 4,
    chunks = kind === "ring" ? gpus : 1;
  // As tensor_split cuts it; null is the whole.
  const sizeOf = (chunk) =>
    chunk === null ? nbytes : 4 * (Math.floor(numbers / gpus) + (chunk < numbers % gpus ? 1 : 0));
  // A set of GPUs whose shares are summed, as the bits of a number.
  const holds = Array.from({ length: gpus }, (_, gpu) => Array(chunks).fill(1 << gpu));
  const links = new Map(rounds.flat().map(([source, target]) => [`${source} → ${target}`, { sofar: 0, whole: 0 }]));
  let largest = 0;
  rounds.forEach((sends, round) => {
    // All at once: what is sent is what was there before the round.
    const arrived = sends.map(([source, , chunk]) => holds[source][chunk ?? 0]);
    sends.forEach(([source, target, chunk, reduce], i) => {
      const link = links.get(`${source} → ${target}`);
      link.whole += sizeOf(chunk);
      if (round >= now) return;
      link.sofar += sizeOf(chunk);
      holds[target][chunk ?? 0] = reduce ? holds[target][chunk ?? 0] + arrived[i] : arrived[i];
    });
    if (round < now) largest += Math.max(...sends.map(([, , chunk]) => sizeOf(chunk)));
  });
  const total = (what) => sum([...links.values()].map((link) => link[what]));
  return {
    kind,
    gpus,
    now,
    nbytes,
    chunks,
    holds,
    links,
    rounds: rounds.length,
    sends: now ? rounds[now - 1] : [],
    moved: total("sofar"),
    all: total("whole"),
    busiest: Math.max(...[...links.values()].map((link) => link.sofar)),
    piece: sizeOf(kind === "ring" ? 0 : null),
    times: Math.round((100 * largest) / nbytes) / 100,
  };
}

const complete = ({ gpus, holds }) => holds.flat().filter((shares) => shares === 2 ** gpus - 1).length;

function stepSentence(at) {
  const { kind, gpus, now, rounds, sends } = at,
    name = `${kind[0].toUpperCase()}${kind.slice(1)} on ${gpus} GPUs`;
  if (!now)
    return `${name}, before the first of ${rounds} rounds: each GPU holds its own gradient of ${size(at.nbytes)}.`;
  const what = sends[0][3] ? ["adds it to its own", "add it to their own"] : ["keeps it", "keep it"];
  const moves = list(sends.map(([source, target], i) => `GPU ${source} ${i ? "" : "sends "}to GPU ${target}`));
  const happens =
    kind === "ring"
      ? `each GPU sends one chunk (${size(at.piece)}) to the next, which ${what[0]}`
      : `${moves}, which ${what[+(sends.length > 1)]}`;
  const whole = complete(at),
    of = at.holds.flat().length;
  const state =
    whole === of
      ? `every GPU holds the sum, in the time that ${at.times} whole gradients take over one link`
      : `${whole} of ${of} ${kind === "ring" ? "chunks" : "GPUs"} ${whole === 1 ? "is" : "are"} complete`;
  const moved = `${size(at.moved)} have moved, at most ${size(at.busiest)} over one link`;
  return `${name}, round ${now} of ${rounds}: ${happens}; ${moved}; ${state}.`;
}

// A line, and a head at (x, y) that points along (dx, dy).
function arrow(picture, path, [x, y], [dx, dy]) {
  const head = `M${x},${y} L${x - 6 * dx + 4 * dy},${y - 6 * dy + 4 * dx} L${x - 6 * dx - 4 * dy},${y - 6 * dy - 4 * dx} Z`;
  picture.append(svg("path", { d: path, class: "mgpu-send" }), svg("path", { d: head, class: "mgpu-head" }));
}

const words = (picture, x, y, text, attributes = {}) => picture.append(svg("text", { x, y, ...attributes }, text));

// One GPU's chunk: a place for each GPU's share, filled if it is in the sum.
function drawChunk(picture, at, shares, x, y, wide, high) {
  const each = wide / at.gpus;
  for (let gpu = 0; gpu < at.gpus; gpu++) {
    if (!((shares >> gpu) & 1)) continue;
    picture.append(
      svg("rect", { x: x + each * gpu, y, width: each, height: high, class: `mgpu-share mgpu-gpu${gpu}` }),
    );
    if (each >= 15) {
      const middle = { "text-anchor": "middle", class: `mgpu-on${gpu}` };
      words(picture, x + each * (gpu + 0.5), y + high / 2 + 4.5, gpu, middle);
    }
  }
  const full = shares === 2 ** at.gpus - 1;
  picture.append(
    svg("rect", { x, y, width: wide, height: high, rx: 2, class: full ? "mgpu-chunk mgpu-full" : "mgpu-chunk" }),
  );
}

function drawGpus(picture, at, width) {
  const { gpus, chunks, holds, sends, kind } = at,
    high = 22,
    gap = kind === "ring" ? 22 : 10,
    left = 52,
    gutter = kind === "ring" ? 2 : 14 + 0.75 * bulge(gpus - 1),
    step = Math.min((width - left - gutter) / chunks, kind === "ring" ? 110 : 420),
    wide = step - 5;
  const top = kind === "ring" ? 66 : 28,
    row = (gpu) => top + gpu * (high + gap),
    bottom = row(gpus - 1) + high;
  const title = at.now
    ? `round ${at.now} of ${at.rounds}: ${sends[0][3] ? "added to what is there (+)" : "put in its place (=)"}`
    : `before round 1 of ${at.rounds}`;
  words(picture, 0, 13, title, { class: "mgpu-strong" });
  if (chunks > 1) {
    words(picture, 0, 36, "chunk", { class: "mgpu-quiet" });
    for (let chunk = 0; chunk < chunks; chunk++) {
      words(picture, left + step * chunk + wide / 2, 36, chunk, { "text-anchor": "middle", class: "mgpu-quiet" });
    }
  }
  holds.forEach((pieces, gpu) => {
    words(picture, 0, row(gpu) + 16, `GPU ${gpu}`, { class: "mgpu-strong" });
    pieces.forEach((shares, chunk) => drawChunk(picture, at, shares, left + step * chunk, row(gpu), wide, high));
  });
  for (const [source, target, chunk, reduce] of sends) {
    const sign = reduce ? "+" : "=";
    if (chunk === null) {
      const x = left + step - 3,
        out = bulge(Math.abs(source - target)),
        [from, to] = [row(source) + high / 2, row(target) + high / 2];
      arrow(picture, `M${x},${from} C${x + out},${from} ${x + out},${to} ${x + 6},${to}`, [x, to], [-1, 0]);
      words(picture, x + 0.75 * out + 4, (from + to) / 2 + 4, sign, { class: "mgpu-strong" });
      continue;
    }
    const x = left + step * chunk + wide / 2,
      anchor = x > width / 2 ? { dx: -7, "text-anchor": "end" } : { dx: 7 };
    const from = row(source) + high,
      to = row(target);
    if (target > source) {
      arrow(picture, `M${x},${from + 1} V${to - 6}`, [x, to - 1], [0, 1]);
      words(picture, x, to - 6, sign, { dx: 7, class: "mgpu-strong" });
    } else {
      // From the last GPU to the first: it leaves below and comes in above.
      arrow(picture, `M${x},${from + 1} v9`, [x, from + 16], [0, 1]);
      arrow(picture, `M${x},${to - 17} v9`, [x, to - 1], [0, 1]);
      words(picture, x, from + 15, `to GPU ${target}`, anchor);
      words(picture, x, to - 6, `${sign} from GPU ${source}`, anchor);
    }
  }
  return bottom + (kind === "ring" ? 22 : 6);
}

const bulge = (distance) => 26 + 4 * distance;

function drawLinks(picture, at, width, top) {
  const columns = Math.max(1, Math.floor(width / 230)),
    each = width / columns,
    lines = Math.ceil(at.links.size / columns),
    most = Math.max(...[...at.links.values()].map((link) => link.whole)),
    busy = new Set(at.sends.map(([source, target]) => `${source} → ${target}`));
  words(picture, 0, top + 13, `each link so far; in all ${size(at.moved)} of ${size(at.all)}`, {
    class: "mgpu-strong",
  });
  [...at.links].forEach(([name, { sofar, whole }], i) => {
    const x = each * Math.floor(i / lines),
      y = top + 24 + 22 * (i % lines),
      bar = each - 46 - 84,
      weight = busy.has(name) ? { class: "mgpu-strong" } : {};
    words(picture, x, y + 13, name, weight);
    picture.append(
      svg("rect", { x: x + 46, y: y + 2, width: (bar * sofar) / most, height: 13, class: "mgpu-carried" }),
      svg("rect", { x: x + 46, y: y + 2, width: (bar * whole) / most, height: 13, class: "mgpu-room" }),
    );
    words(picture, x + 46 + bar + 66, y + 13, size(sofar), { "text-anchor": "end", ...weight });
  });
  return top + 28 + 22 * lines;
}

// A button that moves the step by `by`.
function stepButton(model, label, by, last) {
  const next = () => Math.min(Math.max(model.get("step") + by, 0), last());
  return button(
    label,
    () => choose(model, "step", next()),
    () => next() === model.get("step"),
  );
}

export function render({ model, el }) {
  const state = () => follow(...["data", "kind", "num_gpus", "step"].map((key) => model.get(key)));
  const last = () => model.get("data").schedules[model.get("kind")][model.get("num_gpus") - 2].length;
  // The last round is another one for another kind or number of GPUs; Python keeps `step` within it in the same way.
  const kept = {
    get: (key) => (key === "step" ? Math.min(model.get("step"), last()) : model.get(key)),
    set(key, value) {
      model.set(key, value);
      model.set("step", kept.get("step"));
    },
    save_changes: () => model.save_changes(),
  };
  const steps = [];
  const describe = (step) => (step ? `after round ${step} of ${last()}` : "at the start");
  const [slide, showSlide] = slider(kept, "step", "Step", steps, describe);
  const buttons = [stepButton(kept, "◀ Back", -1, last), stepButton(kept, "Next ▶", 1, last)];
  const showStep = () => {
    steps.splice(0, Infinity, ...upTo(last(), 0));
    slide.querySelector("input").max = last();
    showSlide();
  };
  return figure({
    model,
    el,
    caption: model.get("caption"),
    keys: ["kind", "num_gpus", "step"],
    controls: [
      radios(kept, "kind", "Way", KINDS),
      slider(kept, "num_gpus", "Number of GPUs", upTo(8, 2), (n) => `${n} GPUs`),
      [slide, showStep],
      together(html("span", { class: "mgpu-buttons" }, ...buttons.map(([element]) => element)), buttons),
    ],
    sentence: () => stepSentence(state()),
    draw: (picture, width) => drawLinks(picture, state(), width, drawGpus(picture, state(), width) + 8),
  });
}
