"""Two halves of what is published: the clock is fitted to one and held against the other."""

import hashlib
from collections.abc import Callable, Iterable


def halve(counted: Iterable[dict], group: Callable[[dict], object]) -> None:
    """Give every row its "half": in each group its curves, in the order of a hash, are held out and fitted in turn.

    A curve stays together, or the clock would be fitted to the neighbors of what it is tested on.
    """
    counted = list(counted)
    for name in set(map(group, counted)):
        members = [row for row in counted if group(row) == name]
        curves = sorted({row["curve"] for row in members}, key=digest)
        for row in members:
            row["half"] = ("held out", "fit")[curves.index(row["curve"]) % 2]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
