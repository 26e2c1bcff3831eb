// The explorers of batch size and learning rate: controls, the map where there is one, curves, and the Train button.

import { BATCH_NORM, explorerSentence, nearestRatio, netName, netOf, ratesOf } from "./cells.js";
import { curveLegend, drawCurves } from "./curves.js";
import { figure, menu, named, slider, translated, valuesOf } from "./figure.js";
import { heatMap } from "./heatmap.js";
import { same, trainButton } from "./trainbutton.js";

const KEYS = ["network", "batch_norm", "budget", "num_gpus", "batch_size", "lr"];

// The values chosen now. They go together: a learning rate that was not recorded for a batch size is the nearest that
// was, as in Python.
function chosen(model, data) {
  const at = valuesOf(model, KEYS),
    net = netOf(data, at);
  if (!net.batch_sizes.includes(at.batch_size)) at.batch_size = nearestRatio(at.batch_size, net.batch_sizes);
  if (!(at.budget in net.budgets)) at.budget = "epochs";
  const rates = ratesOf(net, at.batch_size);
  if (!rates.includes(at.lr)) at.lr = nearestRatio(at.lr, rates);
  return at;
}

// The model, with all values written back that another one has changed.
function keeping(model, state) {
  const set = (key, value) => {
    model.set(key, value);
    for (const [name, now] of Object.entries(state())) model.set(name, now);
  };
  return translated(model, (key) => state()[key], set);
}

// A menu's values are words; these are numbers, and true or false.
const worded = (kept, parse, get = (key) => String(kept.get(key))) =>
  translated(kept, get, (key, value) => kept.set(key, parse(value)));

function explorerMenus(data, kept, state) {
  const networks = [...new Set(Object.keys(data.nets).map((name) => name.replace(BATCH_NORM, "")))],
    budgets = Object.assign({}, ...Object.values(data.nets).map((net) => net.budgets)),
    menus = [];
  if (networks.length > 1) {
    menus.push(menu(kept, "network", "Network", named(networks)));
  }
  if (Object.keys(data.nets).some((name) => name.endsWith(BATCH_NORM))) {
    const shown = () => netName(data, state()).endsWith(BATCH_NORM),
      truth = worded(kept, (word) => word === "true", shown),
      recorded = (word) => state().network + (word === "true" ? BATCH_NORM : "") in data.nets;
    menus.push(menu(truth, "batch_norm", "Batch norm", { false: "without", true: "with" }, recorded));
  }
  if (Object.keys(budgets).length > 1) {
    const names = { epochs: "equal epochs", steps: "equal steps" };
    menus.push(menu(kept, "budget", "Compare at", names, (name) => name in netOf(data, state()).budgets));
  }
  const counts = Object.fromEntries(data.counts.map((k) => [k, k === 1 ? "1 GPU" : `${k} GPUs`]));
  return [...menus, menu(worded(kept, Number), "num_gpus", "Number of GPUs", counts)];
}

export function render({ model, el }) {
  const data = model.get("data"),
    state = () => chosen(model, data),
    kept = keeping(model, state),
    steps = { batch_size: [], lr: [] };
  // A slider whose values change with the other choices.
  const stops = (key, label, values, describe) => {
    const [element, show] = slider(kept, key, label, steps[key], describe);
    const update = () => {
      steps[key].splice(0, Infinity, ...values());
      element.querySelector("input").max = steps[key].length - 1;
      show();
    };
    return [element, update];
  };
  const batch = stops(
    "batch_size",
    "Batch size",
    () => netOf(data, state()).batch_sizes,
    (b) => `${b}`,
  );
  const rate = stops(
    "lr",
    "Learning rate",
    () => ratesOf(netOf(data, state()), state().batch_size),
    (lr) => `${lr}`,
  );
  const [train, showTrain, leaveTrain] = trainButton(model, data);
  const controls = [batch, rate, ...explorerMenus(data, kept, state), [train, showTrain]];
  const pick = (size, lr) => {
    model.set("batch_size", size);
    model.set("lr", lr);
    model.save_changes();
  };
  const map = data.map ? heatMap(data, state, pick) : undefined;
  if (map) controls.push(map);
  const leave = figure({
    model,
    el,
    caption: model.get("caption"),
    keys: [...KEYS, "run"],
    controls,
    below: [curveLegend(Boolean(model.send))],
    sentence: () => explorerSentence(data, state()),
    draw(picture, width) {
      const run = model.get("run");
      return drawCurves(picture, width, data, state(), same(run, state()) ? run : undefined);
    },
  });
  el.firstChild.classList.add("mgpu-explorer");
  if (map) el.querySelector(".mgpu-picture").before(map[0]);
  return () => {
    leaveTrain();
    leave();
  };
}
