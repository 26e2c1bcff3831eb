"""Memory comes back: whatever way a tensor on a virtual GPU was made, it goes when nobody holds it any more."""

import contextlib
import copy
import gc
import io
import os
import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import happens
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed import fsdp, tensor
from torch.nn.parallel import DistributedDataParallel, comm, parallel_apply, replicate
from torch.utils import checkpoint as recomputing
from torch.utils.data import DataLoader, TensorDataset

from virtual_gpus import virtual_gpus

MiB = 1 << 20


class Sub(Tensor):
    """A class of tensors, as users write them."""


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0].sign()


def fresh(*shape, device="cuda"):
    return torch.rand(*(shape or (64, 64)), device=device)


def wanting(*shape):
    return fresh(*shape).requires_grad_()


def network(device="cuda"):
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64)).to(device)


def saved(value, **options):
    file = io.BytesIO()
    torch.save(value, file, **options)
    file.seek(0)
    return file


def reload(value, **options):
    torch.load(saved(value), **options)


def trained(net, optimizer=torch.optim.SGD, **options):
    net(fresh()).sum().backward()
    made = optimizer(net.parameters(), lr=0.1, **options)
    made.step()
    return made


def queued(value):
    return ForkingPickler.loads(bytes(ForkingPickler.dumps(value)))


def resized():
    x = fresh()
    for size in (0, x.nbytes):
        x.untyped_storage().resize_(size)
    for size in (0, x.numel()):
        x._typed_storage()._resize_(size)


def streamed():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = (fresh() * 2).to("cuda:1", non_blocking=True)
    x.record_stream(stream)


def pinned():
    host = fresh(device="cpu").pin_memory()
    host.copy_(host.cuda(non_blocking=True), non_blocking=True)


def loaded_in_batches():
    data = TensorDataset(fresh(8, 4, device="cpu"), torch.arange(8))
    for X, y in DataLoader(data, batch_size=4, pin_memory=True):
        X.cuda(), y.cuda()
    for _ in DataLoader(TensorDataset(fresh(8, 4)), batch_size=4):
        pass


def noted():
    x = fresh()
    x.note, x.other = "seen", fresh()
    copy.deepcopy(x), copy.copy(x)


def hooked():
    seen, net, x = [], network(), wanting()
    x.register_hook(seen.append)
    net[0].weight.register_post_accumulate_grad_hook(lambda weight: None)
    net[0].register_forward_hook(lambda module, args, out: 2 * out)
    net[0].register_full_backward_hook(lambda module, into, out: None)
    net(x).sum().backward()


def packed():
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        loss = network()(wanting()).sum()
    loss.backward()


def recomputed(reentrant):
    recomputing.checkpoint(network(), wanting(), use_reentrant=reentrant).sum().backward()


def moved(*places):
    net = network()
    trained(net)
    for place in places:
        net.to(place)


def exchanged():
    x = nn.Parameter(fresh())
    x.data = fresh()
    x.data = fresh(device="cpu")
    x.data = fresh(device="cuda:1")
    torch.utils.swap_tensors(x, nn.Parameter(fresh()))


def scaled():
    scaler, net = torch.amp.GradScaler("cuda"), network()
    optimizer = torch.optim.AdamW(net.parameters())
    with torch.autocast("cuda"):
        loss = net(fresh()).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def restored():
    net = network()
    optimizer = trained(net, torch.optim.Adam)
    state = torch.load(saved({"net": net.state_dict(), "optimizer": optimizer.state_dict()}))
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])


def functional():
    net = network()
    torch.func.functional_call(net, {name: p.clone() for name, p in net.named_parameters()}, fresh())
    torch.func.vmap(torch.func.grad(lambda w, x: (w * x).sum()), (None, 0))(fresh(64), fresh())


def by_hand():
    replicas = replicate(network(), [0, 1])
    parts = comm.scatter(fresh(8, 64), [0, 1])
    comm.gather(parallel_apply(replicas, [(part,) for part in parts]))
    comm.reduce_add_coalesced([[fresh()], [fresh(device="cuda:1")]])


def out_of_memory():
    x = fresh()
    with contextlib.suppress(torch.OutOfMemoryError):
        x.expand(1 << 30, 64, 64).contiguous()


def refused():
    x = wanting()
    with contextlib.suppress(RuntimeError):
        (2 * x) @ fresh(device="cuda:1")
    with contextlib.suppress(RuntimeError):
        (2 * x) @ fresh(7, 7)


def objects():
    said = [fresh(), {"x": fresh()}]
    gathered = [None]
    dist.all_gather_object(gathered, said)
    dist.broadcast_object_list(said)


def sharded():
    net = network()
    for layer in (*net, net):
        fsdp.fully_shard(layer)
    trained(net, torch.optim.Adam, foreach=True)


def distributed_tensors():
    mesh = dist.init_device_mesh("cuda", (1,))
    x = tensor.distribute_tensor(wanting(), mesh, [tensor.Shard(0)])
    (x @ x).redistribute(mesh, [tensor.Replicate()]).full_tensor().sum().backward()


def kept_in_a_folder(folder):
    net = network()
    dcp.save({"net": net.state_dict()}, checkpoint_id=folder)
    dcp.load({"net": net.state_dict()}, checkpoint_id=folder)


def mapped(folder):
    torch.save(fresh(), folder / "x.pt")
    torch.load(folder / "x.pt", mmap=True)
    torch.load(folder / "x.pt", mmap=True, map_location="cuda:1")


WAYS = {
    "a function that makes one": lambda: torch.zeros(64, device="cuda"),
    "from the CPU and back": lambda: fresh(device="cpu").cuda().cpu(),
    "another GPU and back": lambda: fresh().to("cuda:1").to("cuda:0"),
    "a stream": streamed,
    "pinned memory": pinned,
    "a DataLoader": loaded_in_batches,
    "parts": lambda: torch.cat(fresh().split(16))[torch.tensor([0, 1])].t()[1:].expand(2, 63, 2),
    "resize_": lambda: fresh(10).resize_(1000).resize_(10),
    "set_": lambda: torch.empty(0, device="cuda").set_(fresh()),
    "out=": lambda: torch.add(fresh(), 1, out=torch.empty(0, device="cuda")),
    "a storage": lambda: fresh().untyped_storage(),
    "storages of no size and back": resized,
    "complex numbers": lambda: torch.view_as_real(torch.fft.fft(fresh()).conj().resolve_conj()),
    "a deep copy of views": lambda: copy.deepcopy((lambda x: [x, x[1:], x.t()])(fresh())),
    "attributes": noted,
    "a class": lambda: (fresh().as_subclass(Sub) * 2).sum(),
    "pickle": lambda: pickle.loads(pickle.dumps(fresh())),
    "pickle, a parameter": lambda: pickle.loads(pickle.dumps(nn.Parameter(fresh()))),
    "pickle, a class": lambda: pickle.loads(pickle.dumps(fresh().as_subclass(Sub))),
    "a queue": lambda: queued([fresh(), nn.Parameter(fresh()), fresh().as_subclass(Sub)]),
    "load": lambda: reload(fresh()),
    "load, a dictionary": lambda: reload(fresh(), map_location={"cuda:0": "cuda:1"}),
    "load, a function": lambda: reload(fresh(), map_location=lambda storage, place: storage.cuda(1)),
    "load, from the CPU": lambda: reload(fresh(device="cpu"), map_location="cuda"),
    "load, any object": lambda: reload(fresh(), weights_only=False),
    "load, the old format": lambda: torch.load(saved(fresh(), _use_new_zipfile_serialization=False)),
    "load, a type without typed storages": lambda: reload(torch.zeros(4, dtype=torch.uint16, device="cuda")),
    "load, views": lambda: reload((lambda x: [x, x[1:], x.t()])(fresh())),
    "load, a class": lambda: reload(fresh().as_subclass(Sub), weights_only=False),
    "load, a network": lambda: reload(network(), weights_only=False),
    "load, the state of a training": restored,
    "load, a mapped file": mapped,
    "backward": lambda: network()(wanting()).sum().backward(),
    "a graph that nobody goes back": lambda: network()(wanting()).sum(),
    "a graph that is kept": lambda: network()(wanting()).sum().backward(retain_graph=True),
    "a Function": lambda: Twice.apply(wanting()).sum().backward(),
    "hooks": hooked,
    "saved on the CPU": packed,
    "recomputation": lambda: recomputed(reentrant=False),
    "recomputation, reentrant": lambda: recomputed(reentrant=True),
    "a recurrent network": lambda: nn.LSTM(64, 64).cuda()(fresh(5, 3, 64))[0].sum().backward(),
    "functional calls": functional,
    "inference": lambda: torch.inference_mode()(network())(fresh()),
    "a network that moves": lambda: moved("cpu", "cuda", "cuda:1", torch.float16, "cuda:0"),
    "data of another device": exchanged,
    "a fused one": lambda: trained(network(), torch.optim.AdamW, fused=True),
    "automatic mixed precision": scaled,
    "DataParallel": lambda: nn.DataParallel(network())(wanting(8, 64)).sum().backward(),
    "its parts": by_hand,
    "out of memory": out_of_memory,
    "an error": refused,
    "an asynchronous collective": lambda: dist.all_gather_into_tensor(fresh(), fresh(), async_op=True).wait(),
    "objects of all ranks": objects,
    "DistributedDataParallel": lambda: trained(DistributedDataParallel(network())),
    "fully_shard": sharded,
    "DTensor": distributed_tensors,
    "a checkpoint of all ranks": kept_in_a_folder,
}


IN_CYCLES = {"fully_shard"}  # of Python objects, by PyTorch itself
if torch.__version__ < "2.11":
    IN_CYCLES.add("a checkpoint of all ranks")


@pytest.fixture(scope="module", autouse=True)
def gpus():
    with virtual_gpus(2) as machine:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        gc.freeze()  # what is there already need not be looked through each time
        yield machine
        gc.unfreeze()
        dist.destroy_process_group()


def in_use(machine):
    """Bytes and blocks of each GPU; how many Python objects of tensors and storages there are anywhere."""
    counts = [(ledger.allocated, ledger.blocks) for ledger in machine.ledgers]
    kinds = [kind for kind in map(type, gc.get_objects()) if issubclass(kind, (Tensor, torch.UntypedStorage))]
    return counts, len(kinds)


def is_back(machine, before):
    """Whether no more is there than `before`. Objects may be fewer: a moment before, gloo's threads had some."""
    counts, objects = in_use(machine)
    return counts == before[0] and objects <= before[1]


@pytest.mark.parametrize("name", WAYS)
def test_memory_comes_back(gpus, tmp_path, name):
    """At once: without the garbage collector, where PyTorch needs none."""
    way = WAYS[name]
    if "all ranks" in name:
        pytest.importorskip("numpy")  # by which PyTorch sends objects
    arguments = [tmp_path] * way.__code__.co_argcount
    way(*arguments)  # for what PyTorch makes once
    gc.collect()
    gc.disable()
    try:
        before = in_use(gpus)
        for _ in range(3):
            way(*arguments)
        if name in IN_CYCLES:
            gc.collect()
        assert happens(lambda: is_back(gpus, before), seconds=60), (in_use(gpus), before)
    finally:
        gc.enable()


def test_data_parallel_makes_no_cycles(gpus):
    net = nn.DataParallel(network())
    net(wanting(8, 64)).sum().backward()
    gc.collect()
    net(wanting(10, 64)).sum().backward()
    assert gc.collect() == 0


def resident():
    """Bytes of the computer's memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc, which Linux has")
@pytest.mark.parametrize("way", [reload, lambda x: reload(x.cpu(), map_location="cuda"), queued, copy.deepcopy])
def test_the_computers_memory_comes_back(gpus, way):
    x = torch.ones(64 * MiB, dtype=torch.uint8, device="cuda")
    way(x)
    before = resident()
    for _ in range(5):
        way(x)
    assert resident() - before < 3 * x.nbytes
    assert torch.cuda.memory_allocated() >= x.nbytes, "it is there still"


def test_a_loaded_tensor_is_its_own(tmp_path):
    """Also where torch.load maps the file: as on a GPU, the file may change, or go."""
    file = tmp_path / "x.pt"
    torch.save(torch.ones(10_000, device="cuda"), file)
    x = torch.load(file, mmap=True)
    torch.save(torch.zeros(1), file)
    assert x.sum() == 10_000
