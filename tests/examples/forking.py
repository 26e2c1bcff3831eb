"""Runs the script of one rank again and again, each time in a new process, but with PyTorch imported only once.

python forking.py PLAN.json script.py [arguments]: until it ends by itself. Killed runs are started again, as a reader
would do it with the same command line.
"""

import os
import signal
import sys

import killing
import torch
import torch._dynamo  # what an optimizer imports with its first step

torch.set_num_threads(1)  # a process that has started threads can't be forked


def start(plan, script, arguments):
    """The exit status of one start in a process of its own; negative for a signal, as in subprocess."""
    child = os.fork()
    if child == 0:
        try:
            killing.run(plan, script, arguments)
        except SystemExit as error:
            os._exit(int(bool(error.code)))
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    while (status := start(sys.argv[1], sys.argv[2], sys.argv[3:])) == -signal.SIGKILL:
        pass
    sys.exit(status)
