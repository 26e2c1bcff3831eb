"""How long collective operations take: what must hold of any model, and by hand where that is easy."""

import math

import pytest
from test_topology import topology

from virtual_gpus.clock import nccl
from virtual_gpus.clock.costs import link_seconds, pipeline_seconds, ring_seconds, round_seconds
from virtual_gpus.clock.machine_types import MACHINES, NETWORKS
from virtual_gpus.clock.specs import find_gpu
from virtual_gpus.clock.topology import find_topology

NAMES = "all_reduce all_gather reduce_scatter broadcast reduce all_to_all gather scatter send".split()
SIZES = [2**n for n in range(4, 31)]


def bus(nbytes, gpus, where):
    """The bus bandwidth of an all-reduce, GB/s."""
    share = 2 * (len(gpus) - 1) / len(gpus)
    return share * nbytes / nccl.collective_seconds("all_reduce", nbytes, gpus, where) / 1e9


@pytest.mark.parametrize("kind", MACHINES)
@pytest.mark.parametrize("name", NAMES)
def test_more_bytes_take_longer_and_none_faster_than_the_link(kind, name):
    where, gpus = topology(kind), range(2) if name == "send" else range(MACHINES[kind].gpus)
    seconds = [nccl.collective_seconds(name, nbytes, gpus, where) for nbytes in SIZES]
    assert seconds == sorted(seconds) and 5e-6 < seconds[0] < 500e-6
    assert SIZES[-1] / 2 / seconds[-1] < where.ring_bandwidth(range(MACHINES[kind].gpus)) * 1.1


@pytest.mark.parametrize("network", NETWORKS)
def test_nodes_are_slower_than_one(network):
    where = topology("DGX A100", network)
    for nbytes in SIZES:
        one, two, four = (nccl.collective_seconds("all_gather", nbytes, range(n), where) for n in (8, 16, 32))
        assert one < two < four
    cards = where.nics * where.network.bandwidth / 1e9
    assert bus(2**30, range(32), where) < cards and bus(2**30, range(16), where) < min(2 * cards, 300)


def test_two_nodes_send_each_byte_once_up_and_down_a_tree():
    """With one card each, NCCL's bus bandwidth exceeds the card's: github.com/NVIDIA/nccl-tests/issues/22."""
    where = topology("DGX A100", "Ethernet 100")
    assert bus(2**30, range(16), where) > 12.5 > bus(2**30, range(32), where)


def test_nvswitch_adds_from_five_gpus_on():
    where = topology("DGX H100")
    assert bus(2**30, range(8), where) > 1.2 * bus(2**30, range(4), where)


def test_a_route_is_as_narrow_as_its_narrowest_place():
    where = topology("DGX-1V")
    assert nccl.route([0, 3], where)[:4] == (2, 1, "nvlink2", 50e9)
    assert nccl.route([0, 5], where)[:4] == (2, 1, "pcie", 6e9)
    half = nccl.route([0, 1, 2, 3, 8, 9, 10, 11], topology("DGX-1V", "InfiniBand EDR"))
    assert (half.nodes, half.gpus_per_node) == (2, 4)
    assert (half.intra_node, half.inter_node) == (100e9, 25e9)  # two of four cards
    alone = nccl.route([0, 8], topology("DGX-1V", "InfiniBand EDR"))
    assert (alone.intra_node, alone.inter_node) == (math.inf, 12.5e9)


def test_groups_that_communicate_at_once_share_a_nodes_network_cards():
    where = topology("DGX A100", "Ethernet 100")  # one card for eight GPUs
    one, all_eight = [0, 8], [node * 8 + gpu for node in range(2) for gpu in range(8)]
    assert [where.concurrent_groups(gpus) for gpus in (one, [0, 4, 8, 12], all_eight)] == [8, 4, 1]
    assert nccl.route(one, where).inter_node == nccl.route(all_eight, where).inter_node == 12.5e9
    assert nccl.route(one, where, concurrent_groups=8).inter_node == 12.5e9 / 8
    # each card sends about as much for eight groups of a gibibyte each as for one group of all GPUs with eight
    groups = nccl.collective_seconds("all_gather", 2**30, range(0, 256, 8), where, concurrent_groups=8)
    assert groups == pytest.approx(nccl.collective_seconds("all_gather", 2**33, range(256), where), rel=0.05)

    plenty = topology("DGX A100", "InfiniBand HDR")  # a card for each GPU
    assert nccl.route(one, plenty, concurrent_groups=8) == nccl.route(one, plenty)
    assert find_topology("nvlink", find_gpu("A100-40")).concurrent_groups(one) == 1


def test_a_node_with_few_ranks_shares_its_cards_among_those(monkeypatch):
    where = topology("DGX-1V", "InfiniBand EDR")  # four cards for eight GPUs
    for ranks, shared, cards in ((8, 8, 0.5), (2, 2, 1), (1, 1, 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert where.concurrent_groups([0, 8]) == shared
        assert nccl.route([0, 8], where, shared).inter_node == cards * 12.5e9


def test_without_a_machine_type_a_collective_goes_around_one_ring():
    plain = find_topology("nvlink", find_gpu("A100-40"))
    said = {name: nccl.collective_seconds(name, 2**24, range(8), plain) for name in NAMES}
    assert said["all_reduce"] == ring_seconds(2**24, 8, plain.link)
    assert said["broadcast"] == said["reduce"] == pipeline_seconds(2**24, 8, plain.link)
    assert said["send"] == link_seconds(2**24, plain.link, "peer")
    assert said["all_gather"] == said["all_to_all"] == 7 * round_seconds(2**21, plain.link)
    assert nccl.collective_seconds("all_reduce", 2**24, [3], plain) == nccl.ROUND


def test_the_fastest_algorithm_of_an_all_reduce_is_taken():
    one, many = topology("DGX H100"), topology("DGX A100", "InfiniBand HDR")
    for where, gpus in ((one, 8), (one, 4), (many, 64)):
        for nbytes in SIZES:
            found = nccl.all_reduce_by_algorithm(nbytes, range(gpus), where)
            assert list(found) == ["ring", "tree", "nvls"][: 3 if (where, gpus) == (one, 8) else 2]
            assert min(found.values()) == nccl.collective_seconds("all_reduce", nbytes, range(gpus), where)
    few, whole = (nccl.all_reduce_by_algorithm(nbytes, range(gpus), many) for nbytes, gpus in ((64, 1024), (2**30, 8)))
    assert few["ring"] > 10 * few["tree"] and whole["ring"] < whole["tree"]
    with pytest.raises(ValueError, match="nvlink3: rings and trees take a machine type, such as link='DGX A100'"):
        nccl.all_reduce_by_algorithm(64, range(4), find_topology("nvlink3", find_gpu("A100-80")))
    with pytest.raises(ValueError, match="network"):
        nccl.all_reduce_by_algorithm(64, range(16), one)
