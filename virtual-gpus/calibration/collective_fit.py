"""Fit the constants of collective operations to one half of the published tables.

    python -m calibration.collective_fit

writes virtual-gpus/virtual_gpus/clock/nccl.json. As in `clock_fit` each setting is drawn towards a plain
starting value, by as much as it is known beforehand: what the tables say nothing about, as TCP, stays there.
"""

import math

import numpy as np
from scipy.optimize import least_squares

from calibration import published_collectives
from calibration.clock_fit import soft
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
LINKS, KINDS = ("nvlink2", "nvlink3", "nvlink4", "pcie"), ("RDMA", "EFA", "Slingshot", "TCP")
START = {
    **{("link", link): (0.76 if link == "pcie" else 0.8, 0.2) for link in LINKS},
    **{("begin", link): (1.0, 0.7) for link in LINKS},
    **{("step", link): (1.0, 0.5) for link in LINKS},
    **{("tree", link): (0.92, 0.2) for link in LINKS},
    ("nvls",): (1.0, 0.2),
    ("piece",): (2e6, 0.7),
    **{("network", kind): (0.9, 0.2) for kind in KINDS},
    **{("hop", kind): (1.0, 0.7) for kind in KINDS},
}


def constants(values):
    """The tables of nccl.json, from one value for each key of START."""
    found = {}
    for (table, *key), value in zip(START, values, strict=True):
        if key:
            found.setdefault(table, {})[key[0]] = float(value)
        else:
            found[table] = float(value)
    return found


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
    """The constants: least squares of the logarithms, robust against single rows; each curve counts as one."""
    repeated = {t["curve"]: sum(other["curve"] == t["curve"] for other in tables) for t in tables}
    start, loose = np.array(list(START.values())).T
    routes = [(table, route(table)) for table in tables]

    def residuals(x):
        fitted = constants(np.exp(x))
        found = [
            soft(np.array(errors(table, fitted, where)) / SPREAD) / math.sqrt(repeated[table["curve"]])
            for table, where in routes
        ]
        return np.concatenate([*found, (x - np.log(start)) / loose])

    found = least_squares(residuals, np.log(start), x_scale=loose)
    return constants([float(f"{math.exp(x):.3g}") for x in found.x])


def main():
    tables = [table for table in published_collectives.tables() if table.get("half") == "fit"]
    about = {**provenance("collective_fit"), "tables": len(tables)}
    write(OUT, {**fit(tables), "provenance": about})


if __name__ == "__main__":
    main()
