"""Machines with several GPUs, and the networks between them: data sheets, each with its source."""

import itertools
from dataclasses import dataclass

from virtual_gpus.clock.specs import Source, read_sources

BROADWELL, SAPPHIRE_RAPIDS, AMD = 6e9, 22e9, 16e9  # bytes per second between sockets with such processors, "nccl-topo"

MACHINE_SOURCES = read_sources("machine_sources")


@dataclass(frozen=True)
class Network:
    """What joins nodes."""

    key: str
    transport: str  # how its adapters work, a key of nccl.json
    bandwidth: float  # of an adapter (NIC), bytes per second, one direction, peak
    nics: int | None  # adapters of a node; None: as many as its machine type has
    source: Source


NETWORKS = {
    key: Network(key, transport, gigabits * 1e9 / 8, nics, MACHINE_SOURCES[source])
    for key, transport, gigabits, nics, source in (
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
    """A machine with several GPUs."""

    key: str
    link: str | None  # key in LINKS; None: no NVLink
    pcie_switches: tuple[tuple[int, int], ...]  # (socket, PCIe switch) of each GPU: a switch has one link to the host
    nics: int  # network adapters of a node
    socket_bandwidth: float  # bytes per second from one socket to the other
    source: Source | None  # None: no product, but what is plain
    nvlinks: dict[tuple[int, int], int] | None = None  # {(smaller, larger): links that join two GPUs}; not named: none
    nvswitch: bool = False  # joins all GPUs, so that every pair has all of a GPU's NVLinks; `nvlinks` is not asked
    network: str | None = None  # that it comes with, a key of NETWORKS

    @property
    def gpus(self) -> int:
        """How many GPUs a node has."""
        return len(self.pcie_switches)


def _machine(
    key: str,
    link: str | None,
    gpus: int,
    nics: int,
    socket_bandwidth: float,
    source: str | None,
    network: str | None = None,
    **nvlinks,
) -> MachineType:
    """Of its `gpus` two are under each PCIe switch, half of them on each of two sockets."""
    switches = tuple((gpu // (gpus // 2), gpu // 2) for gpu in range(gpus))
    return MachineType(
        key, link, switches, nics, socket_bandwidth, MACHINE_SOURCES.get(source), network=network, **nvlinks
    )


def _all_pairs(links: int) -> dict[tuple[int, int], int]:
    """Of four GPUs."""
    return dict.fromkeys(itertools.combinations(range(4), 2), links)


_DGX1_PAIRS = {1: "01 02 13 26 37 45 46 57", 2: "03 04 12 15 23 47 56 67"}  # that so many links join
_DGX1 = {(int(pair[0]), int(pair[1])): n for n, pairs in _DGX1_PAIRS.items() for pair in pairs.split()}
MACHINES = {
    each.key: each
    for each in (  # key, link, GPUs, NICs, bandwidth between sockets, source, network
        _machine("DGX-1V", "nvlink2", 8, 4, BROADWELL, "dgx1-topo", "InfiniBand EDR", nvlinks=_DGX1),
        _machine("DGX A100", "nvlink3", 8, 8, AMD, "dgx-a100", "InfiniBand HDR", nvswitch=True),
        _machine("DGX H100", "nvlink4", 8, 8, SAPPHIRE_RAPIDS, "dgx-h100", "InfiniBand NDR", nvswitch=True),
        _machine("p4d.24xlarge", "nvlink3", 8, 4, AMD, "networks", "EFA", nvswitch=True),
        _machine("p5.48xlarge", "nvlink4", 8, 32, SAPPHIRE_RAPIDS, "networks", "EFA", nvswitch=True),
        _machine("HGX A100 4-GPU", "nvlink3", 4, 4, AMD, "perlmutter", "Slingshot 11", nvlinks=_all_pairs(4)),
        _machine("HGX H100 4-GPU", "nvlink4", 4, 4, AMD, "snellius", "InfiniBand HDR", nvlinks=_all_pairs(6)),
        _machine("PCIe tree", None, 8, 1, AMD, None, nvlinks={}),
    )
}
