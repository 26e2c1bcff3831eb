"""How long NCCL takes for a collective operation, along the links that a machine has.

NCCL has several algorithms (a ring, a tree, and NVLS, in which NVSwitch adds), and protocols, of which LL and LL128
save time for a short message and Simple for a long one. It estimates a latency and a bandwidth of each and takes the
fastest, and so does this module. The steps of an algorithm, and what a step costs, are those of NCCL's own estimate
(https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc). Factors on them, and the parts of a link's peak rate
that are reached, stand in nccl.json; `python -m calibration.collective_fit` fitted them to one half of what others
published.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from virtual_gpus.clock.costs import link_seconds, pipeline_seconds, ring_seconds, round_seconds
from virtual_gpus.clock.rates import CHANNELS, CHANNELS_OF_ADAPTER, ROUND
from virtual_gpus.clock.specs import Link
from virtual_gpus.clock.topology import Topology

NCCL_PATH = Path(__file__).parent / "nccl.json"
NCCL = json.loads(NCCL_PATH.read_text())


class Tuning(NamedTuple):
    """What NCCL reckons with for an algorithm and a protocol."""

    efficiency: float  # part of the bandwidth that carries data
    base: float  # µs before the first step
    nvlink: float  # µs of a step over NVLink
    pcie: float  # the same over PCIe
    network: float  # and over a network


TUNINGS = {  # (algorithm, protocol)
    ("ring", "LL"): Tuning(0.5, 6.6, 0.6, 1.0, 2.7),
    ("ring", "LL128"): Tuning(0.92, 14.0, 1.9, 2.5, 4.0),
    ("ring", "Simple"): Tuning(1.0, 8.4, 3.4, 5.7, 14.0),
    ("tree", "LL"): Tuning(1 / 3.8, 6.8, 0.6, 1.0, 5.0),
    ("tree", "LL128"): Tuning(7 / 9, 14.0, 1.25, 1.9, 8.5),
    ("tree", "Simple"): Tuning(1.0, 8.4, 4.0, 4.0, 14.0),
    ("nvls", "Simple"): Tuning(1.0, 0.0, 25.0, math.inf, 20.9),
}
# Tenths of a tree's bandwidth that are left for messages of medium size, of 64 bytes (first), 128 bytes, ... to 256 MiB
TREE_TENTHS = {
    "LL": (10, 10, 10, 10, 9, 8, 7, 7, 7, 7, 6, 5, 4, 4, 5, 6, 7, 8, 9, 10, 10, 10, 10),
    "LL128": (10, 10, 10, 10, 10, 9, 8, 8, 8, 7, 6, 6, 6, 6, 6, 6, 8, 9, 9, 9, 9, 10, 10),
    "Simple": (9, 9, 9, 9, 9, 9, 9, 8, 7, 6, 6, 5, 5, 5, 5, 6, 7, 8, 7, 7, 8, 9, 9),
}
LL_MOST = {"nvlink2": 39e9, "nvlink3": 87.7e9, "nvlink4": 141e9}  # bytes per second that the protocol LL reaches
SHARING = "nvlink3", "nvlink4", "nvlink5"  # links on which NCCL is known to take multiprocessors
NVLS_FROM = 5  # GPUs of a node from which on NCCL uses NVLS: measured on H200, see machine_types' "networks"


class Route(NamedTuple):
    """What some GPUs have between them."""

    gpus: int
    nodes: int
    link: str  # what joins those of a node, a key of nccl.json
    intra_node: float  # bytes per second around the rings of a node, one direction, peak
    transport: str | None  # of the network, a key of nccl.json
    inter_node: float  # bytes per second from a node to the network, peak
    nvls: bool  # whether NVSwitch can add
    same_order: bool  # whether all rings go through the GPUs in one order

    @property
    def gpus_per_node(self) -> int:
        return math.ceil(self.gpus / self.nodes)


def route(gpus: Sequence[int], topology: Topology, concurrent_groups: float = 1) -> Route:
    """The Route of these GPUs (their numbers) of a known machine type; `concurrent_groups`: see collective_seconds."""
    members: dict[int, list[int]] = {}
    for gpu in gpus:
        members.setdefault(topology.node(gpu), []).append(gpu)
    most = max(map(len, members.values()))
    intra_node = min((topology.ring_bandwidth(those) for those in members.values() if len(those) > 1), default=math.inf)
    link = topology.link.key if topology.link.key.startswith("nvlink") else "pcie"
    # no figures of NVLink 5 are known
    link = "pcie" if intra_node <= topology.pcie.bandwidth else {"nvlink5": "nvlink4"}.get(link, link)
    network, kind = topology.network, topology.machine_type
    nics = min(adapters(most, topology), topology.nics / concurrent_groups)
    return Route(
        gpus=len(gpus),
        nodes=len(members),
        link=link,
        intra_node=intra_node,
        transport=network.transport if network else None,
        inter_node=network.bandwidth * nics if len(members) > 1 else math.inf,
        nvls=kind.nvswitch and link == "nvlink4" and most >= NVLS_FROM,
        same_order=kind.nvswitch or link == "pcie",
    )


def adapters(most: int, topology: Topology) -> int:
    """How many network adapters a group uses in a node in which it has so many GPUs: those nearest to them."""
    return max(1, topology.nics * most // topology.machine_type.gpus)


def collective_channels(gpus: Sequence[int], topology: Topology) -> int:
    """How many of a GPU's multiprocessors a collective operation among `gpus`, their numbers in `topology`, keeps from
    the kernels beside it: 0 where that isn't known, with links other than NVLink 3 and later."""
    if topology.link.key not in SHARING or len(gpus) == 1:
        return 0
    members = Counter(map(topology.node, gpus))
    if len(members) == 1:
        return CHANNELS
    return min(CHANNELS, CHANNELS_OF_ADAPTER * adapters(max(members.values()), topology))


def collective_seconds(
    name: str, nbytes: float, gpus: Sequence[int], topology: Topology, concurrent_groups: float = 1
) -> float:
    """Modelled seconds of a collective operation of torch.distributed among `gpus`, their numbers in `topology`.

    name: "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "gather", "scatter",
    "barrier", or "send" between two. `nbytes` are those of the larger side, of one GPU: the output of all_gather, and
    the input of reduce_scatter. `concurrent_groups`: how many groups of GPUs like this one do the same at the same time
    and share each node's network adapters. GPUs whose machine type is not known have rings of one plain link.
    ValueError for GPUs of several nodes without a network.
    """
    if len(gpus) == 1:
        return ROUND
    if topology.machine_type is None:
        return plain_seconds(name, nbytes, len(gpus), topology.link)
    topology.check(max(gpus) + 1)
    return route_seconds(name, nbytes, route(gpus, topology, concurrent_groups), NCCL)


def plain_seconds(name: str, nbytes: float, k: int, link: Link) -> float:
    """The same for `k` GPUs of which nothing is known but the `link` that joins them all."""
    if name == "all_reduce":
        return ring_seconds(nbytes, k, link)
    if name in ("broadcast", "reduce"):
        return pipeline_seconds(nbytes, k, link)
    if name == "send":
        return link_seconds(nbytes, link, "peer")
    return (k - 1) * round_seconds(nbytes / k, link)


def route_seconds(name: str, nbytes: float, route: Route, fitted: dict) -> float:
    """The same along a Route, with the constants `fitted`."""
    if name in ("all_to_all", "gather", "scatter"):
        return exchange_seconds(name, nbytes, route, fitted)
    if name == "barrier":  # an all-reduce of one number
        name = "all_reduce"
    return min(seconds_by_algorithm(name, nbytes, route, fitted).values())


def seconds_by_algorithm(name: str, nbytes: float, route: Route, fitted: dict) -> dict[str, float]:
    """{algorithm: seconds with the best protocol}, of the algorithms that NCCL has for this operation."""
    fastest: dict[str, float] = {}
    for algorithm, protocol in TUNINGS:
        if algorithm == "ring" or (name == "all_reduce" and (algorithm == "tree" or route.nvls)):
            seconds = algorithm_seconds(algorithm, protocol, name, nbytes, route, fitted)
            fastest[algorithm] = min(seconds, fastest.get(algorithm, math.inf))
    return fastest


def all_reduce_by_algorithm(nbytes: float, gpus: Sequence[int], topology: Topology) -> dict[str, float]:
    """{"ring": seconds, "tree": seconds}, modelled, of an all-reduce of `nbytes` among `gpus`, their numbers in
    `topology`, and "nvls" where NVSwitch can add. NCCL takes the fastest, and so does `collective_seconds`.

    ValueError for GPUs whose machine type is not known: the clock has no algorithms there.
    """
    if topology.machine_type is None:
        raise ValueError(f"{topology.link.key}: rings and trees take a machine type, such as link='DGX A100'")
    topology.check(max(gpus) + 1)
    return seconds_by_algorithm("all_reduce", nbytes, route(gpus, topology), NCCL)


def algorithm_seconds(algorithm: str, protocol: str, name: str, nbytes: float, route: Route, fitted: dict) -> float:
    """Seconds of an algorithm with a protocol: its latency, and its bytes at the rate of the slowest link."""
    if protocol == "LL128" and route.link == "pcie":
        return math.inf
    tuning = TUNINGS[algorithm, protocol]
    steps, hops, share = path(algorithm, name, route)
    step = tuning.pcie if route.link == "pcie" else tuning.nvlink
    latency = fitted["begin"][route.link] * tuning.base + fitted["step"][route.link] * steps * step  # µs
    intra_node, inter_node = route.intra_node * fitted["link"][route.link], math.inf  # bytes per second
    if algorithm == "tree":
        intra_node *= fitted["tree"][route.link]
    if algorithm == "nvls":
        intra_node = route.intra_node * fitted["nvls"]
    if route.nodes > 1:
        latency += fitted["hop"][route.transport] * hops * tuning.network
        inter_node = route.inter_node * fitted["network"][route.transport]
        if algorithm != "ring":  # with two nodes each sends every byte once; around a ring, or in a tree, twice
            inter_node *= fitted["tree"][route.link] * (2 if route.nodes == 2 else 1)
    rate = min(intra_node, inter_node) * tuning.efficiency
    size = int(math.log2(max(nbytes, 64) / 64))
    if algorithm == "tree" and size < len(TREE_TENTHS[protocol]):
        rate *= TREE_TENTHS[protocol][size] / 10
    if protocol == "LL":
        rate = min(rate, LL_MOST.get(route.link, rate))
    if name in ("broadcast", "reduce") and not route.same_order:  # the last GPU waits for the first piece
        latency += (route.gpus - 2) * min(nbytes, fitted["piece"]) / rate * 1e6
    return latency * 1e-6 + share * nbytes / rate


def path(algorithm: str, name: str, route: Route) -> tuple[float, float, float]:
    """(steps within nodes, hops between nodes, parts of the message that pass each link) of an algorithm."""
    k, nodes = route.gpus, route.nodes
    if algorithm == "tree":
        return 2 * (route.gpus_per_node - 1), 2 * math.log2(nodes), 2
    if algorithm == "nvls":
        return 1, 2 * math.log2(nodes), 2 * (k - 1) / k
    if name == "all_reduce":
        return 2 * (k - 1) - 2 * (nodes - 1), 2 * (nodes - 1), 2 * (k - 1) / k
    if name in ("broadcast", "reduce", "send"):
        return 1 if route.same_order else k - nodes, nodes - 1, 1
    return k - nodes, nodes - 1, (k - 1) / k


def exchange_seconds(name: str, nbytes: float, route: Route, fitted: dict) -> float:
    """Seconds in which every GPU, or only one of them, sends a part of `nbytes` to each of the others."""
    k, per_node, tuning = route.gpus, route.gpus_per_node, TUNINGS["ring", "Simple"]
    step = fitted["step"][route.link] * (tuning.pcie if route.link == "pcie" else tuning.nvlink)
    latency = fitted["begin"][route.link] * tuning.base + step  # µs
    seconds = nbytes * (k - 1) / k / (route.intra_node * fitted["link"][route.link])
    if route.nodes > 1:
        latency += fitted["hop"][route.transport] * tuning.network
        leaving = nbytes * (k - per_node) / k * (per_node if name == "all_to_all" else 1)
        seconds = max(seconds, leaving / (route.inter_node * fitted["network"][route.transport]))
    return latency * 1e-6 + seconds
