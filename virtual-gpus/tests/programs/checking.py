"""What the programs of checks share: a network, batches, and the network trained alone, on the CPU, as the oracle."""

import contextlib
import copy
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

F = nn.functional
CHECKS = []
STEPS = 3


def check(function):
    """A function of (rank, n), which all n ranks call."""
    CHECKS.append(function)
    return function


def network(hidden=9):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, hidden), nn.Tanh(), nn.Linear(hidden, 6), nn.Tanh(), nn.Linear(6, 3)).double()


class Branches(nn.Module):
    """A branch for each remainder of a number, and the last one for nobody."""

    def __init__(self, n=3):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(5, 4).double()
        self.branches = nn.ModuleList([nn.Linear(4, 3).double() for _ in range(n)])

    def forward(self, X, number):
        return self.branches[number % (len(self.branches) - 1)](torch.tanh(self.trunk(X)))


class Tied(nn.Module):
    """The last layer has the weight of the first; a layer between is frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = (nn.Linear(5, 5).double() for _ in range(3))
        self.last.weight = self.first.weight
        self.middle.requires_grad_(False)

    def forward(self, X):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(X)))))


def batches(rows=8, steps=STEPS, shape=(5,), classes=3):
    """Whole batches: each rank takes its part of every one of them."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        X = torch.randn(rows, *shape, dtype=torch.float64, generator=generator)
        yield X, torch.randint(classes, (rows,), generator=generator)


def part(tensor, rank, n):
    return tensor.chunk(n)[rank].cuda()


def sgd(parameters, **options):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, **options)


def train(net, data, optimizer=sgd, loss=F.cross_entropy):
    """The network, after a step with each of the (X, y) of `data`."""
    optimizer = optimizer(net.parameters()) if callable(optimizer) else optimizer
    for X, y in data:
        optimizer.zero_grad()
        loss(net(X), y).backward()
        optimizer.step()
    return net


def trained_alone(net, optimizer=sgd, data=None, **options):
    """A copy of `net` after the whole batches, on the CPU."""
    return train(copy.deepcopy(net), data or batches(), optimizer, **options)


def parts(rank, n, data=None):
    """This rank's parts of the batches."""
    for X, y in data or batches():
        yield part(X, rank, n), part(y, rank, n)


def whole(tensor):
    """All of a DTensor or another tensor, on the CPU."""
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().cpu()


def same(tensor, expected, tolerance=1e-9):
    assert tensor.device.type == "cuda" and tensor.dtype == expected.dtype, (tensor.device, tensor.dtype)
    torch.testing.assert_close(whole(tensor), expected.detach(), rtol=tolerance, atol=tolerance)


def same_networks(net, expected, tolerance=1e-9):
    """Parameters and buffers of `net`, on this rank's GPU, are those of `expected`, by name."""
    found, wanted = net.state_dict(), expected.state_dict()
    assert found.keys() == wanted.keys(), (found.keys(), wanted.keys())
    for name in wanted:
        same(found[name], wanted[name], tolerance)


def raises(kind, words, function, *args, **kwargs):
    """An error of that kind, with these words: one text, or several."""
    try:
        function(*args, **kwargs)
    except kind as error:
        assert all(each in str(error) for each in ([words] if isinstance(words, str) else words)), error
        return
    raise AssertionError(f"nothing was raised that says {words!r}")


def equal_on_all_ranks(tensor):
    everybody = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, tensor.detach().contiguous())
    return all(torch.equal(tensor, other) for other in everybody)


def check_accumulation(ddp, net, rank, n):
    """Two micro-batches a step: only the second travels, and it takes the first along."""
    data, optimizer = list(batches(16)), sgd(ddp.parameters())
    for X, y in data:
        optimizer.zero_grad()
        first, second = zip(part(X, rank, n).chunk(2), part(y, rank, n).chunk(2), strict=True)
        with ddp.no_sync():
            (F.cross_entropy(ddp(first[0]), first[1]) / 2).backward()
        assert not equal_on_all_ranks(next(ddp.parameters()).grad)
        (F.cross_entropy(ddp(second[0]), second[1]) / 2).backward()
        optimizer.step()
    same_networks(ddp.module, trained_alone(net, data=data))


def check_unused_parameters(ddp, alone, rank, n):
    """Other ones on other ranks, and in other steps; what no rank uses has no gradient, what was used under no_sync
    has."""
    optimizers = sgd(ddp.parameters()), sgd(alone.parameters())
    for step, (X, y) in enumerate(batches()):
        for optimizer in optimizers:
            optimizer.zero_grad()
        used = [step + r * (step > 0) for r in range(n)]  # in the first step the same on all ranks
        with ddp.no_sync() if step > 1 else contextlib.nullcontext():
            F.cross_entropy(ddp(part(X, rank, n), step), part(y, rank, n)).backward()
        F.cross_entropy(ddp(part(X, rank, n), used[rank]), part(y, rank, n)).backward()
        for number, x, t in zip(used, X.chunk(n), y.chunk(n), strict=True):
            ((F.cross_entropy(alone(x, step), t) + F.cross_entropy(alone(x, number), t)) / n).backward()
        for found, expected in zip(ddp.module.parameters(), alone.parameters(), strict=True):
            assert (found.grad is None) == (expected.grad is None)
        for optimizer in optimizers:
            optimizer.step()
    same_networks(ddp.module, alone)


def run(names):
    """Run the checks of these names, or all: rank 0 prints "ok NAME" after each that has passed on all ranks.

    A rank whose check fails ends with its traceback, and torchrun then ends the others, which may wait for it.
    """
    dist.init_process_group("nccl", timeout=timedelta(seconds=80))
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    for function in CHECKS:
        if not names or function.__name__ in names:
            function(rank, n)
            dist.barrier(dist.new_group(backend="gloo"))
            if rank == 0:
                print("ok", function.__name__, flush=True)
    dist.destroy_process_group()
