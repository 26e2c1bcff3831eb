"""Storages of tensors on a virtual GPU, to be compared, measured and resized; what they hold is read as a tensor."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

if TYPE_CHECKING:
    from virtual_gpus.gpu import VirtualGPU


class VirtualStorage:
    """x.untyped_storage()."""

    is_cuda = True

    def __init__(self, inner: torch.UntypedStorage, gpu: "VirtualGPU"):
        self.inner, self.gpu, self.device = inner, gpu, gpu.device

    def __eq__(self, other):
        return isinstance(other, VirtualStorage) and self._cdata == other._cdata

    def __hash__(self):
        return hash(self._cdata)

    _cdata = property(lambda self: self.inner._cdata)

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def nbytes(self) -> int:
        return self.inner.nbytes()

    size = __len__ = nbytes

    def element_size(self) -> int:
        return 1

    def get_device(self) -> int:
        return self.gpu.index

    def resize_(self, nbytes: int) -> "VirtualStorage":
        """Also in the GPU's ledger; torch.OutOfMemoryError if there is no room."""
        self.inner.block.resize(nbytes)
        self.inner.resize_(nbytes)
        if (capture := self.gpu.capturing()) is not None:
            capture.append(self.inner.resize_, [nbytes])
        if self.gpu.machine.step_memory is not None:
            self.gpu.machine.step_memory.owned["in transit"].add(self.inner.block.address)
        return self


def storage_of(name: str) -> Callable:
    """The method of a typed storage that gives the storage of what the tensor's method `name` makes."""
    return lambda self, *args: getattr(self.elements(), name)(*args).storage()


class VirtualTypedStorage(torch.TypedStorage):
    """x.storage(), and x._typed_storage(), by which FSDP frees and reallocates memory: sizes are in elements."""

    def __new__(cls, tensor: Tensor):
        return object.__new__(cls)

    def __init__(self, tensor: Tensor):
        self.tensor, self.dtype, self._untyped_storage = tensor, tensor.dtype, tensor.untyped_storage()

    def elements(self) -> Tensor:
        return self.tensor.detach().as_strided((self._size(),), (1,), 0)

    def _pickle_storage_type(self) -> NoReturn:
        raise RuntimeError(f"the storage of a tensor on {self.device} is not saved: save the tensor")

    def tolist(self) -> list:
        return self.elements().tolist()

    clone, cpu, cuda, _to = map(storage_of, ("clone", "cpu", "cuda", "to"))
