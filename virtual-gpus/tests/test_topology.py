"""Which links join which GPUs: against what nvidia-smi prints on such machines, and what follows for copies."""

import functools

import pytest
import torch

from virtual_gpus import collective_seconds, virtual_gpus
from virtual_gpus.clock.machine_types import MACHINE_SOURCES, MACHINES, NETWORKS
from virtual_gpus.clock.specs import LINKS, find_gpu
from virtual_gpus.clock.topology import count_rings, find_topology

# nvidia-smi topo -m of a DGX-1 with V100s: tests/test_topologies.py of microsoft/msccl-tools
DGX1 = """
GPU0 X NV1 NV1 NV2 NV2 SYS SYS SYS
GPU1 NV1 X NV2 NV1 SYS NV2 SYS SYS
GPU2 NV1 NV2 X NV2 SYS SYS NV1 SYS
GPU3 NV2 NV1 NV2 X SYS SYS SYS NV1
GPU4 NV2 SYS SYS SYS X NV1 NV1 NV2
GPU5 SYS NV2 SYS SYS NV1 X NV2 NV1
GPU6 SYS SYS NV1 SYS NV1 NV2 X NV2
GPU7 SYS SYS SYS NV1 NV2 NV1 NV2 X
"""
GPU = {"nvlink2": "V100", "nvlink3": "A100-80", "nvlink4": "H100", None: "T4"}  # with these links


@functools.cache  # it keeps the rings that it has found
def topology(name, network=None):
    return find_topology(name, find_gpu(GPU[MACHINES[name].link]), network)


def test_a_dgx1_is_what_nvidia_smi_says():
    header, *rows = topology("DGX-1V").matrix(8)
    assert header == ["", *(f"GPU{gpu}" for gpu in range(8))]
    assert rows == [line.split() for line in DGX1.strip().splitlines()]


@pytest.mark.parametrize(
    "name, pair, expected",
    [
        ("DGX-1V", (0, 3), ("NV2", 50e9)),
        ("DGX-1V", (3, 7), ("NV1", 25e9)),
        ("DGX-1V", (0, 7), ("SYS", 6e9)),
        ("DGX A100", (0, 7), ("NV12", 300e9)),
        ("DGX H100", (1, 2), ("NV18", 450e9)),
        ("HGX A100 4-GPU", (0, 3), ("NV4", 100e9)),
        ("PCIe tree", (0, 1), ("PIX", 15.75e9)),
        ("PCIe tree", (0, 2), ("NODE", 15.75e9)),
        ("PCIe tree", (0, 4), ("SYS", 15.75e9)),
    ],
)
def test_what_joins_a_pair(name, pair, expected):
    there, back = topology(name).connection(*pair), topology(name).connection(*reversed(pair))
    assert there == back and there.name == expected[0]
    assert there.bandwidth == pytest.approx(expected[1], rel=1e-3) and there.latency > 0


@pytest.mark.parametrize("kind", MACHINES.values(), ids=MACHINES)
def test_no_gpu_has_more_nvlinks_than_there_are(kind):
    if kind.nvlinks:
        ends = [gpu for pair, links in kind.nvlinks.items() for gpu in pair * links]
        assert [ends.count(gpu) for gpu in range(kind.gpus)] == [LINKS[kind.link].links] * kind.gpus
    assert kind.source is None or kind.source in MACHINE_SOURCES.values()


def test_every_source_has_a_figure():
    used = {row.source for row in (*MACHINES.values(), *NETWORKS.values())} - {None}
    assert used == set(MACHINE_SOURCES.values()) - {MACHINE_SOURCES["nccl-topo"]}
    assert all(source.url.startswith("https://") for source in MACHINE_SOURCES.values())


def test_nodes_are_joined_by_their_network_cards():
    two = topology("DGX A100", "InfiniBand HDR")
    assert [two.node(gpu) for gpu in (0, 7, 8, 15)] == [0, 0, 1, 1] and two.nics == 8
    assert two.connection(7, 8).name == "NET" and two.connection(8, 9).name == "NV12"
    assert two.name == "DGX A100 (NVLink 3, 12 links, InfiniBand HDR)"
    assert topology("DGX A100", "Ethernet 25").nics == 1  # a machine has one such card, not eight


@pytest.mark.parametrize(
    "gpus, expected",
    [(range(8), 6), ([0, 1, 2, 3], 4), ([0, 3], 2), ([0, 1], 1), ([0, 1, 2], 2), ([0, 5], 0), ([0, 1, 5], 0)],
)
def test_rings_in_a_dgx1(gpus, expected):
    """All eight: three rings in both directions, as NCCL finds them. By hand for the few."""
    assert count_rings(tuple(gpus), topology("DGX-1V").nvlinks) == expected


def test_rings_take_pcie_where_nvlinks_do_not_reach():
    assert topology("DGX-1V").ring_bandwidth([0, 5]) == 6e9 and topology("DGX-1V").ring_bandwidth(range(8)) == 150e9
    assert topology("HGX H100 4-GPU").ring_bandwidth(range(4)) == topology("DGX H100").ring_bandwidth(range(4)) == 450e9


@pytest.mark.parametrize("pair, at_once", [(("cuda:0", "cuda:1"), False), (("cuda:0", "cuda:2"), True)])
def test_gpus_under_one_switch_share_its_way_to_the_host(pair, at_once):
    with virtual_gpus(4, "V100", "DGX-1V", backing="meta") as machine:
        X = torch.ones(2**26).pin_memory()
        for device in pair:
            X.to(device, non_blocking=True)
    first, second = (e for e in machine.timeline if e.row == "copy in")
    assert (second.start < first.end) == at_once


def test_ranks_have_gpus_node_by_node(monkeypatch):
    two = topology("DGX A100", "InfiniBand HDR")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert two.gpus_of([0, 7, 8]) == [0, 7, 8]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # two ranks on each node
    assert two.gpus_of([0, 1, 2, 3]) == [0, 1, 8, 9]


def test_without_a_machine_type_all_pairs_have_the_link():
    plain = find_topology("nvlink", find_gpu("V100"))
    assert plain.connection(0, 7)[1:] == (plain.link.bandwidth, plain.link.latency) and plain.matrix(3)[1][3] == "NV6"
    assert find_topology("pcie", find_gpu("V100")).matrix(2)[1] == ["GPU0", "X", "PHB"]
    assert collective_seconds("all_reduce", 2**20, range(4), plain) < 1e-3
