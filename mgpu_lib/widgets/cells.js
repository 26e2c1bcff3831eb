// The recorded runs of the explorers, and what is said about them. recorded.py packs them.

import { sum } from "./figure.js";
import { duration } from "./time.js";

export const BATCH_NORM = " with batch norm";

export const many = (n, noun) => `${n.toLocaleString("en-US")} ${noun}${n === 1 ? "" : "s"}`;

// An accuracy in `unit` times 0.01 % as percent with one decimal, halves upwards.
export const percents = (accuracy, unit = 1) => (Math.floor((2 * accuracy * unit + 10) / 20) / 10).toFixed(1) + "%";

// Without or with batch norm, where only one was recorded.
export function netName({ nets }, { network, batch_norm }) {
  const names = [network, network + BATCH_NORM];
  return [names[+batch_norm], ...names].find((name) => name in nets) ?? Object.keys(nets)[0];
}
export const netOf = (data, at) => data.nets[netName(data, at)];
export const ratesOf = (net, batch) => net.rates[net.batch_sizes.indexOf(batch)];

// The nearest of `known` by ratio.
export const nearestRatio = (value, known) =>
  known.reduce((a, b) => (Math.abs(Math.log(b / value)) < Math.abs(Math.log(a / value)) ? b : a));

export const perEpoch = (net, batch) => Math.ceil(net.images / batch);
export const endOf = (net, batch, budget) =>
  budget === "steps" ? net.budgets.steps : net.budgets.epochs * perEpoch(net, batch);

// The seeds' runs: [{accuracy (0.01 %), loss (thousandths), ended (the step at which it diverged, or 0)}].
export function runsOf(net, batch, lr) {
  const row = net.batch_sizes.indexOf(batch);
  return net.runs[row][net.rates[row].indexOf(lr)].map((run) => {
    const [accuracy, loss, ended] = run.split("|");
    const numbers = (words) => (words ? words.split(" ").map(Number) : []);
    return { accuracy: numbers(accuracy), loss: numbers(loss), ended: +ended };
  });
}

// {end (steps), finals (accuracies of the seeds that did not diverge, ascending), diverged (steps), seeds}.
export function cellOf(net, batch, lr, budget) {
  const runs = runsOf(net, batch, lr),
    end = endOf(net, batch, budget),
    at = net.marks[net.batch_sizes.indexOf(batch)].indexOf(end);
  const out = ({ ended }) => ended && ended <= end;
  return {
    end,
    seeds: runs.length,
    finals: runs
      .filter((run) => !out(run))
      .map(({ accuracy }) => accuracy[at])
      .sort((a, b) => a - b),
    diverged: runs.filter(out).map(({ ended }) => ended),
  };
}
export const rounded = ({ finals }, digit) =>
  Math.floor((2 * sum(finals) + digit * finals.length) / (2 * digit * finals.length));

// [batch size, learning rate] of the highest mean accuracy among cells of which no seed diverged.
export function bestOf(net, budget, batch) {
  let best,
    most = -1;
  for (const size of batch === undefined ? net.batch_sizes : [batch])
    for (const lr of ratesOf(net, size)) {
      const { finals, diverged, seeds } = cellOf(net, size, lr, budget);
      if (!diverged.length && sum(finals) / seeds > most) [best, most] = [[size, lr], sum(finals) / seeds];
    }
  return best;
}

export const timesOf = (data, net, at, batch) =>
  net.times[net.batch_sizes.indexOf(batch)].map((row) => row[data.counts.indexOf(at.num_gpus)]);

export function amount(net, { budget, batch_size }, end) {
  if (budget === "epochs") return `${many(net.budgets.epochs, "epoch")} (${many(end, "step")})`;
  return `${many(end, "step")} (${many(end * batch_size, "image")})`;
}

function result(net, at, { end, finals, diverged, seeds }) {
  const within = `within ${many(Math.max(...diverged), "step")}`;
  if (!finals.length) return `diverged ${within} (${seeds > 1 ? `all ${seeds} seeds` : "one seed"}).`;
  const span = `${percents(finals[0])} to ${percents(finals.at(-1))} over ${finals.length} seeds`;
  const guessed = finals.at(-1) < 1200 ? " (no better than guessing)" : "";
  const words =
    `accuracy ${percents(rounded({ finals }, 10), 10)}${guessed} after ${amount(net, at, end)}, ` +
    `${finals.length > 1 ? span : "one seed"}.`;
  return diverged.length ? `${words} ${diverged.length} of ${seeds} seeds diverged, ${within}.` : words;
}

// How many times as long a run takes as one of another batch size; "" where they differ by less than 5 %.
function pace(data, net, at, batch) {
  const [own, other] = [at.batch_size, batch].map((size) => {
    const [step, epoch] = timesOf(data, net, at, size);
    return net.budgets[at.budget] * (at.budget === "epochs" ? epoch : step);
  });
  if (20 * Math.abs(own - other) < own) return "";
  const less = Math.min(own, other),
    tenths = Math.floor((20 * Math.max(own, other) + less) / (2 * less)),
    times = tenths < 100 ? (tenths / 10).toFixed(1) : Math.floor((tenths + 5) / 10).toLocaleString("en-US");
  return `, and ${times} times as ${own > other ? "slow" : "fast"}`;
}

function comparison(data, net, at, cell) {
  const best = bestOf(net, at.budget);
  if (!best) return "";
  if (cell.diverged.length) {
    const sound = ratesOf(net, at.batch_size).filter(
      (lr) => !cellOf(net, at.batch_size, lr, at.budget).diverged.length,
    );
    return sound.length ? ` At this batch size ${Math.max(...sound)} is the largest rate at which none did.` : "";
  }
  if (best[0] === at.batch_size && best[1] === at.lr) return " No cell of this map is better.";
  const other = cellOf(net, ...best, at.budget),
    name = `the best cell (batch ${best[0]}, rate ${best[1]})`,
    slower = pace(data, net, at, best[0]);
  if (cell.finals.at(-1) >= other.finals[0]) return ` As good as ${name} within the spread of the seeds${slower}.`;
  const tenths = rounded(other, 10) - rounded(cell, 10);
  return ` That is ${(tenths / 10).toFixed(1)} points below ${name}${slower}.`;
}

export const gpuName = ({ gpu }, { num_gpus: k }) => (k === 1 ? `one ${gpu}` : `${k} ${gpu}s`);

function timeWords(data, net, at) {
  const { num_gpus: k, batch_size } = at,
    [, epoch] = timesOf(data, net, at, batch_size);
  let where = gpuName(data, at);
  if (k > batch_size) where += `, ${k - batch_size} of them without an image`;
  else if (k > 1) where += ` with ${many(Math.floor(batch_size / k), "image")} each`;
  return ` An epoch takes ${duration(epoch)} on ${where} (modelled).`;
}

export function explorerSentence(data, at) {
  const net = netOf(data, at),
    cell = cellOf(net, at.batch_size, at.lr, at.budget),
    start = `${netName(data, at)} at batch ${at.batch_size}, learning rate ${at.lr}: `;
  return start + result(net, at, cell) + (data.map ? comparison(data, net, at, cell) : "") + timeWords(data, net, at);
}
