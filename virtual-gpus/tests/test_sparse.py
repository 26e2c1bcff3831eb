"""Sparse COO tensors on virtual GPUs: embeddings with sparse=True, their optimizers, nn.parallel."""

import copy
import io
from functools import partial

import pytest
import torch
import torch.distributed as dist
from oracle import check_same_on_a_gpu
from torch import nn
from torch.nn.parallel import comm
from versions import since

from virtual_gpus import dry_run, virtual_gpus

GPU0, GPU1 = torch.device("cuda:0"), torch.device("cuda:1")
INDICES, VALUES = [[0, 1, 1], [0, 2, 2]], [1.0, 2.0, 3.0]


def sparse(device="cuda:1", **options):
    return torch.sparse_coo_tensor(INDICES, VALUES, (2, 3), device=device, **options)


def gradient_of_values(x):
    values = torch.tensor(VALUES, device=x.device, requires_grad=True)
    torch.sparse_coo_tensor(INDICES, values, (2, 3), device=x.device).to_dense().square().sum().backward()
    return values.grad


@pytest.mark.parametrize(
    "make",
    [
        lambda x: [x, x.coalesce(), 2 * x - x.coalesce() / 4, x.clone().zero_(), x.clone().add_(x), copy.deepcopy(x)],
        lambda x: [x.to(torch.float64), x.to_dense(), x.to_dense().to_sparse(), x.abs().pow(2).sqrt(), x.sum()],
        lambda x: torch.ones(2, 3, device=x.device).sparse_mask(x.coalesce()),
        lambda x: torch.ones(2, 3, device=x.device).add_(x, alpha=-0.5),
        lambda x: [x.coalesce().values(), x.coalesce().indices()],
        lambda x: torch.sparse_coo_tensor(INDICES, VALUES, device=x.device),
        lambda x: torch.sparse_coo_tensor(x._indices(), x._values(), x.shape),
        lambda x: torch.sparse_coo_tensor(x._indices(), x._values(), x.shape, dtype=torch.float64, device=x.device),
        lambda x: torch.sparse_coo_tensor(size=(2, 3), device=x.device),
        gradient_of_values,
    ],
)
def test_gives_the_same_as_on_the_cpu(gpus, make):
    check_same_on_a_gpu(lambda device: make(sparse(device)))


def test_moves_prints_and_is_saved(gpus):
    x, file = sparse().coalesce(), io.BytesIO()
    for moved in (x.cuda(0), x.to("cuda:0"), x.cpu().cuda()):
        assert (moved.device, moved._indices().device, moved._values().tolist()) == (GPU0, GPU0, [1, 5])
    assert gpus.traffic["cuda:1", "cuda:0"] == 2 * x.nbytes == 2 * (4 * 8 + 2 * 4)
    assert repr(x) == repr(x.cpu()).replace("size=", "device='cuda:1', size=")
    on_cpu = torch.sparse_coo_tensor(x._indices(), x._values(), x.shape, device="cpu")
    assert on_cpu.is_cpu and torch.equal(on_cpu.to_dense(), x.cpu().to_dense())
    torch.save(x, file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded.device == GPU1 and torch.equal(loaded.to_dense(), x.to_dense()) and loaded.is_coalesced()


def test_takes_the_memory_of_its_indices_and_values(gpus):
    x = torch.sparse_coo_tensor(torch.zeros(1, 1000, dtype=torch.int64), torch.ones(1000, 4), (10, 4), device="cuda:1")
    assert gpus.ledgers[1].allocated == 8192 + 16384
    x.add_(x)
    assert gpus.ledgers[1].allocated == 2 * (8192 + 16384) - 512  # 16,000 bytes of indices, in blocks of 512
    del x
    assert gpus.ledgers[1].allocated == 0


def trained(optimizer, device):
    table = nn.Embedding(10, 4, sparse=True).to(device)
    optimizer = optimizer(table.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for words in ([0, 1, 1, 5], [0, 3]):
            table(torch.tensor(words, device=device)).square().sum().backward()
        assert table.weight.grad.is_sparse and table.weight.grad.device == table.weight.device
        optimizer.step()
    return table.weight


OPTIMIZERS = torch.optim.SGD, partial(torch.optim.SGD, momentum=0.9), torch.optim.SparseAdam, torch.optim.Adagrad


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_embeddings_train_as_on_the_cpu(gpus, optimizer):
    check_same_on_a_gpu(partial(trained, optimizer))


@since("2.15")  # before, PyTorch had no norm of a sparse tensor
def test_gradients_are_clipped_and_unscaled_as_on_the_cpu(gpus):
    def gradient(device):
        table = nn.Embedding(10, 4, sparse=True).to(device)
        scaler = torch.amp.GradScaler(table.weight.device.type, init_scale=8)
        scaler.scale(table(torch.tensor([1, 1, 3], device=device)).square().sum()).backward()
        scaler.unscale_(torch.optim.SGD(table.parameters()))
        nn.utils.clip_grad_norm_(table.parameters(), 0.1)
        return table.weight.grad.to_dense()

    check_same_on_a_gpu(gradient)


def test_data_parallel_adds_up_sparse_gradients(gpus):
    words = torch.randint(10, (20, 5))
    table = nn.Embedding(10, 4, sparse=True)
    table(words).square().sum().backward()
    expected = table.weight.grad.to_dense()
    table.zero_grad()
    parallel = nn.DataParallel(table.cuda(), [0, 1])
    parallel(words.cuda()).square().sum().backward()
    torch.testing.assert_close(table.weight.grad.to_dense().cpu(), expected)


def test_is_broadcast_and_added_beside_dense_tensors(gpus):
    x, y = sparse("cuda:0"), torch.ones(3, device="cuda:0")
    [same, copies] = comm.broadcast_coalesced([x, y], [0, 1])
    assert same[0] is x and [t.device for t in copies] == [GPU1, GPU1]
    total, dense = comm.reduce_add_coalesced([same, copies])
    assert torch.equal(total.to_dense(), 2 * x.to_dense()) and dense.tolist() == [2, 2, 2]


def test_a_step_takes_the_time_of_its_rows_and_not_of_the_table():
    def seconds(rows):
        with virtual_gpus(1) as machine:
            table = torch.zeros(rows, 64, device="cuda")
            gradient = torch.sparse_coo_tensor([[0, 1]], torch.ones(2, 64), (rows, 64), device="cuda")
            torch.cuda.synchronize()
            before = machine.elapsed()
            table.add_(gradient)
            torch.cuda.synchronize()
            return machine.elapsed() - before

    assert seconds(10) == seconds(100_000)


@pytest.mark.parametrize(
    "make",
    [
        lambda: sparse("cuda:0"),
        lambda: torch.ones(2, device="cuda").to_sparse(),
        lambda: nn.Embedding(2, 3, sparse=True, device="cuda")(torch.tensor([1], device="cuda")).sum().backward(),
    ],
)
def test_a_dry_run_has_none(make):
    with pytest.raises(RuntimeError, match="without values there are no sparse tensors"):
        dry_run(make, n_gpus=1)


@pytest.mark.parametrize(("backend", "words"), [("nccl", "must be CUDA and dense"), ("gloo", "not sparse ones")])
def test_collectives_take_dense_tensors(gpus, backend, words):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=words):
            dist.all_reduce(sparse("cuda:0"))
    finally:
        dist.destroy_process_group()
