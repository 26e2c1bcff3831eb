"""Machines with several GPUs, and the networks between them: data sheets, each with its source, of data_sheets.json."""

from dataclasses import dataclass
from typing import Any

from virtual_gpus.clock.specs import SHEETS, Source, sources_of

MACHINE_SOURCES = sources_of(SHEETS["machine_sources"])


@dataclass(frozen=True)
class Network:
    """What joins nodes."""

    key: str
    transport: str  # how its adapters work, a key of nccl.json
    bandwidth: float  # of an adapter (NIC), bytes per second, one direction, peak
    nics: int | None  # adapters of a node; None: as many as its machine type has
    source: Source


NETWORKS = {
    key: Network(key, sheet["transport"], sheet["gigabits"] * 1e9 / 8, sheet["nics"], MACHINE_SOURCES[sheet["source"]])
    for key, sheet in SHEETS["networks"].items()
}


@dataclass(frozen=True)
class MachineType:
    """A machine with several GPUs."""

    key: str
    link: str | None  # key in LINKS; None: no NVLink
    gpus: int  # of a node
    nics: int  # network adapters of a node
    socket_bandwidth: float  # bytes per second from one socket to the other, by its processors: see "nccl-topo"
    source: Source | None  # None: no product, but what is plain
    nvlinks: dict[tuple[int, int], int]  # {(smaller, larger): links that join two GPUs}; not named: none
    nvswitch: bool = False  # joins all GPUs, so that every pair has all of a GPU's NVLinks; `nvlinks` is not asked
    network: str | None = None  # that it comes with, a key of NETWORKS

    def pcie_switch(self, gpu: int) -> tuple[int, int]:
        """(socket, PCIe switch) of a node's GPU: two are under each switch, which has one link to the host, and half of
        them on each of two sockets."""
        return gpu // (self.gpus // 2), gpu // 2


def machine_of(key: str, sheet: dict[str, Any]) -> MachineType:
    """The machine type of an entry in the file, which has GB/s, and names pairs of GPUs as "01"."""
    nvlinks = {(int(a), int(b)): links for (a, b), links in sheet.get("nvlinks", {}).items()}
    bandwidth, source = sheet["socket_bandwidth"] * 1e9, MACHINE_SOURCES.get(sheet["source"])
    return MachineType(key=key, **sheet | {"nvlinks": nvlinks, "socket_bandwidth": bandwidth, "source": source})


MACHINES = {key: machine_of(key, sheet) for key, sheet in SHEETS["machines"].items()}
