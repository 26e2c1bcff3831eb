"""The questions about the stack: who called?"""

import io
from operator import attrgetter
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from virtual_gpus import frames
from virtual_gpus.constants import unknown_scalars


class Asks(Tensor):
    """Asks at every operation, as VirtualTensor does."""

    answers: ClassVar = {}

    def __new__(cls, inner):
        self = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.answers[func.overloadpacket.__name__] = frames.called_from_cpp_autograd(func)
        return Asks(func(*tree_map_only(Asks, attrgetter("inner"), args), **kwargs or {}))


def test_derivatives_in_cpp_are_told_from_hooks(monkeypatch):
    monkeypatch.setattr(frames, "OPERATIONS", (__name__,))  # the modules that don't count as callers
    program = {"__name__": "a program"}
    y = Asks(torch.ones(2)).requires_grad_().sin()
    y.register_hook(eval("lambda grad: grad.neg()", program))
    y.sum().backward()
    eval("y.exp()", program | {"y": y})
    assert Asks.answers["cos"] and not Asks.answers["neg"] and not Asks.answers["exp"]  # cos: the derivative of sin


def test_inside_and_outside_of_torch_load():
    file, answers = io.BytesIO(), []
    torch.save(torch.ones(2), file)
    file.seek(0)
    torch.load(file, map_location=lambda storage, _: answers.append(frames.called_by_torch_load()) or storage)
    assert answers == [True] and not frames.called_by_torch_load()


@pytest.mark.parametrize("through", [lambda ask: ask(), lambda ask: tree_map(ask, 0)])
def test_the_line_is_the_programs(through):
    line = frames.program_line()
    assert line == f"test_frames.py, line {test_the_line_is_the_programs.__code__.co_firstlineno + 2}"
    assert through(lambda *_: unknown_scalars(())).program_line.startswith("test_frames.py, line ")
