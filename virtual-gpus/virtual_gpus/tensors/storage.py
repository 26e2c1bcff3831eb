"""Storages of tensors on a virtual GPU: they can be compared, measured and resized, and not read."""

from typing import TYPE_CHECKING

import torch

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

    def data_ptr(self):
        return self.inner.data_ptr()

    def nbytes(self):
        return self.inner.nbytes()

    size = __len__ = nbytes

    def element_size(self):
        return 1

    def resize_(self, nbytes):
        """Also in the GPU's ledger; torch.OutOfMemoryError if there is no room."""
        self.inner.block.resize(nbytes)
        self.inner.resize_(nbytes)
        if self.gpu.machine.step_memory is not None:
            self.gpu.machine.step_memory.owned["in transit"].add(self.inner.block.address)
        return self


class VirtualTypedStorage:
    """x._typed_storage(), by which FSDP frees and reallocates memory: sizes are counted in elements."""

    def __init__(self, untyped: VirtualStorage, itemsize: int):
        self.untyped, self.itemsize = untyped, itemsize

    def _size(self):
        return self.untyped.nbytes() // self.itemsize

    def _resize_(self, size):
        self.untyped.resize_(size * self.itemsize)

    def _data_ptr(self):
        return self.untyped.data_ptr()
