"""The networks of the book: LeNet from raw tensors and as a module, ResNets for small images, a CNN for color."""

from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional as F


def lenet_params(seed=0):
    """The eight tensors W1, b1 … W4, b4 that LeNet starts from, on the CPU and without gradients.

    Shapes: W1 (20, 1, 3, 3), W2 (50, 20, 5, 5), W3 (800, 128), W4 (128, 10), one bias per output; 129,068 numbers.
    Weights are normal with variance 2 / inputs (He et al. 2015, arXiv:1502.01852), biases 0. With d2l's 0.01 for every
    layer the signal all but vanishes, and nothing is learned in the first 235 steps of 256 images.
    The same `seed` gives the same values. `get_params` makes trainable copies of them.
    """
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape, inputs):
        return torch.randn(shape, generator=generator) * (2 / inputs) ** 0.5

    return [
        weight(20, 1, 3, 3, inputs=9),
        torch.zeros(20),
        weight(50, 20, 5, 5, inputs=500),
        torch.zeros(50),
        weight(800, 128, inputs=800),
        torch.zeros(128),
        weight(128, 10, inputs=128),
        torch.zeros(10),
    ]


def lenet(X, params):
    """Logits (N, 10) of the images X (N, 1, 28, 28); N may be 0. X and `params` lie on one device."""
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    H = F.relu(F.conv2d(X, W1, b1))  # (N, 20, 26, 26)
    H = F.avg_pool2d(H, 2)  # (N, 20, 13, 13)
    H = F.relu(F.conv2d(H, W2, b2))  # (N, 50, 9, 9)
    H = F.avg_pool2d(H, 2)  # (N, 50, 4, 4)
    H = F.relu(H.flatten(1) @ W3 + b3)  # (N, 800) -> (N, 128)
    return H @ W4 + b4


def lenet_bn_params(seed=0):
    """`lenet_params`, and a scale and a shift for each channel of the two convolutions: (20,), (20,), (50,), (50,)."""
    return [*lenet_params(seed), torch.ones(20), torch.zeros(20), torch.ones(50), torch.zeros(50)]


def lenet_bn(X, params, normalize):
    """`lenet` with batch norm, for `lenet_bn_params`: normalize(H, scale, shift), one of BatchNorm's methods, is
    called on what each convolution puts out."""
    W1, b1, W2, b2, W3, b3, W4, b4, scale1, shift1, scale2, shift2 = params
    H = F.relu(normalize(F.conv2d(X, W1, b1), scale1, shift1))
    H = F.avg_pool2d(H, 2)
    H = F.relu(normalize(F.conv2d(H, W2, b2), scale2, shift2))
    H = F.avg_pool2d(H, 2)
    H = F.relu(H.flatten(1) @ W3 + b3)
    return H @ W4 + b4


class BatchNorm:
    """What normalizes inside `lenet_bn`, on every GPU by itself, as nn.DataParallel's replicas do.

    In training, `norm.by_batch`, the mean and variance of the batch at hand normalize, and running statistics follow
    them; to evaluate, `norm.by_running_statistics`, those normalize. They are kept as an optimizer keeps its state, by
    parameter, so replicas have statistics of their own. A batch of no images changes none.
    Source: Ioffe & Szegedy 2015 (arXiv:1502.03167); momentum 0.1 and epsilon 1e-5 as in nn.BatchNorm2d.
    """

    def __init__(self):
        self.statistics = {}  # {scale: [mean, variance]}, one number for each channel

    def by_batch(self, H, scale, shift):
        return F.batch_norm(H, *self.statistics_of(scale), scale, shift, training=True)

    def by_running_statistics(self, H, scale, shift):
        return F.batch_norm(H, *self.statistics_of(scale), scale, shift)

    def statistics_of(self, scale):
        if scale not in self.statistics:
            self.statistics[scale] = [torch.zeros_like(scale.detach()), torch.ones_like(scale.detach())]
        return self.statistics[scale]


def lenet_module(batch_norm=False):
    """The network of `lenet` as an nn.Sequential, or that of `lenet_bn`.

    Takes (N, 1, 28, 28), gives logits (N, 10). Starts from torch's global random state, as PyTorch's layers do.
    """
    layers = {
        **{"conv1": nn.Conv2d(1, 20, 3), "norm1": nn.BatchNorm2d(20), "relu1": nn.ReLU(), "pool1": nn.AvgPool2d(2)},
        **{"conv2": nn.Conv2d(20, 50, 5), "norm2": nn.BatchNorm2d(50), "relu2": nn.ReLU(), "pool2": nn.AvgPool2d(2)},
        **{"flatten": nn.Flatten(), "full1": nn.Linear(800, 128), "relu3": nn.ReLU(), "full2": nn.Linear(128, 10)},
    }
    if not batch_norm:
        del layers["norm1"], layers["norm2"]
    return nn.Sequential(OrderedDict(layers))


def require_torchvision():
    """The torchvision module. Raises ImportError, with what to install, when it is missing or does not fit torch."""
    try:
        import torchvision
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # "operator torchvision::nms does not exist"
        raise ImportError(
            f"torchvision does not fit torch {torch.__version__} ({error}): install both from one index, with "
            "`pip install --force-reinstall torch torchvision`, and for the CPU-only builds of both add "
            "`--index-url https://download.pytorch.org/whl/cpu`"
        ) from None
    return torchvision


def resnet18(num_classes=10, in_channels=1):
    """ResNet-18 for images of 28x28: torchvision's, with a 3x3 stem of stride 1 and no max-pool, 11.2 million numbers.

    Takes (N, in_channels, 28, 28), gives logits (N, num_classes). Starts from torch's global random state. The original
    stem, made for 224x224, would leave 7x7 pixels. Raises ImportError when torchvision does not work.
    """
    net = require_torchvision().models.resnet18(num_classes=num_classes)
    net.conv1 = nn.Conv2d(in_channels, 64, kernel_size=3, padding=1, bias=False)
    net.maxpool = nn.Identity()
    return net


def resnet8(num_classes=10):
    """A ResNet of eight layers that a processor can train: a stem, three of ResNet-18's blocks, a linear layer.

    Takes (N, 1, 28, 28), gives logits (N, num_classes): 19,714 numbers for 10 classes. The stem and two blocks halve
    the pixels, to 4x4; channels are 8, 8, 16, 32. Starts from torch's global random state. Raises ImportError when
    torchvision does not work.
    """
    block = require_torchvision().models.resnet.BasicBlock

    def halving(inputs, outputs):
        return block(inputs, outputs, 2, nn.Conv2d(inputs, outputs, 1, stride=2, bias=False))

    stem = [nn.Conv2d(1, 8, kernel_size=3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    blocks = [block(8, 8), halving(8, 16), halving(16, 32)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, num_classes))


class SimpleCNN(nn.Module):
    """Two 3x3 convolutions (3 -> 64 -> 128 channels), the mean over all positions, one linear layer to the logits.

    Takes (N, 3, height, width) of any size, gives logits (N, num_classes): 76,938 numbers for 10 classes. Starts from
    torch's global random state.
    """

    def __init__(self, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(64, 128, kernel_size=3, padding=1)
        self.head = nn.Linear(128, num_classes)

    def forward(self, X):
        H = F.relu(self.conv2(F.relu(self.conv1(X))))
        return self.head(H.mean(dim=(2, 3)))  # one row of logits per image
