"""Three steps of DistributedDataParallel, and who was there. Looks for torch before it imports it, as many do.

With "hide", each rank hides all GPUs but its own.
"""

import importlib.util
import os
import sys

assert importlib.util.find_spec("torch") is not None

import virtual_gpus  # noqa: E402, I001  (before torch: it may well come first)
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

if "hide" in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank if torch.cuda.device_count() > 1 else 0)
net = DistributedDataParallel(torch.nn.Linear(500, 500).cuda())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    net(torch.ones(4, 500, device="cuda")).sum().backward()
    optimizer.step()
timelines = virtual_gpus.gather_timeline()
if rank == 0:
    print(torch.cuda.device_count(), torch.cuda.get_device_name(), [timeline.gpus for timeline in timelines])
    first, second = (next(e for e in timeline if e.name == "all_reduce") for timeline in timelines)
    assert (first.start, first.end) == (second.start, second.end)
else:
    assert timelines is None
if "fail" in sys.argv and rank == 1:
    raise ValueError("rank 1 has had enough")
dist.destroy_process_group()
