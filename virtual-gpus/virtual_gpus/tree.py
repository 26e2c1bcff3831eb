"""Tensors in nested lists, tuples and dicts."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dicts, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())
