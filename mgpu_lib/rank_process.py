"""What each process of `ranks.Ranks` does: it runs the code that it is sent, and sends back what came of it.

Run as a script, with the number of the file descriptor that leads to the notebook. When that is gone, so is this, and
what it has started. Rank 0 gets the number of another one, the socket at which the ranks meet.
"""

import ast
import contextlib
import io
import itertools
import linecache
import os
import queue
import re
import signal
import socket
import sys
import threading
import traceback
import types
from multiprocessing.connection import Connection

CELL_NUMBERS = itertools.count()
OWN_FILE = re.compile(r"<cell \d+>")
CELL = "<cell>"  # what tracebacks call the file of any cell


def executed(code, names):
    """(stdout, stderr, error) of `code`, whose variables are `names`; what the last line is worth is printed."""
    file = f"<cell {next(CELL_NUMBERS)}>"  # each has its own: functions of older cells may be in a traceback, too
    linecache.cache[file] = len(code), None, code.splitlines(keepends=True), file
    out, err, error = io.StringIO(), io.StringIO(), ""
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            body = ast.parse(code, file).body
            last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
            exec(compile(ast.Module(body, []), file, "exec"), names)
            if last is not None:
                sys.displayhook(eval(compile(ast.Expression(last.value), file, "eval"), names))
        except BaseException as raised:
            own = raised.__traceback__.tb_next  # without this function
            error = OWN_FILE.sub(CELL, "".join(traceback.format_exception(type(raised), raised, own)))
    return out.getvalue(), err.getvalue(), error


def listen(connection, cells):
    """Pass on what is sent, also while a cell runs; end the process group when nobody is there any more."""
    try:
        while True:
            cells.put(connection.recv())
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)


def serve(connection):
    cells = queue.SimpleQueue()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the notebook was started to ignore it
    sys.modules["__main__"] = program = types.ModuleType("__main__")  # not this one, whose names cells could overwrite
    names = vars(program)
    threading.Thread(target=listen, args=(connection, cells), daemon=True).start()
    while True:
        with contextlib.suppress(KeyboardInterrupt):  # that comes after the cell which it was meant for
            connection.send(executed(cells.get(), names))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until there is a cell to interrupt
    from loopback import stay_inside

    sys.path[0] = ""  # the folder of the notebook, not of this file
    descriptor, *places = map(int, sys.argv[1:])
    stay_inside(*(socket.socket(fileno=place) for place in places))
    serve(Connection(descriptor))
