"""What belongs to the Python object of a tensor, whatever lies beneath it: its attributes, and changing its device.

PyTorch moves a module in place: net.to("cuda") gives each parameter other data, by `p.data = …` or by
torch.utils.swap_tensors (Module._apply in torch/nn/modules/module.py), because optimizers, hooks and tied weights hold
on to the object. A virtual tensor has another class than one on the CPU, so here the object has to change its class.
"""

from collections.abc import MutableMapping
from typing import NoReturn

import torch
from torch import Tensor

from virtual_gpus.compat import swap_tensor_impl

VIRTUAL_ATTRIBUTES = ("inner", "tensor_meta", "gpu")  # those that make a tensor virtual
ALL_ATTRIBUTES = vars(Tensor)["__dict__"]  # the descriptor of PyTorch's own __dict__, which has these, too


class UserAttributes(dict):
    """The __dict__ of a virtual tensor as programs see it: without the attributes that make it virtual.

    Libraries copy a tensor's __dict__ to another tensor, as fastai does; values and device must not go with it.
    """

    def __init__(self, attributes: dict):
        super().__init__({name: value for name, value in attributes.items() if name not in VIRTUAL_ATTRIBUTES})
        self.attributes = attributes

    def __setitem__(self, name, value):
        super().__setitem__(name, value)
        self.attributes[name] = value

    def __delitem__(self, name):
        super().__delitem__(name)
        del self.attributes[name]

    # These go through the two above.
    update, setdefault = MutableMapping.update, MutableMapping.setdefault
    pop, popitem, clear = MutableMapping.pop, MutableMapping.popitem, MutableMapping.clear

    def __copy__(self):
        return dict(self)


def move_in_place(tensor: Tensor, moved: Tensor) -> None:
    """`tensor` gets the data of `moved`, on another device, and keeps its identity and the user's attributes."""
    attributes = dict(vars(tensor))
    attributes.pop("_is_param", None)  # PyTorch's own, on Parameters of other classes: `moved` has it where it must
    swap_impl(tensor, moved)
    tensor.__dict__.update(attributes)


def swap_impl(a: Tensor, b: Tensor) -> None:
    """torch.utils.swap_tensors, which refuses tensors that an autograd graph holds: there, backward is refused instead.

    A program may build a graph, throw it away, and move its module then; on a real GPU `p.data = …` allows that.
    """
    for tensor in (a, b):
        if tensor.is_leaf and tensor.requires_grad and not tensor.is_inference():
            with torch.inference_mode(False):
                torch.autograd.graph.get_gradient_edge(tensor).node.register_prehook(refuse_stale_graph)
    a.__class__, b.__class__ = b.__class__, a.__class__
    attributes = ALL_ATTRIBUTES.__get__(a), ALL_ATTRIBUTES.__get__(b)
    ALL_ATTRIBUTES.__set__(a, attributes[1])
    ALL_ATTRIBUTES.__set__(b, attributes[0])
    hooks = [(t._backward_hooks, t._post_accumulate_grad_hooks) for t in (a, b)]
    swap_tensor_impl(a, b)
    for tensor, own in zip((a, b), hooks, strict=True):  # hooks belong to the object that they were given to
        if own != (None, None):
            tensor._backward_hooks, tensor._post_accumulate_grad_hooks = own


def refuse_stale_graph(grads: tuple) -> NoReturn:
    raise RuntimeError(
        "this graph was made before its parameters moved to another device: backward can't reach them "
        "any more. Move first, then run forward and backward. (FullyShardedDataParallel moves them itself if it is "
        "given cpu_offload: fully_shard with a CPUOffloadPolicy does the same, and works.)"
    )
