"""Machines with several GPUs: what joins each pair of them, and what joins the machines, each with its source.

A machine type says how many NVLinks join two of its GPUs, and where they sit on PCIe. A `Topology` is some machines of
a type (nodes) on a network. GPUs are numbered through: with 8 in a node, GPU 9 is the second of the second node.
"""

import itertools
import os
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

from virtual_gpus.clock.specs import LINKS, Source, find_link, unknown

NVLINKS = {"nvlink2": 6, "nvlink3": 12, "nvlink4": 18, "nvlink5": 18}  # of one GPU, whose bandwidth LINKS adds up

BROADWELL, SAPPHIRE_RAPIDS, AMD = 6e9, 22e9, 16e9  # bytes per second between sockets with such processors, "nccl-topo"

# key: title, and in the next line the address
_SOURCES = """
dgx1-topo: nvidia-smi topo -m of a DGX-1 with V100, in MSCCL tools
    https://github.com/microsoft/msccl-tools/blob/main/tests/test_topologies.py
dgx-a100: DeepOps: DGX A100 with 8 ConnectX-6 HDR of 200 Gb/s
    https://github.com/NVIDIA/deepops/blob/master/docs/k8s-cluster/nvidia-network-operator.md
dgx-h100: NVIDIA DGX BasePOD, Core Components: DGX H100 with 4 NVSwitches and 8 ConnectX-7 of 400 Gb/s
    https://docs.nvidia.com/dgx-basepod/reference-architecture-infrastructure-foundation-enterprise-ai/latest/core-components.html
perlmutter: NERSC, Perlmutter Architecture: 4 A100 without NVSwitch (12 NVLinks for 3 others), 4 HPE Slingshot 11
    https://docs.nersc.gov/systems/perlmutter/architecture
snellius: nccl-tests on Snellius: 4 H100 without NVSwitch (18 NVLinks for 3 others), 4 InfiniBand cards of 200 Gb/s
    https://github.com/odissei-benchmarks/nccl-tests
nccl-topo: NCCL, src/graph/topo.h: what it reckons with for PCIe and between sockets
    https://github.com/NVIDIA/nccl/blob/master/src/graph/topo.h
networks: Bekman, Machine Learning Engineering: rates of InfiniBand, EFA and Slingshot, and cards a node, with sources
    https://github.com/stas00/ml-engineering/blob/master/network/README.md
ethernet: NVIDIA MLNX_OFED Release Notes: Ethernet rates of ConnectX cards
    https://docs.nvidia.com/networking/display/mlnxofedv590560107/release+notes
"""
_LINES = iter(_SOURCES.strip().splitlines())
MACHINE_SOURCES = {
    key: Source(key, title, next(_LINES).strip()) for key, _, title in (line.partition(": ") for line in _LINES)
}


class Joint(NamedTuple):
    """What joins two GPUs."""

    name: str  # as nvidia-smi topo -m has it, such as NV2 or SYS; NET: a network
    bandwidth: float  # bytes per second, one direction, peak
    latency: float  # seconds that a copy of no bytes takes


@dataclass(frozen=True)
class Network:
    """What joins nodes: cards of `bandwidth` bytes per second each, one direction, peak.

    `kind` is that of the way they work, a key of nccl.json. `cards`: of a node; None: as many as its machine type has.
    """

    key: str
    kind: str
    bandwidth: float
    cards: int | None
    source: Source


NETWORKS = {
    key: Network(key, kind, gigabits * 1e9 / 8, cards, MACHINE_SOURCES[source])
    for key, kind, gigabits, cards, source in (
        ("InfiniBand EDR", "RDMA", 100, None, "networks"),
        ("InfiniBand HDR", "RDMA", 200, None, "networks"),
        ("InfiniBand NDR", "RDMA", 400, None, "networks"),
        ("RoCE 100", "RDMA", 100, None, "ethernet"),
        ("EFA", "EFA", 100, None, "networks"),
        ("Slingshot 11", "Slingshot", 200, None, "networks"),
        ("Ethernet 25", "TCP", 25, 1, "ethernet"),
        ("Ethernet 100", "TCP", 100, 1, "ethernet"),
    )
}


@dataclass(frozen=True)
class MachineType:
    """A machine with several GPUs. `pairs` says how many NVLinks join two of them; those not named have none.

    `switched`: NVSwitch joins them, so that every pair has all of a GPU's NVLinks, and `pairs` is not asked.
    `under` has (socket, PCIe switch) of each GPU: all under one switch share its one way to the host.
    """

    key: str
    link: str | None  # key in LINKS; None: no NVLink
    under: tuple
    cards: int  # network cards of a node
    sockets: float  # bytes per second from one socket to the other
    source: Source | None  # None: no product, but what is plain
    pairs: dict | None = None  # {(smaller, larger): NVLinks}
    switched: bool = False
    network: str | None = None  # that it comes with, a key of NETWORKS

    @property
    def gpus(self):
        """How many GPUs a node has."""
        return len(self.under)


_DGX1 = {2: "03 04 12 15 23 47 56 67", 1: "01 02 13 26 37 45 46 57"}  # NVLinks: the pairs that have so many
_DGX1_PAIRS = {(int(a), int(b)): links for links, pairs in _DGX1.items() for a, b in pairs.split()}


def _all_pairs(n, links):
    return {pair: links for pair in itertools.combinations(range(n), 2)}


def _under(n):
    """`n` GPUs, two under each PCIe switch, half of them on each of two sockets."""
    return tuple((gpu // (n // 2), gpu // 2) for gpu in range(n))


_DGX_A100 = MachineType(
    *("DGX A100", "nvlink3", _under(8), 8, AMD, MACHINE_SOURCES["dgx-a100"]), switched=True, network="InfiniBand HDR"
)
_DGX_H100 = MachineType(
    *("DGX H100", "nvlink4", _under(8), 8, SAPPHIRE_RAPIDS, MACHINE_SOURCES["dgx-h100"]),
    switched=True,
    network="InfiniBand NDR",
)
_DGX1V = MachineType("DGX-1V", "nvlink2", _under(8), 4, BROADWELL, MACHINE_SOURCES["dgx1-topo"], _DGX1_PAIRS)
_HGX_A100 = MachineType("HGX A100 4-GPU", "nvlink3", _under(4), 4, AMD, MACHINE_SOURCES["perlmutter"], _all_pairs(4, 4))
_HGX_H100 = MachineType("HGX H100 4-GPU", "nvlink4", _under(4), 4, AMD, MACHINE_SOURCES["snellius"], _all_pairs(4, 6))
MACHINES = {
    kind.key: kind
    for kind in (
        replace(_DGX1V, network="InfiniBand EDR"),
        _DGX_A100,
        _DGX_H100,
        replace(_DGX_A100, key="p4d.24xlarge", cards=4, source=MACHINE_SOURCES["networks"], network="EFA"),
        replace(_DGX_H100, key="p5.48xlarge", cards=32, source=MACHINE_SOURCES["networks"], network="EFA"),
        replace(_HGX_A100, network="Slingshot 11"),
        replace(_HGX_H100, network="InfiniBand HDR"),
        MachineType("PCIe tree", None, _under(8), 1, AMD, None, {}),
    )
}


class Topology:
    """`kind`: the MachineType of the nodes, None for GPUs that are all joined by `link`, as many as there are.

    link, pcie  the data sheets (specs.Link) of the NVLinks of one GPU (without: of PCIe), and of its way to the host
    network     the Network between nodes, None if there is but one; `cards` of each of them
    """

    def __init__(self, kind, link, pcie, network=None, cards=None):
        self.kind, self.link, self.pcie, self.network = kind, link, pcie, network
        self.cards = cards or (network and network.cards) or (kind.cards if kind else 1)
        self.found = {}  # rings, by the GPUs that they go through
        self.paths = {}  # what `path` says

    @property
    def name(self):
        """The link's name; of machine types theirs, with the link and the network."""
        if self.kind is None:
            return self.link.name
        return f"{self.kind.key} ({self.link.name}{f', {self.network.key}' if self.network else ''})"

    def node(self, gpu):
        """The number of the node that this GPU is in."""
        return gpu // self.kind.gpus if self.kind else 0

    def check(self, n):
        """ValueError if `n` GPUs are more than one node has and there is no network, naming those that would do."""
        if self.kind and n > self.kind.gpus and self.network is None:
            raise ValueError(
                f"{n} GPUs: a {self.kind.key} has {self.kind.gpus}. More take a network: {', '.join(NETWORKS)}."
            )

    def gpus_of(self, ranks):
        """The numbers of the GPUs that these ranks of a program have: rank 0 has the first of the first node."""
        if self.kind is None:
            return list(ranks)
        here = self.ranks_of_a_node()
        return [rank // here * self.kind.gpus + rank % here for rank in ranks]

    def ranks_of_a_node(self):
        """torchrun says how many it starts on each, in LOCAL_WORLD_SIZE; a node has no more ranks than GPUs."""
        return min(int(os.environ.get("LOCAL_WORLD_SIZE", self.kind.gpus)), self.kind.gpus)

    def groups_at_once(self, gpus):
        """How many groups like that of these GPUs a node has ranks for: they are taken to communicate when it does."""
        if self.kind is None:
            return 1
        members = Counter(map(self.node, gpus))
        return max(1.0, self.ranks_of_a_node() / max(members.values()))

    def links(self, a, b):
        """How many NVLinks join two GPUs of one node."""
        if self.kind is None or self.kind.switched:
            return NVLINKS.get(self.link.key, 0)
        a, b = sorted((a % self.kind.gpus, b % self.kind.gpus))
        return self.kind.pairs.get((a, b), 0)

    def joint(self, a, b):
        """What joins GPU `a` to GPU `b`: a Joint."""
        if self.node(a) != self.node(b):
            share = max(1.0, self.cards / self.kind.gpus)  # a GPU has at least one card to send by
            return Joint("NET", self.network.bandwidth * share, self.pcie.latency)
        links = self.links(a, b)
        if links:
            return Joint(f"NV{links}", self.link.bandwidth * links / NVLINKS[self.link.key], self.link.latency)
        if self.kind is None:
            return Joint("PHB", self.link.bandwidth, self.link.latency)
        (socket, switch), (other_socket, other_switch) = (self.kind.under[gpu % self.kind.gpus] for gpu in (a, b))
        name = "PIX" if switch == other_switch else "NODE" if socket == other_socket else "SYS"
        bandwidth = min(self.pcie.bandwidth, self.kind.sockets) if name == "SYS" else self.pcie.bandwidth
        return Joint(name, bandwidth, self.pcie.latency)

    def path(self, source, target):
        """(Joint or Link, ports): what a copy from GPU `source` to GPU `target` goes over (one of them None: the host),
        and what it occupies at both ends, as keys."""
        ends = source, target
        if ends not in self.paths:
            link = self.pcie if None in ends else self.joint(source, target)
            rows = (source, target, "copy out"), (target, source, "copy in")
            self.paths[ends] = link, [(self.port(gpu, other), row) for gpu, other, row in rows if gpu is not None]
        return self.paths[ends]

    def port(self, gpu, other):
        """What a copy between `gpu` and GPU `other` (None: the host) occupies at the end of `gpu`: a key."""
        if other is not None and (self.kind is None or self.kind.switched):
            return self.link.key, gpu
        if other is not None and self.joint(gpu, other).name != "SYS":
            return self.link.key, gpu, other
        return self.pcie.key, (self.node(gpu), self.kind.under[gpu % self.kind.gpus]) if self.kind else gpu

    def matrix(self, n):
        """The matrix of `nvidia-smi topo -m` for `n` GPUs: a list of rows, each a list of words, GPUs' names first."""
        names = [f"GPU{gpu}" for gpu in range(n)]
        rows = [["X" if a == b else self.joint(a, b).name for b in range(n)] for a in range(n)]
        return [["", *names], *([name, *row] for name, row in zip(names, rows, strict=True))]

    def ring(self, gpus):
        """Bytes per second that go around in rings through these GPUs of one node, in one direction, peak.

        NCCL lays as many rings along NVLinks as there is room for, and takes PCIe only where they don't reach all GPUs.
        """
        if self.kind is None or self.kind.switched:
            return self.link.bandwidth
        key = tuple(sorted(gpus))
        if key not in self.found:
            slowest = min(self.joint(a, b).bandwidth for a, b in zip(key, (*key[1:], key[0]), strict=True))
            count = rings(key, self.links)
            self.found[key] = self.link.bandwidth * count / NVLINKS[self.link.key] if count else slowest
        return self.found[key]


def rings(gpus, links):
    """How many rings through all `gpus` find room on NVLinks, each of which carries one ring in each direction.

    gpus: their numbers, at least two. links(a, b): how many NVLinks join two of them.
    """
    room = {frozenset(pair): links(*pair) for pair in itertools.combinations(gpus, 2)}
    if len(gpus) == 2:
        return room[frozenset(gpus)]
    orders = ((gpus[0], *order) for order in itertools.permutations(gpus[1:]))
    ways = {frozenset(frozenset(pair) for pair in zip(order, (*order[1:], order[0]), strict=True)) for order in orders}
    return 2 * most([way for way in ways if all(room[pair] for pair in way)], room)


def most(ways, room):
    """How many of `ways`, each a set of pairs and taken any number of times, find room: {pair: number}."""
    best = 0
    for i, way in enumerate(ways):
        if all(room[pair] for pair in way):
            left = {pair: n - (pair in way) for pair, n in room.items()}
            best = max(best, 1 + most(ways[i:], left))
    return best


def find_topology(link, gpu, network=None):
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
