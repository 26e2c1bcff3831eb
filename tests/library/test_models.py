"""LeNet and ResNet-18 have the shapes they say; LeNet starts from the same values and computes what torch.nn does."""

import sys

import pytest
import torch
from common import lenet_of_modules

from mgpu_lib.models import SimpleCNN, lenet, lenet_bn_params, lenet_params, resnet8, resnet18


def test_lenet_params_are_eight_plain_leaves():
    params = lenet_params()
    weights, biases = [(20, 1, 3, 3), (50, 20, 5, 5), (800, 128), (128, 10)], [(20,), (50,), (128,), (10,)]
    assert [tuple(p.shape) for p in params] == [shape for pair in zip(weights, biases) for shape in pair]
    assert sum(p.numel() for p in params) == 129_068
    assert all(p.is_leaf and not p.requires_grad and p.dtype == torch.float32 for p in params)
    for weight, inputs in zip(params[::2], (9, 500, 800, 128)):
        assert weight.std().item() == pytest.approx((2 / inputs) ** 0.5, rel=0.1), "He et al.'s"


def test_the_seed_decides_the_values_and_the_global_state_stays():
    state = torch.random.get_rng_state()
    first, again, other, with_norm = lenet_params(3), lenet_params(3), lenet_params(4), lenet_bn_params(3)
    assert all(torch.equal(p, q) for p, q in zip(first, again)) and not torch.equal(first[0], other[0])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(p, q) for p, q in zip(first, with_norm))
    found = [(p.shape, p.unique().tolist()) for p in with_norm[8:]]  # a scale and a shift for each channel
    assert found == [((20,), [1]), ((20,), [0]), ((50,), [1]), ((50,), [0])]


@pytest.mark.parametrize("rows", [0, 7])
def test_lenet_computes_what_the_modules_do(rows):
    params = lenet_params()
    X = torch.rand(rows, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    assert lenet(X, params).shape == (rows, 10)
    torch.testing.assert_close(lenet(X, params), lenet_of_modules(params)(X))


@pytest.mark.parametrize("channels, classes", [(1, 10), (3, 7)])
def test_resnet18_keeps_small_images_large(channels, classes):
    net, sizes = resnet18(num_classes=classes, in_channels=channels).eval(), []
    for layer in (net.conv1, net.maxpool, net.layer1, net.layer4):
        layer.register_forward_hook(lambda module, inputs, output: sizes.append(output.shape[-1]))
    assert net(torch.zeros(2, channels, 28, 28)).shape == (2, classes)
    assert sizes == [28, 28, 28, 4]
    assert sum(p.numel() for p in net.parameters()) == 11_167_104 + 576 * channels + 513 * classes


def test_resnet8_has_eight_layers_for_a_processor():
    net, sizes = resnet8(7).eval(), []
    for block in net[3:6]:
        block.register_forward_hook(lambda module, inputs, output: sizes.append(tuple(output.shape[1:])))
    assert net(torch.zeros(2, 1, 28, 28)).shape == (2, 7)
    assert sizes == [(8, 14, 14), (16, 7, 7), (32, 4, 4)]
    weights = [name for name, p in net.named_parameters() if p.dim() > 1 and "downsample" not in name]
    assert len(weights) == 8 and sum(p.numel() for p in net.parameters()) == 19_384 + 33 * 7


def test_simple_cnn_has_the_shapes_it_says():
    net = SimpleCNN()
    assert sum(p.numel() for p in net.parameters()) == 76_938
    assert net(torch.zeros(5, 3, 32, 32)).shape == (5, 10) and SimpleCNN(7)(torch.zeros(2, 3, 9, 5)).shape == (2, 7)


@pytest.mark.parametrize("error", ["ImportError('no')", "RuntimeError('operator torchvision::nms does not exist')"])
def test_a_torchvision_that_does_not_fit_says_what_to_install(monkeypatch, tmp_path, error):
    (tmp_path / "torchvision.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    for make in (resnet18, resnet8):
        with pytest.raises(ImportError, match=r"install both from one index.*--force-reinstall torch torchvision"):
            make()
