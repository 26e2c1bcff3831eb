"""How long NCCL takes for a collective operation, along the links that a machine has.

NCCL has some ways to do each: around a ring, along a tree, or within NVSwitch, and protocols of which some save time
for a short message and others for a long one. It estimates each way as a latency and a bandwidth and takes the best,
and so does this module. The steps of a way, and what a step costs, are those of NCCL's own estimate
(https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc). Factors on them, and the parts of a link's peak rate
that are reached, stand in nccl.json; `python -m experiments.collective_fit` fitted them to one half of what others
published.
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

from virtual_gpus.clock.costs import link_seconds, pipeline_seconds, ring_seconds, round_seconds
from virtual_gpus.clock.rates import ROUND

NCCL_PATH = Path(__file__).parent / "nccl.json"
NCCL = json.loads(NCCL_PATH.read_text())
ALGORITHMS = {
    # part of the bandwidth that carries data; µs before the first step, of a step over NVLink, PCIe, and a network
    ("ring", "LL"): (0.5, 6.6, 0.6, 1.0, 2.7),
    ("ring", "LL128"): (0.92, 14.0, 1.9, 2.5, 4.0),
    ("ring", "Simple"): (1.0, 8.4, 3.4, 5.7, 14.0),
    ("tree", "LL"): (1 / 3.8, 6.8, 0.6, 1.0, 5.0),
    ("tree", "LL128"): (7 / 9, 14.0, 1.25, 1.9, 8.5),
    ("tree", "Simple"): (1.0, 8.4, 4.0, 4.0, 14.0),
    ("switch", "Simple"): (1.0, 0.0, 25.0, math.inf, 20.9),
}
# Tenths of a tree's bandwidth that are left for messages of medium size, of 64 bytes (first), 128 bytes, ... to 256 MiB
TREE_TENTHS = {
    "LL": (10, 10, 10, 10, 9, 8, 7, 7, 7, 7, 6, 5, 4, 4, 5, 6, 7, 8, 9, 10, 10, 10, 10),
    "LL128": (10, 10, 10, 10, 10, 9, 8, 8, 8, 7, 6, 6, 6, 6, 6, 6, 8, 9, 9, 9, 9, 10, 10),
    "Simple": (9, 9, 9, 9, 9, 9, 9, 8, 7, 6, 6, 5, 5, 5, 5, 6, 7, 8, 7, 7, 8, 9, 9),
}
LL_MOST = {"nvlink2": 39e9, "nvlink3": 87.7e9, "nvlink4": 141e9}  # bytes per second that the protocol LL reaches
SWITCH_FROM = 5  # GPUs of a node from which on NCCL lets NVSwitch add: measured on H200, see topology's "networks"


class Route(NamedTuple):
    """What some GPUs have between them."""

    gpus: int
    nodes: int
    link: str  # what joins those of a node, a key of nccl.json
    inside: float  # bytes per second around the rings of a node, one direction, peak
    kind: str | None  # that of the network
    outside: float  # bytes per second from a node to the network, peak
    adds: bool  # whether NVSwitch can add
    alike: bool  # whether all rings go through the GPUs in one order

    @property
    def in_a_node(self):
        return math.ceil(self.gpus / self.nodes)


def route(gpus, topology, at_once=1):
    """The Route of these GPUs (their numbers) of a machine of a known type; `at_once`: see collective_seconds."""
    members = {}
    for gpu in gpus:
        members.setdefault(topology.node(gpu), []).append(gpu)
    most = max(map(len, members.values()))
    inside = min((topology.ring(those) for those in members.values() if len(those) > 1), default=math.inf)
    link = topology.link.key if topology.link.key.startswith("nvlink") else "pcie"
    link = "pcie" if inside <= topology.pcie.bandwidth else {"nvlink5": "nvlink4"}.get(link, link)  # nothing is known
    network, kind = topology.network, topology.kind
    cards = min(max(1, topology.cards * most // kind.gpus), topology.cards / at_once)  # those nearest to its GPUs
    outside = network.bandwidth * cards if len(members) > 1 else math.inf
    adds = kind.switched and link == "nvlink4" and most >= SWITCH_FROM
    alike = kind.switched or link == "pcie"
    return Route(len(gpus), len(members), link, inside, network and network.kind, outside, adds, alike)


def collective_seconds(name, nbytes, gpus, topology, at_once=1):
    """Modelled seconds of a collective operation of torch.distributed among `gpus`, their numbers in `topology`.

    name: "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "gather", "scatter",
    "barrier", or "send" between two. `nbytes` are those of the larger side, of one GPU: what all_gather gives, and what
    reduce_scatter takes. `at_once`: how many groups of GPUs like this one do the same at the same time and share each
    node's network cards. GPUs whose machine type is not known have rings of one plain link. ValueError for GPUs of
    several nodes without a network.
    """
    if len(gpus) == 1:
        return ROUND
    if topology.kind is None:
        return plain_seconds(name, nbytes, len(gpus), topology.link)
    topology.check(max(gpus) + 1)
    return route_seconds(name, nbytes, route(gpus, topology, at_once), NCCL)


def plain_seconds(name, nbytes, k, link):
    """The same for `k` GPUs of which nothing is known but the `link` that joins them all."""
    if name == "all_reduce":
        return ring_seconds(nbytes, k, link)
    if name in ("broadcast", "reduce"):
        return pipeline_seconds(nbytes, k, link)
    if name == "send":
        return link_seconds(nbytes, link, "peer")
    return (k - 1) * round_seconds(nbytes / k, link)


def route_seconds(name, nbytes, route, fitted):
    """The same along a Route, with the constants `fitted`."""
    if name in ("all_to_all", "gather", "scatter"):
        return exchange_seconds(name, nbytes, route, fitted)
    if name == "barrier":  # an all-reduce of one number
        name = "all_reduce"
    return min(seconds_by_way(name, nbytes, route, fitted).values())


def seconds_by_way(name, nbytes, route, fitted):
    """{way: its seconds with the best protocol}, of the ways that NCCL has for this operation."""
    found = {}
    for way, protocol in ALGORITHMS:
        if way == "ring" or (name == "all_reduce" and (way == "tree" or route.adds)):
            seconds = way_seconds(way, protocol, name, nbytes, route, fitted)
            found[way] = min(seconds, found.get(way, math.inf))
    return found


def all_reduce_by_way(nbytes, gpus, topology):
    """{"ring": seconds, "tree": seconds}, modelled, of an all-reduce of `nbytes` among `gpus`, their numbers in
    `topology`, and "switch" where NVSwitch can add. NCCL takes the quickest, and so does `collective_seconds`.

    ValueError for GPUs whose machine type is not known: the clock has no ways there.
    """
    if topology.kind is None:
        raise ValueError(f"{topology.link.key}: rings and trees take a machine type, such as link='DGX A100'")
    topology.check(max(gpus) + 1)
    return seconds_by_way("all_reduce", nbytes, route(gpus, topology), NCCL)


def way_seconds(way, protocol, name, nbytes, route, fitted):
    """Seconds of one way with one protocol: its latency, and its bytes through the narrowest place."""
    if protocol == "LL128" and route.link == "pcie":
        return math.inf
    part, begin, *step = ALGORITHMS[way, protocol]
    steps, hops, share = path(way, name, route)
    latency = fitted["begin"][route.link] * begin + fitted["step"][route.link] * steps * step[route.link == "pcie"]
    inside, outside = route.inside * fitted["link"][route.link], math.inf
    if way == "tree":
        inside *= fitted["tree"][route.link]
    if way == "switch":
        inside = route.inside * fitted["switch"]
    if route.nodes > 1:
        latency += fitted["hop"][route.kind] * hops * step[2]
        outside = route.outside * fitted["network"][route.kind]
        if way != "ring":  # with two nodes each sends every byte once; around a ring, or up and down a tree, twice
            outside *= fitted["tree"][route.link] * (2 if route.nodes == 2 else 1)
    rate = min(inside, outside) * part
    size = int(math.log2(max(nbytes, 64) / 64))
    if way == "tree" and size < len(TREE_TENTHS[protocol]):
        rate *= TREE_TENTHS[protocol][size] / 10
    if protocol == "LL":
        rate = min(rate, LL_MOST.get(route.link, rate))
    if name in ("broadcast", "reduce") and not route.alike:  # the last GPU waits for the first piece
        latency += (route.gpus - 2) * min(nbytes, fitted["piece"]) / rate * 1e6
    return latency * 1e-6 + share * nbytes / rate


def path(way, name, route):
    """(steps within nodes, hops between nodes, parts of the message that pass each place) of a way."""
    k, nodes = route.gpus, route.nodes
    if way == "tree":
        return 2 * (route.in_a_node - 1), 2 * math.log2(nodes), 2
    if way == "switch":
        return 1, 2 * math.log2(nodes), 2 * (k - 1) / k
    if name == "all_reduce":
        return 2 * (k - 1) - 2 * (nodes - 1), 2 * (nodes - 1), 2 * (k - 1) / k
    if name in ("broadcast", "reduce", "send"):
        return 1 if route.alike else k - nodes, nodes - 1, 1
    return k - nodes, nodes - 1, (k - 1) / k


def exchange_seconds(name, nbytes, route, fitted):
    """Seconds in which every GPU, or only one of them, sends a part of `nbytes` to each of the others."""
    k, here = route.gpus, route.in_a_node
    _, begin, nvlink, pcie, network = ALGORITHMS["ring", "Simple"]
    step = fitted["step"][route.link] * (pcie if route.link == "pcie" else nvlink)
    latency = fitted["begin"][route.link] * begin + step
    seconds = nbytes * (k - 1) / k / (route.inside * fitted["link"][route.link])
    if route.nodes > 1:
        latency += fitted["hop"][route.kind] * network
        leaving = nbytes * (k - here) / k * (here if name == "all_to_all" else 1)
        seconds = max(seconds, leaving / (route.outside * fitted["network"][route.kind]))
    return latency * 1e-6 + seconds
