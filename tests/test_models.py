"""LeNet and ResNet-18 have the shapes they say; LeNet starts from the same values and computes what torch.nn does."""

import pytest
import torch
from torch import nn

from mgpu_lib.models import lenet, lenet_params, resnet18
from mgpu_lib.parallel import get_params


def test_lenet_params_are_eight_plain_leaves():
    params = lenet_params()
    assert [tuple(p.shape) for p in params] == [
        (20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (800, 128), (128,), (128, 10), (10,)]
    assert sum(p.numel() for p in params) == 129_068
    assert all(p.is_leaf and not p.requires_grad and p.dtype == torch.float32 for p in params)


def test_the_seed_decides_the_values_and_the_global_state_stays():
    state = torch.random.get_rng_state()
    first, again, other = lenet_params(3), lenet_params(3), lenet_params(4)
    assert all(torch.equal(p, q) for p, q in zip(first, again))
    assert not torch.equal(first[0], other[0])
    assert torch.equal(torch.random.get_rng_state(), state)


def lenet_of_modules(params):
    """The same network from torch.nn: the oracle."""
    net = nn.Sequential(nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2),
                        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2),
                        nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10))
    with torch.no_grad():
        for p, value in zip(net.parameters(), params):
            p.copy_(value.T if value.dim() == 2 else value)  # nn.Linear keeps its weight as (outputs, inputs)
    return net


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_lenet_computes_what_the_modules_do(rows):
    params = lenet_params()
    X = torch.rand(rows, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    assert lenet(X, params).shape == (rows, 10)
    torch.testing.assert_close(lenet(X, params), lenet_of_modules(params)(X))


def test_an_empty_batch_gives_zero_gradients():
    params = get_params(lenet_params(), "cpu")
    lenet(torch.empty(0, 1, 28, 28), params).sum().backward()
    assert all(p.grad.count_nonzero() == 0 for p in params)


@pytest.mark.parametrize("channels, classes", [(1, 10), (3, 7)])
def test_resnet18_keeps_small_images_large(channels, classes):
    net = resnet18(num_classes=classes, in_channels=channels).eval()
    sizes = []
    for layer in (net.conv1, net.maxpool, net.layer1, net.layer4):
        layer.register_forward_hook(lambda module, inputs, output: sizes.append(output.shape[-1]))
    assert net(torch.zeros(2, channels, 28, 28)).shape == (2, classes)
    assert sizes == [28, 28, 28, 4]


def test_resnet18_has_11_million_parameters():
    assert sum(p.numel() for p in resnet18().parameters()) == 11_172_810
