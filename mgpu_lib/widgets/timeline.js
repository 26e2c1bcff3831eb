// The timeline viewer's controls: zooming, moving, and choosing events, with keys and with the pointer.

function render({ model, el }) {
  const data = model.get("data"),
    { whole, levels } = data,
    { lanes, items } = unpack(data),
    busy = busyTimes(lanes),
    home = lanes.findIndex((lane) => lane.gpu !== null);
  let drawn, // of the picture as it is now: its scale and its rows
    layer,
    hovered;
  const clamp = (value, most) => Math.min(Math.max(value, 0), most);
  const span = (zoom = model.get("zoom")) => Math.ceil(whole / 2 ** zoom);
  const from = () => clamp(Math.round(model.get("start") * TICKS.s), whole - span());
  const to = () => from() + span();
  const chosen = () => items[model.get("event")];
  const lane = () => chosen()?.lane ?? lanes[Math.max(home, 0)];

  const show = (values) => {
    for (const [key, value] of Object.entries(values)) model.set(key, value);
    model.save_changes();
  };
  const startAt = (tick, zoom = model.get("zoom")) => clamp(Math.round(tick), whole - span(zoom)) / TICKS.s;
  // `still` is the moment that keeps its place in the picture.
  const zoomTo = (level, still) => {
    const zoom = clamp(level, levels);
    if (zoom === model.get("zoom")) return;
    const item = chosen(),
      seen = item && item.end > from() && item.start < to();
    still ??= seen ? (item.start + item.end) / 2 : from() + span() / 2;
    const part = (still - from()) / span();
    show({ zoom, start: startAt(still - part * span(zoom), zoom) });
  };
  const choice = (item) => {
    if (!item) return;
    const visible = item.start >= from() && item.end <= to(),
      start = visible ? {} : { start: startAt((item.start + item.end - span()) / 2) };
    show({ event: item.id, ...start });
  };
  const move = (key) => {
    const now = chosen(),
      row = lane();
    if (!now) return choice(nearest(row.items, from()));
    if (key === "ArrowLeft" || key === "ArrowRight") {
      return choice(row.items[row.items.indexOf(now) + (key === "ArrowLeft" ? -1 : 1)]);
    }
    const next = lanes[row.row + (key === "ArrowUp" ? -1 : 1)];
    choice(next && nearest(next.items, now.start));
  };
  const zoomKeys = { "+": 1, "=": 1, "-": -1 };
  const onKeys = (input, keys) =>
    input.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const action = event.key in zoomKeys ? () => zoomTo(model.get("zoom") + zoomKeys[event.key]) : keys(event.key);
      if (!action) return;
      event.preventDefault();
      action();
    });

  const zooms = Array.from({ length: levels + 1 }, (_, level) => level);
  // The slider keeps the middle, or the chosen bar, where it is.
  const zooming = { get: (key) => model.get(key), set: (_, level) => zoomTo(level), save_changes() {} };
  const [zoom, showZoom] = slider(
    zooming,
    "zoom",
    "Zoom",
    zooms,
    (level) => `${2 ** level}×, ${duration(span(level))}`,
  );
  onKeys(zoom.querySelector("input"), () => undefined);

  const begin = html("input", { type: "range", min: 0, step: 1, ...KEYS_ARE_MINE }),
    beginning = html("output");
  const startLabel = html("label", { class: "mgpu-slider" }, html("span", {}, "Window starts at"), begin, beginning);
  begin.addEventListener("input", () => show({ start: startAt(+begin.value) }));
  const by = { ArrowLeft: -1 / 8, ArrowDown: -1 / 8, ArrowRight: 1 / 8, ArrowUp: 1 / 8, PageDown: -1, PageUp: 1 };
  onKeys(begin, (key) => by[key] && (() => show({ start: startAt(from() + by[key] * span()) })));
  const showBegin = () => {
    begin.max = whole - span();
    begin.value = from();
    beginning.textContent = duration(from());
    begin.setAttribute("aria-valuetext", `${duration(from())} to ${duration(to())}`);
  };

  const press = (label, name, act, idle) => {
    const element = html("button", { type: "button", "aria-label": name, ...KEYS_ARE_MINE }, label);
    element.addEventListener("click", () => idle() || act());
    return [element, () => element.setAttribute("aria-disabled", idle())];
  };
  const level = () => model.get("zoom");
  const buttons = [
    press(
      "− Wider",
      "Zoom out: a wider window",
      () => zoomTo(level() - 1),
      () => level() === 0,
    ),
    press(
      "+ Closer",
      "Zoom in: a closer look",
      () => zoomTo(level() + 1),
      () => level() === levels,
    ),
    press(
      "Show all",
      "Show all",
      () => show({ zoom: 0, start: 0 }),
      () => level() === 0,
    ),
  ];

  const picked = html("input", { type: "range", min: 0, step: 1, ...KEYS_ARE_MINE }),
    words = html("span", { class: "mgpu-words", "aria-hidden": "true" });
  const eventLabel = html("label", { class: "mgpu-event" }, html("span", {}, "Event"), picked, words);
  const hint = "Point at a bar, or choose one here: ← → along its row, ↑ ↓ to another row, + − zoom, Esc for none.";
  picked.addEventListener("input", () => choice(lane().items[+picked.value]));
  onKeys(picked, (key) => {
    if (["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"].includes(key)) return () => move(key);
    return key === "Escape" && chosen() ? () => show({ event: -1 }) : undefined;
  });
  const say = () => {
    const item = hovered ?? chosen();
    words.textContent = item ? `${describe(item)}.` : hint;
  };
  const showPicked = () => {
    const item = chosen();
    picked.max = lane().items.length - 1;
    picked.value = item ? lane().items.indexOf(item) : 0;
    picked.setAttribute("aria-valuetext", item ? describe(item) : "none chosen");
    say();
  };

  // Where the pointer is: its moment, and the bar under it or within 3 pixels.
  const under = (event, picture) => {
    const box = picture.getBoundingClientRect(),
      at = event.clientX - box.left,
      y = event.clientY - box.top;
    const perPixel = span() / (drawn.right - drawn.left),
      tick = from() + (at - drawn.left) * perPixel;
    const row = drawn.tops.findIndex((top) => y >= top && y < top + PITCH);
    const inside = row >= 0 && at >= drawn.left - 3 && at <= drawn.right + 3;
    return { tick, perPixel, item: inside ? nearest(lanes[row].items, tick, 3 * perPixel) : undefined };
  };
  const hover = (item) => {
    if (item === hovered) return;
    hovered = item;
    mark(layer, hovered ?? chosen(), drawn, from(), to());
    say();
  };
  const listen = (picture) => {
    let drag,
      turned = 0;
    picture.classList.add("mgpu-time");
    picture.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      drag = { x: event.clientX, from: from(), moved: false };
      picture.setPointerCapture(event.pointerId);
    });
    picture.addEventListener("pointermove", (event) => {
      const { item, perPixel } = under(event, picture);
      if (!drag) return hover(item);
      drag.moved ||= Math.abs(event.clientX - drag.x) > 4;
      if (drag.moved) show({ start: startAt(drag.from - (event.clientX - drag.x) * perPixel) });
    });
    picture.addEventListener("pointerup", (event) => {
      if (drag && !drag.moved) {
        const { item } = under(event, picture);
        if (item) choice(item);
        picked.focus({ preventScroll: true });
      }
      drag = undefined;
    });
    picture.addEventListener("pointercancel", () => (drag = undefined));
    picture.addEventListener("pointerleave", () => hover(undefined));
    picture.addEventListener(
      "wheel",
      (event) => {
        if (!event.ctrlKey) return; // the page scrolls
        event.preventDefault();
        turned += event.deltaY;
        if (Math.abs(turned) < 50) return; // a trackpad sends many small turns
        zoomTo(level() - Math.sign(turned), clamp(under(event, picture).tick, whole));
        turned = 0;
      },
      { passive: false },
    );
  };

  return figure({
    model,
    el,
    caption: model.get("caption"),
    keys: ["start", "zoom", "event"],
    controls: [
      [zoom, showZoom],
      [startLabel, showBegin],
      [
        html("span", { class: "mgpu-buttons" }, ...buttons.map(([element]) => element)),
        () => {
          buttons.forEach(([, show]) => show());
          showPicked();
        },
      ],
    ],
    below: [legend(Object.values(items)), eventLabel],
    sentence: () => timelineSentence(data, busy, from(), to()),
    draw(picture, width) {
      if (!drawn) listen(picture);
      drawn = drawTimeline(picture, width, { data, lanes, from: from(), to: to() });
      layer = svg("g");
      picture.append(layer);
      mark(layer, hovered ?? chosen(), drawn, from(), to());
      return drawn.height;
    },
  });
}
