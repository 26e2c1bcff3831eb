"""Ranks of one computer that nobody outside can reach: PyTorch's store listens on all interfaces, this one on one.

Run as a script it is torchrun, with such stores. Its first argument is the number of a file descriptor: when there is
nobody any more at the other end, torchrun ends, and its ranks.
"""

import importlib
import os
import signal
import socket
import sys
import threading

HOST = "127.0.0.1"
# What PyTorch's gloo listens on, which would otherwise be the interface that the computer's name leads to.
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}


def check_platform():
    """RuntimeError on Windows, where processes can't be handed sockets and ended in groups."""
    if not hasattr(signal, "SIGKILL"):
        raise RuntimeError("ranks of a notebook need Linux or macOS; Windows has them in WSL (wsl --install)")


def listening(port=0):
    """A socket that listens; 0: on a port that is free."""
    return socket.create_server((HOST, port), backlog=128)


def stay_inside(place=None):
    """Have PyTorch's stores listen here only, from now on. `place`: a socket that listens already, on its port."""
    import torch.distributed as dist

    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # which a function of this name hides

    class LocalStore(dist.TCPStore):
        def __init__(self, host_name, port, *args, is_master=False, **options):
            if is_master:
                ours = place is not None and port == place.getsockname()[1]
                opened = place.dup() if ours else listening(port or 0)
                host_name, port = HOST, opened.getsockname()[1]
                options["master_listen_fd"] = opened.detach()
            super().__init__(host_name, port, *args, is_master=is_master, **options)

    dist.TCPStore = rendezvous.TCPStore = LocalStore


def end_with(descriptor):
    """Ask this process to end when the other end of a pipe is gone."""
    os.read(descriptor, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.path[0] = ""  # not the folder of this file
    threading.Thread(target=end_with, args=(int(sys.argv.pop(1)),), daemon=True).start()
    stay_inside()
    from torch.distributed import run

    run.main()
