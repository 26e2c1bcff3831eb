"""What chapters on many processes build by hand is right, on several ranks.

In "DistributedDataParallel" its three versions and its ring, in "Sharding" its three stages.
"""

import pages
import pytest

from mgpu_lib.ranks import Ranks

PAGE = "10-distributeddataparallel"
MAGIC = "%%ranks"
CHECKS = """
import copy

def network(dtype=torch.float64):
    torch.manual_seed(0)
    tied = nn.Linear(5, 5)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), tied, nn.Tanh(), tied, nn.Linear(5, 4)).to(dtype)

def trained(net, wrap, finish, parts, steps=3):
    net = copy.deepcopy(net)
    net.to(parts[0][0].device)
    wrapped, optimizer = wrap(net), torch.optim.SGD(net.parameters(), lr=0.1)
    for X, y in parts[:steps]:
        optimizer.zero_grad()
        F.cross_entropy(wrapped(X), y).backward()
        finish(wrapped)
        optimizer.step()
    return [p.detach().cpu() for p in net.parameters()]

k = dist.get_world_size()
whole = [(torch.rand(6 * k, 3, dtype=torch.float64), torch.arange(6 * k) % 4) for _ in range(3)]
mine = [(X.chunk(k)[rank].cuda(), y.chunk(k)[rank].cuda()) for X, y in whole]
alone = trained(network(), lambda net: net, lambda net: None, whole)

def gap(wrap, finish):
    return max((p - q).abs().max().item() for p, q in zip(trained(network(), wrap, finish, mine), alone))
"""


def cell(name, page=PAGE):
    """The source of a cell that runs on all ranks, without the magic."""
    [found] = [cell for cell in pages.cells(page) if cell.id == name]
    first, _, rest = found.source.partition("\n")
    assert first.startswith(MAGIC), f"{name} does not run on ranks"
    return rest


@pytest.fixture(scope="module")
def group():
    """Three ranks that have run the page's cells."""
    ranks = Ranks(3)
    try:
        ranks.run(cell("hello"))
        for name in ("version-1", "version-2", "version-3", "version-3-end", "ring", "star"):
            ranks.run(cell(name))
        ranks.run("torch.manual_seed(0)" + CHECKS)
        yield ranks
    finally:
        ranks.stop()


@pytest.mark.slow
def test_all_three_versions_take_the_steps_of_one_device(group):
    """A layer that is used twice has one gradient, and several steps find a hook that works only once."""
    group.run("assert gap(lambda net: net, average_gradients) < 1e-12")
    group.run("assert gap(PerParameter, PerParameter.wait) < 1e-12")
    for size in (1e-9, 1e-4, 3e-4, 4):  # MiB: a bucket for each gradient, some, and one for all
        group.run(f"assert gap(lambda net: Buckets(net, bucket_mb={size}), finish_buckets) < 1e-12")
    # The negative control: without the mean, and without the wait.
    group.run("assert min(gap(lambda net: net, lambda net: None), gap(PerParameter, lambda net: None)) > 1e-4")


@pytest.mark.slow
def test_ring_and_star_sum(group):
    group.run("""
for way in ring_all_reduce, star_all_reduce:
    for numbers in 1, 2, 7, 12:
        x = torch.arange(float(numbers), device="cuda") + rank
        expected = k * torch.arange(float(numbers)) + sum(range(k))
        way(x)
        assert x.cpu().equal(expected), x
""")


# The stages of "Sharding"

SHARDING = "12-sharding"
STAGES = """
def state(stage, parts):
    \"\"\"The parameters after three steps in this stage; the whole of a layer that is freed is gathered.\"\"\"
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4)).double().cuda()
    layers = [net[0], net[2], net[4]]
    units = [classes[stage](layer if stage == 3 else list(layer.parameters()), adam) for layer in layers]
    for X, y in parts:
        F.cross_entropy(net(X), y).backward()
        for unit in units:
            if stage == 1:
                unit.reduce()
            unit.update()
        net.zero_grad()
    for unit in units:
        if stage == 3:
            unit.gather()
    return [p.detach().cpu() for p in net.parameters()]

def alone(data):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4)).double()
    _, step = with_adam(net)
    for X, y in data:
        F.cross_entropy(net(X), y).backward()
        step()
    return list(net.parameters())

classes = {1: Stage1, 2: Stage2, 3: Stage3}
torch.manual_seed(1)
data = [(torch.rand(2 * ranks, 3, dtype=torch.float64), torch.arange(2 * ranks) % 4) for _ in range(3)]
parts = [(X.chunk(ranks)[rank].cuda(), y.chunk(ranks)[rank].cuda()) for X, y in data]

def gap(stage, parts=parts):
    return max((p - q).abs().max().item() for p, q in zip(state(stage, parts), alone(data)))
"""


@pytest.fixture(scope="module")
def sharding():
    """Three ranks that have run the page's cells: none of the layers' sizes is a multiple of three."""
    ranks = Ranks(3)
    try:
        for name in ("hello", "flat", "stage-1", "stage-2", "stage-3"):
            ranks.run(cell(name, SHARDING))
        ranks.run(cell("adam", SHARDING) + STAGES)
        yield ranks
    finally:
        ranks.stop()


@pytest.mark.slow
def test_all_three_stages_take_the_steps_of_one_device(sharding):
    for stage in (1, 2, 3):
        sharding.run(f"assert gap({stage}) < 1e-12")
    # The negative control: with the rows of another rank.
    sharding.run("assert gap(3, [(X[:2].cuda(), y[:2].cuda()) for X, y in data]) > 1e-4")
