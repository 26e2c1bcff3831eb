"""FSDP in both generations, and checkpoints of what is sharded."""

import atexit
import copy
import tempfile
from contextlib import ExitStack, nullcontext

import torch
import torch.distributed as dist
from checking import batches, check, network, part, parts, raises, sgd, train, trained_alone, whole
from placed import Block, Transformer, loss_of, same_placed, texts
from torch import nn
from torch.distributed import checkpoint, fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

F = nn.functional


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def sharded(net, **options):
    """`net` with FSDP2, each linear layer by itself."""
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(net, **options)


def same_whole(net, expected, tolerance=1e-9):
    """All of the parameters of `net`, which FSDP2 has sharded or FSDP summons, are those of `expected`."""
    wanted = dict(expected.named_parameters())
    with FSDP.summon_full_params(net) if isinstance(net, FSDP) else nullcontext():
        found = dict(net.named_parameters())
        assert found.keys() == wanted.keys()
        for name, parameter in found.items():
            torch.testing.assert_close(whole(parameter), wanted[name].detach(), rtol=tolerance, atol=tolerance)


def check_trained(net, rank, n):
    """Training `net`, which is network() in some way, on this rank's parts does what training it alone does."""
    same_whole(train(net, parts(rank, n), adam), trained_alone(network(), adam))


@check
def fsdp_sharding(rank, n):
    """Rows are shared out: 9, 6 and 3 of them among 4 ranks, of which one has none; or among pairs of ranks."""
    for reshard in (True, False, 2):
        net = sharded(network().cuda(), reshard_after_forward=reshard)
        assert isinstance(net[4].weight, DTensor) and net[4].weight.to_local().shape == (int(rank < 3), 6)
        check_trained(net, rank, n)
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = sharded(network().cuda(), mesh=mesh)
    assert len(net[0].weight.to_local()) == (5, 4)[rank % 2]
    check_trained(net, rank, n)


@check
def fsdp_mixed_precision(rank, n):
    types, seen = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}, []
    net = network().float().cuda()
    for layer in (net[0], net[2], net[4]):
        fully_shard(layer, mp_policy=fsdp.MixedPrecisionPolicy(**types))
    fully_shard(net, mp_policy=fsdp.MixedPrecisionPolicy(**types, output_dtype=torch.float64))
    net[2].register_forward_pre_hook(lambda layer, args: seen.extend([layer.weight.dtype, args[0].dtype]))
    train(net, ((X.float(), y) for X, y in parts(rank, n)), adam)
    assert set(seen) == {torch.bfloat16} and net(part(next(batches())[0], rank, n)).dtype is torch.float64
    assert {p.dtype for p in net.parameters()} == {p.grad.dtype for p in net.parameters()} == {torch.float32}
    same_whole(net, trained_alone(network(), adam).float(), 0.02)


@check
def fsdp_on_the_cpu(rank, n):
    """Offloaded: shards, their gradients and the optimizer's states stay on the CPU."""
    net = sharded(network(), offload_policy=fsdp.CPUOffloadPolicy())
    assert {parameter.device.type for parameter in net.parameters()} == {"cpu"}
    train(net, parts(rank, n), adam)
    assert {parameter.grad.device.type for parameter in net.parameters()} == {"cpu"}
    alone = trained_alone(network(), adam)
    for parameter, expected in zip(net.parameters(), alone.parameters(), strict=True):
        rows = expected.chunk(n)[rank] if rank < len(expected.chunk(n)) else expected[:0]
        torch.testing.assert_close(parameter.to_local().detach(), rows.detach())


@check
def fsdp_from_meta(rank, n):
    """Made without memory, sharded, and then filled with the same numbers on all ranks."""
    if not torch._C._has_cuda:
        return  # a build without CUDA refuses FakeTensors of CUDA, which DTensor's uniform_ needs
    with torch.device("meta"):
        net = network()
    sharded(net).to_empty(device="cuda")
    torch.manual_seed(4)
    for layer in net[::2]:
        layer.reset_parameters()
    alone = network()
    alone.load_state_dict({name: whole(value) for name, value in net.state_dict().items()})
    assert 0.1 < alone[0].weight.std() < 0.5 and len(alone[0].weight.unique()) == 45
    same_whole(train(net, parts(rank, n), adam), train(alone, batches(), adam))


@check
def fsdp_with_tensor_parallelism(rank, n):
    """Two ranks share every layer, and two such pairs the data."""
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("data", "tensor"))
    net = network(8).cuda()
    parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(sharded(net, mesh=mesh["data"]), parts(mesh["data"].get_local_rank(), 2), adam)
    same_whole(net, trained_alone(network(8), adam))


def linear(module, recurse, nonwrapped_numel):
    return recurse or isinstance(module, nn.Linear)


def flat(net, rank, **options):
    """`net` with the first generation of FSDP, whose parameters are one flat one for each linear layer."""
    return FSDP(net.cuda(), device_id=rank, auto_wrap_policy=linear, **options)


@check
def fsdp1_sharding(rank, n):
    for strategy, options in (
        ("FULL_SHARD", {"use_orig_params": True}),
        ("SHARD_GRAD_OP", {"use_orig_params": False}),
        ("NO_SHARD", {"use_orig_params": True}),
        ("HYBRID_SHARD", {"device_mesh": init_device_mesh("cuda", (2, 2))}),
    ):
        check_trained(flat(network(), rank, sharding_strategy=fsdp.ShardingStrategy[strategy], **options), rank, n)


@check
def fsdp1_mixed_precision(rank, n):
    half = fsdp.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = train(flat(network().float(), rank, mixed_precision=half), parts(rank, n), adam)
    assert {parameter.grad.dtype for parameter in net.parameters() if parameter.grad is not None} == {torch.float32}
    same_whole(net, trained_alone(network(), adam).float(), 0.02)


@check
def fsdp1_on_the_cpu(rank, n):
    """Refused: parameters change their device between forward and backward."""
    net = flat(network(), rank, cpu_offload=fsdp.CPUOffload(offload_params=True))
    raises(RuntimeError, "fully_shard with a CPUOffloadPolicy", train, net, parts(rank, n))


@check
def fsdp_clips_and_accumulates(rank, n):
    """Both generations, in single precision: the first one takes norms of nothing else."""
    for net in sharded(network().float().cuda()), flat(network().float(), rank, use_orig_params=True):
        alone, first = network().float(), isinstance(net, FSDP)
        optimizers = sgd(net.parameters()), sgd(alone.parameters())
        for X, y in batches(16):
            X = X.float()
            for last, x, t in zip((False, True), part(X, rank, n).chunk(2), part(y, rank, n).chunk(2)):
                if not first:
                    net.set_requires_gradient_sync(last)
                with net.no_sync() if first and not last else nullcontext():
                    (F.cross_entropy(net(x), t) / 2).backward()
            F.cross_entropy(alone(X), y).backward()
            expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
            norm = net.clip_grad_norm_(0.01) if first else nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            torch.testing.assert_close(whole(norm), expected, rtol=1e-6, atol=0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        same_whole(net, alone, 1e-5)


@check
def fsdp1_state_dicts(rank, n):
    net, alone = train(flat(network(), rank), parts(rank, n), adam), trained_alone(network(), adam)
    kinds, on_the_cpu = fsdp.StateDictType, fsdp.FullStateDictConfig(offload_to_cpu=True)
    with FSDP.state_dict_type(net, kinds.FULL_STATE_DICT, on_the_cpu):
        same_states(net.state_dict(), alone)
    with FSDP.state_dict_type(net, kinds.SHARDED_STATE_DICT):
        state, other = net.state_dict(), flat(network(), rank)
    with FSDP.state_dict_type(other, kinds.SHARDED_STATE_DICT):
        other.load_state_dict(state)
    same_whole(other, alone)


def same_states(found, net):
    for name, expected in net.state_dict().items():
        torch.testing.assert_close(whole(found[name]), expected)


@check
def fsdp_with_recomputation(rank, n):
    """A transformer whose activations are computed again in the backward pass."""
    net, data = Transformer().cuda(), texts(rows=8)
    apply_activation_checkpointing(net, check_fn=lambda module: isinstance(module, Block))
    for block in net.blocks:
        fully_shard(block)
    train(fully_shard(net), parts(rank, n, data), adam, loss_of)
    same_placed(net, trained_alone(Transformer(), adam, data, loss=loss_of))


@check
def checkpoints(rank, n):
    """Written by four ranks, and read by two, by one, and without virtual GPUs' help."""
    net = sharded(network().cuda())
    optimizer = adam(net.parameters())
    train(net, parts(rank, n), optimizer)
    folder = shared_folder()
    model_state, optimizer_state = states.get_state_dict(net, optimizer)
    checkpoint.save({"net": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    alone = network()
    oracle = adam(alone.parameters())
    train(alone, batches(), oracle)
    pair = dist.new_group([0, 1])
    if rank < 2:
        other = sharded(network().apply(zero).cuda(), mesh=DeviceMesh.from_group(pair, "cuda"))
        again = adam(other.parameters())
        loaded = dict(zip(("net", "optimizer"), states.get_state_dict(other, again), strict=True))
        checkpoint.load(loaded, checkpoint_id=folder, process_group=pair)
        states.set_state_dict(other, again, model_state_dict=loaded["net"], optim_state_dict=loaded["optimizer"])
        same_whole(other, alone)
        train(other, parts(rank, 2), again)
        same_whole(other, train(alone, batches(), oracle))
    dist.barrier()


@check
def checkpoints_in_the_background(rank, n):
    net, folder = train(sharded(network().cuda()), parts(rank, n), adam), shared_folder()
    group = dist.new_group(backend="gloo")
    future = checkpoint.async_save({"net": states.get_model_state_dict(net)}, checkpoint_id=folder, process_group=group)
    before = copy.deepcopy(net.state_dict())
    train(net, parts(rank, n), adam)  # goes on meanwhile
    future.result()
    for value in before.values():
        value.zero_()
    checkpoint.load({"net": before}, checkpoint_id=folder)
    same_states(before, trained_alone(network(), adam))


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
