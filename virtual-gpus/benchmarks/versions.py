"""What some programs compute, and how long they take on the modelled clock, with this PyTorch: as JSON.

    python benchmarks/versions.py >2.11.json       # in virtual-gpus, and the same with other versions
    python benchmarks/versions.py *.json           # how far each is from the last

With another PyTorch a step may take up to 0.5 % longer or shorter, where it calls other operations. Values are as near.
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from virtual_gpus import dry_run, virtual_gpus


def lenet():
    convolutions = nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU()
    layers = nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()
    return nn.Sequential(*convolutions, *layers, nn.Linear(84, 10))


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.last_norm = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, X):
        return F.relu(X + self.last_norm(self.two(F.relu(self.norm(self.one(X))))))


def resnet():
    stem = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()
    return nn.Sequential(
        *stem, Block(), nn.MaxPool2d(2), Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    )


def transformer(width=64, heads=4):
    layers = (nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, F.gelu, batch_first=True) for _ in range(2))
    return nn.Sequential(nn.Embedding(100, width), *layers, nn.Linear(width, 100))


def images():
    return torch.randn(16, 1, 28, 28), torch.randint(10, (16,))


def tokens():
    return torch.randint(100, (8, 32)), torch.randint(100, (8, 32))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def stepping(net, optimizer, X, y):
    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(net(X).flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        return loss

    return step


def trained(make, batch, optimizer=sgd, gpus=1):
    """Of ten steps."""
    with virtual_gpus(gpus) as machine:
        torch.manual_seed(0)
        net = make().cuda()
        X, y = (t.cuda() for t in batch())
        step = stepping(nn.DataParallel(net) if gpus > 1 else net, optimizer(net.parameters()), X, y)
        step()
        torch.cuda.synchronize()
        start = machine.elapsed()
        losses = [step() for _ in range(10)]
        torch.cuda.synchronize()
        seconds = machine.elapsed() - start
        norm = sum(p.detach().double().square().sum().item() for p in net.parameters()) ** 0.5
        peak = torch.cuda.max_memory_allocated()
    return {"seconds": seconds, "loss": losses[-1].item(), "norm": norm, "peak memory": peak}


def planned(shard, gpus=16):
    def program():
        net = shard(transformer(1024, 16).cuda())
        X, y = (t.cuda() for t in tokens())
        return stepping(net, torch.optim.AdamW(net.parameters()), X, y)

    made = dry_run(program, gpus, "H100")
    return {"seconds": made.seconds, "peak memory": made.peak_memory[0], "flops": made.flops}


def sharded(net):
    for layer in net:
        fully_shard(layer)
    return fully_shard(net)


def measured():
    return {
        "LeNet": trained(lenet, images),
        "LeNet, 4 GPUs": trained(lenet, images, gpus=4),
        "residual blocks": trained(resnet, images),
        "residual blocks, 4 GPUs": trained(resnet, images, gpus=4),
        "transformer, AdamW": trained(transformer, tokens, torch.optim.AdamW),
        "DDP, 16 GPUs, dry run": planned(lambda net: DistributedDataParallel(net)),
        "FSDP2, 16 GPUs, dry run": planned(sharded),
    }


def compare(names):
    *others, last = (json.loads(Path(name).read_text()) for name in names)
    for name, other in zip(names, others, strict=False):
        for program, values in last.items():
            apart = {what: f"{other[program][what] / value - 1:+.2%}" for what, value in values.items()}
            print(f"{name:12} {program:24}", *(f"{what} {by}" for what, by in apart.items()), sep="  ")


if __name__ == "__main__":
    compare(sys.argv[1:]) if sys.argv[1:] else print(json.dumps(measured(), indent=2))
