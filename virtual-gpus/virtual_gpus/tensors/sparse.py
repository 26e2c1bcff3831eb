"""Sparse COO tensors on a virtual GPU, as far as the gradients of embeddings need them.

To C++ one is a sparse tensor on the CPU that has no entries: whoever wants its indices or values calls an operation,
and that comes to __torch_dispatch__ like any other.
"""

import torch
from torch import Tensor

from virtual_gpus.clock.work import stored
from virtual_gpus.compat import DisableTorchDispatch, make_wrapper_subclass, torch_utils
from virtual_gpus.gpu import VirtualGPU
from virtual_gpus.meta_cache import tensor_meta_of
from virtual_gpus.tensors.tensor import CPU, WRAP, AnyTensor, VirtualTensor, call_it_tensor, wrap

ALLOWED = set(
    "_indices indices _values values _nnz sparse_dim dense_dim is_coalesced _coalesce coalesce _coalesced_ to_dense "
    "_to_dense sparse_mask _foreach_add_ _foreach_mul_ add add_ sub sub_ mul mul_ div div_ neg zero_ zeros_like clone "
    "detach _to_copy abs pow sqrt sum norm linalg_vector_norm".split()
)


class VirtualSparseTensor(VirtualTensor, metaclass=AnyTensor):
    """A wrapper around the sparse tensor `inner`."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if func.namespace == "aten" and name not in ALLOWED:
            raise RuntimeError(
                f"{name} of a sparse tensor is not imitated by virtual GPUs, which have sparse COO tensors for the "
                "gradients of embeddings. Make it dense first: to_dense()"
            )
        return super().__torch_dispatch__(func, types, args, kwargs)

    nbytes = property(lambda self: nbytes_of(self.inner))

    def __repr__(self, *, tensor_contents=None):
        self.gpu.clock.wait_for_value(self.gpu)
        with DisableTorchDispatch():
            return repr(self.inner).replace("size=", f"device='{self.device}', size=")

    def __reduce_ex__(self, protocol):
        entries = self._indices(), self._values(), self.size(), self.is_coalesced()
        return torch_utils._rebuild_sparse_tensor, (self.layout, entries)


call_it_tensor(VirtualSparseTensor)


def nbytes_of(x: Tensor) -> int:
    """x.nbytes, also where PyTorch refuses because x is sparse."""
    return stored(x) if x.is_sparse and not isinstance(x, VirtualTensor) else x.nbytes


def check_values(gpu: VirtualGPU) -> None:
    """RuntimeError where a sparse tensor would have none."""
    if gpu.backing.type == "meta":
        raise RuntimeError(
            "without values there are no sparse tensors, as in a dry run: how many entries one has depends on them. "
            "Leave gradients dense (sparse=False)"
        )


def wrap_sparse(inner: Tensor, gpu: VirtualGPU) -> VirtualSparseTensor:
    """`inner` as a tensor on `gpu`, in whose ledger its indices and values are entered."""
    with DisableTorchDispatch():
        for entries in (inner._indices(), inner._values()):
            wrap(entries, gpu)
    self = make_wrapper_subclass(
        VirtualSparseTensor, inner.shape, dtype=inner.dtype, layout=torch.sparse_coo, device=CPU
    )
    self.inner, self.tensor_meta, self.gpu = inner, tensor_meta_of(inner), gpu
    return self


WRAP[torch.sparse_coo] = wrap_sparse
