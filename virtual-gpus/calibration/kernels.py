"""What the kernels of transformers take on one GPU, by shape: a real one, or a virtual one.

    python -m calibration.kernels --measure FILE   # on a real GPU; rows that FILE holds already are left alone
    python -m calibration.kernels                  # the modelled times beside the measured ones, by kind

recorded/measured_h100.json is what the first said on one H100, in "kernels"; beside it stands what the same GPU said to
the book's `python -m experiments.on_a_gpu`. Nothing was fitted to it but rates.SCATTER.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from calibration.record import RECORDED, provenance, write
from virtual_gpus import current, virtual_gpus

OUT = RECORDED / "measured_h100.json"
WIDTHS = 1536, 2048, 4096, 8192
CALLS = 50  # of an operation, between two readings of the host's time
TIMES = 50  # that a sustained step is repeated
CACHE = 2**31  # bytes that are written before each measurement: none of its tensors is in a cache then
Step = Callable[[], object]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, requires_grad: bool = True) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda", requires_grad=requires_grad)


def forward_backward(function: Callable, *inputs: torch.Tensor) -> dict[str, Step]:
    """{"forward": …, "backward": …} of `function`."""
    out = function(*inputs)
    gradient = torch.randn_like(out)
    return {
        "forward": lambda: function(*inputs),
        "backward": lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True),
    }


def linear(tokens: int, inputs: int, outputs: int) -> dict[str, Step]:
    """The three products of a linear layer."""
    X, W, G = (
        random(*shape, requires_grad=False) for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    )
    return {"forward": lambda: F.linear(X, W), "to the input": lambda: G @ W, "to the weights": lambda: G.T @ X}


def square(size: int, dtype: torch.dtype, tf32: bool) -> dict[str, Step]:
    A, B = (random(size, size, dtype=dtype, requires_grad=False) for _ in "AB")

    def product():
        torch.backends.cuda.matmul.allow_tf32 = tf32
        A @ B
        torch.backends.cuda.matmul.allow_tf32 = False

    return {"forward": product}


def attention(length: int, width: int, head: int, backend: SDPBackend) -> dict[str, Step]:
    """Causal attention of 16,384 tokens."""
    q, k, v = (random(max(1, 2**14 // length), width // head, length, head) for _ in "qkv")

    def function(q, k, v):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return forward_backward(function, q, k, v)


def layer_norm(width: int) -> dict[str, Step]:
    return forward_backward(lambda X, w, b: F.layer_norm(X, (width,), w, b), random(8192, width), *parameters(width, 2))


def rms_norm(width: int) -> dict[str, Step]:
    return forward_backward(lambda X, w: F.rms_norm(X, (width,), w), random(8192, width), *parameters(width, 1))


def parameters(width: int, count: int) -> list[torch.Tensor]:
    return [random(width) for _ in range(count)]


def pointwise(name: str, size: int) -> dict[str, Step]:
    """Of `size` numbers in bfloat16."""
    functions = {
        "gelu": F.gelu,
        "silu, times": lambda X, Y: F.silu(X) * Y,
        "add": torch.add,
        "to fp32": torch.Tensor.float,
    }
    inputs = [random(size) for _ in range(2 if name in ("silu, times", "add") else 1)]
    if name == "add":  # its gradient takes no kernel
        return {"forward": lambda: torch.add(*inputs)}
    return forward_backward(functions[name], *inputs)


def cross_entropy(vocabulary: int, dtype: torch.dtype) -> dict[str, Step]:
    """Of 8,192 tokens."""
    labels = torch.zeros(8192, dtype=torch.long, device="cuda")
    return forward_backward(lambda X: F.cross_entropy(X, labels), random(8192, vocabulary, dtype=dtype))


def embedding(width: int) -> dict[str, Step]:
    tokens = torch.arange(8192, device="cuda") * 3
    return forward_backward(lambda W: F.embedding(tokens, W), random(32768, width))


def net_of(width: int, layers: int) -> nn.ParameterList:
    """Parameters, and gradients, as large as those of a GPT."""
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width), (width,), (width,)] * layers
    net = nn.ParameterList(random(*shape, dtype=torch.float32) for shape in shapes)
    for parameter in net:
        parameter.grad = torch.randn_like(parameter)
    return net


def optimizer(name: str, width: int, layers: int) -> dict[str, Step]:
    """AdamW in float32, and the clipping of gradients."""
    net = net_of(width, layers)
    if name == "clip":
        return {"forward": lambda: nn.utils.clip_grad_norm_(net, 1.0)}
    return {"forward": torch.optim.AdamW(net, foreach=name == "foreach", fused=name == "fused").step}


class Block(nn.Module):
    """A layer of GPT."""

    def __init__(self, width: int):
        super().__init__()
        self.heads = width // 128
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, X: torch.Tensor) -> torch.Tensor:  # (sequences, length, width)
        q, k, v = self.qkv(self.norm1(X)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        X = X + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return X + self.down(F.gelu(self.up(self.norm2(X))))


def block(width: int, length: int) -> dict[str, Step]:
    """A layer, with 8,192 tokens."""
    with torch.device("cuda"):
        net = Block(width).bfloat16()
    return forward_backward(lambda X, *_: net(X), random(8192 // length, length, width), *net.parameters())


def sustained(make: Callable, *arguments: int) -> dict[str, Step]:
    """One after the other, for about a second: under load, the GPU lowers its clock rate."""
    steps = make(*arguments).values()
    return {"forward": lambda: [step() for _ in range(TIMES) for step in steps]}


# {kind: (what makes its steps, the arguments of each case)}
KINDS = {
    "linear": (linear, [
        (tokens, width * inputs, width * outputs)
        for tokens, width in itertools.product((2048, 8192, 16384), WIDTHS)
        for inputs, outputs in ((1, 1), (1, 3), (1, 4), (4, 1))
    ] + [(8192, width, 50304) for width in WIDTHS]),
    "square": (square, [
        *((size, torch.bfloat16, False) for size in (1024, 2048, 4096, 8192, 16384)),
        *((size, torch.float32, tf32) for tf32 in (False, True) for size in (1024, 2048, 4096, 8192)),
    ]),
    "block": (block, list(itertools.product(WIDTHS, (2048, 8192)))),
    "attention": (attention, [
        (length, width, head, SDPBackend.FLASH_ATTENTION)
        for length, width, head in itertools.product((512, 1024, 2048, 4096, 8192, 16384), (1536, 4096), (64, 128))
    ]),
    "layer_norm": (layer_norm, [(width,) for width in WIDTHS]),
    "rms_norm": (rms_norm, [(width,) for width in WIDTHS]),
    "optimizer": (optimizer, list(itertools.product(("for-loop", "foreach", "fused", "clip"), (1536, 4096), (1, 4)))),
    "pointwise": (pointwise, list(itertools.product(
        ("gelu", "silu, times", "add", "to fp32"), (2**20, 2**22, 2**24, 2**26, 2**28)
    ))),
    "cross_entropy": (cross_entropy, list(itertools.product((32000, 128256), (torch.bfloat16, torch.float32)))),
    "embedding": (embedding, [(width,) for width in WIDTHS]),
    "sustained": (sustained, [
        *((linear, 8192, width, 4 * width) for width in WIDTHS),
        *((block, width, length) for width in WIDTHS[:3] for length in (2048, 8192)),
    ]),
    "cudnn attention": (attention, [
        (length, 4096, head, SDPBackend.CUDNN_ATTENTION)
        for length, head in itertools.product((1024, 4096, 16384), (64, 128))
    ]),
}  # fmt: skip
HOST = ("add", "linear", "layer_norm", "gelu", "attention", "block", "fused", "foreach", "for-loop")


def host(name: str) -> dict[str, Step]:
    """Calls so small that the GPU waits for the host."""
    if name in ("fused", "foreach", "for-loop"):
        return {"forward": optimizer(name, 16, 24)["forward"]}
    X, net = random(1, 8, 128), Block(128).to("cuda", torch.bfloat16)
    inputs = X.unflatten(2, (2, 64)).transpose(1, 2)
    functions = {
        "add": lambda X, W: X + W,
        "linear": lambda X, W: F.linear(X, net.proj.weight, net.proj.bias),
        "layer_norm": lambda X, W: net.norm1(X),
        "gelu": lambda X, W: F.gelu(X),
        "attention": lambda X, W: F.scaled_dot_product_attention(X, X, X, is_causal=True),
        "block": lambda X, W: net(X),
    }
    x = inputs.detach().requires_grad_() if name == "attention" else X
    out = functions[name](x, X)
    wanted = [x, *net.parameters()] if name == "block" else [x]
    gradient = torch.ones_like(out)
    return {
        "forward": lambda: functions[name](x, X),
        "backward": lambda: torch.autograd.grad(out, wanted, gradient, retain_graph=True),
    }


def spread(step: Callable[[], float]) -> dict[str, float]:
    """Median and quartiles of ten times `step` says, after three that aren't counted; a virtual GPU repeats itself."""
    found = [step() for _ in range(4 if current() else 13)][2 if current() else 3 :]
    low, median, high = statistics.quantiles(found, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high}


def on_gpu(step: Step) -> dict[str, float]:
    """What `step` takes on the GPU, which has had it in its queue by then."""
    others = torch.empty(CACHE, dtype=torch.uint8, device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def seconds():
        others.zero_()
        start.record()
        step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return spread(seconds)


def on_host(step: Step) -> dict[str, float]:
    """What one call of `step` takes of the host."""
    machine = current()
    now = machine.elapsed if machine else time.perf_counter

    def seconds():
        torch.cuda.synchronize()
        start = now()
        for _ in range(CALLS):
            step()
        torch.cuda.synchronize()
        return (now() - start) / CALLS

    return spread(seconds)


def cases() -> dict[str, tuple]:
    """{kind/arguments: (what makes its steps, what times them, arguments)}"""
    found = {}
    for kind, (make, listed) in KINDS.items():
        for arguments in listed:
            named = (getattr(a, "__name__", str(a)).rpartition(".")[2] for a in arguments)
            found["/".join((kind, *named))] = make, on_gpu, arguments
    return found | {f"host/{name}": (host, on_host, (name,)) for name in HOST}


def row(make: Callable, timed: Callable, arguments: tuple) -> dict[str, dict]:
    """{"forward": …, "backward": …} of a case."""
    return {way: timed(step) for way, step in make(*arguments).items()}


def measure(path: Path) -> None:
    """Each case is written down when it is done; what the GPU can't do, with its reason."""
    found = json.loads(path.read_text()) if path.exists() else {"provenance": provenance("kernels"), "kernels": {}}
    found |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    for key, case in cases().items():
        if key not in found["kernels"]:
            try:
                found["kernels"][key] = row(*case)
            except RuntimeError as error:
                found["kernels"][key] = {"error": str(error).splitlines()[0]}
            write(path, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--measure", type=Path, metavar="FILE", help="time the kernels on a real GPU")
    path = parser.parse_args().measure
    if path:
        measure(path)
        return
    measured, ratios = json.loads(OUT.read_text())["kernels"], {}
    with virtual_gpus(1, "H100", backing="meta"):
        for key, case in cases().items():
            with contextlib.suppress(RuntimeError):  # what virtual GPUs refuse
                for way, modelled in row(*case).items():
                    ratio = modelled["median"] / measured[key][way]["median"]
                    ratios.setdefault(f"{key.partition('/')[0]}, {way}", []).append(ratio)
                    print(f"{key:48}{way:16}{measured[key][way]['median']:12.3e}{ratio:8.2f}")
    for kind, found in ratios.items():
        print(f"{kind:40}{len(found):4}{statistics.median(found):8.2f}{min(found):8.2f}{max(found):8.2f}")


if __name__ == "__main__":
    main()
