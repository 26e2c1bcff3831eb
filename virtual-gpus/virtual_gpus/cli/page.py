"""`virtual-gpus plan --html FILE`: what a plan says on one page, which `page.html` draws and which needs no network."""

import json
import re
from pathlib import Path
from typing import Any

from virtual_gpus.clock.timeline import Timeline
from virtual_gpus.dry_runs.prediction import Prediction
from virtual_gpus.dry_runs.step_memory import KINDS
from virtual_gpus.files import replacing

PARTS = "forward", "backward", "communication", "other", "host"  # of events: see `events.Event.part`
MOST_EVENTS = 100_000  # of which all ranks are drawn, and of more the one that holds most
LARGEST = 15  # operations that are listed


def write_page(path: str, plan: dict[str, Any], step: Prediction, summary: list[str], assumed: str) -> None:
    """Write the page to `path`. `plan`: the fields of --json, which are in it; `summary`: its first lines."""
    fullest = step.peak_memory.index(max(step.peak_memory))
    drawn = step.ranks if len(step.timeline) <= MOST_EVENTS else [step.ranks[fullest]]
    dropped = step.timeline.dropped
    data = {
        **{"plan": plan, "summary": summary, "assumed": assumed, "parts": PARTS, "kinds": KINDS},
        "dropped": f"The first {dropped:,} events of the step are not kept, and not counted below." * (dropped > 0),
        **drawing(step.timeline, drawn),
        "operations": operations(step.timeline),
        "end": 1e3 * max(step.seconds, step.timeline.end),  # a pipeline's last rank begins and ends after the first
        "fullest": step.ranks[fullest],
        "changes": [[1e3 * time, KINDS.index(kind), n] for time, kind, n in step.changes[fullest]],
    }
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    escaped = json.dumps(data).replace("<", r"\u003c")  # such as "</script>"
    with replacing(path) as new:
        new.write_text(template.replace("{{data}}", escaped), encoding="utf-8")


def drawing(timeline: Timeline, ranks: list[int]) -> dict[str, list]:
    """The "names" of events; and "rows", whose events are four numbers each, one after the other: name and part, as
    places in their lists, start and duration in milliseconds."""
    names: dict[str, int] = {}
    rows = {}
    for label, events in timeline.rows().items():
        gpu = events[0].gpu
        row = label if gpu is None else label.replace(f"cuda:{gpu}", f"rank {gpu}", 1)
        numbers: list[float] = []
        for e in events:
            numbers += [names.setdefault(e.name, len(names)), PARTS.index(e.part)]
            numbers += [round(1e3 * e.start, 6), round(1e3 * (e.end - e.start), 6)]
        rank, *digits = [int(number) for number in re.findall(r"\d+", row)]
        if rank in ranks:
            rows[rank, gpu is not None, re.sub(r"\d", "", row), tuple(digits)] = {"label": row, "events": numbers}
    return {"names": list(names), "rows": [row for _, row in sorted(rows.items())]}


def operations(timeline: Timeline) -> list[list]:
    """What took the GPUs most time in all: name, part, how many times, seconds, floating-point operations, bytes."""
    by_operation: dict[tuple[str, str], list] = {}
    for e in timeline:
        if e.gpu is not None:
            sums = by_operation.setdefault((e.name, e.part), [0, 0.0, 0, 0])
            sums[:] = (a + b for a, b in zip(sums, (1, e.end - e.start, e.flops, e.nbytes), strict=True))
    largest = sorted(by_operation.items(), key=lambda item: -item[1][1])[:LARGEST]
    return [[*names, *sums] for names, sums in largest]
