"""FSDP in both generations, and checkpoints of what is sharded."""

import atexit
import copy
import itertools
import tempfile
from contextlib import ExitStack, nullcontext

import torch
import torch.distributed as dist
from checking import batches, check, network, part, parts, raises, sgd, train, trained_alone, whole
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

F = nn.functional


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def sharded(net, **options):
    """A copy of `net` with FSDP2, each linear layer by itself."""
    net = copy.deepcopy(net).cuda()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(net, **options)


def same_whole(net, expected, tolerance=1e-9):
    """All of the parameters of `net` are those of `expected`."""
    wanted = dict(expected.named_parameters())
    assert dict(net.named_parameters()).keys() == wanted.keys()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(whole(parameter), wanted[name].detach(), rtol=tolerance, atol=tolerance)


@check
def fsdp_sharding(rank, n):
    """Rows are shared out: 9, 6 and 3 of them among 4 ranks, of which one has none."""
    for reshard in (True, False, 2):
        net = sharded(network(), reshard_after_forward=reshard)
        assert isinstance(net[4].weight, DTensor) and net[4].weight.to_local().shape == (int(rank < 3), 6)
        train(net, parts(rank, n), adam)
        same_whole(net, trained_alone(network(), adam))


@check
def fsdp_prefetch(rank, n):
    net = sharded(network())
    layers = [layer for layer in net if isinstance(layer, FSDPModule)]
    for layer, after in itertools.pairwise(layers):
        layer.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([layer])
    same_whole(train(net, parts(rank, n), adam), trained_alone(network(), adam))


@check
def fsdp_mixed_precision(rank, n):
    types, seen = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}, []
    net = network().float().cuda()
    for layer in (net[0], net[2], net[4]):
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(**types))
    fully_shard(net, mp_policy=MixedPrecisionPolicy(**types, output_dtype=torch.float64))
    net[2].register_forward_pre_hook(lambda layer, args: seen.extend([layer.weight.dtype, args[0].dtype]))
    train(net, ((X.float(), y) for X, y in parts(rank, n)), adam)
    assert set(seen) == {torch.bfloat16} and net(part(next(batches())[0], rank, n)).dtype is torch.float64
    assert {p.dtype for p in net.parameters()} == {p.grad.dtype for p in net.parameters()} == {torch.float32}
    same_whole(net, trained_alone(network(), adam).float(), 0.02)


@check
def fsdp_on_the_cpu(rank, n):
    """Offloaded: shards, their gradients and the optimizer's states stay on the CPU."""
    net = network()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, offload_policy=CPUOffloadPolicy())
    fully_shard(net, offload_policy=CPUOffloadPolicy())
    assert {parameter.device.type for parameter in net.parameters()} == {"cpu"}
    train(net, parts(rank, n), adam)
    assert {parameter.grad.device.type for parameter in net.parameters()} == {"cpu"}
    alone = trained_alone(network(), adam)
    for parameter, expected in zip(net.parameters(), alone.parameters(), strict=True):
        rows = expected.chunk(n)[rank] if rank < len(expected.chunk(n)) else expected[:0]
        torch.testing.assert_close(parameter.to_local().detach(), rows.detach())


@check
def fsdp_hybrid(rank, n):
    """Sharded among two ranks, replicated twice."""
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = sharded(network(), mesh=mesh)
    assert len(net[0].weight.to_local()) == (5, 4)[rank % 2]
    same_whole(train(net, parts(rank, n), adam), trained_alone(network(), adam))


@check
def fsdp_from_meta(rank, n):
    """Made without memory, sharded, and then filled with the same numbers on all ranks."""
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    for layer in (net[0], net[2], net):
        fully_shard(layer)
    net.to_empty(device="cuda")
    torch.manual_seed(4)
    for layer in (net[0], net[2]):
        layer.reset_parameters()
    alone = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    alone.load_state_dict({name: whole(value) for name, value in net.state_dict().items()})
    assert 0.1 < alone[0].weight.std() < 0.5 and len(alone[0].weight.unique()) == 45
    same_whole(train(net, parts(rank, n), adam), train(alone, batches(), adam))


@check
def fsdp_accumulation(rank, n):
    net, data = sharded(network()), list(batches(16))
    optimizer = adam(net.parameters())
    for X, y in data:
        optimizer.zero_grad()
        for last, x, t in zip((False, True), part(X, rank, n).chunk(2), part(y, rank, n).chunk(2), strict=True):
            net.set_requires_gradient_sync(last)
            (F.cross_entropy(net(x), t) / 2).backward()
        optimizer.step()
    same_whole(net, trained_alone(network(), adam, data))


@check
def fsdp_clips_gradients(rank, n):
    net, alone = sharded(network()), network()
    optimizers = sgd(net.parameters()), sgd(alone.parameters())
    for X, y in batches():
        F.cross_entropy(net(part(X, rank, n)), part(y, rank, n)).backward()
        F.cross_entropy(alone(X), y).backward()
        norm, expected = (nn.utils.clip_grad_norm_(m.parameters(), 0.01) for m in (net, alone))
        torch.testing.assert_close(whole(norm), expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same_whole(net, alone)


@check
def fsdp_with_tensor_parallelism(rank, n):
    """Two ranks share every layer, and two such pairs the data."""
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("data", "tensor"))
    net = network(8).cuda()
    parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (net[0], net[2], net[4], net):
        fully_shard(layer, mesh=mesh["data"])
    group = mesh["data"].get_local_rank()
    train(net, parts(group, 2), adam)
    same_whole(net, trained_alone(network(8), adam))


def linear(module, recurse, nonwrapped_numel):
    return recurse or isinstance(module, nn.Linear)


def flat(net, rank, **options):
    """`net` with the first generation of FSDP, whose parameters are one flat one for each linear layer."""
    return FSDP(copy.deepcopy(net).cuda(), device_id=rank, auto_wrap_policy=linear, **options)


def same_summoned(net, expected, tolerance=1e-9):
    with FSDP.summon_full_params(net):
        found = dict(net.named_parameters())
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(found[name].cpu(), parameter, rtol=tolerance, atol=tolerance)


@check
def fsdp1_sharding(rank, n):
    alone = trained_alone(network(), adam)
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        for original in (True, False):
            net = flat(network(), rank, sharding_strategy=ShardingStrategy[strategy], use_orig_params=original)
            same_summoned(train(net, parts(rank, n), adam), alone)


@check
def fsdp1_options(rank, n):
    alone = trained_alone(network(), adam)
    mesh = init_device_mesh("cuda", (2, 2))
    net = flat(network(), rank, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    same_summoned(train(net, parts(rank, n), adam), alone)
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = flat(network().float(), rank, mixed_precision=half)
    train(net, parts(rank, n), adam)
    assert {parameter.grad.dtype for parameter in net.parameters() if parameter.grad is not None} == {torch.float32}
    same_summoned(net, alone.float(), 0.02)


@check
def fsdp1_on_the_cpu(rank, n):
    """Refused: parameters change their device between forward and backward."""
    net = flat(network(), rank, cpu_offload=CPUOffload(offload_params=True))
    raises(RuntimeError, "fully_shard with a CPUOffloadPolicy", train, net, parts(rank, n))


@check
def fsdp1_clips_and_accumulates(rank, n):
    """In single precision: it takes norms of nothing else."""
    net, alone, data = flat(network().float(), rank, use_orig_params=True), network().float(), list(batches(16))
    optimizers = sgd(net.parameters()), sgd(alone.parameters())
    for X, y in data:
        X = X.float()
        for context, x, t in zip((net.no_sync(), nullcontext()), part(X, rank, n).chunk(2), part(y, rank, n).chunk(2)):
            with context:
                (F.cross_entropy(net(x), t) / 2).backward()
        F.cross_entropy(alone(X), y).backward()
        norm, expected = net.clip_grad_norm_(0.01), nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
        torch.testing.assert_close(whole(norm), expected, rtol=1e-6, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same_summoned(net, alone, 1e-5)


@check
def fsdp1_state_dicts(rank, n):
    net, alone = train(flat(network(), rank), parts(rank, n), adam), trained_alone(network(), adam)
    with FSDP.state_dict_type(net, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True)):
        found = net.state_dict()
    for name, expected in alone.state_dict().items():
        torch.testing.assert_close(found[name], expected)
    with FSDP.state_dict_type(net, StateDictType.SHARDED_STATE_DICT):
        state, other = net.state_dict(), flat(network(), rank)
    with FSDP.state_dict_type(other, StateDictType.SHARDED_STATE_DICT):
        other.load_state_dict(state)
    same_summoned(other, alone)


class Block(nn.Module):
    """Attention and two layers, with a residual connection."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layers = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))

    def forward(self, X):
        X = X + self.attention(X, X, X, need_weights=False)[0]
        return X + self.layers(X)


@check
def fsdp_with_recomputation(rank, n):
    """A transformer whose activations are computed again in the backward pass."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), Block(), Block(), nn.Linear(8, 3)).double()
    data = [(torch.randn(8, 6, 5, dtype=torch.float64), torch.randint(6, (8, 3))) for _ in range(3)]
    alone = trained_alone(net, adam, data)
    net = net.cuda()
    apply_activation_checkpointing(net, check_fn=lambda module: isinstance(module, Block))
    for block in net:
        fully_shard(block)
    train(fully_shard(net), parts(rank, n, data), adam)
    found = [whole(parameter) for parameter in net.parameters()]
    for parameter, expected in zip(found, alone.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected.detach(), rtol=1e-9, atol=1e-9)


@check
def checkpoints(rank, n):
    """Written by four ranks, and read by two, by one, and without virtual GPUs' help."""
    net = sharded(network())
    optimizer = adam(net.parameters())
    train(net, parts(rank, n), optimizer)
    folder = shared_folder()
    model_state, optimizer_state = get_state_dict(net, optimizer)
    checkpoint.save({"net": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    alone = network()
    oracle = adam(alone.parameters())
    train(alone, batches(), oracle)
    pair = dist.new_group([0, 1])
    if rank < 2:
        other = sharded(network().apply(zero), mesh=DeviceMesh.from_group(pair, "cuda"))
        again = adam(other.parameters())
        loaded = dict(zip(("net", "optimizer"), get_state_dict(other, again), strict=True))
        checkpoint.load(loaded, checkpoint_id=folder, process_group=pair)
        set_state_dict(other, again, model_state_dict=loaded["net"], optim_state_dict=loaded["optimizer"])
        same_whole(other, alone)
        train(other, parts(rank, 2), again)
        same_whole(other, train(alone, batches(), oracle))
    dist.barrier()


@check
def whole_checkpoints(rank, n):
    """Gathered on rank 0, and handed out again."""
    net = train(sharded(network()), parts(rank, n), adam)
    alone = trained_alone(network(), adam)
    state = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        for name, expected in alone.state_dict().items():
            torch.testing.assert_close(state[name], expected)
    other = sharded(network().apply(zero))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, state if rank == 0 else {}, options=options)
    same_whole(other, alone)


@check
def checkpoints_in_the_background(rank, n):
    net, folder = train(sharded(network()), parts(rank, n), adam), shared_folder()
    group = dist.new_group(backend="gloo")
    future = checkpoint.async_save({"net": get_model_state_dict(net)}, checkpoint_id=folder, process_group=group)
    alone, before = trained_alone(network(), adam), copy.deepcopy(net.state_dict())
    train(net, parts(rank, n), adam)  # goes on meanwhile
    future.result()
    loaded = {"net": before}
    for value in before.values():
        value.zero_()
    checkpoint.load(loaded, checkpoint_id=folder)
    for name, expected in alone.state_dict().items():
        torch.testing.assert_close(whole(before[name]), expected)


def zero(module):
    for parameter in module.parameters(recurse=False):
        nn.init.zeros_(parameter)


def shared_folder():
    """The same new folder on all ranks; it goes with the program."""
    made = [FOLDERS.enter_context(tempfile.TemporaryDirectory())] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(made)
    return made[0]


FOLDERS = ExitStack()
atexit.register(FOLDERS.close)
