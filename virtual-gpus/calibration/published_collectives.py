"""Published figures of collective operations: which count, and which half each of them belongs to.

The tables stand in published_collectives.json, as nccl-tests printed them on the machines of others. All here was
decided from what the sources say of their machines, and committed, before any constant was fitted or any error seen.
"""

import json
import re
from pathlib import Path

from calibration.halves import halve

PATH = Path(__file__).parent / "published_collectives.json"
# the beginning of a table's key: the machine type, the network, and how many of its cards a node has
MACHINES = {
    "v100-8-": ("DGX-1V", None, 0),
    "a100pcie-8-": ("PCIe tree", None, 0),
    "rtx4090-8-": ("PCIe tree", None, 0),
    "a100-8-": ("DGX A100", None, 0),
    "h100-8-xxrjun": ("DGX H100", None, 0),
    "h100-4of8-": ("DGX H100", None, 0),
    "h100-4-snellius": ("HGX H100 4-GPU", None, 0),
    "h100-8-snellius2": ("HGX H100 4-GPU", "InfiniBand HDR", 4),
    "dgxa100-hdr": ("DGX A100", "InfiniBand HDR", 8),
    "dgx1-ib": ("DGX-1V", "InfiniBand EDR", 4),
    "dgx1-roce": ("DGX-1V", "RoCE 100", 2),
    "p3dn-efa": ("DGX-1V", "EFA", 1),
    "p4d-efa": ("DGX A100", "EFA", 4),
    "p4de-efa": ("DGX A100", "EFA", 4),
    "p5-efa": ("DGX H100", "EFA", 32),
    "polaris": ("HGX A100 4-GPU", "Slingshot 11", 2),
    "perlmutter": ("HGX A100 4-GPU", "Slingshot 11", 4),
    "oke-a100": ("DGX A100", "RoCE 100", 16),
    "gcp-a3mega": ("DGX H100", None, 8),
}
RULES = {
    "host": "GeForce cards can't reach each other over PCIe: NCCL goes through the host's memory, which isn't modelled",
    "trust": "the source says that its figures validate connectivity, and need not be what the machine can do",
    "network": "the network (GPUDirect-TCPXO) has no data sheet here",
}
# What ends the key of a table that is one of several of the same measurement: a repetition, one of several equal nodes,
# or another program or setting for it. They go to one half, or the model would be fitted to what it is tested on.
REPEATED = re.compile(
    r"(?<=-panlichen)-\w+-\d+$|(?<=-xxrjun)-\d+-\w+$|((?<=-snellius)|(?<=-snellius2))-\w+$|(?<=polaris-2)-\w+-setup\d$"
)


def tables():
    """All tables, with the keys "machine", "network", "cards", "category", "curve", "half" and "excluded"."""
    found = json.loads(PATH.read_text())["tables"]
    for table in found:
        begin = max((begin for begin in MACHINES if table["key"].startswith(begin)), key=len)
        table["machine"], table["network"], table["cards"] = MACHINES[begin]
        table["category"] = category(table)
        table["curve"] = f"{REPEATED.sub('', table['key'])}/{table['collective']}"
        table["excluded"] = excluded(table)
    halve([table for table in found if not table["excluded"]], lambda table: table["category"])
    return found


def category(table):
    """What errors are put together for: one node of a machine type, or several nodes on a kind of network."""
    return table["machine"] if table["nodes"] == 1 else (table["network"] or "other").split()[0]


def excluded(table):
    """The rule by which a table does not count, or None."""
    if "4090" in table["gpu"]:
        return "host"
    if "validate connectivity" in table["note"]:
        return "trust"
    if table["nodes"] > 1 and table["network"] is None:
        return "network"
    return None
