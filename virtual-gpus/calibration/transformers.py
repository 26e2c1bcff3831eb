"""Training steps of transformers, as the programs take them whose published figures the clock is held against.

A step is written once, in plain PyTorch, and says which chains of operations a program's compiler, or kernels of its
own, make one kernel of: on virtual GPUs such a chain is one kernel too, which reads what goes in and writes what comes
out, in the forward pass and in the backward pass.
"""

import contextlib
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from virtual_gpus import current

aten = torch.ops.aten
MASKED = {128: 20, 384: 60, 512: 80}  # words of a sequence of this length that BERT has to guess
DROPOUT = 0.1


class Fused(torch.autograd.Function):
    """One kernel for a `function` of tensors, and one for its backward, which is taken for `operation` on the clock."""

    @staticmethod
    def forward(ctx, function, operation, *inputs):
        ctx.operation = operation
        ctx.save_for_backward(*inputs)
        with current().clock.paused():
            out = function(*inputs)
        book(operation, inputs, [out])
        return out

    @staticmethod
    def backward(ctx, grad):
        inputs = ctx.saved_tensors
        with current().clock.paused():
            grads = [torch.empty_like(x) if x.requires_grad else None for x in inputs]
        book(ctx.operation, (grad, *inputs), [g for g in grads if g is not None])
        return None, None, *grads


def book(operation, inputs, outputs):
    """A kernel that reads `inputs` and writes `outputs`; it costs what `operation` would for as many bytes."""
    forms = tuple((t.shape, t.dtype) for t in (*inputs, *outputs))
    machine = current()
    machine.clock.record_op(machine.gpus[outputs[0].device.index], operation, inputs, {}, outputs, (operation, forms))


def chain(fused, name, function, operation, *inputs):
    """`function` of the inputs, which is one kernel if the chain of this name is among those that are `fused`."""
    return Fused.apply(function, operation, *inputs) if name in fused else function(*inputs)


class Layer(nn.Module):
    """A layer of an encoder (BERT: norms behind the sums), or of a decoder (GPT: before, and `causal`).

    fused: which chains are one kernel: "softmax" (scale, mask, softmax, dropout), "gelu", "add" (dropout, sum), "norm"
    (with what stands before it and behind it); flash: attention that never writes its scores.
    """

    def __init__(self, width, heads, causal, fused, flash):
        super().__init__()
        self.heads, self.causal, self.fused, self.flash = heads, causal, fused, flash
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def attend(self, X, mask):
        n, tokens, width = X.shape
        q, k, v = self.qkv(X).view(n, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        if self.flash:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            q, k, v = (t.reshape(n * self.heads, tokens, -1) for t in (q, k, v))
            weights = chain(
                self.fused,
                "softmax",
                lambda scores, mask: F.dropout((scores / math.sqrt(q.shape[-1]) + mask).softmax(-1), DROPOUT),
                aten._softmax.default,
                torch.bmm(q, k.transpose(1, 2)),
                mask,
            )
            attended = torch.bmm(weights, v).view(n, self.heads, tokens, -1)
        return self.out(attended.transpose(1, 2).reshape(n, tokens, width))

    def feed(self, X):
        return self.down(chain(self.fused, "gelu", F.gelu, aten.gelu.default, self.up(X)))

    def add(self, h, X):
        return chain(self.fused, "add", lambda h, X: F.dropout(h, DROPOUT) + X, aten.add.Tensor, h, X)

    def add_norm(self, norm, h, X):
        if "norm" not in self.fused:
            return norm(self.add(h, X))
        return Fused.apply(
            lambda h, X, W, b: F.layer_norm(F.dropout(h, DROPOUT) + X, W.shape, W, b),
            *(aten.native_layer_norm.default, h, X, norm.weight, norm.bias),
        )

    def norm(self, norm, X):
        """Before a product: a kernel of one's own writes what that takes."""
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else X.dtype
        if "norm" not in self.fused:
            return norm(X)
        return Fused.apply(
            lambda X, W, b: F.layer_norm(X, W.shape, W, b).to(dtype),
            *(aten.native_layer_norm.default, X, norm.weight, norm.bias),
        )

    def forward(self, X, mask):
        before, behind = self.norms
        if not self.causal:
            X = self.add_norm(before, self.attend(X, mask), X)
            return self.add_norm(behind, self.feed(X), X)
        X = self.add(self.attend(self.norm(before, X), mask), X)
        return self.add(self.feed(self.norm(behind, X)), X)


class Transformer(nn.Module):
    """The network of a published row. BERT's tasks are "masked" (guess words) and "span" (find an answer), or "causal".

    tokens: (n, tokens) -> the loss.
    """

    def __init__(self, row):
        super().__init__()
        program, width = row["program"], row["width"]
        vocabulary = -(-row["vocab"] // 8) * 8  # all of the programs make it so, for the tensor cores
        self.task, self.checkpointed = program.task, row["activation_checkpointing"]
        self.fused = program.fused
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(row["seq_len"], width)
        self.segments = None if self.task == "causal" else nn.Embedding(2, width)
        flash = row["attention"].startswith("flash")
        layer = width, row["heads"], self.task == "causal", program.fused, flash
        self.layers = nn.ModuleList(Layer(*layer) for _ in range(row["layers"]))
        self.norm = nn.LayerNorm(width)
        self.span = nn.Linear(width, 2) if self.task == "span" else None
        self.transform = nn.Linear(width, width) if self.task == "masked" else None
        self.guessed = MASKED[row["seq_len"]] if program.dense else row["seq_len"]

    def forward(self, tokens):
        length = tokens.shape[1]
        X = self.words(tokens) + self.places.weight
        mask = torch.empty(length, length, device=tokens.device, dtype=X.dtype)
        if self.task != "causal":
            X = F.dropout(self.norm(X + self.segments(torch.zeros_like(tokens))), DROPOUT)
            mask = mask[:1]  # of padding: the same for every row
        for layer in self.layers:
            X = checkpoint(layer, X, mask, use_reentrant=False) if self.checkpointed else layer(X, mask)
        if self.task == "span":
            return sum(F.cross_entropy(logits, tokens[:, 0]) for logits in self.span(X).unbind(-1))
        if self.task == "masked":
            X = F.gelu(self.transform(X[:, : self.guessed]))
        X = self.norm(X)
        logits = F.linear(X, self.words.weight).flatten(0, 1)
        labels = tokens[:, : X.shape[1]].flatten()
        return chain(self.fused, "loss", F.cross_entropy, aten._log_softmax.default, logits, labels)


class Masters:
    """An optimizer in FP32 of parameters in half precision, with a copy of each: AMP's level O2, and Megatron's."""

    def __init__(self, params):
        self.params = list(params)
        self.masters = [p.detach().float() for p in self.params]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-4, fused=True)

    def step(self):
        grads = [torch.empty_like(master) for master in self.masters]
        torch._foreach_copy_(grads, [p.grad for p in self.params])
        for master, grad in zip(self.masters, grads, strict=True):
            master.grad = grad
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.params, self.masters)


def step_on(device, row, wrapped=lambda net: net):
    """A function that does one step of a row on `device`, with as many micro-batches as it is told.

    wrapped(net) is what is trained: DistributedDataParallel, for several GPUs.
    """
    half = row["precision"] == "fp16"
    with torch.device("meta"):
        net = Transformer(row)
    net = net.to_empty(device=device)
    net = wrapped(net.half() if half else net)
    by_one = row["optimizer"].startswith("BertAdam")  # which takes one parameter after the other
    adam = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=not by_one, foreach=False)
    optimizer = Masters(net.parameters()) if half else adam
    tokens = torch.empty(row["micro_batch"], row["seq_len"], dtype=torch.int64, device=device)
    casting = torch.autocast("cuda", torch.bfloat16, enabled=row["precision"] == "bf16")

    def step(micro_batches):
        net.zero_grad()
        for i in range(micro_batches):
            last = i == micro_batches - 1
            with contextlib.nullcontext() if last or not hasattr(net, "no_sync") else net.no_sync():
                with casting:
                    loss = net(tokens)
                loss.backward()
        optimizer.step()

    return step
