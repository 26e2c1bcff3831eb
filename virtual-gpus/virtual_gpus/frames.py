"""The three questions about who called that only the stack can answer."""

import dis
import os
import sys
import traceback
import types

import torch

from virtual_gpus.compat import OpOverload

OPERATIONS = ("virtual_gpus.tensors",)  # the modules that an operation goes through, from __torch_dispatch__ on
MODES = ("torch._dynamo", "torch._compile")  # those through which C++ calls a mode
NB_REMAINDER = 6  # the operator % of Python's instruction BINARY_OP (opcode.h)
LIBRARIES = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, __file__))


def called_from_cpp_autograd(func: OpOverload) -> bool:
    """Whether C++ calls the operation `func` for a derivative, asked from within `__torch_dispatch__`.

    Derivatives written in C++ make tensors like those that they are given, and take a virtual tensor for one on the
    CPU. Hooks and `Function.backward` run inside of the engine, too, but from Python frames of their own: no flag that
    the engine sets could tell them apart. Between C++ and this library there may be a TorchDispatchMode of the
    program's, which was called with `func`, too.
    """
    frame = above = outside(sys._getframe(1), OPERATIONS)
    while above is not None and above.f_code.co_name != "run_backward":
        if above.f_code.co_name == "__torch_dispatch__" and any(value is func for value in above.f_locals.values()):
            frame = outside(above.f_back, MODES)
        above = above.f_back
    return frame is None or frame.f_code.co_name == "run_backward"  # None: a thread of the engine


def outside(frame: types.FrameType | None, modules: tuple[str, ...]) -> types.FrameType | None:
    """`frame`, or the first one that has called it from another module."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith(modules):
        frame = frame.f_back
    return frame


def called_by_serialization() -> bool:
    """Whether torch.load or torch.save is running. What a `map_location` function does to a storage is allowed only
    there; and what can be sent to other processes can't always be saved."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
    return any(frame.f_globals.get("__name__") == "torch.serialization" for frame in frames)


def program_place() -> tuple[str, int]:
    """File and line of the user's program, where it has called this library or PyTorch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def program_line() -> str:
    """The same for a sentence, without folders."""
    path, line = program_place()
    return f"{os.path.basename(path)}, line {line}"


def called_by_formatting() -> bool:
    """Whether the caller's caller is at `"%.3f" % x`: an int or float in a text, which Python asks for by __float__."""
    frame = sys._getframe(2)
    opcode, argument = frame.f_code.co_code[frame.f_lasti : frame.f_lasti + 2]
    return dis.opname[opcode] == "BINARY_MODULO" or (dis.opname[opcode], argument) == ("BINARY_OP", NB_REMAINDER)
