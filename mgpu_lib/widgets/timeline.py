"""The timeline viewer: what each thread of the host and each GPU did when, to zoom into and to walk through."""

import traitlets

from mgpu_lib.widgets.base import CSS, HERE, TICK, InteractiveFigure, module
from virtual_gpus import Timeline

MOST = 20_000  # events: a page with more would be slow, and megabytes long
CLOSEST = 1000  # ticks: how short a window may get
STYLE = CSS + (HERE / "timeline.css").read_text(encoding="utf-8")


class TimelineViewer(InteractiveFigure):
    """A `Timeline`'s events as bars in rows, to zoom into, to move through, and to ask what each of them is.

    `start` (seconds since the timeline began) and `zoom` (n shows a 2ⁿ-th of the timeline) say what is on display;
    `event` points one out: an index into the timeline, or -1. For the host's call that launched event i it is
    len(timeline) + i. Raises TypeError for anything but a Timeline, ValueError for an empty one or one of more than
    20,000 events, TraitError for other bad values. A `start` too late for the window means the last window.
    """

    _esm = module("timeline.js")
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
        if timeline.dropped:
            raise ValueError(f"the first {timeline.dropped:,} events of the timeline are not kept: show a later part")
        super().__init__(data=compact(timeline), **values)

    @traitlets.validate(*controls)
    def _there(self, proposal):
        name, value, data = proposal["trait"].name, proposal["value"], self.data
        count = len(data["events"]["type"])
        limits = {"start": data["whole"] * TICK, "zoom": data["levels"], "event": 2 * count - 1}
        if not value <= limits[name]:  # NaN is not
            raise traitlets.TraitError(f"{name}={value!r}: choose {limits[name]} at most")
        return value


def compact(timeline):
    """A timeline as whole numbers in columns, for JSON.

    "rows" are [GPU or None, name]; "types" are [name, kind, phase, bytes, FLOPs, bound by, part], where part decides
    the color. An event has a type, a row, its thread's row, and times in ticks of 10 ns: `called` (since the event
    before it was called; the first: since the timeline began), `handing` (from then until launched), `waiting` (until
    it starts), `running` (until it ends).
    """
    rows = sorted({(-1 if es[0].gpu is None else es[0].gpu, es[0].row) for es in timeline.rows().values()}, key=place)
    index = {row: n for n, row in enumerate(rows)}
    types, last, begin = {}, 0, timeline.start
    columns = {name: [] for name in ("type", "row", "thread", "called", "handing", "waiting", "running")}
    for e in timeline:
        kind = types.setdefault((e.name, e.kind, e.phase, e.nbytes, e.flops, e.bound, e.part), len(types))
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
    return gpu, name.startswith(("collective", "messages")), name.startswith("copy"), name
