"""What an operation's time and shapes depend on is one key, whoever puts it together."""

import pytest
import torch

from virtual_gpus.meta_cache import key_of
from virtual_gpus.ops.table import Op
from virtual_gpus.tensors.arguments import Arguments

aten = torch.ops.aten
CALLS = {
    "tensors": (aten.mm.default, lambda x: ((x, x), {})),
    "a list of tensors, and a number": (aten.cat.default, lambda x: (([x, x], 1), {})),
    "sizes": (aten.view.default, lambda x: ((x, [2, 8]), {})),
    "a float, by name": (aten.add.Tensor, lambda x: ((x, x), {"alpha": 0.5})),
    "dtypes and truths": (aten._to_copy.default, lambda x: ((x,), {"dtype": torch.float64, "non_blocking": False})),
    "a missing tensor": (aten.index.Tensor, lambda x: ((x, [None, x.long()]), {})),
    "a generator": (aten.bernoulli_.float, lambda x: ((x, 0.5), {"generator": torch.Generator("cuda")})),
    "a tensor from the CPU": (aten.add.Tensor, lambda x: ((x, torch.tensor(2.0)), {})),
}


@pytest.mark.parametrize("call", CALLS)
def test_arguments_have_the_key_of_the_inner_call(gpus, call):
    func, given = CALLS[call]
    args, kwargs = given(torch.ones(4, 4, device="cuda"))
    unwrapped = Arguments(Op.of(func), args, kwargs)
    assert unwrapped.key == key_of(func, unwrapped.inner, unwrapped.inner_kwargs)
    hash(unwrapped.key)


def test_one_and_true_are_two_keys():
    func = aten.add.Tensor
    assert len({key_of(func, [value], {}) for value in (1, True, 1.0)}) == 3
    assert key_of(func, [0.1], {}) == key_of(func, [0.2], {})  # no learning rate of its own for each step
