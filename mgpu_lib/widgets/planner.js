// The planner: what each GPU of a large training run holds, where the time of a step goes, and how to split it better.

import { button, figure, html, menu, named, percent, size, slider, sum, svg, swatch, textWidth } from "./figure.js";
import { together, translated, valuesOf } from "./figure.js";
// What planner.py makes of mgpu_lib/plan_formulas.py.
import { Plan, ROOM, TrainingRun, fault, parameters, planned, sizes_of } from "./plan_formulas.js";

const MODELS = {
  "Llama 3 8B": { layers: 32, width: 4096, heads: 32 },
  "Llama 3 70B": { layers: 80, width: 8192, heads: 64 },
};
const OWN = "your own";
const ZERO_STAGES = { 0: "0: all whole", 1: "1: optimizer sharded", 2: "2: gradients, too", 3: "3: parameters, too" };
const SPLIT = ["tensor", "pipeline", "zero", "micro_batch", "recompute"];
const KEYS = ["layers", "width", "heads", "seq_len", "batch_tokens", "gpu", "n_gpus", "network", ...SPLIT, "tokens"];
const DAY = 86_400;

// Colour is never alone: each part also has its own pattern. Of each part its name, its look and that pattern.
const STROKES = "M-2,10 10,-2M6,10 10,6M-2,2 2,-2";
const KINDS = {
  parameters: ["Parameters", "mgpu-parameters", ""],
  gradients: ["Gradients", "mgpu-gradients", STROKES],
  optimizer: ["Optimizer state", "mgpu-optimizer", "M4,2v4M2,4h4"],
  activations: ["Activations", "mgpu-activations", "M0,4h8"],
  buffers: ["Buffers", "mgpu-scratch", "M4,0v8"],
};
const STEP_PARTS = {
  compute: ["Computing", "mgpu-computing", ""],
  recomputation: ["Recomputation", "mgpu-computing", STROKES],
  "tensor parallel": ["Tensor parallelism", "mgpu-between", "M4,2v4M2,4h4"],
  "data parallel": ["Data parallelism", "mgpu-across", "M0,4h8"],
  bubble: ["Pipeline bubble", "mgpu-waiting", "M4,3v2"],
  update: ["Update", "mgpu-updating", "M4,0v8"],
};
const OVER = { over: ["", "mgpu-over", STROKES] };

// Numbers in words

// Three digits, and commas between thousands.
const written = (number) => Number(number.toPrecision(3)).toLocaleString("en");
const whole = (number) => number.toLocaleString("en");

function short(number) {
  const [value, unit] = number < 1e9 ? [number / 1e6, "M"] : number < 1e12 ? [number / 1e9, "B"] : [number / 1e12, "T"];
  return `${written(value)} ${unit}`;
}

function seconds(time) {
  if (time === 0) return "0 s";
  return time < 1 ? `${(1000 * time).toPrecision(3)} ms` : `${time < 1000 ? time.toPrecision(3) : written(time)} s`;
}

const either = (words) => (words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} or ${words.at(-1)}`);

const modelName = (at) =>
  Object.keys(MODELS).find((name) => Object.entries(MODELS[name]).every(([key, value]) => at[key] === value)) ?? OWN;

const CHANGES = {
  zero: (stage) => `ZeRO stage ${stage}`,
  recompute: (on) => (on ? "recomputation" : "no recomputation"),
  micro_batch: (n) => `${n} ${n === 1 ? "sequence" : "sequences"} in a micro-batch`,
  tensor: (n) => (n === 1 ? "no tensor parallelism" : `${n} GPUs that share each layer`),
  pipeline: (n) => (n === 1 ? "a single pipeline stage" : `${n} pipeline stages`),
  batch_tokens: (n) => `a batch of ${short(n)} tokens`,
  n_gpus: (n) => `${whole(n)} GPUs`,
  heads: (n) => `${n} heads`,
};

// What one change would do

// For each of the controls the nearest value with which `good(at)` holds: [control, value].
function remedies(data, at, names, good) {
  return names.flatMap((name) => {
    const values = data.choices[name],
      now = values.indexOf(at[name]),
      distance = (value) => Math.abs(values.indexOf(value) - now),
      others = [...values].filter((value) => value !== at[name]).sort((a, b) => distance(a) - distance(b)),
      found = others.find((value) => good({ ...at, [name]: value }));
    return found === undefined ? [] : [[name, found]];
  });
}

const changed = (found) => either(found.slice(0, 3).map(([name, value]) => CHANGES[name](value)));

function faultAdvice(data, at) {
  const found = remedies(data, at, [...SPLIT, "batch_tokens", "n_gpus", "heads"], (other) => fault(runOf(other)) === null);
  return found.length ? `It would run with ${changed(found)}.` : "No single change helps; look for the best split.";
}

// How to make a run fit that does not.
function memoryAdvice(data, at, { held }) {
  const possible = (other) => (fault(runOf(other)) === null ? planOf(data, other) : null),
    names = ["zero", "recompute", "micro_batch", "tensor", "pipeline"],
    fitting = remedies(data, at, names, (other) => possible(other)?.fits);
  if (fitting.length) return `It would fit with ${changed(fitting)}.`;
  const all = names.flatMap((name) => data.choices[name].map((value) => [name, value])),
    needed = ([name, value]) => possible({ ...at, [name]: value })?.held ?? Infinity,
    least = all.reduce((best, other) => (needed(other) < needed(best) ? other : best)),
    closest = needed(least) < held ? ` It comes closest with ${changed([least])}: ${size(needed(least))}.` : "";
  return `No single change of the split makes it fit, though several may.${closest}`;
}

const runOf = ({ layers, width, heads, batch_tokens, seq_len, ...split }) =>
  TrainingRun({ sizes: sizes_of(layers, width, heads), batch: Math.floor(batch_tokens / seq_len), seq_len, ...split });
const ratesOf = (data, { gpu, network }) => ({
  ...data.kernels[gpu],
  collectives: data.collectives[data.nodes[gpu]][network],
});

// Times below a nanosecond are what rounding leaves of nothing.
function planOf(data, at) {
  const made = planned(runOf(at), ratesOf(data, at)),
    times = Object.entries(made.seconds).map(([part, time]) => [part, time < 1e-9 ? 0 : time]);
  return Plan({ ...made, seconds: Object.fromEntries(times) });
}

// All splits of a run that there can be.
function splits(data, at) {
  let all = [at];
  for (const name of SPLIT) {
    all = all.flatMap((other) => data.choices[name].map((value) => ({ ...other, [name]: value })));
  }
  return all.filter((other) => fault(runOf(other)) === null);
}

// The values of the fastest plan that fits (null if none does), how many splits there can be, and how many of them fit.
function bestSplit(data, at) {
  const tried = splits(data, at).map((values) => [values, planOf(data, values)]),
    fitting = tried.filter(([, { fits }]) => fits),
    steps = fitting.map(([, { step }]) => step),
    best = fitting[steps.indexOf(Math.min(...steps))]?.[0] ?? null;
  return { best, tried: tried.length, fitting: fitting.length };
}

function searchWords({ best, tried, fitting }) {
  if (tried === 0) return "There is no way to split this run: other numbers of GPUs, tokens or heads would do. ";
  if (best) return `The fastest of ${whole(fitting)} splits that fit, of ${whole(tried)} tried. `;
  return `Of ${whole(tried)} splits tried none fits: use more GPUs, shorter sequences or a smaller model. `;
}

// The part that costs most beside computing: [name, seconds].
const costliest = (made) =>
  Object.entries(made.seconds)
    .filter(([part]) => part !== "compute")
    .reduce((most, other) => (other[1] > most[1] ? other : most));

function plannerSentence(data, at) {
  const own = `A model of ${short(parameters(runOf(at).sizes))} parameters`,
    model = modelName(at) === OWN ? own : modelName(at),
    start = `${model} on ${whole(at.n_gpus)} ${at.gpu} (${at.network})`,
    wrong = fault(runOf(at));
  if (wrong) return `${start}: there is no such run. ${wrong}. ${faultAdvice(data, at)}`;
  const made = planOf(data, at);
  if (!made.fits && made.held <= made.capacity) {
    return (
      `${start} may not fit: it needs ${size(made.held)} of ${size(made.capacity)}, and real runs typically held ` +
      `${(1 / ROOM).toFixed(1)} times what is counted here. ${memoryAdvice(data, at, made)}`
    );
  }
  if (!made.fits) {
    const [most, bytes] = Object.entries(made.memory).reduce((a, b) => (b[1] > a[1] ? b : a));
    return (
      `${start} does not fit: it needs ${size(made.held)}, ${size(made.held - made.capacity)} more than one ${at.gpu} ` +
      `has. ${KINDS[most][0]} take most of it, ${size(bytes)}. ${memoryAdvice(data, at, made)}`
    );
  }
  const [part, time] = costliest(made);
  return (
    `${start} fits, with ${size(made.held)} of ${size(made.capacity)}. A step takes ${seconds(made.step)}, modelled, ` +
    `at ${percent(made.mfu, 1)} MFU; ${written(at.tokens / 1e12)} trillion tokens take ${days(made, at)} days. What ` +
    `costs most beside computing is ${COSTS[part]}: ${percent(time, made.step)} of the step.`
  );
}

const COSTS = {
  recomputation: "computing activations once more",
  "tensor parallel": "tensor parallelism",
  "data parallel": "data parallelism",
  bubble: "the pipeline’s bubble",
  update: "the optimizer’s update",
};
const trainingSeconds = (made, at) => at.tokens / (made.tokens_per_second * at.n_gpus);
const days = (made, at) => written(trainingSeconds(made, at) / DAY);

// The picture

function planPatterns(prefix) {
  const pattern = ([name, [, look, path]]) =>
    svg(
      "pattern",
      { id: `${prefix}-${name.replace(" ", "-")}`, width: 8, height: 8, patternUnits: "userSpaceOnUse" },
      svg("rect", { width: 8, height: 8, class: look }),
      svg("path", { d: path, class: "mgpu-pattern" }),
    );
  return svg("defs", {}, ...Object.entries({ ...KINDS, ...STEP_PARTS, ...OVER }).map(pattern));
}
const filled = (prefix, name) => `url(#${prefix}-${name.replace(" ", "-")})`;

const BAR_HEIGHT = 48;

// A part's name and number, or the number alone, where there is room for them.
function planLabel(picture, x, y, width, name, number) {
  const wide = (words) => Math.max(...words.map((word) => textWidth(picture, word))) + 12,
    words = [[name, number], [number]].find((words) => wide(words) + 8 <= width);
  if (!words) return;
  const high = 18 * words.length + 2,
    top = y + (BAR_HEIGHT - high) / 2;
  picture.append(
    svg("rect", { x: x + 4, y: top, width: wide(words), height: high, rx: 3, class: "mgpu-plate" }),
    ...words.map((word, i) =>
      svg("text", { x: x + 10, y: top + 14 + 17 * i, ...(word === name ? { class: "mgpu-strong" } : {}) }, word),
    ),
  );
}

// The larger piece of what a line at `cut` leaves of a part: [x, width].
function besideLine(x, width, cut) {
  if (cut <= x || cut >= x + width) return [x, width];
  return cut - x > x + width - cut ? [x, cut - x] : [cut, x + width - cut];
}

// Parts side by side. `between` is called before the labels are drawn, and no label lies on a line at `cut`.
function planBar(picture, prefix, { parts, names, scale, y, number, between = () => {}, cut = 0 }) {
  let start = 0;
  const drawn = Object.entries(parts).map(([part, value]) => {
    const x = scale(start),
      width = scale(start + value) - x;
    start += value;
    picture.append(svg("rect", { x, y, width, height: BAR_HEIGHT, fill: filled(prefix, part), class: "mgpu-part" }));
    return [...besideLine(x, width, cut), names[part][0], number(value)];
  });
  between();
  drawn.forEach(([x, ...label]) => planLabel(picture, x, y, ...label));
}

function drawMemoryBar(picture, width, prefix, made, gpu, top) {
  const longest = Math.max(made.held, made.capacity),
    scale = (bytes) => 1 + ((width - 2) * bytes) / longest,
    end = scale(made.capacity),
    used = scale(made.held),
    times = made.held / made.capacity,
    inside = made.held <= made.capacity,
    than = inside
      ? `of ${size(made.capacity)}`
      : `${times < 10 ? times.toFixed(1) : written(times)} × what it holds`,
    free = `${size(made.capacity - made.held)} free`,
    y = top + 24;
  const heading = `Memory of a GPU: ${size(made.held)}${inside ? " " : ", "}${than}`;
  const over = () => {
    const room = { x: end, y, width: used - end, height: BAR_HEIGHT, fill: filled(prefix, "over"), class: "mgpu-over" };
    if (!inside) picture.append(svg("rect", room));
  };
  picture.append(
    svg("text", { x: 0, y: top + 14, class: "mgpu-strong" }, heading),
    svg("rect", { x: 1, y, width: end - 1, height: BAR_HEIGHT, class: "mgpu-room" }),
  );
  planBar(picture, prefix, { parts: made.memory, names: KINDS, scale, y, number: size, between: over, cut: end });
  if (inside && textWidth(picture, free) + 16 <= end - used) {
    picture.append(svg("text", { x: end - 8, y: y + 28, "text-anchor": "end", class: "mgpu-quiet" }, free));
  }
  const name = `${gpu} holds ${size(made.capacity)}`,
    left = end > textWidth(picture, name) + 8,
    words = { x: left ? end - 6 : end + 6, y: y + BAR_HEIGHT + 17, "text-anchor": left ? "end" : "start" };
  const advised = scale(ROOM * made.capacity);
  picture.append(
    svg("line", { x1: advised, x2: advised, y1: y - 5, y2: y + BAR_HEIGHT + 5, class: "mgpu-advised" }),
    svg("line", { x1: end, x2: end, y1: y - 5, y2: y + BAR_HEIGHT + 20, class: "mgpu-capacity" }),
    svg("text", { ...words, class: "mgpu-strong" }, name),
  );
}

function drawStepBar(picture, width, prefix, made, top) {
  const scale = (time) => 1 + ((width - 2) * time) / made.step,
    number = (time) => percent(time, made.step);
  const takes = `${made.fits ? "A step takes" : "A step would take"} ${seconds(made.step)} (modelled)`;
  picture.append(svg("text", { x: 0, y: top + 14, class: "mgpu-strong" }, takes));
  planBar(picture, prefix, { parts: made.seconds, names: STEP_PARTS, scale, y: top + 24, number });
}

// Words in lines that are no wider than `width`.
function wrapped(picture, words, width) {
  const lines = [];
  for (const word of words.split(" ")) {
    const longer = `${lines.at(-1)} ${word}`;
    if (lines.length && textWidth(picture, longer, 400) <= width) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines;
}

function drawFault(picture, width, wrong, advice, height) {
  const lines = [wrong, advice].flatMap((words) => ["", ...wrapped(picture, words, width - 32)]),
    high = Math.max(height, 44 + 20 * lines.length);
  picture.append(
    svg("rect", { x: 1, y: 1, width: width - 2, height: high - 2, class: "mgpu-box mgpu-idle" }),
    svg("text", { x: 16, y: 30, class: "mgpu-strong" }, "There is no such run."),
    ...lines.map((line, i) => svg("text", { x: 16, y: 40 + 20 * i }, line)),
  );
  return high;
}

function drawPlanner(picture, width, prefix, data, at) {
  const wrong = fault(runOf(at)),
    second = 112,
    height = second + 24 + BAR_HEIGHT + 1;
  picture.append(planPatterns(prefix)); // the tables use them, too
  if (wrong) return drawFault(picture, width, `${wrong}.`, faultAdvice(data, at), height);
  const made = planOf(data, at);
  drawMemoryBar(picture, width, prefix, made, at.gpu, 0);
  drawStepBar(picture, width, prefix, made, second);
  return height;
}

// Below the picture

function factsOf(data, at) {
  const made = fault(runOf(at)) === null ? planOf(data, at) : null,
    shown = (value) => (made ? value() : "–"),
    hours = () => (trainingSeconds(made, at) * at.n_gpus) / 3600;
  return {
    "tokens/s per GPU": shown(() => written(made.tokens_per_second)),
    MFU: shown(() => percent(made.mfu, 1)),
    "a step": shown(() => seconds(made.step)),
    [`for ${short(at.tokens)} tokens`]: shown(() => `${days(made, at)} days`),
    "GPU-hours": shown(() => (hours() < 1e6 ? written(hours()) : short(hours()))),
  };
}

function facts(data, at) {
  const element = html("div", { class: "mgpu-facts" });
  const show = () => {
    const entries = Object.entries(factsOf(data, at()));
    element.replaceChildren(
      ...entries.map(([name, value]) => html("div", {}, html("b", {}, value), html("span", {}, name))),
    );
  };
  return [element, show];
}

// `amounts()` gives the numbers, or null where there are none.
function partsTable(prefix, names, head, amounts, number) {
  const body = html("tbody");
  const row = (part, cells) => {
    const box = { x: 0.5, y: 0.5, width: 21, height: 15, fill: filled(prefix, part), class: "mgpu-part" },
      name = html("th", { scope: "row" }, swatch(22, 16, svg("rect", box)), names[part][0]);
    return html("tr", {}, name, ...cells.map((cell) => html("td", {}, cell)));
  };
  const show = () => {
    const parts = amounts(),
      total = parts && sum(Object.values(parts)),
      cells = (part) => (parts ? [number(parts[part]), percent(parts[part], total)] : ["–", "–"]);
    body.replaceChildren(...Object.keys(names).map((part) => row(part, cells(part))));
  };
  const columns = html("tr", {}, ...head.map((name) => html("th", { scope: "col" }, name)));
  return [html("table", {}, html("thead", {}, columns), body), show];
}

function tables(prefix, data, at) {
  const made = () => (fault(runOf(at())) === null ? planOf(data, at()) : null);
  const both = [
    partsTable(prefix, KINDS, ["Memory", "Size", "Share"], () => made()?.memory ?? null, size),
    partsTable(prefix, STEP_PARTS, ["Step", "Time", "Share"], () => made()?.seconds ?? null, seconds),
  ];
  return together(html("div", { class: "mgpu-tables" }, ...both.map(([element]) => element)), both);
}

// The controls

// The model with a menu's words in the place of numbers and truths.
const parsed = (model) =>
  translated(
    model,
    (key) => model.get(key),
    (key, word) => model.set(key, JSON.parse(word)),
  );

function modelMenu(model, at) {
  const set = (_, name) => Object.entries(MODELS[name] ?? {}).forEach(([key, value]) => model.set(key, value)),
    names = translated(model, () => modelName(at()), set);
  // "your own" is reached by moving a slider.
  const possible = (name) => name !== OWN || modelName(at()) === OWN;
  return menu(names, "model", "Model", named([...Object.keys(MODELS), OWN]), possible);
}

// A value that follows from others.
function following(label, value) {
  const words = html("b"),
    element = html("div", { class: "mgpu-follows" }, html("span", {}, label), words);
  return [element, () => words.replaceChildren(value())];
}

function long([element, show]) {
  element.classList.add("mgpu-long");
  return [element, show];
}

function group(title, controls) {
  const inside = controls.map(([element]) => element);
  return together(html("fieldset", { class: "mgpu-group" }, html("legend", {}, title), ...inside), controls);
}

function plannerControls(model, data, at, search) {
  const slide = (key, label, describe = whole) => slider(model, key, label, data.choices[key], describe),
    choice = (key, label, names) => menu(parsed(model), key, label, names),
    pick = (key, label, names) => menu(model, key, label, named(names)),
    run = () => runOf(at()),
    dataParallel = () => (run().data * at().tensor * at().pipeline === at().n_gpus ? whole(run().data) : "–");
  const job = group("The model and the job", [
    modelMenu(model, at),
    slide("layers", "Layers"),
    slide("width", "Width"),
    slide("heads", "Heads"),
    following("Parameters", () => short(parameters(run().sizes))),
    slide("seq_len", "Sequence length"),
    slide("batch_tokens", "Batch (tokens)", short),
    slide("tokens", "Training (tokens)", short),
  ]);
  const machines = group("The machines", [
    pick("gpu", "GPU", Object.keys(data.nodes)),
    pick("network", "Between nodes", data.choices.network),
    long(slide("n_gpus", "Number of GPUs")),
  ]);
  const split = group("The split", [
    slide("tensor", "Tensor parallel"),
    slide("pipeline", "Pipeline stages"),
    following("Data parallel", dataParallel),
    slide("micro_batch", "Micro-batch"),
    choice("zero", "ZeRO stage", ZERO_STAGES),
    choice("recompute", "Activations", { false: "keep", true: "recompute" }),
    button("Find me the best split", search),
  ]);
  return [job, machines, split];
}

// Looks through all splits of the run, sets the best one, and keeps what it found as long as nothing is changed.
function searcher(model, data, at, heard) {
  let found;
  const state = () => JSON.stringify(at());
  const search = () => {
    const result = bestSplit(data, at());
    if (result.best) SPLIT.forEach((name) => model.set(name, result.best[name]));
    model.save_changes();
    found = { result, state: state() };
    heard(); // also where all values stay as they were
  };
  return { search, words: () => (found?.state === state() ? searchWords(found.result) : "") };
}

export function render({ model, el }) {
  const data = model.get("data"),
    prefix = `mgpu-${Math.random().toString(36).slice(2)}`,
    at = () => valuesOf(model, KEYS);
  let update;
  const listened = {
    on: (name, listener) => {
      update = listener; // the same for all values
      model.on(name, listener);
    },
    off: (name, listener) => model.off(name, listener),
  };
  const { search, words } = searcher(model, data, at, () => update()),
    below = [facts(data, at), tables(prefix, data, at)],
    controls = plannerControls(model, data, at, search),
    shown = [controls[0][0], () => [controls[0], ...below].forEach(([, show]) => show())];
  const leave = figure({
    model: listened,
    el,
    caption: model.get("caption"),
    below: below.map(([element]) => element),
    keys: KEYS,
    controls: [shown, ...controls.slice(1)],
    sentence: () => words() + plannerSentence(data, at()),
    draw: (picture, width) => drawPlanner(picture, width, prefix, data, at()),
  });
  el.firstChild.classList.add("mgpu-planner");
  return leave;
}
