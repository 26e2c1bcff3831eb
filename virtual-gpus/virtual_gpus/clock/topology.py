"""What joins the GPUs of a program, pair by pair: NVLink, PCIe, and between machines (nodes) a network.

GPUs are numbered through: with 8 in a node, GPU 9 is the second of the second node.
"""

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from virtual_gpus.clock.machine_types import MACHINES, NETWORKS, MachineType, Network
from virtual_gpus.clock.specs import GPU, LINKS, Link, find_link, unknown


class Connection(NamedTuple):
    """What joins two GPUs."""

    name: str  # as nvidia-smi topo -m has it, such as NV2 or SYS; NET: a network
    bandwidth: float  # bytes per second, one direction, peak
    latency: float  # seconds that a copy of no bytes takes


class Topology:
    """Nodes of a `machine_type` on a network.

    machine_type  None: GPUs that are all joined by `link`, as many as there are
    link, pcie    the data sheets of the NVLinks of one GPU (without: of PCIe), and of its link to the host
    network       what joins the nodes, None if there is but one; each has `nics` adapters to it
    """

    def __init__(
        self,
        machine_type: MachineType | None,
        link: Link,
        pcie: Link,
        network: Network | None = None,
        nics: int | None = None,
    ):
        self.machine_type, self.link, self.pcie, self.network = machine_type, link, pcie, network
        self.nics = nics or (network and network.nics) or (machine_type.nics if machine_type else 1)
        self.ring_bandwidths: dict[tuple[int, ...], float] = {}  # by the GPUs that the rings go through
        self.paths: dict[tuple, tuple[Connection | Link, list[tuple], list[str]]] = {}  # what `path` says

    @property
    def name(self) -> str:
        """The link's name; of machine types theirs, with the link and the network."""
        if self.machine_type is None:
            return self.link.name
        return f"{self.machine_type.key} ({self.link.name}{f', {self.network.key}' if self.network else ''})"

    def node(self, gpu: int) -> int:
        """The number of the node that this GPU is in."""
        return gpu // self.machine_type.gpus if self.machine_type else 0

    def check(self, n: int) -> None:
        """ValueError if `n` GPUs are more than one node has and there is no network, naming those that would do."""
        if self.machine_type and n > self.machine_type.gpus and self.network is None:
            raise ValueError(
                f"{n} GPUs: a {self.machine_type.key} has {self.machine_type.gpus}. More take a network: "
                f"{', '.join(NETWORKS)}."
            )

    def gpus_of(self, ranks: Iterable[int]) -> list[int]:
        """The numbers of the GPUs that these ranks of a program have: rank 0 has the first of the first node."""
        if self.machine_type is None:
            return list(ranks)
        per_node = self.ranks_per_node()
        return [rank // per_node * self.machine_type.gpus + rank % per_node for rank in ranks]

    def ranks_per_node(self) -> int:
        """torchrun says how many it starts on each, in LOCAL_WORLD_SIZE; a node has no more ranks than GPUs."""
        return min(int(os.environ.get("LOCAL_WORLD_SIZE", self.machine_type.gpus)), self.machine_type.gpus)

    def concurrent_groups(self, gpus: Iterable[int]) -> float:
        """How many groups like that of these GPUs a node has ranks for: they are taken to communicate when it does."""
        if self.machine_type is None:
            return 1
        members = Counter(map(self.node, gpus))
        return max(1.0, self.ranks_per_node() / max(members.values()))

    def nvlinks(self, a: int, b: int) -> int:
        """How many NVLinks join two GPUs of one node."""
        if self.machine_type is None or self.machine_type.nvswitch:
            return self.link.links
        a, b = sorted((a % self.machine_type.gpus, b % self.machine_type.gpus))
        return self.machine_type.nvlinks.get((a, b), 0)

    def connection(self, a: int, b: int) -> Connection:
        """What joins GPU `a` to GPU `b`."""
        kind = self.machine_type
        if self.node(a) != self.node(b):
            share = max(1.0, self.nics / kind.gpus)  # a GPU has at least one adapter to send by
            return Connection("NET", self.network.bandwidth * share, self.pcie.latency)
        links = self.nvlinks(a, b)
        if links:
            return Connection(f"NV{links}", self.link.bandwidth * links / self.link.links, self.link.latency)
        if kind is None:
            return Connection("PHB", self.link.bandwidth, self.link.latency)
        (socket, switch), (other_socket, other_switch) = (kind.pcie_switch(gpu % kind.gpus) for gpu in (a, b))
        name = "PIX" if switch == other_switch else "NODE" if socket == other_socket else "SYS"
        bandwidth = min(self.pcie.bandwidth, kind.socket_bandwidth) if name == "SYS" else self.pcie.bandwidth
        return Connection(name, bandwidth, self.pcie.latency)

    def path(self, source: int | None, target: int | None) -> tuple[Connection | Link, list[tuple], list[str]]:
        """What a copy from GPU `source` to GPU `target` (one of them None: the host) goes over, and for each GPU the
        key of the port that it occupies and its row in a timeline."""
        ends = source, target
        if ends not in self.paths:
            link = self.pcie if None in ends else self.connection(source, target)
            sides = (source, target, "copy out"), (target, source, "copy in")
            here = [side for side in sides if side[0] is not None]
            self.paths[ends] = link, [self.port(gpu, other) for gpu, other, _ in here], [row for *_, row in here]
        return self.paths[ends]

    def port(self, gpu: int, other: int | None) -> tuple:
        """What a copy between `gpu` and GPU `other` (None: the host) occupies at the end of `gpu`: a key."""
        kind = self.machine_type
        if other is not None and (kind is None or kind.nvswitch):
            return self.link.key, gpu
        if other is not None and self.connection(gpu, other).name != "SYS":
            return self.link.key, gpu, other
        return self.pcie.key, (self.node(gpu), kind.pcie_switch(gpu % kind.gpus)) if kind else gpu

    def matrix(self, n: int) -> list[list[str]]:
        """The matrix of `nvidia-smi topo -m` for `n` GPUs: a list of rows, each a list of words, GPUs' names first."""
        names = [f"GPU{gpu}" for gpu in range(n)]
        rows = [["X" if a == b else self.connection(a, b).name for b in range(n)] for a in range(n)]
        return [["", *names], *([name, *row] for name, row in zip(names, rows, strict=True))]

    def ring_bandwidth(self, gpus: Iterable[int]) -> float:
        """Bytes per second that go around in rings through these GPUs of one node, in one direction, peak.

        NCCL lays as many rings along NVLinks as there is room for, and takes PCIe only where they don't reach all GPUs.
        """
        if self.machine_type is None or self.machine_type.nvswitch:
            return self.link.bandwidth
        key = tuple(sorted(gpus))
        if key not in self.ring_bandwidths:
            slowest = min(self.connection(a, b).bandwidth for a, b in zip(key, (*key[1:], key[0]), strict=True))
            rings = count_rings(key, self.nvlinks)
            self.ring_bandwidths[key] = self.link.bandwidth * rings / self.link.links if rings else slowest
        return self.ring_bandwidths[key]


def count_rings(gpus: Sequence[int], nvlinks: Callable[[int, int], int]) -> int:
    """How many rings through all `gpus` (at least two) find room on NVLinks, each of which carries one ring in each
    direction. nvlinks(a, b): how many join two of them."""
    room = {frozenset(pair): nvlinks(*pair) for pair in itertools.combinations(gpus, 2)}
    if len(gpus) == 2:
        return room[frozenset(gpus)]
    orders = ((gpus[0], *order) for order in itertools.permutations(gpus[1:]))
    rings = {frozenset(frozenset(pair) for pair in zip(order, (*order[1:], order[0]), strict=True)) for order in orders}
    return 2 * most_rings([ring for ring in rings if all(room[pair] for pair in ring)], room)


def most_rings(rings: list[frozenset], room: dict[frozenset, int]) -> int:
    """How many of `rings`, each a set of pairs and taken any number of times, fit: each pair has `room` for so many."""
    best = 0
    for i, ring in enumerate(rings):
        if all(room[pair] for pair in ring):
            left = {pair: n - (pair in ring) for pair, n in room.items()}
            best = max(best, 1 + most_rings(rings[i:], left))
    return best


def find_topology(link: str | None, gpu: GPU, network: str | None = None) -> Topology:
    """The Topology that `link` names, for GPUs with the data sheet `gpu`, on the network named `network` or None.

    link: a name in MACHINES, or what find_link takes: then all GPUs are joined by that, whatever their number.
    ValueError for an unknown name, a machine type with other GPUs, and a network without a machine type: it takes one
    to say how many GPUs a node has.
    """
    if network is not None and network not in NETWORKS:
        raise unknown("network", network, list(NETWORKS))
    pcie, kind, plain = LINKS[gpu.pcie], MACHINES.get(link), ["nvlink", "pcie", *LINKS]
    if link not in (None, *plain, *MACHINES):
        raise unknown("link", link, [*plain, *MACHINES])
    if kind is None:
        if network is not None:
            raise ValueError(f"network={network!r} needs a machine type: link= one of {', '.join(MACHINES)}.")
        return Topology(None, find_link(link, gpu), pcie)
    if kind.link not in (None, gpu.nvlink):
        raise ValueError(f"link={link!r}: its GPUs have {LINKS[kind.link].name}; the {gpu.key} has not.")
    return Topology(kind, LINKS[kind.link] if kind.link else pcie, pcie, NETWORKS.get(network))
