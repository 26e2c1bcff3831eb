"""What virtual GPUs there are, as tables: `virtual-gpus gpus`, `virtual-gpus topo`, `virtual-gpus --version`."""

import argparse
import importlib.metadata
import platform

from virtual_gpus.clock.machine_types import MACHINES, NETWORKS
from virtual_gpus.clock.specs import GPUS, LINKS
from virtual_gpus.clock.topology import find_topology


def run(options: argparse.Namespace) -> int:
    if "machine" in options:
        topo(options.machine)
    else:
        gpus()
    return 0


def gpus() -> None:
    rows = [["GPU", "memory", "bandwidth", "16-bit", "32-bit", "link", "PCIe"]]
    for spec in GPUS.values():
        rates = [f"{rate / 1e12:.0f} TFLOP/s" for rate in (spec.bf16 or spec.fp16 or spec.fp32, spec.fp32)]
        bandwidth = f"{spec.bandwidth / 1e9:.0f} GB/s"
        rows.append([spec.key, f"{spec.memory / 2**30:.1f} GiB", bandwidth, *rates, spec.nvlink or "-", spec.pcie])
    print_table(rows)
    print_table(
        [["link", "GB/s in one direction"], *([key, f"{link.bandwidth / 1e9:.0f}"] for key, link in LINKS.items())]
    )
    types = [[kind.key, str(kind.gpus), kind.link or "-", kind.network or "-"] for kind in MACHINES.values()]
    print_table([["machine type", "GPUs", "link", "network"], *types])
    networks = [[network.key, f"{network.bandwidth / 1e9:.1f}"] for network in NETWORKS.values()]
    print_table([["network", "GB/s of a card"], *networks])


def topo(machine: str) -> None:
    """The matrix of nvidia-smi topo -m."""
    kind = MACHINES[machine]
    spec = next(spec for spec in GPUS.values() if kind.link in (None, spec.nvlink))
    print_table(find_topology(machine, spec).matrix(kind.gpus))


def version() -> int:
    for name in ("virtual-gpus", "torch"):
        try:
            print(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            print(name, "(not installed)")
    print("Python", platform.python_version(), "on", platform.platform())
    return 0


def print_table(rows: list[list[str]]) -> None:
    """Rows of words, the first of them a heading; all columns but the first end at the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    print()
    for row in rows:
        cells = [word.rjust(width) for word, width in zip(row, widths, strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
