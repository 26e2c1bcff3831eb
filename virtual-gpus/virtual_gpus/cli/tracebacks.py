"""An error as the program's author needs it: with the program's frames, and without those that are around them."""

import itertools
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from types import TracebackType

from virtual_gpus.cli.main import FAILED

OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
LIBRARIES = sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")


def show(error: BaseException) -> int:
    """Print it as Python does, or as the program has said in sys.excepthook; an exit status."""
    prune(error)
    sys.excepthook(type(error), error, error.__traceback__)
    return FAILED


def where(error: BaseException) -> str:
    """The program's last line that it came from, if it came from any."""
    prune(error)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{frame.filename}, line {frame.lineno}" for frame in frames if kind_of(frame.filename) == "program"]
    return lines[-1] if lines else "virtual_gpus itself"


def prune(error: BaseException) -> None:
    """Take the frames of this library, and of what runs the program, out of the tracebacks of `error` and its causes.

    An error that the library itself has made of another one stands in the place of that.
    """
    error.__traceback__ = pruned_traceback(error.__traceback__)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        prune(cause)
        if error.__traceback__ is None or cause.__traceback__ is None:
            error.__traceback__ = error.__traceback__ or cause.__traceback__
            error.__cause__ = None  # which suppresses the context, too


def pruned_traceback(first: TracebackType | None) -> TracebackType | None:
    """From the program's first frame on, without ours, and after its last one without what those lead to."""
    entries = list(walk(first))
    kinds = [kind_of(entry.tb_frame.f_code.co_filename) for entry in entries]
    own = [i for i, kind in enumerate(kinds) if kind == "program"]
    if not own:
        return None
    end = next((i for i in range(own[-1], len(kinds)) if kinds[i] == "ours"), len(kinds))
    kept = [entries[i] for i in range(own[0], end) if kinds[i] != "ours"]
    for entry, following in itertools.pairwise([*kept, None]):
        entry.tb_next = following
    return kept[0]


def walk(entry: TracebackType | None) -> Iterator[TracebackType]:
    while entry is not None:
        yield entry
        entry = entry.tb_next


def kind_of(file: str) -> str:
    """Whose a file is: "ours", a "library" (Python's or PyTorch's), or the "program", with what it has installed."""
    if file.startswith(OURS):
        return "ours"
    libraries = file.startswith((*LIBRARIES, "<frozen")) and f"{os.sep}site-packages{os.sep}" not in file
    return "library" if libraries or f"{os.sep}torch{os.sep}" in file else "program"
