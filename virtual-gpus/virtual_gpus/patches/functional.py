"""Results of functional collectives that have not been waited for: to C++ they are where it sees what is inside."""

from virtual_gpus.compat import make_wrapper_subclass
from virtual_gpus.tensors.tensor import VirtualTensor

MODULE = "torch.distributed._functional_collectives"  # imported by the programs that need it


def patches(module):
    """(owner, name, replacement), for patches.install, as soon as the module has been imported."""
    AsyncCollectiveTensor = module.AsyncCollectiveTensor
    original = AsyncCollectiveTensor.__new__

    def new(cls, elem):
        if not isinstance(elem, VirtualTensor):
            return original(cls, elem)
        sizes = {"strides": elem.stride(), "storage_offset": elem.storage_offset(), "dtype": elem.dtype}
        made = make_wrapper_subclass(cls, elem.shape, **sizes, requires_grad=elem.requires_grad)
        made.elem, made.completed = elem, False
        return made

    yield AsyncCollectiveTensor, "__new__", staticmethod(new)
    for name in ("device", "is_cuda", "is_cpu"):
        yield AsyncCollectiveTensor, name, property(lambda self, name=name: getattr(self.elem, name))
    yield AsyncCollectiveTensor, "get_device", lambda self: self.elem.get_device()
    for name in ("to", "cuda", "cpu"):
        yield AsyncCollectiveTensor, name, arrived(name)
    yield AsyncCollectiveTensor, "item", lambda self: self.trigger_wait().item()  # in a dry run, one that is unknown


def arrived(name):
    """A method that may move a tensor to another device: called on one that has been waited for."""

    def method(self, *args, **kwargs):
        return getattr(self.clone(), name)(*args, **kwargs)

    return method
