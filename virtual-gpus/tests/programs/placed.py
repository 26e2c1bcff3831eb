"""DTensor, and what stands on it: tensor and sequence parallelism."""

import torch
from checking import STEPS, check, equal_on_all_ranks, same, sgd, trained_alone, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    ones,
    rand,
    randn,
    zeros,
)
from torch.distributed.tensor import empty as empty_dtensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

F = nn.functional


def values(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


@check
def dtensor_placements(rank, n):
    """Each way to lie on four ranks into each other."""
    mesh, X = init_device_mesh("cuda", (n,)), values(7, 5)
    for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
        x = distribute_tensor(X, mesh, placements)
        assert x.device == torch.device("cuda", rank) and x.placements == tuple(placements)
        for others in ([Shard(0)], [Shard(1)], [Replicate()]):
            other = x.redistribute(mesh, others)
            expected = distribute_tensor(X, mesh, others)
            same(other.to_local(), expected.to_local().cpu())
            same(other.full_tensor(), X)
    partial = DTensor.from_local((X * (rank + 1)).cuda(), mesh, [Partial()])
    for others in ([Shard(0)], [Shard(1)], [Replicate()]):
        same(partial.redistribute(mesh, others).full_tensor(), 10 * X)
    same(DTensor.from_local((X * rank).cuda(), mesh, [Partial("max")]).full_tensor(), torch.maximum(X * 0, X * 3))
    same(DTensor.from_local((X * rank).cuda(), mesh, [Partial("avg")]).full_tensor(), X * 1.5)


@check
def dtensor_operations(rank, n):
    """Forward and backward, on pairs of placements, against whole tensors."""
    mesh = init_device_mesh("cuda", (n,))
    functions = {
        "pointwise": lambda a, b: (a * b.T + a.exp() / 2).sum(),
        "matmul": lambda a, b: (a @ b).pow(2).sum(),
        "norm": lambda a, b: F.layer_norm(a, (6,)).pow(3).sum() + b.mean(),
        "softmax": lambda a, b: (F.softmax(a, 1) * b.T).sum(),
        "views": lambda a, b: (a[1:3].unsqueeze(1) * b.T[:2].unsqueeze(0)).permute(2, 0, 1).pow(2).sum(),
        "cat": lambda a, b: torch.cat([a, b.T]).relu().std(),
    }
    for name, function in functions.items():
        A, B = values(4, 6).requires_grad_(), values(6, 4).requires_grad_()
        expected = function(A, B)
        gradients = torch.autograd.grad(expected, (A, B))
        for one, two in ((Shard(0), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Replicate()), (Replicate(), Shard(0))):
            a, b = distribute_tensor(A.detach(), mesh, [one]), distribute_tensor(B.detach(), mesh, [two])
            out = function(a.requires_grad_(), b.requires_grad_())
            same(out.full_tensor(), expected)
            out.backward()
            for x, gradient in zip((a, b), gradients, strict=True):
                assert x.grad.device.type == "cuda", name
                same(x.grad.full_tensor(), gradient)


@check
def dtensor_random_numbers(rank, n):
    """What is replicated is equal on all ranks, and parts are different from each other.

    The first random number takes all ranks to where rank 0 is, as PyTorch does on real GPUs.
    """
    mesh = init_device_mesh("cuda", (n,))
    torch.distributed.tensor._random._rng_tracker = None  # as at the program's start
    torch.manual_seed(5 + rank)
    first = rand(8, 6, device_mesh=mesh, placements=[Replicate()])
    assert equal_on_all_ranks(first.to_local())
    for make in (rand, randn, drawn, dropped):
        x = make(8, 6, device_mesh=mesh, placements=[Replicate()])
        assert equal_on_all_ranks(x.to_local()) and len(x.to_local().unique()) > 1
        y = make(8, 6, device_mesh=mesh, placements=[Shard(0)])
        all_parts = y.full_tensor().cpu().chunk(n)
        assert not any(torch.equal(all_parts[i], all_parts[j]) for i in range(n) for j in range(i))
        z = make(8, 6, device_mesh=mesh, placements=[Replicate()])
        assert equal_on_all_ranks(z.to_local()) and not torch.equal(x.to_local(), z.to_local())
    plain = torch.rand(1000, device="cuda")  # whoever draws without a DTensor goes on as if it had been none
    assert equal_on_all_ranks(plain)
    torch.manual_seed(5)
    assert torch.equal(first.to_local(), rand(8, 6, device_mesh=mesh, placements=[Replicate()]).to_local())


def drawn(*shape, device_mesh, placements):
    return nn.init.normal_(empty_dtensor(*shape, device_mesh=device_mesh, placements=placements))


def dropped(*shape, device_mesh, placements):
    return F.dropout(ones(*shape, device_mesh=device_mesh, placements=placements))


@check
def dtensor_factories(rank, n):
    mesh = init_device_mesh("cuda", (n,))
    for make, number in ((zeros, 0.0), (ones, 1.0)):
        x = make(6, 5, device_mesh=mesh, placements=[Shard(0)], dtype=torch.float64)
        same(x.full_tensor(), torch.full((6, 5), number, dtype=torch.float64))
    x = distribute_tensor(values(6, 5), mesh, [Shard(0)])
    for y, number in ((torch.zeros_like(x), 0), (torch.ones_like(x), 1), (torch.full_like(x, 3.0), 3)):
        assert isinstance(y, DTensor) and y.placements == x.placements and y.device == x.device
        same(y.full_tensor(), torch.full((6, 5), float(number), dtype=torch.float64))
    y = torch.rand_like(distribute_tensor(values(6, 5), mesh, [Replicate()]))
    assert equal_on_all_ranks(y.to_local())
    assert x.cpu().device.type == "cpu" and x.cpu().cuda().device == x.device and x.float().dtype is torch.float32
    same(x.cpu().cuda().full_tensor(), values(6, 5))


class Attention(nn.Module):
    """Causal attention with four heads, whose number follows from the weights that a rank has."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, X):
        q, k, v = (layer(X).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(8), Attention(), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, X):
        X = X + self.attention(self.norm1(X))
        return X + self.down(F.gelu(self.up(self.norm2(X))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = nn.Embedding(12, 8), nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 12, bias=False)
        self.double()

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.embed(tokens))))


def texts(rows=3):
    generator = torch.Generator().manual_seed(2)
    return [tuple(torch.randint(12, (rows, 8), generator=generator) for _ in range(2)) for _ in range(STEPS)]


def loss_of(y_hat, y):
    return F.cross_entropy(y_hat.flatten(0, 1), y.flatten())


ATTENTION = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}


@check
def sequence_parallelism(rank, n):
    """Norms, dropout and residual connections on a part of each sequence; the loss on parts of the vocabulary."""
    mesh, net = init_device_mesh("cuda", (n,)), Transformer().cuda()
    for block in net.blocks:
        gathered = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
        plan = {"norm1": SequenceParallel(), "norm2": SequenceParallel()} | ATTENTION
        plan |= {"attention": PrepareModuleInput(**gathered), "attention.out": RowwiseParallel(output_layouts=Shard(1))}
        plan |= {"up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))}
        parallelize_module(block, mesh, plan)
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(net, mesh, ends)
    optimizer = sgd(net.parameters())
    for X, y in texts():
        optimizer.zero_grad()
        with loss_parallel():
            loss_of(net(X.cuda()), y.cuda()).backward()
        optimizer.step()
    same_placed(net, trained_alone(Transformer(), data=texts(), loss=loss_of))


def same_placed(net, expected):
    for (name, found), wanted in zip(net.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(whole(found), wanted.detach(), rtol=1e-9, atol=1e-9, msg=name)


@check
def attention_of_dtensors(rank, n):
    """Sharded over heads, or over the batch: causal, with a mask, in half precision."""
    mesh, X = init_device_mesh("cuda", (n,)), values(3, 4, 8, 5, 6)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}, {"scale": 0.3}):
        for place in (Shard(0), Shard(1), Replicate()):
            whole = X.clone().requires_grad_()
            expected = F.scaled_dot_product_attention(*whole, **options)
            expected.pow(2).sum().backward()
            q, k, v = parts = [distribute_tensor(x, mesh, [place]).requires_grad_() for x in X]
            given = dict(options)
            if "attn_mask" in given:
                given["attn_mask"] = distribute_tensor(mask, mesh, [Replicate()])
            out = F.scaled_dot_product_attention(q, k, v, **given)
            assert isinstance(out, DTensor)
            same(out.full_tensor(), expected)
            out.pow(2).sum().backward()
            for x, gradient in zip(parts, whole.grad, strict=True):
                same(x.grad.full_tensor(), gradient)
