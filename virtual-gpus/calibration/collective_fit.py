"""Fit the constants of collective operations to one half of the published tables.

    python -m calibration.collective_fit

writes virtual-gpus/virtual_gpus/clock/nccl.json. As in `clock_fit` each setting is drawn toward a plain
starting value, by as much as it is known beforehand: what the tables say nothing about, as TCP, stays there.
"""

import math
from collections import Counter

import numpy as np

from calibration import fitting, published_collectives
from calibration.fitting import nested
from calibration.record import provenance, write
from virtual_gpus.clock import nccl
from virtual_gpus.clock.machine_types import MACHINES, NETWORKS
from virtual_gpus.clock.specs import GPUS
from virtual_gpus.clock.topology import Topology, find_topology

OUT = nccl.NCCL_PATH
GPU = {"nvlink2": "V100", "nvlink3": "A100-40", "nvlink4": "H100", None: "A100-40"}  # one with these links
SPREAD = 0.15  # how far a good prediction may be off, as a factor e**s
# (place in nccl.json): (starting value, its uncertainty as a factor e**s). NCCL reckons with 20 of 25 GB/s a NVLink and
# 12 of 15.8 over PCIe (src/graph/topo.h), with 0.85 of NVSwitch (0.92 for trees): src/graph/tuning.cc
LINKS, TRANSPORTS = ("nvlink2", "nvlink3", "nvlink4", "pcie"), ("RDMA", "EFA", "Slingshot", "TCP")
START = {
    **{("link", link): (0.76 if link == "pcie" else 0.8, 0.2) for link in LINKS},
    **{("begin", link): (1.0, 0.7) for link in LINKS},
    **{("step", link): (1.0, 0.5) for link in LINKS},
    **{("tree", link): (0.92, 0.2) for link in LINKS},
    ("nvls",): (1.0, 0.2),
    ("piece",): (2e6, 0.7),
    **{("network", kind): (0.9, 0.2) for kind in TRANSPORTS},
    **{("hop", kind): (1.0, 0.7) for kind in TRANSPORTS},
}


def route(table):
    """The nccl.Route of a published table."""
    kind = MACHINES[table["machine"]]
    plain = find_topology(kind.key, GPUS[GPU[kind.link]])
    topology = Topology(kind, plain.link, plain.pcie, NETWORKS.get(table["network"]), table["cards"])
    gpus = (0, 1) if table["collective"] == "sendrecv" else range(table["gpus"])
    if table["nodes"] > 1:
        here = table["gpus"] // table["nodes"]
        gpus = [node * kind.gpus + gpu for node in range(table["nodes"]) for gpu in range(here)]
    return nccl.route(gpus, topology)


def errors(table, fitted, where):
    """Of each row, by how much the modelled bus bandwidth along the Route `where` is too high, as a logarithm."""
    name = table["collective"].replace("sendrecv", "send")
    return [
        math.log(microseconds * 1e-6 / nccl.route_seconds(name, nbytes, where, fitted))
        for nbytes, microseconds, _ in table["rows"]
    ]


def fit(tables):
    """{key of START: value}, to these tables; each curve counts as one."""
    repeated = Counter(table["curve"] for table in tables)
    routes = [(table, route(table)) for table in tables]
    weights = [1 / math.sqrt(repeated[table["curve"]]) for table in tables for _ in table["rows"]]

    def all_errors(values):
        constants = nested(values)
        return [error for table, where in routes for error in errors(table, constants, where)]

    return fitting.fit(START, all_errors, SPREAD, np.array(weights))


def main():
    tables = [table for table in published_collectives.tables() if table.get("half") == "fit"]
    about = {**provenance("collective_fit"), "tables": len(tables)}
    write(OUT, {**nested(fit(tables)), "provenance": about})


if __name__ == "__main__":
    main()
