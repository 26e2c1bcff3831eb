"""The timeline viewer: what each thread of the host and each GPU did when, to zoom into and to walk through."""

import traitlets

from mgpu_lib.virtual.timeline import COLOURS, Timeline, colour, total, union

from .base import CSS, HERE, InteractiveFigure, module, percent, rect, text
from .splitter import join

TICK = 1e-8  # seconds: 10 ns, the unit of time in the page
MOST = 20_000  # events: a page with more would be slow, and megabytes long
CLOSEST = 1000  # ticks: how short a window may get
STYLE = CSS + (HERE / "timeline.css").read_text(encoding="utf-8")
PARTS = {COLOURS[part]: part for part in ("forward", "backward", "host")} | {COLOURS["copy"]: "communication"}
# As in bars.js: where bars lie in their row, which has a height of 18.
LAYERS = {"forward": 0, "backward": 6, "other": 3, "communication": 3, "host": 3}
FILLS = {part: fill for fill, part in PARTS.items()} | {"other": "#000000"}


class TimelineViewer(InteractiveFigure):
    """A `Timeline`'s events as bars in rows, to zoom into, to move through, and to ask what each of them is.

    `start` (seconds since the timeline began) and `zoom` (n shows a 2ⁿ-th of the timeline) say what is on display;
    `event` points one out: an index into the timeline, or -1. For the host's call that launched event i it is
    len(timeline) + i. Raises TypeError for anything but a Timeline, ValueError for an empty one or one of more than
    20,000 events, TraitError for other bad values. A `start` too late for the window means the last window.
    """

    _esm = module("time.js", "events.js", "bars.js", "timeline.js")
    _css = STYLE
    controls = ("start", "zoom", "event")
    start = traitlets.Float(0.0, min=0.0).tag(sync=True)
    zoom = traitlets.Int(0, min=0).tag(sync=True)
    event = traitlets.Int(-1, min=-1).tag(sync=True)
    caption = traitlets.Unicode(
        "What happened when. Each bar is one kernel, one copy, or one call of the host; a row is a thread of the host, "
        "a stream of a GPU, or copies. Look for gaps in a GPU’s rows, and for what it waits. Drag to move, Ctrl and "
        "the wheel to zoom. All times are modelled."
    ).tag(sync=True)

    def __init__(self, timeline, **values):
        if not isinstance(timeline, Timeline):
            what = type(timeline).__name__
            raise TypeError(f"timeline is a {what}: pass a Timeline, such as machine.timeline or predict(...).timeline")
        if not 0 < len(timeline) <= MOST:
            raise ValueError(f"the timeline has {len(timeline)} events: show 1 to {MOST}; timeline.since(start, end)")
        super().__init__(data=compact(timeline), **values)

    @traitlets.validate(*controls)
    def _there(self, proposal):
        name, value, data = proposal["trait"].name, proposal["value"], self.data
        count = len(data["events"]["type"])
        limits = {"start": data["whole"] * TICK, "zoom": data["levels"], "event": 2 * count - 1}
        if not value <= limits[name]:  # NaN is not
            raise traitlets.TraitError(f"{name}={value!r}: choose {limits[name]} at most")
        return value

    def window(self):
        """What is on display: (from, to), in ticks of 10 ns since the timeline began."""
        span = -(-self.data["whole"] // 2**self.zoom)
        start = min(int(self.start / TICK + 0.5), self.data["whole"] - span)
        return start, start + span

    def utilization(self):
        """{GPU: ticks of the window in which at least one kernel ran on it}."""
        start, end = self.window()
        found = {}
        for (gpu, _), items in self.lanes():
            if gpu is not None:
                found.setdefault(gpu, []).extend(item[:2] for item in items if item[2] != "communication")
        return {
            gpu: total((max(a, start), min(b, end)) for a, b in union(spans) if a < end and b > start)
            for gpu, spans in found.items()
        }

    def lanes(self):
        """The rows, [((GPU or None, name), [(start, end, part), ...]), ...], in ticks, as the page unpacks them."""
        data = self.data
        found, calls, called = [(tuple(row), []) for row in data["rows"]], set(), 0
        for kind, row, thread, since, handing, waiting, running in zip(*data["events"].values()):
            called += since
            start = called + handing + waiting
            found[row][1].append((start, start + running, data["types"][kind][-1]))
            if data["rows"][row][0] is not None and handing > 0 and (thread, called) not in calls:
                calls.add((thread, called))
                found[thread][1].append((called, called + handing, "host"))
        return [(row, sorted(items)) for row, items in found]

    def sentence(self):
        data, (start, end) = self.data, self.window()
        whole = duration(data["whole"])
        span = f"All {whole}" if end - start == data["whole"] else f"{duration(start)} to {duration(end)} of {whole}"
        shares = {gpu: percent(busy, end - start) for gpu, busy in self.utilization().items()}
        each = [f"{share}{'' if i else ' of this time'} on cuda:{gpu}" for i, (gpu, share) in enumerate(shares.items())]
        words = join(each) if each else "on no GPU"
        if len(shares) > 1 and len(set(shares.values())) == 1:
            words = f"{next(iter(shares.values()))} of this time on each of {len(shares)} GPUs"
        return f"{span}, modelled ({data['gpu']}, {data['link']}): kernels run {words}."

    def picture(self):
        (start, end), elements, y = self.window(), [], 34
        scale = 230 / (end - start)
        for (gpu, name), items in self.lanes():
            label = name if gpu is None else f"cuda:{gpu} {name}"
            elements += [text(4, y + 13, label), rect(126, y, 230, 16, "#f0f1f3")]
            elements += bars([item for item in items if item[0] < end and item[1] > start], start, end, scale, y)
            y += 20
        title = f"{duration(start)} to {duration(end)} (modelled, {self.data['gpu']})"
        return [text(4, 22, title, weight=600), *elements], y + 6


def bars(items, start, end, scale, y):
    """One path for each part of a row, in the picture's space; what is less than a third of a unit apart is joined."""
    spans = {}
    for begin, until, part in items:
        left, right = ((min(max(tick, start), end) - start) * scale for tick in (begin, until))
        row = spans.setdefault(part, [])
        if row and left - row[-1][1] < 0.34:
            row[-1][1] = max(right, row[-1][1])
        else:
            row.append([left, right])
    for part, row in spans.items():
        top = y + LAYERS[part] - 1
        path = "".join(f"M{126 + a:.1f},{top + 1}h{max(b - a, 0.3):.1f}v10H{126 + a:.1f}z" for a, b in row)
        yield f'<path d="{path}" fill="{FILLS[part]}"/>'


def compact(timeline):
    """A timeline as whole numbers in columns, for JSON.

    "rows" are [GPU or None, name]; "types" are [name, kind, phase, bytes, FLOPs, bound by, part], where part decides
    the colour. An event has a type, a row, its thread's row, and times in ticks of 10 ns: `called` (since the event
    before it was called; the first: since the timeline began), `handing` (from then until launched), `waiting` (until
    it starts), `running` (until it ends).
    """
    rows = sorted({(-1 if es[0].gpu is None else es[0].gpu, es[0].row) for es in timeline.rows().values()}, key=place)
    index = {row: n for n, row in enumerate(rows)}
    types, last, begin = {}, 0, timeline.start
    columns = {name: [] for name in ("type", "row", "thread", "called", "handing", "waiting", "running")}
    for e in timeline:
        part = PARTS.get(colour(e), "other")
        kind = types.setdefault((e.name, e.kind, e.phase, e.nbytes, e.flops, e.bound, part), len(types))
        row = index[-1 if e.gpu is None else e.gpu, e.row]
        called, launched, start, end = (round((t - begin) / TICK) for t in (e.called, e.launched, e.start, e.end))
        times = (called - last, launched - called, start - launched, end - start)
        for column, value in zip(columns.values(), (kind, row, index.get((-1, e.thread), row), *times), strict=True):
            column.append(value)
        last = called
    whole = max(round((timeline.end - begin) / TICK), 1)
    return {
        "gpu": timeline.spec.key,
        "link": timeline.link.name,
        "whole": whole,
        "levels": max((whole // CLOSEST).bit_length() - 1, 0),
        "rows": [[None if gpu < 0 else gpu, name] for gpu, name in rows],
        "types": [list(kind) for kind in types],
        "events": columns,
    }


def place(row):
    """Where a row (GPU, name) stands: the host first; of a GPU the streams, then copies, then collectives."""
    gpu, name = row
    return gpu, name == "collective", name.startswith("copy"), name


def duration(ticks):
    """Ticks of 10 ns to three digits, as time.js writes them."""
    if ticks == 0:
        return "0 µs"
    unit, each = ("µs", 100) if ticks < 10**5 else ("ms", 10**5) if ticks < 10**8 else ("s", 10**8)
    digits = 0 if ticks >= 100 * each else 1 if ticks >= 10 * each else 2
    return f"{(2 * ticks * 10**digits + each) // (2 * each) / 10**digits:.{digits}f} {unit}"
