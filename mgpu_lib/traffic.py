"""The bytes that cross between GPUs in one training step: split by layers, inside layers, or by data."""

import torch
from torch import nn
from torch.nn import functional as F

from mgpu_lib.models import lenet_module, resnet18
from mgpu_lib.parallel import allreduce, split_batch
from mgpu_lib.splitting import Pair, fresh, layers, stages
from virtual_gpus import virtual_gpus


def networks(width=4096):
    """LeNet, ResNet-18 and an MLP `width` wide, for images (N, 1, 28, 28), made of Pairs: a dict of nn.Sequential."""
    conv1, *between, conv2, relu2, pool2, flatten, full1, relu3, full2 = lenet_module()
    lenet = nn.Sequential(
        Pair(conv1, nn.Sequential(*between), conv2, nn.Sequential(relu2, pool2, flatten)),
        Pair(full1, relu3, full2, nn.Identity()),
    )
    mlp = nn.Sequential(
        Pair(nn.Sequential(nn.Flatten(), nn.Linear(784, width)), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
        Pair(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10), nn.Identity()),
    )
    net = resnet18()
    blocks = [
        Pair(b.conv1, nn.Sequential(b.bn1, nn.ReLU()), b.conv2, b.bn2, b.downsample or nn.Identity())
        for stage in (net.layer1, net.layer2, net.layer3, net.layer4)
        for b in stage
    ]
    stem, head = nn.Sequential(net.conv1, net.bn1, nn.ReLU()), nn.Sequential(net.avgpool, nn.Flatten(), net.fc)
    return {"LeNet": lenet, "ResNet-18": nn.Sequential(stem, *blocks, head), "wide MLP": mlp}


def data_parallel_step(net, X, y, devices):
    """Forward and backward of one batch, with a copy of `net` and a shard of the batch on each device.

    Returns the copies, with the gradients of the loss summed over the whole batch.
    """
    replicas = [fresh(net).to(device) for device in devices]
    for replica, X_shard, y_shard in zip(replicas, *split_batch(X, y, devices), strict=True):
        F.cross_entropy(replica(X_shard), y_shard, reduction="sum").backward()
    for params in zip(*(replica.parameters() for replica in replicas), strict=True):
        allreduce([p.grad for p in params])
    return replicas


def measure(step, net, batch_size, num_gpus):
    """Bytes between GPUs in one step, counted by virtual GPUs that hold shapes only.

    `step` is `layer_wise`, `in_layer` or `data_parallel_step`. The copies of the batch from the CPU are not counted.
    """
    with virtual_gpus(num_gpus, backing="meta") as machine:
        X, y = torch.zeros(batch_size, 1, 28, 28), torch.zeros(batch_size, dtype=torch.int64)
        step(net, X, y, machine.devices)
        return sum(nbytes for ends, nbytes in machine.traffic.items() if set(ends) <= set(map(str, machine.devices)))


@torch.no_grad()
def crossing_layers(net, num_stages):
    """Numbers per image that cross the cuts between `num_stages` stages of `net`; None if it has too few layers."""
    if num_stages > len(layers(net)):
        return None
    H, sizes = torch.zeros(2, 1, 28, 28, device="meta"), []
    for stage in stages(fresh(net).to("meta"), num_stages):
        H = stage(H)
        sizes.append(H[0].numel())
    return sum(sizes[:-1])


@torch.no_grad()
def crossing_pairs(net):
    """Numbers per image that are all-reduced when every Pair of `net` is split: outputs, and gradients of inputs."""
    X, total = torch.zeros(2, 1, 28, 28, device="meta"), 0
    for i, block in enumerate(fresh(net).to("meta")):
        if isinstance(block, Pair):
            total += block.row(block.between(block.column(X)))[0].numel()
            total += X[0].numel() if i > 0 else 0  # nobody asks for the images' gradient
        X = block(X)
    return total


def traffic_table(networks, most_gpus=8):
    """Bytes between GPUs in one step, by formula, for 1 to `most_gpus` GPUs: a list of plain dicts, one per network.

    layer_wise and in_layer hold bytes per image of the batch, data_parallel bytes per step; entry k-1 is for k GPUs.
    None: more GPUs than layers. All in float32, summed over all links. An all-reduce of n numbers between k GPUs moves
    2(k-1)n of them, whatever its pattern.
    """
    table, gpus = [], range(1, most_gpus + 1)
    for name, net in networks.items():
        parameters = sum(p.numel() for p in net.parameters())
        cuts, pairs = [crossing_layers(net, k) for k in gpus], crossing_pairs(net)
        table.append(
            {
                "name": name,
                "parameters": parameters,
                "layers": len(layers(net)),
                "layer_wise": [None if numbers is None else 2 * 4 * numbers for numbers in cuts],
                "in_layer": [2 * (k - 1) * 4 * pairs for k in gpus],
                "data_parallel": [2 * (k - 1) * 4 * parameters for k in gpus],
            }
        )
    return table
