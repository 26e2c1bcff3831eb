"""One device is the oracle: every parallel program of the book computes the gradient that one device computes.

On 1 to 4 virtual GPUs, with batches that they share evenly, unevenly, and that are too small for all of them. The
programs are the library's, and those that only a page shows: what the page shows is executed, nothing is copied.

Networks with batch normalization are outside. It looks at a whole batch, so from shards or micro-batches it computes
something else than one device does, and no program could agree. Chapters 6 and 11 show that; test_splitting.py tests
what does agree, splitting by layers and inside layers, where each GPU sees the whole batch.
"""

import copy
from functools import cache, partial
from itertools import pairwise

import pytest
import torch
from pages import shown, solution
from torch import nn
from torch.nn import functional as F

from mgpu_lib import collectives, parallel, primitives, splitting, tensor_parallel, traffic
from mgpu_lib.models import lenet, lenet_params
from mgpu_lib.virtual import virtual_gpus

PARAMS = [p.double() for p in lenet_params()]  # 64 bits: what differs by more than 1e-10 is no rounding
NET = traffic.networks(width=10)["LeNet"].double()  # the module that chapter 11 splits
LR = 0.5


def make_net():
    return copy.deepcopy(NET)


def make_layers(*sizes):
    """Linear layers in 64 bits, the same numbers on each call."""
    torch.manual_seed(0)
    return [nn.Linear(*pair).double() for pair in pairwise(sizes)]


def make_batch(rows):
    generator = torch.Generator().manual_seed(rows)
    return torch.rand(rows, 1, 28, 28, generator=generator).double(), torch.randint(10, (rows,), generator=generator)


def features(X, numbers=12):
    """Some pixels of each image, for a small layer."""
    return X.flatten(1)[:, 300 : 300 + numbers].clone()


def gradients(module):
    return [p.grad for p in module.parameters()]


def alone(net, X, y):
    """Plain PyTorch on the CPU: the gradients of the mean loss, for a copy of `net`."""
    net = splitting.fresh(net).cpu()
    F.cross_entropy(net(X), y).backward()
    return gradients(net)


# The library's programs, and others for the same two networks. Each takes a batch on the CPU and devices, and returns
# the gradients of the mean loss: one list per replica.


def stepped(step):
    """Gradients from what a step with learning rate LR does to lasting replicas of LeNet's parameters."""

    def program(X, y, devices):
        replicas = [parallel.get_params(PARAMS, device) for device in devices]
        loss = step(X, y, replicas, devices, LR)
        if step is parallel.train_batch:
            assert loss == pytest.approx(F.cross_entropy(lenet(X, PARAMS), y).item(), abs=1e-12)
        return [[(before - p.detach().cpu()) / LR for before, p in zip(PARAMS, params)] for params in replicas]

    return program


def reduced(reduce):
    """The step of chapter 4 with another all-reduce: `reduce` works on one list of gradients per GPU, in place."""

    def program(X, y, devices):
        replicas = [parallel.get_params(PARAMS, device) for device in devices]
        for params, X_shard, y_shard in zip(replicas, *parallel.split_batch(X, y, devices)):
            F.cross_entropy(lenet(X_shard, params), y_shard, reduction="sum").backward()
        reduce([[p.grad for p in params] for params in replicas])
        return [[p.grad / len(X) for p in params] for params in replicas]

    return program


def one_by_one(allreduce):
    def reduce(device_grads):
        for same in zip(*device_grads):
            allreduce(list(same))

    return reduce


def wrapped(forward):
    """A module on all GPUs, in whose original the gradients arrive: `forward(net, X, devices)` gives the logits."""

    def program(X, y, devices):
        net = make_net().to(devices[0])
        F.cross_entropy(forward(net, X.to(devices[0]), devices), y.to(devices[0])).backward()
        return [gradients(net)]

    return program


def replicas_of_a_module(X, y, devices):
    return [[grad / len(X) for grad in gradients(net)] for net in traffic.data_parallel_step(make_net(), X, y, devices)]


def layer_wise(way, micro_batches):
    def program(X, y, devices):
        stages = way(make_net(), X, y, devices, micro_batches)
        return [[grad / len(X) for stage in stages for grad in gradients(stage)]]

    return program


def in_layer(way):
    """The parts of each parameter are put together again. What every GPU holds whole must be right on every GPU."""

    def program(X, y, devices):
        joined = []
        for block, parts in zip(make_net(), way(make_net(), X, y, devices)):
            for name, whole in block.named_parameters():
                grads = [
                    dict(part.named_parameters())[name].grad.cpu() / len(X)
                    for part in parts
                    if name in dict(part.named_parameters())
                ]
                cut = [dim for dim in range(whole.dim()) if grads[0].shape[dim] != whole.shape[dim]]
                joined.append(torch.cat(grads, cut[0]) if cut else grads[0])
        return [joined]

    return program


def accumulated(X, y, devices):
    """Gradient accumulation on one device: pieces of three rows, and a smaller one for what is left."""
    net = make_net().to(devices[0])
    names = shown("03", "gradient", "pieces", net=net, X=X.to(devices[0]), y=y.to(devices[0]))
    names["gradient"](names["pieces"](3, lambda n: n / len(X)))
    return [gradients(net)]


def sum_loss(X, y, devices):
    """Chapter 6: the loss is computed inside the wrapped module."""
    net = make_net().to(devices[0])
    SumLoss = shown("06", "WithLoss", "SumLoss")["SumLoss"]
    (nn.DataParallel(SumLoss(net), devices)(X, y).sum() / len(X)).backward()
    return [gradients(net)]


def in_phases(X, y, devices):
    """Chapter 5: data_parallel and its backward pass, by parts whose time is taken; each GPU must get some rows."""
    net, devices = make_net().to(devices[0]), devices[: len(X.chunk(len(devices)))]
    names = shown("05", "phase", "step_in_phases", devices=devices, seconds={})
    names["step_in_phases"](net, X.to(devices[0]), y.to(devices[0]), devices)
    return [gradients(net)]


def with_names(X, y, replicas, devices, lr):
    """Chapter 7: train_batch, its parts named for the timeline."""
    shown("07", "named_step", phase=torch.cuda.nvtx.range)["named_step"](X, y, replicas, devices, lr)


def gradients_for_the_noise(X, y, devices):
    """Chapter 9: the mean gradients of the shards, none of them empty. Weighted by their rows they are the batch's."""
    devices = devices[: len(X)]
    replicas = [parallel.get_params(PARAMS, device) for device in devices]
    found = shown("09", "replica_gradients", devices=devices, replicas=replicas)["replica_gradients"](X, y)
    shares = [len(shard) / len(X) for shard in X.tensor_split(len(devices))]
    return [[sum(share * grad.cpu() for share, grad in zip(shares, same)) for same in zip(*found)]]


clipped_step = solution("museum", "clipped_step", **shown("museum", "backward"))
ON_PARAMS = {
    "train_batch": stepped(parallel.train_batch),
    "star_allreduce": reduced(one_by_one(collectives.star_allreduce)),
    "ring_allreduce": reduced(one_by_one(collectives.ring_allreduce)),
    "tree_allreduce": reduced(one_by_one(collectives.tree_allreduce)),
    "bucketed_allreduce": reduced(partial(collectives.bucketed_allreduce, bucket_bytes=100_000)),
    "chapter 4: solution ring_allreduce": reduced(one_by_one(solution("04", "ring_allreduce"))),
    "chapter 4: solution tree_allreduce": reduced(one_by_one(solution("04", "tree_allreduce"))),
    "chapter 4: solution bucketed_allreduce": reduced(
        partial(solution("04", "bucketed_allreduce"), bucket_bytes=100_000)
    ),
    "chapter 7: named_step": stepped(with_names),
    "chapter 9: replica_gradients": gradients_for_the_noise,
    "museum: right_step": stepped(shown("museum", "backward", "right_step")["right_step"]),
    "museum: solution clipped_step": stepped(partial(clipped_step, length=1e9)),  # nothing is that long
}
ON_NET = {
    "traffic.data_parallel_step": replicas_of_a_module,
    "primitives.data_parallel": wrapped(primitives.data_parallel),
    "nn.parallel.data_parallel": wrapped(nn.parallel.data_parallel),
    "nn.DataParallel": wrapped(lambda net, X, devices: nn.DataParallel(net, devices)(X)),
    "layer_wise": layer_wise(splitting.layer_wise, 1),
    "layer_wise, 3 micro-batches": layer_wise(splitting.layer_wise, 3),
    "in_layer": in_layer(tensor_parallel.in_layer),
    "chapter 3: pieces": accumulated,
    "chapter 11: layer_wise": layer_wise(shown("11", "layer_wise")["layer_wise"], 2),
    "chapter 11: in_layer": in_layer(
        shown("11", "summed", "SumGradients", "SumOutputs", "together", "in_layer")["in_layer"]
    ),
    "chapter 5: by_hand": wrapped(shown("05", "by_hand")["by_hand"]),
    "chapter 5: step_in_phases": in_phases,
    "chapter 6: SumLoss": sum_loss,
}


# Programs for networks of their own. Each returns the gradients, and beside them those that one device computes.


def two_places(name):
    def program(X, y, devices):
        torch.manual_seed(0)
        net = shown("02", "TwoPlaces", "CutEarlier")[name](devices[0]).double()
        whole = copy.deepcopy(net).cpu()
        whole.device = torch.device("cpu")
        tokens, labels = (features(X, 20) * 10_000).long(), y % 2
        F.cross_entropy(net(tokens), labels.to(devices[0])).backward()
        return [gradients(net)], alone(whole, tokens, labels)

    return program


def split_loss(X, y, devices):
    names = shown("11", run=["two-halves"], devices=devices)
    net = names["net"].double()
    names["split_loss"](X, y).backward()
    return [gradients(net)], alone(net, X, y)


def linear_by_hand(cell, dim):
    """A linear layer, forward and backward by hand; `dim` of its weight is cut. The outputs are compared, too."""

    def program(X, y, devices):
        X, [layer] = features(X).requires_grad_(), make_layers(12, 10)
        Y = layer(X)
        Y.retain_grad()
        F.cross_entropy(Y, y).backward()
        names = shown(
            "11",
            "shares",
            "copies",
            "joined",
            "all_gather",
            "close",
            run=[cell],
            gpus=devices,
            X=X,
            Y=Y,
            dY=Y.grad,
            layer=layer,
        )
        Ys, dW, dXs = names["Ys"], names["joined"](names["dWs"], dim), names["dXs"]
        Ys, dXs = (names["all_gather"](Ys), dXs) if dim == 0 else (Ys, names["all_gather"](dXs))
        return [[Y_i, dW, dX] for Y_i, dX in zip(Ys, dXs)], [Y.detach(), layer.weight.grad, X.grad]

    return program


OPERATORS = "summed", "SumGradients", "SumOutputs"


def pair(X, y, devices):
    """Two layers with one sum each way."""
    X, [first, second] = features(X).requires_grad_(), make_layers(12, 20, 10)
    wanted = "joined", *OPERATORS, "together", "split_layer", "split_pair", "pair"
    names = shown("11", *wanted, fresh=splitting.fresh, X=X, first=first, second=second)
    Xs, columns, rows = names["split_pair"](devices)
    Ys = names["pair"](Xs, columns, rows)
    torch.autograd.backward([F.cross_entropy(Y, y.to(Y.device)) for Y in Ys])
    joined = [
        names["joined"](grads, dim)
        for grads, dim in [
            ([part.weight.grad for part in columns], 0),
            ([part.bias.grad for part in columns], 0),
            ([part.weight.grad for part in rows], 1),
        ]
    ]
    expected = alone(nn.Sequential(first, nn.ReLU(), second), X, y)
    return [[*joined, rows[0].bias.grad, X_i.grad] for X_i in Xs], [*expected, X.grad]


def split_net(X, y, devices):
    """A pair behind a layer that is whole on every GPU. Its loss is the sum of the outputs."""
    X, [front, first, second] = features(X), make_layers(12, 12, 20, 10)
    net = nn.Sequential(front, first, nn.ReLU(), second)
    names = shown(
        "11",
        "copies",
        "joined",
        *OPERATORS,
        "split_layer",
        "split_pair",
        "split_net",
        fresh=splitting.fresh,
        gpus=devices,
        X=X,
        net=net,
        first=first,
        second=second,
    )
    _, found = names["split_net"](names["SumGradients"].apply)
    net(X).sum().backward()
    return [found], [layer.weight.grad for layer in (front, first, second)]


def linear_three_gpus(X, y, devices):
    X, [layer] = features(X), make_layers(12, 10)
    inputs = X.to(devices[0]).requires_grad_(), *(p.detach().clone().requires_grad_() for p in layer.parameters())
    output = solution("11", "linear_three_gpus")(*inputs, devices)
    F.cross_entropy(output, y.to(output.device)).backward()
    expected = alone(layer, X.requires_grad_(), y)
    return [[tensor.grad for tensor in inputs]], [X.grad, *expected]


def row_parallel(X, y, devices):
    """It has no backward pass, so its outputs are compared."""
    X, [layer] = features(X), make_layers(12, 10)
    parts = [
        [part.to(device) for part, device in zip(tensor.detach().tensor_split(len(devices), 1), devices)]
        for tensor in (X, layer.weight)
    ]
    outputs = solution("11", "row_parallel")(*parts, layer.bias.detach().to(devices[0]))
    return [[output] for output in outputs], [layer(X).detach()]


def one_block(X, y, devices):
    """DataParallel around the middle of a network."""
    torch.manual_seed(0)
    DataParallelModel = shown("06", "Spy", "DataParallelModel", seen=[])["DataParallelModel"]
    net = DataParallelModel(devices).double().to(devices[0])
    X, y = features(X, 10), y % 5
    F.cross_entropy(net(X.to(devices[0])), y.to(devices[0])).backward()
    return [gradients(net)], alone(nn.Sequential(net.block1, net.block2.module, net.block3), X, y)


def split_hidden_units(X, y, devices):
    """Half of the hidden units on each GPU. The museum's bug is in the inputs; here both halves see the same."""
    names = shown("museum", "small_net", "split_in_layer", "logits", devices=devices, seed=0)
    halves = names["split_in_layer"]()
    F.cross_entropy(names["logits"]([X, X], halves), y.to(devices[0])).backward()
    net = names["small_net"]()
    for layer in (net[1], net[3]):
        layer.bias = None
    found = [torch.cat([half[i].grad.cpu() for half in halves], dim=1 - i).T for i in (0, 1)]
    return [found], alone(net, X, y)


def module_step(X, y, devices):
    """The museum's bug is in buffers; this network has none."""
    names = shown("museum", "small_net", "module_step", seed=0)
    nets = [names["small_net"]().to(device) for device in devices]
    names["module_step"](X, y, nets, devices, LR)
    before = names["small_net"]()
    return [
        [((old - new.cpu()) / LR).detach() for old, new in zip(before.parameters(), net.parameters())] for net in nets
    ], alone(before, X, y)


WITH_ORACLE = {
    "chapter 2: TwoPlaces": two_places("TwoPlaces"),
    "chapter 2: CutEarlier": two_places("CutEarlier"),
    "chapter 11: split_loss": split_loss,
    "chapter 11: column-parallel": linear_by_hand("column-parallel", dim=0),
    "chapter 11: row-parallel": linear_by_hand("row-parallel", dim=1),
    "chapter 11: pair": pair,
    "chapter 11: split_net": split_net,
    "chapter 11: solution linear_three_gpus": linear_three_gpus,
    "chapter 11: solution row_parallel": row_parallel,
    "chapter 6: DataParallelModel": one_block,
    "museum: logits": split_hidden_units,
    "museum: module_step": module_step,
}
PROGRAMS = {**ON_PARAMS, **ON_NET, **WITH_ORACLE}
ONLY = {
    "chapter 3: pieces": 1,
    "chapter 2: TwoPlaces": 1,
    "chapter 2: CutEarlier": 1,  # they take no number of GPUs
    "chapter 11: split_loss": 2,
    "museum: logits": 2,
}


@cache
def one_device(rows, raw):
    """The gradients of the mean loss by plain PyTorch, on the CPU."""
    X, y = make_batch(rows)
    if not raw:
        return alone(NET, X, y)
    params = [p.clone().requires_grad_() for p in PARAMS]
    F.cross_entropy(lenet(X, params), y).backward()
    return [p.grad for p in params]


@pytest.mark.sweep(5)  # which meets all counts and all sizes of a batch
@pytest.mark.parametrize("rows", [1, 2, 7, 8])
@pytest.mark.parametrize(
    "name, count", [(name, count) for name in PROGRAMS for count in (1, 2, 3, 4) if ONLY.get(name, count) == count]
)
def test_a_parallel_program_computes_what_one_device_does(name, count, rows):
    X, y = make_batch(rows)
    with virtual_gpus(count) as machine:
        found = PROGRAMS[name](X, y, list(machine.devices))
        replicas, expected = found if name in WITH_ORACLE else (found, one_device(rows, raw=name in ON_PARAMS))
        replicas = [[grad.detach().cpu() for grad in grads] for grads in replicas]
    for grads in replicas:
        assert [grad.shape for grad in grads] == [grad.shape for grad in expected]
        gap = max((ours - right).abs().max().item() for ours, right in zip(grads, expected))
        assert gap < 1e-10


@pytest.mark.parametrize(
    "reduce",
    [
        lambda grads: None,
        one_by_one(lambda data: [tensor.div_(2) for tensor in (collectives.ring_allreduce(data), data)[1]]),
    ],
)
def test_a_wrong_program_does_not_pass(reduce):
    """The negative control: without an all-reduce, and with a mean in place of a sum."""
    X, y = make_batch(7)
    with virtual_gpus(2) as machine:
        for grads in reduced(reduce)(X, y, list(machine.devices)):
            gap = max((ours.cpu() - right).abs().max().item() for ours, right in zip(grads, one_device(7, raw=True)))
            assert gap > 1e-3
