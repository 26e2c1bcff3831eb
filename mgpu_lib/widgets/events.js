// Events on the modelled clock as bars in rows: the host's threads, then each GPU's streams, copies and collectives.
// Times are whole ticks of 10 ns since the timeline began. timeline.py's `compact` packs what `unpack` reads.

import { list, percent, size } from "./figure.js";
import { duration } from "./time.js";

// {lanes: [{gpu, name, items}], items: by id}. A call of the host that launched an event is an item of its own.
export function unpack({ rows, types, events }) {
  const lanes = rows.map(([gpu, name], row) => ({ gpu, name, row, items: [] })),
    count = events.type.length,
    launches = new Map(),
    items = [];
  let called = 0;
  for (let id = 0; id < count; id++) {
    const [name, kind, phase, nbytes, flops, bound, part] = types[events.type[id]];
    called += events.called[id];
    const launched = called + events.handing[id],
      start = launched + events.waiting[id],
      lane = lanes[events.row[id]];
    const item = { id, name, kind, phase, nbytes, flops, bound, part, lane, called, launched, start };
    item.end = start + events.running[id];
    item.thread = lanes[events.thread[id]];
    if (lane.gpu !== null && launched > called) launches.set(`${events.thread[id]} ${called}`, item);
    lane.items.push((items[id] = item));
  }
  for (const item of launches.values()) {
    const call = { id: count + item.id, part: "host", lane: item.thread, start: item.called, end: item.launched };
    item.thread.items.push((items[call.id] = Object.assign(call, { of: item })));
    item.call = call;
  }
  lanes.forEach((lane) => lane.items.sort((a, b) => a.start - b.start));
  return { lanes, items };
}

// The times in which at least one kernel runs on a GPU, without overlap: {GPU: [[start, end], …]}.
export function busyTimes(lanes) {
  const found = {};
  for (const lane of lanes) {
    if (lane.gpu === null) continue;
    found[lane.gpu] ??= [];
    for (const item of lane.items) if (item.part !== "communication") found[lane.gpu].push([item.start, item.end]);
  }
  for (const [gpu, spans] of Object.entries(found)) {
    const merged = [];
    for (const [start, end] of spans.sort((a, b) => a[0] - b[0])) {
      if (merged.length && start <= merged.at(-1)[1]) merged.at(-1)[1] = Math.max(merged.at(-1)[1], end);
      else merged.push([start, end]);
    }
    found[gpu] = merged;
  }
  return found;
}

const within = (spans, from, to) =>
  spans.reduce((sum, [start, end]) => sum + Math.max(0, Math.min(end, to) - Math.max(start, from)), 0);

export function timelineSentence({ gpu, link, whole }, busy, from, to) {
  const span =
    to - from === whole ? `All ${duration(whole)}` : `${duration(from)} to ${duration(to)} of ${duration(whole)}`;
  const shares = Object.values(busy).map((spans) => percent(within(spans, from, to), to - from)),
    gpus = Object.keys(busy);
  const each = shares.map((share, i) => `${share}${i ? "" : " of this time"} on cuda:${gpus[i]}`);
  const alike = gpus.length > 1 && new Set(shares).size === 1;
  const words = alike ? `${shares[0]} of this time on each of ${gpus.length} GPUs` : list(each) || "on no GPU";
  return `${span}, modelled (${gpu}, ${link}): kernels run ${words}.`;
}

// What one bar is, in words.
export function describe(item) {
  const when = `starts at ${duration(item.start)}, takes ${duration(item.end - item.start)}`;
  if (item.of) return `${item.lane.name} hands ${item.of.name} to cuda:${item.of.lane.gpu}: ${when}`;
  if (item.lane.gpu === null) return `${item.name}, work of ${item.lane.name}: ${when}`;
  const kind = [item.kind, item.phase].filter(Boolean).join(", "),
    parts = [when];
  if (item.nbytes) parts.push(size(item.nbytes));
  if (item.flops) parts.push(flops(item.flops));
  parts.push(`bound by ${{ fixed: "the fixed time of a launch", link: "the link" }[item.bound] ?? item.bound}`);
  const waits = item.start - item.launched;
  const then = waits > 0 ? `it starts ${duration(waits)} later` : "it starts at once",
    launch = `Launched at ${duration(item.launched)} by ${item.thread.name}; ${then}`;
  return `${item.name} (${kind}) on cuda:${item.lane.gpu}, ${item.lane.name}: ${parts.join(", ")}. ${launch}`;
}

function flops(n) {
  const power = Math.max(0, Math.min(5, Math.floor(Math.log10(n) / 3))),
    value = n / 1000 ** power;
  const unit = ["", "k", "M", "G", "T", "P"][power];
  return `${value.toFixed(power === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2)} ${unit}FLOP`;
}

// The first item of a row that is not over at `time`; items of a row do not overlap.
export function firstAfter(items, time) {
  let low = 0,
    high = items.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (items[middle].end > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

// The item of a row nearest to `time`, at most `reach` away.
export function nearestItem(items, time, reach = Infinity) {
  const next = firstAfter(items, time),
    distance = (item) => (item ? Math.max(item.start - time, time - item.end, 0) : Infinity);
  const found = distance(items[next]) <= distance(items[next - 1]) ? items[next] : items[next - 1];
  return distance(found) <= reach ? found : undefined;
}
