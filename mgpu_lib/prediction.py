"""How long a training step would take on GPUs that nobody has here: a dry run on virtual GPUs that hold shapes only."""

import copy
import functools
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parameter import UninitializedTensorMixin

from mgpu_lib.parallel import allreduce
from virtual_gpus import Prediction, Timeline, current, dry_run, find_gpu, virtual_gpus

PRECISIONS = ("fp32", "tf32", "default", "amp", "bf16")
CASTS = {"amp": torch.float16, "bf16": torch.bfloat16}


def predict(
    model,
    example_batch,
    gpu="A100-80",
    n_gpus=1,
    strategy="manual",
    precision="fp32",
    link=None,
    training=True,
    host=1.0,
    network=None,
    bucket_cap_mb=None,
):
    """The time and memory of one training step of `model` on `n_gpus` GPUs: a Prediction.

    model          an nn.Module; its values are neither needed nor changed (on the meta device it takes no memory)
    example_batch  the inputs of a step, for all GPUs together; only shape and type count (a meta tensor will do)
    gpu, link, network, host  as `virtual_gpus` takes them: a fast processor may need a third of the host's time
    strategy       "manual" (`train_batch`) or "data_parallel", both in one process; "ddp": `dry_run`, as rank 0 sees it
    precision      "fp32" (no TF32 in convolutions either), "tf32" (there and in products), "default" (PyTorch's: TF32
                   in convolutions, where the GPU has it), "amp" (autocast to FP16), or "bf16" (to BF16)
    training       False: the forward pass only; bucket_cap_mb as DistributedDataParallel takes it (None: 25, first 1)
    The batch lies on the GPUs already; the loss is the cross-entropy of outputs (N, classes), or else their mean; SGD
    has momentum. Raises ValueError or TypeError for nonsense, torch.OutOfMemoryError for what doesn't fit."""
    check(model, example_batch, n_gpus, strategy, precision, training, bucket_cap_mb)
    net, X = bare(model).train(training), torch.empty_like(example_batch, device="meta", requires_grad=False)
    computing = functools.partial(computes, precision, training)
    if strategy == "ddp":
        program = functools.partial(ddp, net, X, n_gpus, computing, bucket_cap_mb)
        machine = {"link": link or usual_link(gpu), "network": network, "host": host}
        return on_every_rank(dry_run(program, n_gpus, gpu, per_node=None, **machine), n_gpus)
    with virtual_gpus(n_gpus, gpu, link, "meta", network, host) as machine, computing() as casting:
        step = STRATEGIES[strategy](net, X, machine.devices, casting)
        step()  # makes the optimizer's state: from here on, all steps are alike
        start = synchronized(machine)
        machine.clock.reset()
        step()
        seconds = synchronized(machine) - start
        if seconds == 0:
            raise ValueError(f"{type(model).__name__} runs nothing on a GPU, so there is no step to time")
        peaks = [ledger.peak for ledger in machine.ledgers]
        return Prediction(seconds, peaks, machine.timeline.since(start), list(range(n_gpus)), machine.totals)


def usual_link(gpu):
    """What joins GPUs of this kind if nobody says more."""
    return "nvlink" if find_gpu(gpu).nvlink else "pcie"


@contextmanager
def computes(precision, training):
    """Inside, the virtual GPUs that are on compute like that; yields a context for the forward pass."""
    machine = current()
    needed = {"tf32": "tf32", "amp": "fp16", "bf16": "bf16"}.get(precision)
    if needed is not None and getattr(machine.spec, needed) is None:
        raise ValueError(f'precision={precision!r}: the {machine.spec.key} has no tensor cores for it; "fp32" would do')
    machine.clock.tf32 = precision in ("tf32", "default"), precision == "tf32"
    with torch.set_grad_enabled(training):
        yield torch.autocast("cuda", CASTS[precision]) if precision in CASTS else nullcontext()


def check(model, example_batch, n_gpus, strategy, precision, training, bucket_cap_mb):
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: pass an nn.Module")
    if not isinstance(example_batch, torch.Tensor) or example_batch.dim() == 0:
        raise TypeError(f"example_batch is {example_batch!r}: pass a tensor whose first dimension counts the samples")
    if any(isinstance(t, UninitializedTensorMixin) for t in (*model.parameters(), *model.buffers())):
        raise ValueError("the model has lazy parameters, which have no shape yet: call it once on a batch first")
    if training and not any(p.requires_grad for p in model.parameters()):
        raise ValueError("no parameter of the model requires a gradient, so there is nothing to train: training=False?")
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r}: use {', '.join(map(repr, STRATEGIES))}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}: use {', '.join(map(repr, PRECISIONS))}")
    bucketed = bucket_cap_mb is None or (isinstance(bucket_cap_mb, (int, float)) and 0 < bucket_cap_mb < float("inf"))
    if not bucketed:
        raise ValueError(f"bucket_cap_mb={bucket_cap_mb!r}: the MiB of a bucket must be a number above 0, or None")
    if isinstance(n_gpus, int) and n_gpus > len(example_batch):
        raise ValueError(f"n_gpus={n_gpus} for a batch of {len(example_batch)}: each GPU needs at least one sample")


def bare(model):
    """A copy of `model` on the meta device; nothing of its values is touched."""
    memo = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    for b in model.buffers():
        memo[id(b)] = torch.empty_like(b, device="meta")
    return copy.deepcopy(model, memo)


def synchronized(machine):
    """The time when all GPUs have done what they were given."""
    for device in machine.devices:
        torch.cuda.synchronize(device)
    return machine.elapsed()


def optimizer_of(net):
    """SGD with momentum, or None for a network that isn't trained."""
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) if net.training else None


def loss_of(output):
    """Labels and values don't matter for the time; "sum" because a shard's mean would not be the batch's."""
    if output.dim() == 2 and output.is_floating_point():
        return F.cross_entropy(
            output, torch.empty(len(output), dtype=torch.long, device=output.device), reduction="sum"
        )
    return output.float().mean()


def forward(net, X, casting):
    """The loss of `net` on X, or its output when nobody wants gradients."""
    with torch.cuda.nvtx.range("forward"), casting:
        return loss_of(net(X)) if torch.is_grad_enabled() else net(X)


def manual(net, X, devices, casting):
    """A step of one process that drives all GPUs, one after the other."""
    replicas = [copy.deepcopy(net).to_empty(device=device) for device in devices]
    optimizers = [optimizer_of(replica) for replica in replicas]
    shards = [torch.empty_like(shard, device=device) for shard, device in zip(X.tensor_split(len(replicas)), devices)]

    def step():
        outputs = [forward(replica, shard, casting) for replica, shard in zip(replicas, shards)]
        if torch.is_grad_enabled():
            for replica in replicas:
                replica.zero_grad()
            with torch.cuda.nvtx.range("backward"):
                for loss in outputs:
                    loss.backward()
            if len(replicas) > 1:
                with torch.cuda.nvtx.range("all-reduce"):
                    for params in zip(*(replica.parameters() for replica in replicas)):
                        allreduce([p.grad for p in params if p.grad is not None])
            with torch.cuda.nvtx.range("update"):
                for optimizer in optimizers:
                    optimizer.step()

    return step


def dp(net, X, devices, casting):
    """A step of nn.DataParallel; the batch lies on the first of the devices."""
    net, X = net.to_empty(device=devices[0]), torch.empty_like(X, device=devices[0])
    wrapped, optimizer = nn.DataParallel(net, devices), optimizer_of(net)
    return lambda: one_process(wrapped, X, optimizer, casting)


def one_process(net, X, optimizer, casting):
    """A step of training as on one GPU, or a forward pass."""
    output = forward(net, X, casting)
    if torch.is_grad_enabled():
        optimizer.zero_grad()
        with torch.cuda.nvtx.range("backward"):
            output.backward()
        with torch.cuda.nvtx.range("update"):
            optimizer.step()


def ddp(net, X, k, computing, bucket_cap_mb):
    """A step of rank 0 of `k`, which has the largest shard: a program for `dry_run`."""
    net = net.to_empty(device="cuda")
    X, optimizer = torch.empty_like(X.tensor_split(k)[0], device="cuda"), optimizer_of(net)
    wrapped = net
    if k > 1 and net.training:
        optimizer.register_step_pre_hook(lambda *args: check_gradients(net))
        wrapped = nn.parallel.DistributedDataParallel(net, device_ids=[0], bucket_cap_mb=bucket_cap_mb)

    def step():
        with computing() as casting:
            one_process(wrapped, X, optimizer, casting)

    return step


def check_gradients(net):
    """ValueError if a parameter has none: DistributedDataParallel would complain in the next step, or wait for ever."""
    params = [p for p in net.parameters() if p.requires_grad]
    without = sum(p.grad is None for p in params)
    if without:
        raise ValueError(
            f"{without} of the model's {len(params)} parameters got no gradient; DistributedDataParallel needs all. "
            "Use them, or freeze them (requires_grad_(False))"
        )


def on_every_rank(one, k):
    """The Prediction `one` of rank 0 as that of all `k` ranks: each has a process, a GPU, and a host's thread."""
    events = [
        e._replace(gpu=rank, thread=e.thread.replace("rank 0", f"rank {rank}"))
        for e in one.timeline
        for rank in range(k)
    ]
    its = one.timeline
    timeline = Timeline(events, its.spec, its.link, its.reproducible, k * its.dropped, its.dropped_until)
    return Prediction(one.seconds, one.peak_memory * k, timeline, list(range(k)), one.totals * k)


STRATEGIES = {"manual": manual, "data_parallel": dp, "ddp": ddp}
