"""How much longer kernels take on one real GPU while another kernel keeps some of its multiprocessors and copies.

    python -m calibration.contention FILE   # needs a GPU and Triton

That is what a collective operation does beside the computation. recorded/measured_h100.json holds what one H100 said,
in "contention"; rates.WAITING and its neighbors were read from it. A real collective copies over links, too, and waits
for other GPUs.
"""

import functools
import json
import sys
import time
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend

from calibration import kernels
from calibration.record import write

WORK = {
    "product of width 1536": (kernels.linear, (8192, 1536, 6144)),
    "product of width 8192": (kernels.linear, (8192, 8192, 8192)),
    "attention": (kernels.attention, (2048, 4096, 128, SDPBackend.FLASH_ATTENTION)),
    "cudnn attention": (kernels.attention, (2048, 4096, 128, SDPBackend.CUDNN_ATTENTION)),
    "layer_norm": (kernels.layer_norm, (8192,)),
    "pointwise": (kernels.pointwise, ("add", 2**28)),
}
BLOCKS = 4, 8, 16, 24, 32, 64  # thread blocks that copy; NCCL has one for each of its channels
SIZE = 2**27  # numbers in float32 that are copied in each round
TIMES = 20  # that the work is repeated while they do


@triton.jit
def copy(source, target, count, rounds, PIECE: tl.constexpr):
    """Copy `count` numbers, `rounds` times, piece by piece."""
    stride = tl.num_programs(0) * PIECE
    for _ in range(rounds):
        for start in range(tl.program_id(0) * PIECE, count, stride):
            where = start + tl.arange(0, PIECE)
            tl.store(target + where, tl.load(source + where))


def seconds(step, stream=None):
    """Of one of TIMES steps."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        start.record()
        for _ in range(TIMES):
            step()
        end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / TIMES


def beside(step, alone, blocks, piece, round_seconds, buffers, side):
    """Seconds of a step while the copy runs, and whether it ran until the end."""
    rounds = int(3 * (0.002 + alone * TIMES) / round_seconds) + 1
    done = torch.cuda.Event()
    with torch.cuda.stream(side):
        copy[(blocks,)](*buffers, SIZE, rounds, PIECE=piece, num_warps=16)
        done.record()
    time.sleep(0.001)  # until it has begun
    took = seconds(step)
    whole = not done.query()
    torch.cuda.synchronize()
    return took, whole


def main():
    path = Path(sys.argv[1])
    buffers, side = [torch.ones(SIZE, device="cuda") for _ in range(2)], torch.cuda.Stream()
    found = {"work": {}, "copies": {}}
    for piece in (2048, 8192):
        for blocks in BLOCKS:
            rounds = functools.partial(copy[(blocks,)], *buffers, SIZE, 1, PIECE=piece, num_warps=16)
            rounds()
            found["copies"][f"{blocks}/{piece}"] = min(seconds(rounds) for _ in range(2))
    for name, (make, arguments) in WORK.items():
        for way, step in make(*arguments).items():
            seconds(step)
            alone = min(seconds(step) for _ in range(3))
            row = found["work"][f"{name}, {way}"] = {"alone": alone}
            for key, round_seconds in found["copies"].items():
                blocks, piece = map(int, key.split("/"))
                tries = [beside(step, alone, blocks, piece, round_seconds, buffers, side) for _ in range(2)]
                row[key] = min(took for took, _ in tries) if all(whole for _, whole in tries) else None
            write(path, found)
    print(json.dumps(found["work"]))


if __name__ == "__main__":
    main()
