"""The checks of "Where the time goes": typical wrong answers are explained."""

import pytest
from answers import (  # noqa: F401
    test_a_wrong_answer_is_explained,
    test_every_exercise_of_the_page_has_wrong_answers,
)

from mgpu_lib.exercises import where_the_time_goes

SIGNATURES = {
    "longest_gap": "events",
    "bottleneck": "timeline",
    "smallest_batch": "time",
    "step_seconds": "step, devices, now",
    "workers_needed": "loading, step",
}
SYNC = "[torch.cuda.synchronize(device) for device in devices]"
TIMING = f"""
    import statistics
    def done():
        {SYNC}
        return now()
    def call():
        start = done()
        step()
        return done() - start
    """
COSTS = """
    bound = timeline.bound_by(0)
    costs = {"host": timeline.waiting_for_host(0), "link": bound.get("link", 0), "compute": bound.get("compute", 0),
             "memory": bound.get("memory", 0)}
    """
SIZES = "sizes = [2 ** n for n in range(5, 14)]\n    pays = [b for b in sizes if time(1, b) >= 1.5 * time(2, b)]\n    "

WRONG = [
    ("longest_gap", "return max((b.start - a.end for a, b in zip(events, events[1:])), default=0)", "sort them"),
    (
        "longest_gap",
        """
    events = sorted(events)
    return max([0] + [b.start - a.end for a, b in zip(events, events[1:])])""",
        "inside a longer one",
    ),
    (
        "longest_gap",
        """
    end = gap = 0
    for event in sorted(events):
        gap, end = max(gap, event.start - end), max(end, event.end)
    return gap""",
        "before the first event",
    ),
    (
        "longest_gap",
        """
    events = sorted(events)
    return sum(b.start - a.end for a, b in zip(events, events[1:]))""",
        "from 4 to 6",
    ),
    ("bottleneck", COSTS + "return max(costs, key=costs.get)", "Only the communication that overlap() doesn't hide"),
    ("bottleneck", "return max(timeline.bound_by(0), key=timeline.bound_by(0).get)", "'fixed' is none of"),
    ("bottleneck", COSTS + "return max(costs.values())", "is none of"),
    ("bottleneck", COSTS + 'costs["link"] = 0\n    return max(costs, key=costs.get)', "and the times are"),
    *[
        (
            "bottleneck",
            COSTS
            + f"""costs["link"] = timeline.communication(0) * (1 - timeline.overlap()[0])
    costs["host"] = {half}
    return max(costs, key=costs.get)""",
            "fifty sums of 32 × 32 and three of 4096 × 4096: 'memory'",
        )
        for half in ("timeline.waiting_for_host(0)", "bound.get('fixed', 0)")
    ],
    ("smallest_batch", SIZES + "return next((b for b in sizes if time(2, b) < time(1, b)), 0)", "not 1.5 times"),
    (
        "smallest_batch",
        SIZES + "return next((b for b in sizes if 2 * time(1, b) >= 1.5 * time(2, 2 * b)), 0)",
        "the one of all GPUs together",
    ),
    ("smallest_batch", SIZES + "return pays[0] // 2 if pays else 0", "is that the shard of each GPU?"),
    ("smallest_batch", SIZES + "return pays[0] if pays else None", "return 0 then"),
    ("smallest_batch", "return 8192", "instead of"),
    (
        "step_seconds",
        """
    import statistics
    def call():
        start = now()
        step()
        return now() - start
    return statistics.median([call() for i in range(7)][2:])""",
        "Synchronize every device",
    ),
    (
        "step_seconds",
        TIMING.replace(SYNC, "torch.cuda.synchronize()") + "return statistics.median([call() for i in range(7)][2:])",
        "Synchronize every device",
    ),
    ("step_seconds", TIMING + "return statistics.mean([call() for i in range(7)][2:])", "that is the mean"),
    ("step_seconds", TIMING + "return max([call() for i in range(7)][2:])", "the slowest call"),
    ("step_seconds", TIMING + "return sum([call() for i in range(7)][2:])", "of all five calls"),
    ("step_seconds", TIMING + "return statistics.median([call() for i in range(5)])", "called 5 times"),
    ("step_seconds", TIMING + "return min([call() for i in range(7)][:2])", "a cold one, or the disturbed one"),
    ("workers_needed", "return max(1, int(loading // step))", "Round up"),
    ("workers_needed", "return int(loading // step) + 1", "exactly as fast as the step is fast enough"),
    ("workers_needed", "return -int(-loading // step) if loading > step else 0", "take turns"),
    ("workers_needed", "return loading / step", "instead of 4"),
]


@pytest.mark.parametrize(
    "program, right",
    [
        (where_the_time_goes.products, "compute"),
        (where_the_time_goes.sums, "memory"),
        (where_the_time_goes.tiny, "host"),
        (where_the_time_goes.copies, "link"),
        (where_the_time_goes.hidden, "compute"),
    ],
)
def test_the_programs_have_clear_bottlenecks(program, right):
    """Whatever rates the clock is fitted to: the largest is a quarter more than the next."""
    costs = where_the_time_goes.costs_of(where_the_time_goes.timeline_of(program))
    first, second = sorted(costs, key=costs.get, reverse=True)[:2]
    assert first == right and costs[first] > 1.25 * costs[second], costs


def test_a_copy_that_is_hidden_would_look_like_the_bottleneck():
    timeline = where_the_time_goes.timeline_of(where_the_time_goes.hidden)
    assert timeline.communication(0) > 0 and timeline.overlap()[0] > 0.9
    named = {"compute": timeline.bound_by(0)["compute"], "memory": timeline.bound_by(0)["memory"]}
    assert timeline.communication(0) > max(named.values())
