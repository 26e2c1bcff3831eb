"""The one whole traceback that the book prints, of a script that runs out of memory: chapter 3 shows it as it is."""

import linecache
import re
import traceback

import pytest
import torch
from pages import cells

import mgpu_lib as mgpu

SCRIPT = """\
import torch
from torch.nn import functional as F
import mgpu_lib as mgpu

def backward(net, texts):
    tokens = torch.zeros(texts, 1024, dtype=torch.int64, device="cuda:0")
    logits = net(tokens)
    F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()

net = mgpu.Transformer(vocab=10_000, width=512, layers=8, heads=8)
backward(net.to("cuda:0"), texts=48)
"""


def printed():
    """What Python prints, with short paths, and without the frames of this test and inside of virtual GPUs."""
    linecache.cache["train.py"] = (len(SCRIPT), None, SCRIPT.splitlines(True), "train.py")
    with mgpu.virtual_gpus(1, "T4", backing="meta"), pytest.raises(torch.OutOfMemoryError) as caught:
        exec(compile(SCRIPT, "train.py", "exec"), {"__name__": "__main__"})
    lines = traceback.TracebackException.from_exception(caught.value)
    lines.stack[:] = [
        frame for frame in lines.stack if frame.filename != __file__ and "virtual_gpus" not in frame.filename
    ]
    text = "".join(lines.format())
    text = re.sub(r'File ".*/(?=torch/|mgpu_lib/)', 'File "…/', text)
    return re.sub(r"^ +[~^]+\n", "", text, flags=re.M).strip()  # Python 3.13 marks other parts of a line


def test_the_traceback_is_what_the_script_prints():
    """Line numbers and one sentence are of this PyTorch and this GPU."""
    [page] = [cell.source for cell in cells("03-what-fills-the-memory") if cell.id == "out-of-memory-why"]
    [shown] = re.findall(r"```pytb\n(Traceback.*?)\n```", page, re.S)
    assert without_numbers(shown) == without_numbers(printed())


def without_numbers(text):
    return re.sub(r", line \d+, in ", ", in ", text)
