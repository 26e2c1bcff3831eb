"""Published measurements of training steps and inference on GPUs: which of them the clock is held against, and why.

`published.json` holds them as they were printed, with their sources. Which of them count is decided by the rules in
this module, and by nothing else. Some of the rules were written when first errors had been seen, see `late`; the
validation therefore reports the error without them, too.

NVIDIA's DeepLearningExamples tables for ResNet-50 are not among them. They are kept for an independent trial.
"""

import contextlib
import copy
import functools
import json
from pathlib import Path

import torch
import torchvision
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torchvision.models.resnet import Bottleneck, ResNet

from calibration.halves import halve

PATH = Path(__file__).parent / "published.json"
# How the sources name GPUs -> key of a data sheet. Where form or memory are not stated, the first kind of that GPU.
SHEETS = {
    "V100-SXM2-16GB": "V100",
    "V100-SXM2-32GB": "V100",
    "V100-SXM2 (memory size not stated)": "V100",
    "V100 (form and memory not stated)": "V100",
    "V100-SXM3-32GB (DGX-2)": "V100",
    "T4": "T4",
    "Titan V": "TitanV",
    "GTX 1080 Ti": "GTX1080Ti",
    "RTX 2080 Ti": "RTX2080Ti",
    "RTX 3090": "RTX3090",
    "RTX 4090": "RTX4090",
    "A100-SXM4-40GB": "A100-40",
    "A100-40GB (SXM4 or PCIe not stated)": "A100-40",
    "A100 (form and memory not stated)": "A100-40",
}
# The programs that measured, by the group they stand in: what a timed step contains, beside forward and backward.
#   update: the optimizer's step; copied: the batch is copied, from the shared memory of eight DataLoader workers;
#   smallest: the least batch that counts, because the host's program is another than plain PyTorch
PROGRAMS = {
    "ddp": {"update": True},
    "ait": {},
    "timm": {"update": True},
    "pycls": {},
    "u39": {},
    "ryu": {},
    "sjtu": {"copied": True},
    "aisen": {"copied": True},
    "incnext": {"update": True},
    "xwang": {"update": True},
    "dle-resnext101": {"update": True},
    "mx": {"update": True, "smallest": 16},  # MXNet 1.2 runs a graph without Python
    "hf": {"smallest": 16},  # the models of Hugging Face call more, smaller modules
}
SAME = "source sheet model mode precision memory_format".split()  # of all rows of a curve
RULES = {
    "program": "the program that measured is not a PyTorch or MXNet that calls cuDNN 7 or later operation by operation",
    "sheet": "no data sheet of this GPU is in virtual_gpus.clock.specs",
    "model": "the model is neither one of torchvision's nor the encoder of BERT",
    "trust": "the precision, the number or what was timed is not stated clearly",
    "pipeline": "derived from the hours of a whole training, which contain reading images and evaluation",
    "host": "a small batch, timed with another host program than plain PyTorch",
    "early": "half precision with PyTorch 0.3 and cuDNN 7.0, which used tensor cores for few convolutions",
    "half": "training in half precision throughout (.half()): its batch norm runs in other kernels than autocast's",
}


def rows():
    """All published rows, with the keys "sheet", "curve", "half" and "excluded" (a key of RULES, or None)."""
    printed = json.loads(PATH.read_text())
    found = printed["rows"]
    for row in found:
        row["url"], row["note"] = printed["urls"][row["url"]], printed["notes"][row["note"]]
        row["sheet"] = SHEETS.get(row["gpu"])
        row["small"] = row["batch_per_gpu"] <= 8
        row["curve"] = "/".join([*(str(row[key]) for key in SAME), "small" if row["small"] else "large"])
        row["excluded"] = excluded(row)
    # Batches of 8 and less are curves of their own: there the host sets the pace.
    halve([row for row in found if not row["excluded"]], lambda row: (row["source"], row["small"]))
    return found


def excluded(row):
    """The rule by which a row does not count, or None."""
    program = PROGRAMS.get(row["source"])
    if program is None or row["framework"].startswith("MXNet commit"):  # MXNet 0.9 with cuDNN 5
        return "program"
    if row["sheet"] is None:
        return "sheet"
    if row["trust"] == "low":
        return "trust"
    if row["precision"] == "fp16" and row["framework"].startswith("PyTorch 0.3"):
        return "early"
    if row["precision"] == "fp16" and row["mode"] == "train":
        return "half"
    if row["source"] == "pycls" and row["mode"] == "train":
        return "pipeline"
    if row["batch_per_gpu"] < (64 if is_bert(row) else program.get("smallest", 1)):
        return "host"
    if build_by(row["model"]) is None:
        return "model"
    return None


def late(row):
    """Whether a row is left out by something that was decided when first errors had been seen."""
    inference = row["source"] == "dle-resnext101" and row["mode"] == "infer"  # "trust", see its note
    return row["excluded"] in ("early", "half") or inference or (row["excluded"] == "host" and is_bert(row))


def is_bert(row):
    return row["model"].startswith("bert-base encoder only")


def seconds(row):
    """Published seconds of one step."""
    return row["value"] / 1e3 if row["unit"] == "ms" else row["batch_per_gpu"] * row["n_gpus"] / row["value"]


def build_by(name):
    """A function that builds the model of this name, or None."""
    if name.startswith("bert-base encoder only"):
        return lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(768, 12, 3072, activation="gelu", batch_first=True), 12
        )
    if name.startswith("resnext101_32x4d"):
        return lambda: ResNet(Bottleneck, [3, 4, 23, 3], groups=32, width_per_group=4)
    options = {"aux_logits": False, "init_weights": False} if name == "inception_v3" else {}
    make = getattr(torchvision.models, name, None)
    return make and functools.partial(make, **options)


def build(name):
    """The model, without values: one of its own for each caller, who may change it."""
    return copy.deepcopy(built(name))


@functools.cache
def built(name):
    return build_by(name)().to("meta")


def batch_shape(row):
    return (row["batch_per_gpu"], *(row["image"] or (sequence(row), 768)))


def sequence(row):
    """Length of a sequence: "...-s128-infer..." in the row's name."""
    return int(next(part[1:] for part in row["id"].split("-") if part[0] == "s" and part[1:].isdigit()))


@contextlib.contextmanager
def attention(row):
    """A context in which attention is computed as the row's PyTorch did: before 2.0 by single operations."""
    fast = torch.backends.mha.get_fastpath_enabled()
    reduced = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.mha.set_fastpath_enabled(False)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH) if row["framework"].startswith("PyTorch 1") else contextlib.nullcontext():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(reduced)


def tf32(row):
    """Whether convolutions, and whether matrix products, ran in TF32: PyTorch's defaults on GPUs that have it."""
    return True, row["precision"] == "tf32"


def step_on(device, row):
    """A function that does one step of a row on `device`, as the program that measured did."""
    program = PROGRAMS[row["source"]]
    net = build(row["model"]).to_empty(device=device)
    X = torch.empty(batch_shape(row), device="cpu" if program.get("copied") else device)
    if row["precision"] == "fp16":
        net, X = net.half(), X.half()
    if row["memory_format"] != "nchw":  # "unknown": the source took the better one
        net, X = net.to(memory_format=torch.channels_last), X.to(memory_format=torch.channels_last)
    if program.get("copied"):
        X.share_memory_()
    net.train(row["mode"] == "train")
    y = torch.zeros(len(X), dtype=torch.int64, device=device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step():
        optimizer.zero_grad()
        with torch.set_grad_enabled(net.training), torch.autocast("cuda", torch.float16, row["precision"] == "amp"):
            out = net(X.to(device))
            loss = nn.functional.cross_entropy(out, y) if net.training else None
        if net.training:
            loss.backward()
        if net.training and program.get("update"):
            optimizer.step()

    return step
