// Plans of large training runs: mgpu_lib/planning.py, function by function, so that a page can try all splits at once.
// What each function assumes, and why, is said there; a test holds the two together. Nothing here draws.

import { sum } from "./figure.js";

export const PER_NODE = 8;
const LARGEST = 16_384;
const PARTS_OF_MEMORY = ["parameters", "gradients", "optimizer", "activations", "buffers"];
const PARTS_OF_STEP = ["compute", "recomputation", "tensor parallel", "data parallel", "bubble", "update"];
export const ROOM = 0.7;
const MICROSECOND = 1e-6;
const PICOSECOND = 1e-12;

// The runs

const byPart = (names, values) => Object.fromEntries(names.map((name, i) => [name, values[i]]));
const largest = (items, measure) => items.reduce((best, item) => (measure(item) > measure(best) ? item : best));

// A TrainingRun; beside its fields the number of GPUs with the same part of the model, and their micro-batches.
function trainingRun(fields) {
  const data = Math.floor(fields.n_gpus / (fields.tensor * fields.pipeline));
  return { ...fields, data, micro_batches: Math.floor(fields.batch / (data * fields.micro_batch)) };
}

export function runOf({ layers, width, heads, batch_tokens, seq_len, ...split }) {
  const inner = Math.floor((width * 7) / 2),
    sizes = { vocab: 128_256, width, layers, heads, kv_heads: Math.min(8, heads), inner };
  return trainingRun({ sizes, batch: Math.floor(batch_tokens / seq_len), seq_len, ...split });
}

// What plan_rates.constants returns, from a figure's data. There the collectives are lists without names, in
// microseconds and picoseconds per byte.
export function constants(data, gpu, network) {
  const [near, far, ...groups] = data.collectives[data.nodes[gpu]][network],
    line = ([begin, each]) => [begin * MICROSECOND, each * PICOSECOND],
    found = { send: { near: line(near), far: line(far) } };
  data.groups.forEach((name, i) => {
    found[name] = { gather: line(groups[2 * i]), reduce: line(groups[2 * i + 1]) };
  });
  return { ...data.kernels[gpu], collectives: found };
}

export function plan(run, rates) {
  const memory = held(run),
    seconds = timeOfStep(run, rates),
    flops = modelFlops(run),
    total = sum(Object.values(memory)),
    step = sum(Object.values(seconds));
  return {
    run,
    memory,
    capacity: rates.memory,
    seconds,
    flops,
    total,
    fits: total <= ROOM * rates.memory,
    step,
    tokensPerSecond: (run.batch * run.seq_len) / step / run.n_gpus,
    mfu: flops / step / (run.n_gpus * rates.peak),
  };
}

// The fastest plan that fits (null if none does), how many splits there can be, and how many of them fit.
export function bestPlan(run, rates, choices) {
  let best = null,
    tried = 0,
    fitting = 0;
  for (const other of splits(run, choices)) {
    const made = plan(other, rates);
    tried++;
    if (!made.fits) continue;
    fitting++;
    if (best === null || made.step < best.step) best = made;
  }
  return { best, tried, fitting };
}

export function splits(run, choices) {
  let values = [{}];
  for (const name of ["tensor", "pipeline", "zero", "micro_batch", "recompute"]) {
    values = values.flatMap((others) => choices[name].map((value) => ({ ...others, [name]: value })));
  }
  return values.map((split) => trainingRun({ ...run, ...split })).filter((made) => fault(made) === null);
}

// In the words of planning.fault.
export function fault(run) {
  const { tensor, pipeline, data, sizes } = run;
  if (tensor * pipeline * data !== run.n_gpus || data === 0) {
    return `tensor=${tensor} × pipeline=${pipeline} does not divide n_gpus=${run.n_gpus}`;
  }
  if (!(run.n_gpus <= LARGEST && (run.n_gpus % PER_NODE === 0 || PER_NODE % run.n_gpus === 0))) {
    return `n_gpus=${run.n_gpus}: 1, 2, 4, or whole machines of ${PER_NODE}, and at most ${LARGEST}`;
  }
  if (!(tensor % PER_NODE === 0 || PER_NODE % tensor === 0)) {
    return `tensor=${tensor}: 1, 2, 4, or whole machines of ${PER_NODE}`;
  }
  if (sizes.heads % tensor || sizes.width % sizes.heads) {
    return `tensor=${tensor}: ${sizes.heads} heads can't be shared by so many, or the width by the heads`;
  }
  if (sizes.layers % pipeline) return `pipeline=${pipeline}: ${sizes.layers} layers don't make so many equal stages`;
  if (run.seq_len % tensor) return `tensor=${tensor}: ${run.seq_len} tokens can't be shared by so many`;
  if (run.batch % (data * run.micro_batch)) {
    return `batch=${run.batch}: not a multiple of ${data} × ${run.micro_batch}, data parallel × micro_batch`;
  }
  if (run.zero > 1 && pipeline > 1) {
    return `zero=${run.zero} with pipeline=${pipeline}: each micro-batch would send all gradients; use 0 or 1`;
  }
  return null;
}

// The model

function share(run) {
  const { sizes, tensor } = run,
    headWidth = Math.floor(sizes.width / sizes.heads),
    mine = {
      tokens: run.micro_batch * run.seq_len,
      width: sizes.width,
      part: sizes.width / tensor,
      heads: sizes.width / tensor,
      kv: Math.ceil(sizes.kv_heads / tensor) * headWidth,
      inner: sizes.inner / tensor,
      vocab: Math.ceil(sizes.vocab / tensor),
      layers: Math.floor(sizes.layers / run.pipeline),
    };
  const products = 2 * mine.heads + 2 * mine.kv + 3 * mine.inner;
  return { ...mine, layer: mine.width * products + 2 * mine.width, table: mine.width * mine.vocab };
}

export function parameters(sizes) {
  const kv = sizes.kv_heads * Math.floor(sizes.width / sizes.heads),
    layer = sizes.width * (2 * sizes.width + 2 * kv + 3 * sizes.inner + 2);
  return sizes.layers * layer + sizes.width * (2 * sizes.vocab + 1);
}

function modelFlops(run) {
  const { sizes } = run,
    tokens = run.batch * run.seq_len,
    products = parameters(sizes) - sizes.width * (sizes.vocab + 2 * sizes.layers + 1),
    attention = 2 * sizes.layers * run.seq_len * sizes.width;
  return 3 * tokens * (2 * products + attention) + tokens * sizes.layers * run.seq_len * sizes.width;
}

// Memory: bytes

function held(run) {
  const mine = share(run),
    stages = [...new Set([0, run.pipeline - 1])].map((stage) => ofStage(run, mine, stage));
  return largest(stages, (kinds) => sum(Object.values(kinds)));
}

function ofStage(run, mine, stage) {
  const first = stage === 0,
    last = stage === run.pipeline - 1,
    n = mine.layers * mine.layer + (first + last) * mine.table;
  const states =
    run.zero < 2
      ? [2 * n, 4 * n, (12 * n) / (run.zero ? run.data : 1)]
      : [(4 * n) / run.data, (4 * n) / run.data, (8 * n) / run.data];
  const kept = Math.min(run.pipeline - stage, run.micro_batches) * mine.layers * ofLayer(run, mine),
    [beside, buffers] = largest(moments(run, mine, last), sum);
  return byPart(PARTS_OF_MEMORY, [...states, kept + beside, buffers].map(Math.trunc));
}

function ofLayer(run, mine) {
  return 2 * mine.tokens * (run.recompute ? mine.part : keptNumbers(mine));
}

function keptNumbers(mine) {
  return 4 * mine.part + 3 * mine.heads + 3 * mine.kv + 4 * mine.inner;
}

function moments(run, mine, last) {
  const again = run.recompute ? keptNumbers(mine) : 0;
  const backward = [2 * mine.tokens * (5 * mine.inner + again), wholeBytes(run, mine, 3, 2 + run.recompute)],
    loss = [6 * mine.tokens * mine.vocab, wholeBytes(run, mine, 2, 1)];
  return last ? [backward, loss] : [backward];
}

function wholeBytes(run, mine, tables, layers) {
  if (run.zero < 2) return 0;
  return 2 * (tables * mine.table + (layers + (run.zero === 2 ? mine.layers : 0)) * mine.layer);
}

// Time: seconds

function timeOfStep(run, rates) {
  const mine = share(run),
    forward = layerForward(run, mine, rates),
    backward = layerBackward(run, mine, rates),
    again = run.recompute ? forward : [0, 0],
    work = [],
    talk = [];
  for (let stage = 0; stage < run.pipeline; stage++) {
    const [computing, talking] = bothEnds(run, mine, rates, stage === 0, stage === run.pipeline - 1);
    work.push(mine.layers * (forward[0] + backward[0]) + computing);
    talk.push(mine.layers * (forward[1] + backward[1]) + talking);
  }
  const stages = work.map((seconds, i) => seconds + talk[i] + mine.layers * sum(again)),
    whole = pipelineTime(run, mine, rates, stages),
    mean = [work, talk].map((part) => (run.micro_batches * sum(part)) / run.pipeline),
    recomputed = run.micro_batches * mine.layers * again[0],
    talked = mean[1] + run.micro_batches * mine.layers * again[1],
    exposed = run.zero > 1 ? shardedTime(run, mine, rates, forward, backward, again) : unshardedTime(run, mine, rates),
    bubble = run.pipeline > 1 ? whole - mean[0] - talked - recomputed : 0;
  return byPart(PARTS_OF_STEP, [mean[0], recomputed, talked, exposed, bubble, updateTime(run, mine, rates)]);
}

function pipelineTime(run, mine, rates, stages) {
  const near = run.data * run.tensor < PER_NODE,
    [begin, each] = rates.collectives.send[near ? "near" : "far"],
    message = begin + each * 2 * mine.tokens * mine.part,
    sent = 2 * (run.pipeline - 1) * message;
  return sum(stages) + (run.micro_batches - 1) * Math.max(...stages) + sent;
}

function productTime(rates, rows, inner, columns) {
  const results = rows * columns;
  return rates["fixed product"] + ((2 * results * inner) / rates.rate) * (1 + rates.half / results);
}

function memoryTime(rates, nbytes, kernels, kind = "pointwise") {
  return kernels * rates.fixed + nbytes / rates[kind];
}

function collectiveTime(rates, run, kind, nbytes, ranks, stride) {
  const here = Math.min(ranks, Math.max(1, Math.floor(PER_NODE / stride)));
  if (ranks === 1) return 0;
  const [begin, each] = rates.collectives[`${here} × ${Math.floor(ranks / here)}`][kind];
  return begin + each * nbytes;
}

function layerProducts(mine) {
  return [
    [mine.width, mine.heads + 2 * mine.kv],
    [mine.heads, mine.width],
    [mine.width, 2 * mine.inner],
    [mine.inner, mine.width],
  ];
}

function attentionTime(run, mine, rates, kind) {
  const flops = 2 * mine.tokens * run.seq_len * mine.heads * (kind === "attention backward" ? 2.5 : 1);
  return rates["fixed product"] + flops / rates[kind];
}

function layerForward(run, mine, rates) {
  const t = 2 * mine.tokens,
    numbers = 10 * (mine.heads + mine.kv) + 5 * mine.inner + 6 * mine.part;
  const computing =
    sum(layerProducts(mine).map(([inner, columns]) => productTime(rates, mine.tokens, inner, columns))) +
    attentionTime(run, mine, rates, "attention") +
    memoryTime(rates, t * numbers, 25) +
    memoryTime(rates, t * 4 * mine.part, 2, "norm");
  return [computing, 4 * collectiveTime(rates, run, "gather", t * mine.width, run.tensor, 1)];
}

function layerBackward(run, mine, rates) {
  const t = 2 * mine.tokens,
    sizes = layerProducts(mine),
    toInput = sizes.map(([inner, columns]) => productTime(rates, mine.tokens, columns, inner)),
    toMatrix = sizes.map(([inner, columns]) => productTime(rates, inner, mine.tokens, columns)),
    numbers = 12 * (mine.heads + mine.kv) + 2 * mine.kv + 13 * mine.inner + 6 * mine.part;
  const computing =
    sum(toInput) +
    sum(toMatrix) +
    attentionTime(run, mine, rates, "attention backward") +
    memoryTime(rates, t * numbers, 17) +
    memoryTime(rates, t * 6 * mine.part, 2, "norm") +
    (run.zero < 2 ? memoryTime(rates, 10 * mine.layer, 6) : 0);
  const gather = collectiveTime(rates, run, "gather", t * mine.width, run.tensor, 1),
    behind = [toInput[0], toMatrix[0], toInput[2], toMatrix[2]];
  return [computing, 2 * gather + sum(behind.map((each) => Math.max(0, gather - each)))];
}

function bothEnds(run, mine, rates, first, last) {
  const t = 2 * mine.tokens,
    gather = collectiveTime(rates, run, "gather", t * mine.width, run.tensor, 1);
  let computing = 0,
    talking = 0;
  if (first) {
    computing += memoryTime(rates, 2 * t * mine.width + 4 * mine.table, 2, "gather");
    talking += 2 * gather;
  }
  if (last) {
    const toInput = productTime(rates, mine.tokens, mine.vocab, mine.width),
      toMatrix = productTime(rates, mine.width, mine.tokens, mine.vocab);
    computing += productTime(rates, mine.tokens, mine.width, mine.vocab) + toInput + toMatrix;
    computing += memoryTime(rates, t * 10 * mine.part, 2, "norm");
    computing += memoryTime(rates, 52 * mine.tokens * mine.vocab, 8);
    talking += gather + Math.max(0, gather - toInput) + Math.max(0, gather - toMatrix);
  }
  if (run.zero < 2) computing += memoryTime(rates, 10 * (first + last) * mine.table, 1);
  return [computing, talking];
}

function fullest(run, mine) {
  return mine.layers * mine.layer + (1 + (run.pipeline === 1)) * mine.table;
}

function unshardedTime(run, mine, rates) {
  const n = fullest(run, mine);
  if (run.zero === 0) return collectiveTime(rates, run, "reduce", 4 * n, run.data, run.tensor);
  return sum([4, 2].map((bytes) => collectiveTime(rates, run, "gather", bytes * n, run.data, run.tensor)));
}

function updateTime(run, mine, rates) {
  const n = fullest(run, mine) / (run.zero ? run.data : 1);
  if (run.zero < 2) {
    return memoryTime(rates, 20 * n + 4 * fullest(run, mine), 5) + memoryTime(rates, 28 * n, 1, "lists");
  }
  return memoryTime(rates, 40 * n, 3, "lists");
}

function shardedTime(run, mine, rates, forward, backward, again) {
  const gather = (n) => collectiveTime(rates, run, "gather", 2 * n, run.data, run.tensor),
    copy = (n) => memoryTime(rates, 4 * n, 1),
    { layer, layers } = mine,
    tables = 2 * mine.table,
    there = sum(forward),
    back = sum(backward) + sum(again),
    times = run.zero === 3 ? run.micro_batches : 1;
  let whole = run.micro_batches * (copy(layer) * layers + copy(tables));
  whole += times * (gather(tables) + copy(tables) + gather(layer) + layers * copy(layer));
  whole += times * (layers - 1) * Math.max(0, gather(layer) - there - copy(layer));
  const behind = gather(layer) * (run.zero === 3 ? 2 : 1);
  if (run.zero === 3) whole += run.micro_batches * layers * copy(layer);
  whole += run.micro_batches * (layers - 1) * Math.max(0, behind - back - copy(layer));
  return whole + run.micro_batches * (gather(layer) + gather(tables));
}
