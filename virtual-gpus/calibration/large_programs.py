"""Programs that train large language models on many GPUs, as those of published_runs do.

A program is built from a row of published_runs and handed to `dry_run`. There are two kinds: one whose parameters
lie in parts on all GPUs (FSDP, ZeRO-3), and one as Megatron-LM is (Shoeybi et al. 2019, arXiv:1909.08053; Narayanan et
al. 2021, arXiv:2104.04473; Korthikanti et al. 2022, arXiv:2205.05198), which splits matrices, tokens, layers and
batches. Tokens are the first dimension there, so that a part of them is one piece of memory.

Left out as smaller than a thousandth of a step: the sum of the gradients of an embedding that the first and the last
stage share, and of norms whose tokens are split.
"""

import itertools
import os
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from calibration.llama import Transformer, rotary_angles, rotate
from calibration.transformers import DROPOUT, Fused, aten, book
from virtual_gpus import current

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
ROOMY = 10**15  # bytes: the published batches did fit, so nothing may be in their way


# How matrices and tokens are split


class Split(NamedTuple):
    """The `parts` GPUs of a `group` that share each matrix, and with `tokens` also what lies between matrices."""

    group: object
    parts: int
    tokens: bool

    def gathered(self, X, wait=True):
        """All parts of X, first dimension; with wait=False also what to wait for."""
        whole = X.new_empty(self.parts * X.shape[0], *X.shape[1:])
        work = dist.all_gather_into_tensor(whole, X.contiguous(), group=self.group, async_op=not wait)
        return whole if wait else (whole, work)

    def scattered(self, X, wait=True):
        """This GPU's part of the sum."""
        part = X.new_empty(X.shape[0] // self.parts, *X.shape[1:])
        work = dist.reduce_scatter_tensor(part, X.contiguous(), group=self.group, async_op=not wait)
        return part if wait else (part, work)

    def summed(self, X):
        X = X.contiguous()
        dist.all_reduce(X, group=self.group)
        return X


class Columns(torch.autograd.Function):
    """X @ W.T + b, where each GPU has some columns of the result.

    Where tokens are split, messages go on beside products: so Megatron-LM does since 2022, and nanotron.
    """

    @staticmethod
    def forward(ctx, X, W, b, split):
        ctx.split, ctx.biased = split, b is not None
        ctx.save_for_backward(X, W)
        return F.linear(split.gathered(X) if split.tokens else X, W, b)

    @staticmethod
    def backward(ctx, grad):
        (X, W), split = ctx.saved_tensors, ctx.split
        if not split.tokens:
            back = split.summed(grad @ W)
            return back, product(grad, X), grad.sum((0, 1)) if ctx.biased else None, None
        whole, work = split.gathered(X, wait=False)
        back = grad @ W
        work.wait()
        back, work = split.scattered(back, wait=False)
        found = product(grad, whole), grad.sum((0, 1)) if ctx.biased else None
        work.wait()
        return back, *found, None


def product(grad, X):
    """The gradient of a matrix."""
    return grad.flatten(0, 1).t() @ X.flatten(0, 1)


class Joined(torch.autograd.Function):
    """The sum over all GPUs of a split matrix: whole, or a part of the tokens each."""

    @staticmethod
    def forward(ctx, X, split):
        ctx.split = split
        return split.scattered(X) if split.tokens else split.summed(X)

    @staticmethod
    def backward(ctx, grad):
        return ctx.split.gathered(grad) if ctx.split.tokens else grad, None


class Packed(torch.autograd.Function):
    """What a stage sends on: each GPU a part, which the next stage puts together again ("scatter/gather")."""

    @staticmethod
    def forward(ctx, X, split, sends):
        ctx.split, ctx.sends = split, sends
        return Packed.part(X, split) if sends else split.gathered(X)

    @staticmethod
    def backward(ctx, grad):
        return ctx.split.gathered(grad) if ctx.sends else Packed.part(grad, ctx.split), None, None

    @staticmethod
    def part(X, split):
        return X[: X.shape[0] // split.parts].clone()  # of shapes only, any part is this GPU's


class Column(nn.Linear):
    def __init__(self, wide, out, split, bias=True):
        super().__init__(wide, -(-out // split.parts), bias)
        self.split = split

    def forward(self, X):
        return F.linear(X, self.weight, self.bias) if self.split.parts == 1 else Columns.apply(*self.inputs(X))

    def inputs(self, X):
        return X, self.weight, self.bias, self.split


class Row(nn.Linear):
    """Its bias is added later, in one kernel with what follows."""

    def __init__(self, wide, out, split):
        super().__init__(wide // split.parts, out, bias=False)
        self.split = split

    def forward(self, X):
        out = F.linear(X, self.weight)
        return out if self.split.parts == 1 else Joined.apply(out, self.split)


class Loss(torch.autograd.Function):
    """Cross entropy in FP32 of logits whose words lie on all GPUs, in the steps in which Megatron-LM takes it."""

    @staticmethod
    def forward(ctx, logits, labels, split):
        ctx.dtype, logits = logits.dtype, logits.float()
        most = logits.amax(-1)
        if split.parts > 1:
            dist.all_reduce(most, dist.ReduceOp.MAX, group=split.group)
        logits.sub_(most.unsqueeze(-1))
        guessed = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        total = logits.exp_().sum(-1)
        if split.parts > 1:
            dist.all_reduce(guessed, group=split.group)
            dist.all_reduce(total, group=split.group)
        ctx.save_for_backward(logits.div_(total.unsqueeze(-1)), labels)
        return (total.log() - guessed).mean()

    @staticmethod
    def backward(ctx, grad):
        softmax, labels = ctx.saved_tensors
        softmax.scatter_add_(-1, labels.unsqueeze(-1), torch.full_like(labels, -1, dtype=softmax.dtype).unsqueeze(-1))
        return softmax.mul_(grad / labels.numel()).to(ctx.dtype), None, None


# Layers


class Added(torch.autograd.Function):
    """dropout(h + b) + X in one kernel, which keeps only what was dropped."""

    @staticmethod
    def forward(ctx, h, b, X):
        with current().clock.paused():
            out, dropped = torch.empty_like(X), torch.empty_like(X, dtype=torch.uint8)
        book(aten.add.Tensor, (h, b, X), [out, dropped])
        ctx.save_for_backward(dropped)
        return out

    @staticmethod
    def backward(ctx, grad):
        [dropped] = ctx.saved_tensors
        with current().clock.paused():
            back = torch.empty_like(grad)
        book(aten.add.Tensor, (grad, dropped), [back])
        return back, back.sum((0, 1)), grad


class GPT(nn.Module):
    """A layer of GPT, with the chains that Megatron-LM makes one kernel of: scale, mask and softmax; bias and GELU;
    bias, dropout and sum. Of attention's core "selective" recomputation keeps nothing."""

    def __init__(self, row, split):
        super().__init__()
        width, inner = row["width"], row["ffn"]
        self.heads, self.head_width = row["heads"] // split.parts, width // row["heads"]
        self.flash, self.again = row["attention"] == "flash", row["recomputation"] == "selective"
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = Column(width, 3 * width, split), Row(width, width, split)
        self.up, self.down = Column(width, inner, split, bias=False), Row(inner, width, split)
        self.biases = nn.ParameterList(torch.empty(n) for n in (width, inner // split.parts, width))

    def core(self, q, k, v):
        if self.flash:
            q, k, v = (by_heads(t, self.heads) for t in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)
        tokens, n, _ = q.shape
        q, k, v = (t.reshape(tokens, n * self.heads, -1).transpose(0, 1) for t in (q, k, v))
        scores = torch.bmm(q, k.transpose(1, 2))
        weights = Fused.apply(lambda scores: scores.softmax(-1), aten._softmax.default, scores)
        attended = torch.bmm(F.dropout(weights, DROPOUT), v)
        return attended.transpose(0, 1).reshape(tokens, n, -1)

    def forward(self, X):
        q, k, v = self.qkv(self.norms[0](X)).chunk(3, -1)
        attended = checkpoint(self.core, q, k, v, use_reentrant=False) if self.again else self.core(q, k, v)
        X = Added.apply(self.out(attended), self.biases[0], X)
        h = self.up(self.norms[1](X))
        h = Fused.apply(lambda h, b: F.gelu(h + b), aten.gelu.default, h, self.biases[1])
        return Added.apply(self.down(h), self.biases[2], X)


class Llama(nn.Module):
    """A layer of Llama as nanotron has it: queries, keys and values are one product, gate and up another."""

    def __init__(self, row, split):
        super().__init__()
        width, inner = row["width"], row["ffn"]
        self.heads, self.head_width = row["heads"] // split.parts, width // row["heads"]
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out = Column(width, 3 * width, split, bias=False), Row(width, width, split)
        self.up, self.down = Column(width, 2 * inner, split, bias=False), Row(inner, width, split)

    def forward(self, X):
        q, k, v = (by_heads(t, self.heads) for t in self.qkv(self.norms[0](X)).chunk(3, -1))
        angles = rotary_angles(q.shape[2], self.head_width, q.device, q.dtype)
        attended = F.scaled_dot_product_attention(rotate(q, angles), rotate(k, angles), v, is_causal=True)
        X = X + self.out(attended.permute(2, 0, 1, 3).flatten(2))
        gate, up = self.up(self.norms[1](X)).chunk(2, -1)
        return X + self.down(F.silu(gate) * up)


def by_heads(X, heads):
    """(tokens, N, heads × head_width) → (N, heads, tokens, head_width)."""
    return X.unflatten(2, (heads, -1)).permute(1, 2, 0, 3)


class Part(nn.Module):
    """Some layers of a row's model, those of one stage. The first embeds tokens (N, tokens), the last gives the loss.

    Between stages what they send is in parts, which is one message for each GPU that shares a matrix.
    """

    def __init__(self, row, split, layers, first, last):
        super().__init__()
        kind = Llama if row["gated"] else GPT
        self.split, self.first, self.last, self.again = split, first, last, row["recomputation"] == "full"
        width, norm = row["width"], nn.RMSNorm if row["gated"] else nn.LayerNorm
        words = -(-row["vocab"] // split.parts)
        self.words = nn.Embedding(words, width) if first else None
        self.places = nn.Embedding(row["seq_len"], width) if first and not row["gated"] else None
        self.layers = nn.ModuleList(kind(row, split) for _ in range(layers))
        self.norm = norm(width) if last else None
        self.head = Column(width, row["vocab"], split, bias=False) if last else None
        self.shape = row["seq_len"], row["micro_batch"]

    def forward(self, X):
        packed = self.split.parts > 1 and not self.split.tokens
        if self.first:
            X = self.embedded(X)
        elif packed:
            X = Packed.apply(X, self.split, False)
        for layer in self.layers:
            X = self.whole(layer, X) if self.again else layer(X)
        if self.last:
            labels = torch.empty(self.shape, dtype=torch.long, device=X.device)
            return Loss.apply(self.head(self.norm(X)), labels, self.split)
        return Packed.apply(X, self.split, True) if packed else X

    def whole(self, layer, X):
        """A layer that is computed again, to its very end."""
        return checkpoint(layer, X, use_reentrant=False, preserve_rng_state=False, early_stop=False)

    def embedded(self, tokens):
        X = self.words(tokens.t())
        X = Joined.apply(X, self.split) if self.split.parts > 1 else X
        if self.places is None:
            return X
        places = self.places.weight[: X.shape[0]].unsqueeze(1)
        return F.dropout(X + places, DROPOUT)


# Optimizers


class Adam:
    """Adam in FP32 of `params` in half precision, which become parts of one piece of memory, as their gradients do.

    group: of the ranks that have other batches; None: gradients are summed elsewhere. zero: each of them steps with a
    part. add_up: dtype in which the gradients of micro-batches are added.
    """

    def __init__(self, params, group, zero, add_up):
        params = list(params)
        self.group, self.zero = group if group and group.size() > 1 else None, zero
        parts = self.group.size() if self.group and zero else 1
        ends = list(itertools.accumulate(p.numel() for p in params))
        size = -(-ends[-1] // parts) * parts
        self.params = torch.empty(size, dtype=params[0].dtype, device="cuda")
        self.grads = torch.zeros(size, dtype=add_up, device="cuda")
        for p, end in zip(params, ends, strict=True):
            here = slice(end - p.numel(), end)
            p.data = self.params[here].view(p.shape)
            self.collect(p, self.grads[here].view(p.shape))
        self.masters = nn.Parameter(torch.empty(size // parts, device="cuda"))
        self.adam = torch.optim.AdamW([self.masters], lr=1e-4, fused=True)
        self.masters.grad = torch.zeros_like(self.masters)
        self.adam.step()  # makes its moments, so that the first step is like all others
        self.masters.grad = None

    def collect(self, p, grad):
        """Have the gradient of p added to its place."""
        if grad.dtype == p.dtype:
            p.grad = grad
            return

        def add(p):
            grad.add_(p.grad)
            p.grad = None

        p.register_post_accumulate_grad_hook(add)

    def step(self):
        grads, mine = self.grads, self.params[: self.masters.numel()]
        if self.group and self.zero:
            grads = self.grads.new_empty(self.masters.shape)
            dist.reduce_scatter_tensor(grads, self.grads, group=self.group)
        elif self.group:
            dist.all_reduce(grads, group=self.group)
        self.masters.grad = grads.float()
        norm = torch.linalg.vector_norm(self.masters.grad)
        dist.all_reduce(norm)  # all stages and all parts of matrices share it
        self.masters.grad.mul_(norm)
        self.adam.step()
        mine.copy_(self.masters.detach())
        if self.group and self.zero:
            dist.all_gather_into_tensor(self.params, mine, group=self.group)
        self.masters.grad = None
        self.grads.zero_()


# Programs


def program(row, micro_batches, peaks):
    """What a dry run calls for a row: it sets all up, and returns a step of so many micro-batches of each GPU.

    peaks: gets {rank: the most bytes held in the passes, and in the optimizer's step}.
    """

    def started():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        for ledger in current().ledgers:
            ledger.capacity = ROOMY
        build = sharded if "ZeRO-3" in row["sharding"] else split_up
        parts = build(row, micro_batches)
        return lambda: peaks.update({dist.get_rank(): [peak_of(part) for part in parts]})

    return started


def peak_of(part):
    torch.cuda.reset_peak_memory_stats()
    part()
    return torch.cuda.max_memory_allocated()


def split_up(row, micro_batches):
    """(passes, optimizer's step) in Megatron's way: a GPU has a part of matrices, of layers and of sequences."""
    sizes = row["pipeline"], row["data"], row["tensor"]
    mesh = init_device_mesh("cuda", sizes, mesh_dim_names=("pipeline", "data", "tensor"))
    split = Split(mesh["tensor"].get_group(), row["tensor"], bool(row["sequence_parallel"]))
    data, stages = mesh["data"].get_group(), mesh["pipeline"].get_group()
    half = HALF[row["precision"][:4]]
    parts = {place: made(row, split, place).to(half).to_empty(device="cuda") for place in places(row, stages.rank())}
    net = nn.ModuleList(parts.values())
    overlaps = row.get("ddp_impl") == "torch" and row["pipeline"] == 1
    add_up = torch.float32 if "fp32" in row["precision"] else half
    optimizer = Adam(net.parameters(), None if overlaps else data, "ZeRO" in row["sharding"], add_up)
    tokens = torch.empty(micro_batches * row["micro_batch"], row["seq_len"], dtype=torch.long, device="cuda")
    if row["pipeline"] == 1:
        wrapped = nn.parallel.DistributedDataParallel(net[0], process_group=data) if overlaps else net[0]
        return partial(all_layers, wrapped, tokens.split(row["micro_batch"])), optimizer.step
    run = pipeline(row, parts, stages, micro_batches).step
    return partial(run, *([tokens] if 0 in parts else []), target=tokens, return_outputs=False), optimizer.step


def places(row, rank):
    """Which of all parts of the model a stage's GPU has."""
    return range(rank, row["pipeline"] * row["virtual_stages"], row["pipeline"])


def made(row, split, place):
    counts = layers_of_parts(row)
    with torch.device("meta"):
        return Part(row, split, counts[place], place == 0, place == len(counts) - 1)


def layers_of_parts(row):
    """How many layers each part has. Where they don't go evenly, embedding and output layer count as one each."""
    n = row["pipeline"] * row["virtual_stages"]
    if row["source"] == "nanotron":
        return cut_by_work(row, n)
    if row["layers"] % n == 0:
        return [row["layers"] // n] * n
    counts = [(row["layers"] + 2) // n] * n
    counts[0], counts[-1] = counts[0] - 1, counts[-1] - 1
    return counts


def cut_by_work(row, n):
    """nanotron's way: a part ends with the block that brings it over its share of all products."""
    layer = 4 * row["width"] ** 2 + 3 * row["width"] * row["ffn"]
    work = [layer] * row["layers"] + [row["width"] * row["vocab"]]
    counts, place, done = [0] * n, 0, 0
    for each in work[:-1]:
        counts[place], done = counts[place] + 1, done + each
        place += done > sum(work) * (place + 1) / n
    return counts


def pipeline(row, parts, stages, micro_batches):
    count = row["pipeline"] * row["virtual_stages"]
    made = [PipelineStage(net, place, count, torch.device("cuda"), group=stages) for place, net in parts.items()]
    options = {"loss_fn": lambda loss, _: loss, "scale_grads": False}
    if row["virtual_stages"] == 1:
        schedule = Schedule1F1B(made[0], max(micro_batches, row["pipeline"]), **options)
        schedule._n_microbatches = micro_batches  # it refuses fewer than stages, and yet knows what to do with them
        return schedule
    return ScheduleInterleaved1F1B(made, micro_batches, **options)


def all_layers(net, batches):
    """The passes of some batches; gradients are shared after the last."""
    for i, tokens in enumerate(batches):
        if i < len(batches) - 1 and hasattr(net, "no_sync"):
            with net.no_sync():
                net(tokens).backward()
        else:
            net(tokens).backward()


def sharded(row, micro_batches):
    """The same with parameters in parts, over all GPUs, or in each node, whose copies share gradients."""
    nodes = row["n_gpus"] // row["gpus_per_node"]
    hybrid = "hybrid" in row["sharding"] and nodes > 1
    sizes, names = ((nodes, row["gpus_per_node"]), ("copies", "parts")) if hybrid else ((row["n_gpus"],), ("parts",))
    mesh, half = init_device_mesh("cuda", sizes, mesh_dim_names=names), HALF[row["precision"][:4]]
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(half, half)}
    with torch.device("meta"):
        net = Part(row, Split(None, 1, False), row["layers"], True, True) if not row["gated"] else llama(row)
    for layer in net.layers:
        fully_shard(layer, **options)
    net = fully_shard(net, **options).to_empty(device="cuda")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    tokens = torch.empty(row["micro_batch"], row["seq_len"], dtype=torch.long, device="cuda")

    def passes():
        for i in range(micro_batches):
            net.set_requires_gradient_sync(i == micro_batches - 1)
            loss(net, tokens).backward()

    def update():
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return passes, update


def llama(row):
    net = Transformer(row["vocab"], row["width"], row["layers"], row["heads"], row["kv_heads"], row["ffn"])
    if row["recomputation"] == "full":
        for i, layer in enumerate(net.layers):
            net.layers[i] = checkpoint_wrapper(layer)
    return net


def loss(net, tokens):
    out = net(tokens)
    return F.cross_entropy(out.flatten(0, 1), tokens.flatten()) if out.dim() else out
