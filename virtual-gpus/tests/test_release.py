"""Memory comes back: whatever way a tensor on a virtual GPU was made, it goes when nobody holds it any more.

Of each program that oracle.py compares with the CPU that is checked there, too. These are ways of another kind.
"""

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


def train(net):
    net(fresh()).sum().backward()
    torch.optim.Adam(net.parameters()).step()


def queued(value):
    return ForkingPickler.loads(bytes(ForkingPickler.dumps(value)))


def views():
    x = fresh()
    return [x, x[1:], x.t()]


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
    for device in "cpu", "cuda":
        data = TensorDataset(fresh(8, 4, device=device), torch.arange(8))
        for X, y in DataLoader(data, batch_size=4, pin_memory=device == "cpu"):
            X.cuda(), y.cuda()


def noted():
    x = fresh()
    x.note, x.other = "seen", fresh()
    copy.deepcopy(x), copy.copy(x)


def moved():
    net = network()
    train(net)
    for place in ("cpu", "cuda", "cuda:1", torch.float16, "cuda:0"):
        net.to(place)


def exchanged():
    x = nn.Parameter(fresh())
    for device in ("cuda", "cpu", "cuda:1"):
        x.data = fresh(device=device)
    torch.utils.swap_tensors(x, nn.Parameter(fresh()))


def scaled():
    scaler, net = torch.amp.GradScaler("cuda"), network()
    optimizer = torch.optim.AdamW(net.parameters())
    with torch.autocast("cuda"):
        loss = net(fresh()).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def by_hand():
    replicas = replicate(network(), [0, 1])
    parts = comm.scatter(fresh(8, 64), [0, 1])
    comm.gather(parallel_apply(replicas, [(part,) for part in parts]))
    comm.reduce_add_coalesced([[fresh()], [fresh(device="cuda:1")]])


def refused():
    x = wanting()
    with contextlib.suppress(torch.OutOfMemoryError):
        x.expand(1 << 30, 64, 64).contiguous()
    for other in (fresh(device="cuda:1"), fresh(7, 7)):
        with contextlib.suppress(RuntimeError):
            (2 * x) @ other


def objects():
    said = [fresh(), {"x": fresh()}]
    dist.all_gather_object([None], said)
    dist.broadcast_object_list(said)


def sharded():
    net = network()
    for layer in (*net, net):
        fsdp.fully_shard(layer)
    train(net)


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
    for place in (None, "cuda:1"):
        torch.load(folder / "x.pt", mmap=True, map_location=place)


WAYS = {
    "from the CPU, over both GPUs, and back": lambda: fresh(device="cpu").cuda().to("cuda:1").to("cuda:0").cpu(),
    "a stream": streamed,
    "pinned memory": pinned,
    "a DataLoader": loaded_in_batches,
    "a storage": lambda: fresh().untyped_storage(),
    "storages of no size and back": resized,
    "attributes": noted,
    "a class": lambda: (fresh().as_subclass(Sub) * 2).sum(),
    "pickle, a class": lambda: pickle.loads(pickle.dumps(fresh().as_subclass(Sub))),
    "a queue": lambda: queued([fresh(), nn.Parameter(fresh()), fresh().as_subclass(Sub)]),
    "load, a dictionary": lambda: reload(fresh(), map_location={"cuda:0": "cuda:1"}),
    "load, a function": lambda: reload(fresh(), map_location=lambda storage, place: storage.cuda(1)),
    "load, from the CPU": lambda: reload(fresh(device="cpu"), map_location="cuda"),
    "load, the old format": lambda: torch.load(saved(fresh(), _use_new_zipfile_serialization=False)),
    "load, a type without typed storages": lambda: reload(torch.zeros(4, dtype=torch.uint16, device="cuda")),
    "load, views": lambda: reload(views()),
    "load, any object": lambda: reload([network(), fresh().as_subclass(Sub)], weights_only=False),
    "load, a mapped file": mapped,
    "a graph that nobody goes back": lambda: network()(wanting()).sum(),
    "a graph that is kept": lambda: network()(wanting()).sum().backward(retain_graph=True),
    "inference": lambda: torch.inference_mode()(network())(fresh()),
    "recomputation": lambda: recomputing.checkpoint(network(), wanting(), use_reentrant=True).sum().backward(),
    "a network that moves": moved,
    "data of another device": exchanged,
    "automatic mixed precision": scaled,
    "DataParallel": lambda: nn.DataParallel(network())(wanting(8, 64)).sum().backward(),
    "its parts": by_hand,
    "errors": refused,
    "an asynchronous collective": lambda: dist.all_gather_into_tensor(fresh(), fresh(), async_op=True).wait(),
    "objects of all ranks": objects,
    "DistributedDataParallel": lambda: train(DistributedDataParallel(network())),
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
    x = torch.ones(32 * MiB, dtype=torch.uint8, device="cuda")
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
