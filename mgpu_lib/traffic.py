"""The bytes that all GPUs send in one training step of a transformer: as a pipeline, cut inside its layers, by data."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from mgpu_lib.models import lenet_module, resnet18
from mgpu_lib.splitting import Pair
from mgpu_lib.transformer import Transformer, rotary_angles

TEXT = 8192  # tokens of a text: Llama 3 was trained on such (Grattafiori et al. 2024, arXiv:2407.21783)
ACTIVATION = 2  # bytes, in BF16
GRADIENT = 4  # bytes of a parameter's, in FP32, as Llama 3 adds them up


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


def pipeline_step(net, tokens):
    """Forward and backward of `tokens` (rows, n + 1), with a Transformer's layer on each rank and one micro-batch.

    The first rank has the embedding, too, the last one norm, head and loss. Gradients are in this rank's part of `net`.
    """
    rank, last, H = dist.get_rank(), dist.get_world_size() - 1, None
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if rank > 0:
        H = net.head.weight.new_empty(*inputs.shape, net.embedding.embedding_dim)
        dist.recv(H, rank - 1)
        H.requires_grad_()
    X = net.embedding(inputs) if H is None else H
    X = net.layers[rank](X, rotary_angles(X.shape[1], net.head_width, X.device, X.dtype))
    if rank == last:
        F.cross_entropy(net.head(net.norm(X)).flatten(0, 1), targets.flatten()).backward()
    else:
        dist.send(X.detach(), rank + 1)
        grad = torch.empty_like(X)
        dist.recv(grad, rank + 1)
        X.backward(grad)
    if rank > 0:
        dist.send(H.grad, rank - 1)


def parameters(sizes):
    """How many a Transformer of these `sizes` has."""
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(**sizes).parameters())


def numbers_per_token(sizes):
    """(pipeline, tensor): what each token of the batch adds to a step, in numbers per cut, and per two all-reduces.

    Tensor: four all-reduces in each layer, those of the embedding and of the head, and three numbers for the loss.
    """
    return sizes["width"], (4 * sizes["layers"] + 2) * sizes["width"] + 3


def traffic_table(networks, most_gpus=8):
    """Bytes between GPUs in one step, for 1 to `most_gpus` GPUs: a list of plain dicts, one per network.

    networks   {name: what Transformer takes}, such as LLAMA
    Of the entries, pipeline and tensor hold bytes per text of TEXT tokens, data bytes per step; entry k-1
    is for k GPUs. None: more GPUs than layers, or key-value heads that k GPUs can't share; `limits` says of what there
    are too few. Summed over all links: an all-reduce of n numbers between k GPUs moves 2(k-1)n, around a ring or along
    a tree. Activations and their gradients are in BF16, the gradients of parameters in FP32.
    """
    table, gpus = [], range(1, most_gpus + 1)
    for name, sizes in networks.items():
        layers, heads = sizes["layers"], sizes["kv_heads"]
        pipeline, tensor = (2 * ACTIVATION * TEXT * numbers for numbers in numbers_per_token(sizes))
        table.append(
            {
                "name": name,
                "limits": {"pipeline": f"{layers} layers", "tensor": f"{heads} key-value heads"},
                "pipeline": [(k - 1) * pipeline if k <= layers else None for k in gpus],
                "tensor": [None if heads % k else (k - 1) * tensor for k in gpus],
                "data": [2 * (k - 1) * GRADIENT * parameters(sizes) for k in gpus],
            }
        )
    return table
