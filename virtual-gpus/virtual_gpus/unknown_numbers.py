"""A number that a dry run doesn't know: what .item() returns there."""

import os
import sys

import torch

PACKAGES = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, __file__))


class Unknown:
    """Can be printed, as "?", and reckoned with. A program that decides something by it gets a RuntimeError.

    `where` it was read: file and line.
    """

    def __init__(self, where):
        self.where = where

    def __repr__(self):
        return "?"

    def __format__(self, spec):
        return "?"

    def _result(self, *others):
        return self

    def _decide(self, *others):
        raise RuntimeError(
            f"a dry run has shapes and no values: the number that was read at {self.where} is unknown, and what the "
            "program does next depends on it. Print it, or leave it out of the step"
        )

    __hash__ = _decide


_RESULTS = "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg pos abs round"
_DECISIONS = "bool float int index eq ne lt le gt ge complex floor ceil trunc"
for _names, _method in ((_RESULTS, Unknown._result), (_DECISIONS, Unknown._decide)):
    for _name in _names.split():
        setattr(Unknown, f"__{_name}__", _method)


def where_called():
    """File and line where the program has called this library or PyTorch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGES):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno}"


def unknown_number():
    return Unknown(where_called())


def unknown_numbers(shape):
    """As many of them, in nested lists."""
    return [unknown_numbers(shape[1:]) for _ in range(shape[0])] if shape else unknown_number()
