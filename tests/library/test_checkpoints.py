"""Checkpoints: with and without the prefix `module.` that wrappers add, and a file that is whole."""

import pytest
import torch
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from mgpu_lib import checkpoints
from mgpu_lib.checkpoints import add_prefix, save_checkpoint, strip_prefix
from mgpu_lib.models import SimpleCNN, resnet8
from virtual_gpus import virtual_gpus


def test_a_prefix_goes_and_comes_with_all_that_belongs_to_it():
    wrapped = nn.DataParallel(resnet8())
    state, plain = wrapped.state_dict(), wrapped.module.state_dict()
    before, stripped, back = dict(state), strip_prefix(state), add_prefix(plain)
    assert dict(state) == before, "the argument stays as it is"
    assert list(stripped) == list(plain) and list(back) == list(state)
    assert all(stripped[name] is value for name, value in zip(stripped, state.values()))
    consume_prefix_in_state_dict_if_present(state, "module.")  # PyTorch's helper, which works in place
    assert stripped._metadata == plain._metadata == state._metadata == strip_prefix(back)._metadata
    wrapped.load_state_dict(back)


def test_only_one_prefix_goes_and_only_at_the_front_of_all_names():
    state = {"module.submodule.weight": 1, "module.module.bias": 2}
    assert strip_prefix(state) == {"submodule.weight": 1, "module.bias": 2}
    assert strip_prefix({"modules.weight": 1}) == {"modules.weight": 1}
    assert strip_prefix({}) == add_prefix({}) == {}
    with pytest.raises(ValueError, match=r"1 of 2 names begin with 'module\.'.*'module\.a'.*'b'"):
        strip_prefix({"module.a": 1, "b": 2})
    with pytest.raises(ValueError, match=r"all 1 names begin with 'module\.' already"):
        add_prefix({"module.a": 1})


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda net: net], ids=["wrapped", "plain"])
def test_a_saved_checkpoint_has_plain_names_and_loads_without_gpus(tmp_path, wrap):
    with virtual_gpus(2):
        net = SimpleCNN().to("cuda:0")
        save_checkpoint(wrap(net), tmp_path / "net.pt")
        state = torch.load(tmp_path / "net.pt", map_location="cpu", weights_only=True)
        torch.testing.assert_close(state, net.cpu().state_dict(), rtol=0, atol=0)


def test_a_checkpoint_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    def dies(state, path):
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    path = tmp_path / "net.pt"
    save_checkpoint(SimpleCNN(), path)
    before = path.read_bytes()
    monkeypatch.setattr(checkpoints.torch, "save", dies)
    with pytest.raises(OSError, match="no space left"):
        save_checkpoint(SimpleCNN(), path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
