"""Every operation and module of PyTorch, on its own sample inputs: a virtual GPU gives the CPU's values and gradients.

A part of them, and all with MGPU_ALL=1, as `make test ALL=1` sets it.
"""

import functools
import itertools
import re

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from virtual_gpus import virtual_gpus
from virtual_gpus.tensors.tensor import VirtualDenseTensor

pytest.importorskip("numpy")  # which PyTorch's own list of operations and sample inputs needs
pytest.importorskip("expecttest")
DTYPES = (torch.float32, torch.int64, torch.complex64)
NOT_IMITATED = {
    "to_sparse": "makes what test_sparse compares",
    "to": "takes its device from the test's own inputs",
    "combinations": "raises on PyTorch 2.11",
    "istft": "raises without a window",
    "tensor_split": "raises for indices on a GPU, as PyTorch does",
    "normal": "without a device the numbers belong on the CPU",
    **dict.fromkeys(("histogram", "histogramdd"), "CUDA has none"),
}
REFUSED = {"as_strided"}  # some of whose samples PyTorch itself refuses on the CPU
# With three dimensions CUDA makes it of single operations and the CPU of one kernel, each 1e-5 away from float64.
ROUNDED = {"nn.functional.scaled_dot_product_attention": {"rtol": 1.3e-6, "atol": 3e-5}}
REPLACED = {"quantile", "nanquantile", "linalg.matrix_rank", "nn.functional.one_hot"}


def public(name):
    """torch.….name"""
    return functools.reduce(getattr, name.split("."), torch)


def on_gpu(value):
    return value.detach().to("cuda:1").requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def fresh(value):
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def tensors(values):
    return [t for t in tree_leaves(values) if isinstance(t, torch.Tensor)]


def run(op, sample):
    """What the operation returns, and its gradients for all inputs that want one."""
    function = op.op
    if "device" in sample.kwargs or op.name in REPLACED:  # op.op is the original, and these are replaced in torch
        function = getattr(torch.Tensor, op.name, op.op) if op.name.startswith("new_") else public(op.name)
    outputs = tensors(function(sample.input, *sample.args, **sample.kwargs))
    wanted = [t for t in tensors((sample.input, sample.args, sample.kwargs)) if t.requires_grad]
    smooth = [t for t in outputs if t.requires_grad]
    if not wanted or not smooth:
        return outputs
    total = sum(t.abs().sum() if t.is_complex() else t.sum() for t in smooth)
    return outputs + [g for g in torch.autograd.grad(total, wanted, allow_unused=True) if g is not None]


def samples_of(op):
    dtype = next(d for d in DTYPES if d in op.dtypes)
    samples = op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd and dtype.is_floating_point)
    for sample in itertools.islice(samples, 3):
        if all(t.layout is torch.strided for t in tensors((sample.input, sample.args, sample.kwargs))):
            yield sample


def on_the_cpu(op, sample):
    """What PyTorch gives, or None where it refuses the sample."""
    try:
        return seeded(run, op, sample.transform(fresh))
    except RuntimeError:
        assert op.name in REFUSED, f"{op.name} refuses a sample on the CPU, and was to be compared"


def compare(op, sample, expected):
    moved = sample.transform(on_gpu)
    moved.kwargs = {k: "cuda:1" if k == "device" else v for k, v in moved.kwargs.items()}
    numbers = seeded(torch.get_rng_state)
    got = seeded(run, op, moved)
    assert torch.equal(torch.get_rng_state(), numbers), f"{op.name} drew from the CPU's generator"
    named = "device" in moved.kwargs or any(type(t) is VirtualDenseTensor for t in tensors((moved.input, moved.args)))
    assert all(type(t) is VirtualDenseTensor for t in got if named), f"{op.name} left the GPU"
    assert [t.shape for t in got] == [t.shape for t in expected], op.name
    if "empty" not in op.name:
        options = {"equal_nan": True, **ROUNDED.get(op.name, {})}
        torch.testing.assert_close([t.detach().cpu() for t in got], [t.detach() for t in expected], **options)


def seeded(function, *args):
    torch.manual_seed(0)
    return function(*args)


@functools.cache
def operations():
    """PyTorch's own list. It takes seconds to load, which the processes of other tests need not spend."""
    from torch.testing._internal import common_utils

    # Each sample of theirs asks it for a unittest, which it seeks in the sources of all frames: most of the time.
    common_utils.extract_test_fn = lambda: None
    from torch.testing._internal.common_methods_invocations import op_db

    ours = [op for op in op_db if op.name not in NOT_IMITATED and not op.name.startswith("jiterator")]
    return [op for op in ours if any(d in op.dtypes for d in DTYPES)]


PARTS = 16


@pytest.mark.sweep(16)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.filterwarnings("ignore")
def test_operations_equal_those_on_the_cpu(part):
    ops = operations()[part::PARTS]
    samples = [(op, sample, on_the_cpu(op, sample)) for op in ops for sample in samples_of(op)]
    compared = 0
    with virtual_gpus(2):
        for op, sample, expected in samples:
            if expected is not None:
                compare(op, sample, expected)
                compared += 1
    assert compared >= len(samples) - 1 >= 0.9 * len(ops), "nearly every operation has a sample"
    assert len(ops) > 600 / PARTS


def module_given(info, sample, device):
    """What the module of a sample returns on `device`, and its gradients for its parameters and its inputs."""
    torch.manual_seed(0)
    module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).double().to(device)
    move = on_gpu if device == "cuda:1" else fresh
    args, kwargs = tree_map(move, (sample.forward_input.args, sample.forward_input.kwargs))
    torch.manual_seed(0)
    outputs = tensors(module(*args, **kwargs))
    wanted = [t for t in (*tensors((args, kwargs)), *module.parameters()) if t.requires_grad]
    total = sum(t.sum() for t in outputs if t.requires_grad)
    found = outputs + [g for g in torch.autograd.grad(total, wanted, allow_unused=True) if g is not None]
    assert {t.device for t in (*found, *module.state_dict().values())} == {torch.device(device)}
    return [t.detach().cpu() for t in (*found, *module.state_dict().values())]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("part", range(4))
@pytest.mark.filterwarnings("ignore")
def test_modules_equal_those_on_the_cpu(part):
    from torch.testing._internal.common_modules import module_db

    with virtual_gpus(2):
        for info in module_db[part::4]:
            options = {"device": "cpu", "dtype": torch.float64, "requires_grad": True, "training": True}
            samples = info.module_inputs_func(info, **options)
            for sample in samples[:: -(-len(samples) // 30)]:
                found, expected = (module_given(info, sample, device) for device in ("cuda:1", "cpu"))
                torch.testing.assert_close(found, expected, equal_nan=True, msg=f"{info.name}: {sample.desc}")


# Which of these CUDA takes depends on the card, and op_db is asked where there is none.
ASKS_THE_CARD = {"addbmm bmm matmul __rmatmul__ nn.functional.bilinear": torch.bfloat16}
SCALED = ("torch._scaled_mm", "torch._scaled_mm_v2")  # of eight bits, which virtual GPUs compute as far as the CPU does


def lacking():
    """(operation, type) for what op_db says the CPU computes and CUDA doesn't."""
    for op in operations():
        for dtype in sorted(set(op.dtypes) - set(op.dtypesIfCUDA), key=str):
            asks = any(op.name in names.split() and dtype is kind for names, kind in ASKS_THE_CARD.items())
            if not asks and op.name not in SCALED:
                yield op, dtype


def refuses(op, sample):
    try:
        run(op, sample.transform(on_gpu))
    except RuntimeError as error:
        assert re.search(r"not implemented for|not supported|Could not run 'aten::", str(error)), error
        return True
    return False


@pytest.mark.filterwarnings("ignore")
def test_what_cuda_has_no_kernel_for_is_refused(gpus):
    cases = list(lacking())
    assert len(cases) > 100
    # Not each sample needs a kernel: some are empty, or products of single numbers.
    taken = [
        (o.name, d) for o, d in cases if not any(refuses(o, s) for s in itertools.islice(o.sample_inputs("cpu", d), 12))
    ]
    assert taken == []
