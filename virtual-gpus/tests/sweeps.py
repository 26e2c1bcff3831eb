"""A pytest plugin: which cases of a sweep run."""

import os
import zlib
from collections import defaultdict


def pytest_collection_modifyitems(config, items):
    """Leave out what runs with MGPU_ALL=1 only: each test with the mark `slow`, and of a test with `sweep(n)` all but
    every n-th case. Where those begin is chosen by the test's name, so that tests which go through the same list take
    different ones of it.
    """
    if os.environ.get("MGPU_ALL") == "1":
        return
    cases = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    kept = {item for test, its_cases in cases.items() for item in chosen(test, its_cases)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def chosen(test, cases):
    """Those of the `cases` of a test that run without MGPU_ALL=1."""
    if cases[0].get_closest_marker("slow"):
        return []
    sweep = cases[0].get_closest_marker("sweep")
    step = sweep.args[0] if sweep else 1
    return cases[zlib.crc32(test.encode()) % min(step, len(cases)) :: step]
