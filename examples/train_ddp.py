r"""Train LeNet or ResNet-18 on Fashion-MNIST with DistributedDataParallel: one file to read, take away and change.

In one process, on a GPU or on the CPU:

    python examples/train_ddp.py

In one process for each of four GPUs; with fewer GPUs, the four share the CPU and talk through gloo instead of NCCL:

    torchrun --standalone --nproc-per-node 4 examples/train_ddp.py --net resnet18 --amp bf16 --accumulate 2

On four virtual GPUs:

    virtual-gpus run -n 4 examples/train_ddp.py

What a step would take on 16 H100, without any of them:

    virtual-gpus plan -n 16 --gpu H100 examples/train_ddp.py --net resnet18 --batch-size 4096

On two machines with four GPUs each. Start the same line on both; HOST is the name of one of them:

    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \
        examples/train_ddp.py

If you add --max-restarts there, export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on both first. Without it torchrun keeps
its store, in which restarted ranks find the addresses of their dead predecessors, and fail to connect (PyTorch 2.15).

With a checkpoint. When a rank dies, torchrun restarts all of them, and they go on from the last checkpoint. When
torchrun itself has died or was stopped, start the same line again to go on from there:

    torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/train_ddp.py \
        --checkpoint run.pt --metrics run.csv

Under Slurm, on two nodes with four GPUs each:

    sbatch examples/train_ddp.slurm
"""

import argparse
import contextlib
import ctypes
import hashlib
import io
import math
import os
import platform
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

CACHE = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
DIGITS = Path(__file__).resolve().parent.parent / "mgpu_lib" / "digits.csv.gz"
DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FIXED = "net", "batch_size", "accumulate", "lr", "amp", "seed", "images"  # a resumed run must not change these
HEADER = "step,epoch,loss,accuracy\n"


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--net", choices=["lenet", "resnet18"], default="lenet")
    add("--epochs", type=int, default=3)
    add("--batch-size", type=int, default=256, help="images per optimizer step, all ranks and passes together")
    add("--accumulate", type=int, default=1, metavar="PASSES", help="forward and backward passes per optimizer step")
    add("--lr", type=float, default=0.05, help="learning rate of SGD with momentum 0.9")
    add("--amp", choices=DTYPES, default="no", help="mixed precision")
    add("--seed", type=int, default=0)
    add("--checkpoint", metavar="FILE", help="where to save the run, and where to resume it from")
    add("--every", type=int, default=100, metavar="STEPS", help="save a checkpoint after so many steps")
    add("--metrics", metavar="FILE.csv", help="one line per step")
    add("--data", metavar="FOLDER", default=os.environ.get("MGPU_DATA") or f"{CACHE}/mgpu_lib", help="or: digits")
    add("--images", type=int, metavar="N", help="train and test on the first N images only")
    return parser.parse_args()


def main():
    args = parse_args()
    train(args, join_group())
    # Not in a `finally`: NCCL waits for the other ranks here. After an error on this one, they wait for it, and its
    # traceback, which Python prints last, would never be seen.
    dist.destroy_process_group()


def join_group():
    """Meet the other ranks; the device of this one. A script that torchrun didn't start is a group of one rank."""
    launched = dist.is_torchelastic_launched()
    if launched and sys.platform == "linux":
        # If torchrun is killed, so are its ranks. They would otherwise train on as orphans, and overwrite the files of
        # the run that you start in their place. 1 is PR_SET_PDEATHSIG.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    local_rank, ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if torch.cuda.device_count() >= ranks:
        backend, device = "nccl", torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        backend, device = "gloo", torch.device("cpu")
    if local_rank == 0:  # of each machine, before they meet: if only one lacks GPUs, they wait for each other
        print(f"{platform.node()}: {backend} on {device.type}; ranks: {ranks}", flush=True)
    if launched:
        store, rank, world_size = next(dist.rendezvous("env://"))
        if os.environ["GROUP_WORLD_SIZE"] == "1":
            # torchrun keeps its store when it restarts the ranks of one machine: without a prefix for each attempt, a
            # fast rank finds the address of its neighbor's dead predecessor there, and fails to connect.
            store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    else:
        store, rank, world_size = dist.HashStore(), 0, 1
    limit = timedelta(minutes=5)  # for a rank that hangs
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    return device


def train(args, device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if args.batch_size % (world_size * args.accumulate):
        leave(f"--batch-size {args.batch_size} can't be split over {world_size} ranks and {args.accumulate} passes")
    X, y, X_test, y_test = on_each_rank(load_data, args.data, args.images)
    args.images, steps_per_epoch = len(X), len(X) // args.batch_size  # an incomplete last batch is left out
    if steps_per_epoch == 0:
        leave(f"--batch-size {args.batch_size} is more than the {len(X)} training images")

    torch.manual_seed(args.seed)
    net = make_net(args.net).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")  # bf16 has the range of float32
    settle_buckets(model, *to_device(X[:1], y[:1], device))
    step = resume(args, net, optimizer, scaler)
    if args.metrics:
        on_rank_0(cut_metrics, args.metrics, step, args.every if args.checkpoint else math.inf)

    # torchrun and Slurm end a run with SIGTERM, and some time later with SIGKILL. Up to here, SIGTERM may end the
    # process where it stands; from here on it's a request to save a checkpoint first.
    stop_requests = []
    signal.signal(signal.SIGTERM, lambda signum, frame: stop_requests.append(signum))
    sampler = DistributedSampler(X, world_size, rank, seed=args.seed, drop_last=True)
    began, first = time.perf_counter(), step
    for epoch in range(step // steps_per_epoch, args.epochs):
        sampler.set_epoch(epoch)  # or every epoch would have the same order
        batches = torch.tensor(list(sampler)).split(args.batch_size // world_size)[:steps_per_epoch]
        for rows in batches[step % steps_per_epoch :]:
            # Random numbers follow from the step and the rank, so there is no random state that a checkpoint must hold.
            torch.manual_seed(seed_of(args.seed, step, rank))
            loss_sum = train_step(model, shifted(X[rows]), y[rows], optimizer, scaler, args, device)
            step += 1

            # SIGTERM reaches the ranks at different steps, and a rank that left alone would have the others wait for it
            # forever: all of them have to hear of it. The host waits for the GPU to read what comes, so where a step
            # takes only a millisecond or two, do this every tenth step.
            report = torch.tensor([loss_sum, len(rows)], device=device)
            stop = torch.tensor(len(stop_requests), device=device)
            dist.all_reduce(report)
            dist.all_reduce(stop)
            (loss_sum, images), stop = report.tolist(), stop.item()
            loss, accuracy, done = loss_sum / images, "", step == args.epochs * steps_per_epoch
            # fp16's scaler skips such a step and halves its scale, which is 1 without fp16. Down there it has failed.
            if not math.isfinite(loss) and scaler.get_scale() <= 1:
                leave(f"the loss of step {step} is {loss}: not saved")
            if step % steps_per_epoch == 0:
                accuracy = evaluate(net, X_test, y_test, device)
            if args.metrics:
                on_rank_0(add_metrics, args.metrics, f"{step},{epoch},{loss!r},{accuracy}\n")
            if rank == 0 and (step % 50 == 0 or accuracy != ""):
                speed = (step - first) * args.batch_size / (time.perf_counter() - began)
                tested = f"test accuracy {accuracy:.3f}, " if accuracy != "" else ""
                print(f"epoch {epoch}, step {step}: loss {loss:.3f}, {tested}{speed:,.0f} images/s", flush=True)
            if args.checkpoint and (step % args.every == 0 or stop or done):
                on_rank_0(check_finite, net, step)
                on_rank_0(save_checkpoint, args, step, net, optimizer, scaler)
            if stop and not done:
                leave(f"stopped by SIGTERM after step {step}", status=0)


def train_step(model, X, y, optimizer, scaler, args, device):
    """One optimizer step with this rank's images: the sum of their losses."""
    loss_sum, size = 0.0, len(X) // args.accumulate
    parts = list(zip(X.split(size), y.split(size)))
    for i, part in enumerate(parts):
        X_part, y_part = to_device(*part, device)
        # Gradients add up on each rank; only the last backward pass takes the sums to the other ranks.
        with contextlib.nullcontext() if i == len(parts) - 1 else model.no_sync():
            with torch.autocast(device.type, DTYPES[args.amp], enabled=args.amp != "no"):
                loss = F.cross_entropy(model(X_part), y_part)
            scaler.scale(loss / args.accumulate).backward()
        loss_sum += loss.detach() * len(X_part)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss_sum.item()


@torch.no_grad()
def evaluate(net, X, y, device):
    """The share of images that are classified correctly. Each rank counts its own, so that none is counted twice."""
    for buffer in net.buffers():  # ranks have seen different images, so their batch norm statistics differ
        dist.broadcast(buffer, src=0)
    net.eval()  # not through DistributedDataParallel, whose forward pass all ranks must call equally often
    correct = torch.zeros((), device=device)
    for rows in torch.arange(dist.get_rank(), len(X), dist.get_world_size()).split(500):
        X_part, y_part = to_device(X[rows], y[rows], device)
        correct += (net(X_part).argmax(1) == y_part).sum()
    net.train()
    dist.all_reduce(correct)
    return correct.item() / len(X)


def settle_buckets(model, X, y):
    """Have DistributedDataParallel lay out its gradient buckets for good, in a pass whose gradients are thrown away.

    After its first backward pass it arranges them by the order in which gradients came. The sum over ranks depends, in
    its last bit, on where in a bucket a gradient lies, so a resumed run would differ in its first step from one that
    was never interrupted.
    """
    model.eval()  # leaves the statistics of batch norm alone
    F.cross_entropy(model(X), y).backward()
    model.zero_grad()
    model.train()


# Files. Rank 0 alone reads and writes checkpoints and metrics. After a restart it may be on another machine: with
# several of them, name files in a folder that all of them see.


def on_rank_0(function, *args):
    """What `function` returns on rank 0, for every rank. If it fails there, all of them leave together."""
    answer = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = function(*args)
        except Exception as error:  # whatever it is: left alone, the other ranks would wait for this one
            answer[1] = str(error)
    dist.broadcast_object_list(answer)  # also a barrier: nobody goes on before rank 0 is done
    if answer[1]:
        leave(answer[1])
    return answer[0]


def on_each_rank(function, *args):
    """What `function` returns. If it fails on one rank, all of them leave together, with that rank's error."""
    answer, errors = None, [None] * dist.get_world_size()
    try:
        answer = function(*args)
    except Exception as error:  # on whichever rank: left alone, the others would wait for it
        errors[dist.get_rank()] = str(error)
    dist.all_gather_object(errors, errors[dist.get_rank()])
    if any(errors):
        leave(next(filter(None, errors)))
    return answer


def leave(message, status=1):
    """End the script on all ranks, which call this together, with a message from rank 0 and the exit status."""
    if dist.get_rank() == 0:
        print(message, file=sys.stderr, flush=True)
    dist.barrier()  # torchrun ends the others when one has left: not before rank 0 has connected and spoken
    dist.destroy_process_group()
    sys.exit(status)


def check_finite(net, step):
    """Whether the parameters are worth saving: a step's loss is finite if those before the step were."""
    norm = nn.utils.get_total_norm(net.parameters()).item()
    if not math.isfinite(norm):
        raise ValueError(f"the norm of the parameters is {norm} after step {step}: not saved")


def save_checkpoint(args, step, net, optimizer, scaler):
    """Write args.checkpoint. Whenever the process is killed, the file there is whole: the new one, or still the old."""
    parts = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
    content, new = io.BytesIO(), Path(f"{args.checkpoint}.new")  # in the same folder, as os.replace needs it
    torch.save({"step": step, "args": {name: getattr(args, name) for name in FIXED}, **parts}, content)
    with explaining(f"the checkpoint {args.checkpoint} after step {step}"):
        try:
            with new.open("wb") as file:
                file.write(content.getbuffer())
                file.flush()
                os.fsync(file.fileno())  # or a power cut could leave the new name without the new bytes
            os.replace(new, args.checkpoint)
        except OSError:
            with contextlib.suppress(OSError):
                new.unlink()
            raise


@contextlib.contextmanager
def explaining(file):
    """Have an error of the disk say which file it is about, and what to do."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"can't write {file} ({error}). The last checkpoint, if there is one, is untouched. "
            "Make room or name a file in another folder, and start the same command again."
        ) from error


def resume(args, net, optimizer, scaler):
    """Continue from args.checkpoint if it exists: the number of steps that are done."""
    state = on_rank_0(read_checkpoint, args.checkpoint)
    if state is None:
        if args.checkpoint and dist.get_rank() == 0:
            print(f"no checkpoint {args.checkpoint}: starting from the beginning", flush=True)
        return 0
    for name, value in state["args"].items():
        if getattr(args, name) != value:
            leave(f"{args.checkpoint} was trained with {name} = {value}, not {getattr(args, name)}: name another file")
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    scaler.load_state_dict(state["scaler"])
    if dist.get_rank() == 0:
        print(f"resuming {args.checkpoint} after step {state['step']}; ranks: {dist.get_world_size()}", flush=True)
    return state["step"]


def read_checkpoint(path):
    if path is None or not os.path.exists(path):
        return None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)  # weights_only: a file can't run code
    except Exception as error:
        raise ValueError(f"{path} can't be read as a checkpoint ({error}): name another file") from error


def cut_metrics(path, step, longest):
    """Keep the lines up to the checkpoint's step. `longest`: as many there can be before the first checkpoint."""
    with explaining(f"the metrics {path}"), open(path, "a+") as file:
        file.seek(0)
        lines = file.readlines()
        if step == 0 and len(lines) - 1 > longest:
            raise ValueError(f"{path} has {len(lines) - 1} steps, but their checkpoint is missing: name another file")
        part = HEADER.startswith("".join(lines))  # of the header, which a full disk may have left
        kept = [] if part else lines[: step + 1]
        file.truncate(len("".join(kept)))
        file.write("" if kept else HEADER)


def add_metrics(path, line):
    with explaining(f"the metrics {path}"), open(path, "a") as file:
        file.write(line)


def load_data(folder, limit):
    """Training images (N, 1, 28, 28) and labels (N,), and the same for testing; bytes, so all of it is 55 MB."""
    if folder == "digits":  # 1,797 that come with the book, enlarged from 8x8 pixels: no download
        if not DIGITS.exists():
            raise FileNotFoundError(f"--data digits reads {DIGITS}: copy it there, or name a folder with --data")
        table = torch.from_numpy(np.loadtxt(DIGITS, delimiter=","))
        X = F.interpolate(table[:, :64].float().view(-1, 1, 8, 8) * 15.9, size=28, mode="bilinear").byte()
        y = table[:, 64].long()
        return X[:1500][:limit], y[:1500][:limit], X[1500:][:limit], y[1500:][:limit]
    raw, tensors = Path(folder).expanduser() / "FashionMNIST" / "raw", []
    for part in "train", "t10k":
        try:  # the files have headers of 16 and 8 bytes
            X, y = (np.fromfile(raw / f"{part}-{name}-ubyte", np.uint8) for name in ("images-idx3", "labels-idx1"))
        except FileNotFoundError as error:
            get = f"from torchvision.datasets import FashionMNIST as F; F('{raw.parent.parent}', download=True)"
            message = f'{error.filename} is missing. To download it: python -c "{get}"\nTo do without: --data digits'
            raise FileNotFoundError(message) from error
        X, y = torch.from_numpy(X[16:]).view(-1, 1, 28, 28), torch.from_numpy(y[8:]).long()
        tensors += [X[:limit], y[:limit]]
    return tensors


def seed_of(*parts):
    """A seed that all the parts decide. Sums won't do: a CPU's generator drops all but the last 32 bits of a seed."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big")


def shifted(X):
    """The images X, moved by up to two pixels in each direction: other images for each rank, step and epoch."""
    return X.roll(torch.randint(-2, 3, (2,)).tolist(), dims=(2, 3))


def to_device(X, y, device):
    return X.to(device).float() / 255, y.to(device)


def make_net(name):
    if name == "resnet18":
        from torchvision.models import resnet18

        net = resnet18(num_classes=10)  # its stem is made for 224x224 pixels and would leave 7x7 of these 28x28
        net.conv1, net.maxpool = nn.Conv2d(1, 64, kernel_size=3, padding=1, bias=False), nn.Identity()
        return net
    return nn.Sequential(
        *(nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2)),  # 28 -> 26 -> 13 pixels a side
        *(nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2)),  # 13 -> 9 -> 4
        *(nn.Flatten(), nn.Linear(50 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


if __name__ == "__main__":
    main()
