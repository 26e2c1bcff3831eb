"""The machines that a dry run is about: how many GPUs, which, and what joins them."""

from typing import NamedTuple

from virtual_gpus.clock.machine_types import MACHINES, NETWORKS
from virtual_gpus.clock.rates import NEWEST
from virtual_gpus.clock.specs import GPU, find_gpu
from virtual_gpus.machine import Machine


class Cluster(NamedTuple):
    """`n_gpus` GPUs, `per_node` of them in a node; the rest as `virtual_gpus` takes it, see `dry_run.dry_run`."""

    n_gpus: int
    gpu: str = "H100"
    per_node: int | None = 8  # None: as many as its machine type has, or all of them
    link: str | None = None
    network: str | None = None
    host: float = 1.0
    software: str = NEWEST

    def node(self) -> Machine:
        """A Machine that stands for one of its nodes; it is off. ValueError if there can't be such a cluster."""
        per_node = self.per_node
        if per_node is None:
            per_node = MACHINES[self.link].gpus if self.link in MACHINES else self.n_gpus
        for name, number in (("n_gpus", self.n_gpus), ("per_node", per_node)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ValueError(f"{name}={number!r}: the number of GPUs must be a whole number, at least 1")
        nodes = self.n_gpus / per_node
        if nodes > 1 and self.n_gpus % per_node:
            raise ValueError(f"n_gpus={self.n_gpus} with per_node={per_node}: {nodes:.2f} nodes; use whole ones")
        link = self.link or default_machine_type(find_gpu(self.gpu), per_node, nodes)
        if link in MACHINES and per_node > MACHINES[link].gpus:
            raise ValueError(f"per_node={per_node}: a {link} has {MACHINES[link].gpus} GPUs")
        network = self.network if nodes <= 1 else self.network or default_network(link)
        return Machine(min(self.n_gpus, per_node), self.gpu, link, "meta", network, self.host, self.software)


def default_machine_type(spec: GPU, per_node: int, nodes: float) -> str | None:
    """The name of the smallest machine type with at least `per_node` such GPUs; None for one node without a type."""
    fitting = [kind for kind in MACHINES.values() if kind.link == spec.nvlink and kind.gpus >= per_node]
    if not fitting and nodes > 1:
        raise ValueError(f"no machine type has {per_node} {spec.key}: link= one of {', '.join(MACHINES)}")
    return min(fitting, key=lambda kind: kind.gpus).key if fitting else None


def default_network(link: str) -> str:
    """The name of the network that machines of a type come with."""
    if link not in MACHINES:
        raise ValueError(f"link={link!r} for several nodes: use a machine type, one of {', '.join(MACHINES)}")
    if MACHINES[link].network is None:
        raise ValueError(f"a {link} comes with no network: network= one of {', '.join(NETWORKS)}")
    return MACHINES[link].network
