// What a timeline's figure has on display and what is chosen in it, and how both change.

import { busyTimes, nearestItem, unpack } from "./events.js";
import { TICKS } from "./time.js";

export const clamp = (value, most) => Math.min(Math.max(value, 0), most);

// The window, in ticks: the model's values as numbers that fit the timeline, and a way to set them.
function windowOf(model, whole) {
  const span = (zoom = model.get("zoom")) => Math.ceil(whole / 2 ** zoom);
  const from = () => clamp(Math.round(model.get("start") * TICKS.s), whole - span());
  return {
    span,
    from,
    to: () => from() + span(),
    level: () => model.get("zoom"),
    startAt: (tick, zoom = model.get("zoom")) => clamp(Math.round(tick), whole - span(zoom)) / TICKS.s,
    show(values) {
      for (const [key, value] of Object.entries(values)) model.set(key, value);
      model.save_changes();
    },
  };
}

// Everything that the figure's controls ask and do.
export function viewOf(model) {
  const data = model.get("data"),
    { whole, levels } = data,
    { lanes, items } = unpack(data),
    home = lanes.find((lane) => lane.gpu !== null) ?? lanes[0],
    frame = windowOf(model, whole),
    { span, from, to, startAt, show } = frame;
  const chosen = () => items[model.get("event")];
  const lane = () => chosen()?.lane ?? home;
  // `still` is the moment that keeps its place in the picture; if not given, the chosen bar or the middle does.
  const zoomTo = (wanted, still) => {
    const zoom = clamp(wanted, levels);
    if (zoom === model.get("zoom")) return;
    const item = chosen(),
      seen = item && item.end > from() && item.start < to();
    still ??= seen ? (item.start + item.end) / 2 : from() + span() / 2;
    const part = (still - from()) / span();
    show({ zoom, start: startAt(still - part * span(zoom), zoom) });
  };
  const pick = (item) => {
    if (!item) return;
    const visible = item.start >= from() && item.end <= to(),
      start = visible ? {} : { start: startAt((item.start + item.end - span()) / 2) };
    show({ event: item.id, ...start });
  };
  // To the next bar of the row, or to the nearest one of the row above or below.
  const move = (key) => {
    const now = chosen(),
      row = lane();
    if (!now) return pick(nearestItem(row.items, from()));
    if (key === "ArrowLeft" || key === "ArrowRight") {
      return pick(row.items[row.items.indexOf(now) + (key === "ArrowLeft" ? -1 : 1)]);
    }
    const next = lanes[row.row + (key === "ArrowUp" ? -1 : 1)];
    pick(next && nearestItem(next.items, now.start));
  };
  return { data, whole, levels, lanes, items, busy: busyTimes(lanes), ...frame, chosen, lane, zoomTo, pick, move };
}
