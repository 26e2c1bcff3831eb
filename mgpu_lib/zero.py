"""ZeRO from scratch: data parallelism in which every rank keeps only its shard of what all ranks would keep alike.

Rajbhandari, Rasley, Ruwase and He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020,
arXiv:1910.02054). With n parameters of 4 bytes and Adam, each of k ranks keeps from step to step, or between backward
and step: 4n + 4n + 8n/k bytes in stage 1, 4n + (4n + 8n)/k in stage 2, and (4n + 4n + 8n)/k in stage 3.
"""

import weakref

import torch
import torch.distributed as dist
from torch import nn

from mgpu_lib.ddp import broadcast_from_rank_0, gradient_of

STAGES = 1, 2, 3


class ZeRO(nn.Module):
    """A network that every rank trains on its own part of the batch, with an optimizer that is sharded over all ranks.

    stage 1  shards the optimizer's state: after the backward pass each rank gets the mean of its part of the gradients
             (a reduce-scatter), updates its part of the parameters, and collects the others' (an all-gather)
    stage 2  the gradients, too: they are reduce-scattered as soon as a layer's are complete, and the whole is freed
    stage 3  the parameters, too: a layer's are all-gathered before its forward and backward pass, and freed after it

    net             begins as rank 0 has it. It may lie on the CPU: `layers` go to this rank's GPU one after the other
    make_optimizer  makes one from a list of parameters, as partial(torch.optim.Adam, lr=0.001) does; one that treats
                    each number by itself, since it sees flat shards
    layers          modules of `net` whose parameters travel together; those outside, or in several, are one more unit
    `step()` takes the place of optimizer.step() and zero_grad(). Several backward passes before it add up.
    Frozen parameters and buffers stay whole on every rank. All ranks must pass networks of the same shapes, and run
    the same layers in the same order. ValueError for another stage, for what is no layer, or if nothing can be trained.
    """

    def __init__(self, net, make_optimizer, stage, layers=()):
        super().__init__()
        if stage not in STAGES:
            raise ValueError(f"stage={stage!r}: ZeRO has the stages 1, 2 and 3")
        for layer in layers:
            if isinstance(layer, (nn.ModuleList, nn.ModuleDict)):
                raise ValueError(f"a {type(layer).__name__} is never called: pass the layers in it")
            if layer not in set(net.modules()):
                raise ValueError(f"this {type(layer).__name__} of `layers` is no part of the network")
        self.net, self.stage, self.units = net, stage, []
        self.names = {p: name for name, p in net.named_parameters()}
        for layer, params in trained_in(net, layers).items():
            layer.cuda()
            if params:
                self.units.append(Unit(params, sharded=stage == 3))
                self.watch(layer, self.units[-1])
        if not self.units:
            raise ValueError("no parameter of this network requires a gradient: there is nothing to train")
        broadcast_from_rank_0([*(p for p in net.parameters() if not p.requires_grad), *net.buffers()])
        self.optimizer = make_optimizer([unit.shard for unit in self.units])

    def watch(self, layer, unit):
        """Have autograd tell `unit` when its gradients come, and in stage 3 when its parameters are needed."""
        at_once, known = self.stage > 1, weakref.ref(unit)  # Python's collector doesn't see what such a hook refers to
        for p in unit.params:
            p.register_post_accumulate_grad_hook(lambda p: known().on_gradient(p, at_once))
        if self.stage == 3:
            layer.register_forward_pre_hook(lambda *_: unit.gather())
            layer.register_forward_hook(lambda *_: unit.after_forward())
            layer.register_full_backward_pre_hook(lambda *_: unit.before_backward())

    def forward(self, *inputs, **kwargs):
        return self.net(*inputs, **kwargs)

    @torch.no_grad()
    def step(self):
        """Update the parameters with the gradients of all backward passes since the last step, and forget these.

        RuntimeError, which names them, if parameters had no gradient in one of the passes.
        """
        for unit in self.units:
            missing = [self.names[p] for p in unit.params if p not in unit.arrived]
            if missing and (unit.arrived or unit.shard.grad is None):
                raise RuntimeError(f"no gradient for {', '.join(missing)}: freeze what isn't used")
            if unit.arrived:  # in stage 1
                unit.reduce()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.stage < 3:
            for unit in self.units:
                unit.collect()

    @torch.no_grad()
    def whole_state(self):
        """The state dict of the whole network, on the CPU, the same on all ranks: call it on all of them."""
        copies = {}
        for unit in self.units:
            unit.gather()
            copies |= {p: p.detach().cpu() for p in unit.params}
            unit.after_forward()
        params = dict(self.net.named_parameters(remove_duplicate=False))
        state = self.net.state_dict().items()
        return {name: copies[params[name]] if params.get(name) in copies else tensor.cpu() for name, tensor in state}


class Unit:
    """The parameters of one layer in one flat tensor, of which each rank owns a shard; all shards have the same size.

    flat   (ranks × size,): the parameters, which are views of it, and zeros behind them. If `sharded`, its memory is
           there only from `gather` until the parameters have been used
    shard  (size,): this rank's part, which the optimizer updates; a view of `flat`, or a copy if `sharded`
    """

    def __init__(self, params, sharded):
        kinds = {(str(p.dtype), str(p.device)) for p in params}
        if len(kinds) > 1:
            raise ValueError(f"parameters that travel together must be of one type, and on one GPU: {sorted(kinds)}")
        self.params, self.sharded, self.arrived, self.in_backward = params, sharded, set(), False
        self.padding = -sum(p.numel() for p in params) % dist.get_world_size()
        self.flat = self.joined([p.detach() for p in params])
        dist.broadcast(self.flat, src=0)
        for p, values in zip(params, self.flat.split([p.numel() for p in params] + [self.padding])):
            p.data = values.view_as(p)
        self.nbytes = self.flat.untyped_storage().nbytes()
        mine = self.flat.chunk(dist.get_world_size())[dist.get_rank()]
        self.shard = nn.Parameter(mine.clone() if sharded else mine)
        self.free()

    def joined(self, tensors):
        return torch.cat([*(t.reshape(-1) for t in tensors), tensors[0].new_zeros(self.padding)])

    def on_gradient(self, p, at_once):
        """The backward pass has p.grad: called by autograd."""
        self.arrived.add(p)
        if at_once and len(self.arrived) == len(self.params):
            self.reduce()
            self.free()

    @torch.no_grad()
    def reduce(self):
        """Add the mean over all ranks to the gradient of this rank's shard, and free the whole gradient."""
        whole = self.joined([gradient_of(p) for p in self.params]).div_(dist.get_world_size())
        for p in self.params:
            p.grad = None
        mean = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(mean, whole)
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad.add_(mean)
        self.arrived.clear()
        self.in_backward = False

    @torch.no_grad()
    def collect(self):
        """Fill `flat` with the shards of all ranks."""
        dist.all_gather_into_tensor(self.flat, self.shard.detach())

    def gather(self):
        """Have the whole parameters, if they aren't there."""
        if not self.flat.untyped_storage().nbytes():
            self.flat.untyped_storage().resize_(self.nbytes)
            self.collect()

    def after_forward(self):
        if not self.in_backward:  # activation checkpointing runs a forward pass within the backward pass
            self.free()

    def before_backward(self):
        self.in_backward = True
        self.gather()

    def free(self):
        """Give the memory of the whole parameters back; those who remember them find the next ones in their place."""
        if self.sharded:
            self.flat.untyped_storage().resize_(0)


def trained_in(net, layers):
    """{layer or `net`: the parameters that it trains}; what several of `layers` share, or none has, is in `net`."""
    inside = {module: layer for layer in [net, *layers] for module in layer.modules()}
    home = {}
    for module, layer in inside.items():
        for p in module.parameters(recurse=False):
            if p.requires_grad:
                home[p] = layer if home.get(p, layer) is layer else net
    return {layer: [p for p, where in home.items() if where is layer] for layer in [*layers, net]}
