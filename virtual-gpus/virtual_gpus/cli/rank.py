"""What a rank does first that `processes` has started: nobody outside reaches it, and it ends with its launcher."""

import importlib
import os
import socket
import threading

import torch.distributed as dist

from virtual_gpus.cli.main import FAILED
from virtual_gpus.cli.processes import LAUNCHER


def become_rank() -> bool:
    """Become one, if `processes` has started this process as a rank; whether it has."""
    if LAUNCHER not in os.environ:
        return False
    pipe, listening = map(int, os.environ.pop(LAUNCHER).split())
    threading.Thread(target=lambda: os.read(pipe, 1) or os._exit(FAILED), daemon=True).start()
    listen_on_loopback(socket.socket(fileno=listening))
    return True


def listen_on_loopback(place: socket.socket) -> None:
    """Have PyTorch's stores listen on loopback alone, instead of on all interfaces; `place` listens there already."""
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # which a function of this name hides

    class LoopbackStore(dist.TCPStore):
        def __init__(self, host_name, port, world_size=None, is_master=False, *args, **options):
            if is_master:
                ours = port == place.getsockname()[1]
                server = place.dup() if ours else socket.create_server(("127.0.0.1", port or 0), backlog=128)
                host_name, port = server.getsockname()
                options["master_listen_fd"] = server.detach()
            super().__init__(host_name, port, world_size, is_master, *args, **options)

    for module in (dist, rendezvous):
        vars(module)["TCPStore"] = LoopbackStore
