r"""Train a transformer on a text with FSDP2 (`fully_shard`): one file to read, take away and change.

Every parameter, its gradient and its two averages of AdamW are cut into as many parts as there are ranks, and no rank
ever holds the whole network: it is made on the device "meta", sharded, and only then given memory and values.

In one process, on a GPU or on the CPU:

    python examples/train_fsdp.py

On four GPUs; with fewer, four ranks share the CPU and talk through gloo instead of NCCL:

    torchrun --standalone --nproc-per-node 4 examples/train_fsdp.py --amp bf16 --accumulate 2

On four virtual GPUs:

    virtual-gpus run -n 4 examples/train_fsdp.py

How much memory and time a step of 7 billion parameters would take on 16 H100, without any of them:

    virtual-gpus plan -n 16 --gpu H100 examples/train_fsdp.py --layers 32 --width 4096 --heads 32 --context 4096 \
        --batch-size 64 --accumulate 4 --amp bf16 --recompute

On two machines with four GPUs each, which see one folder. Start the same line on both; HOST is the name of one of them:

    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \
        examples/train_fsdp.py --checkpoints run

With checkpoints. They are written while training goes on, each rank its own shards, and one that isn't whole is never
read. After a crash, or to go on with another number of GPUs, start it again with the same arguments:

    torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/train_fsdp.py \
        --checkpoints run --metrics run.csv

On the same number of ranks a run that was killed ends bit for bit as one that wasn't. On another number, sums are
rounded in another order.

From weights that somebody has trained, and back to one file that any PyTorch program reads:

    torchrun --standalone --nproc-per-node 4 examples/train_fsdp.py --pretrained net.pt --export tuned.pt
"""

import argparse
import ctypes
import hashlib
import math
import os
import platform
import shutil
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

TEXT = Path(__file__).resolve().parent.parent / "mgpu_lib" / "text" / "alice.txt"
# What a resumed run must not change:
FIXED = "layers", "width", "heads", "context", "batch_size", "lr", "clip", "amp", "seed", "text_hash"
HEADER = "step,loss,gradient norm\n"
VOCABULARY = 256  # a token is a byte: no tokenizer to download


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--layers", type=int, default=4)
    add("--width", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--context", type=int, default=128, metavar="TOKENS", help="length of a sequence")
    add("--steps", type=int, default=200)
    add("--batch-size", type=int, default=32, help="sequences per optimizer step, all ranks and passes together")
    add("--accumulate", type=int, default=1, metavar="PASSES", help="forward and backward passes per optimizer step")
    add("--keep-gradients", action="store_true", help="until a step's last pass, instead of adding up shards: faster")
    add("--recompute", action="store_true", help="activations of a layer in its backward pass: less memory")
    add("--lr", type=float, default=1e-3, help="learning rate of AdamW, after 20 steps of warm-up")
    add("--clip", type=float, default=1.0, metavar="NORM", help="largest norm of a step's gradient")
    add("--amp", choices=["no", "bf16"], default="no", help="compute in bfloat16, with parameters in float32")
    add("--seed", type=int, default=0)
    add("--text", metavar="FILE", type=Path, default=TEXT, help="what to train on; its last tenth is for testing")
    add("--checkpoints", metavar="FOLDER", type=Path, help="where to save the run, and where to resume it from")
    add("--every", type=int, default=50, metavar="STEPS", help="save a checkpoint after so many steps")
    add("--metrics", metavar="FILE.csv", help="one line per step")
    add("--pretrained", metavar="FILE", help="a state_dict of the whole network to start from")
    add("--export", metavar="FILE", help="write a state_dict of the whole network at the end")
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
    tokens, test_tokens, args.text_hash = on_each_rank(load_text, args.text, args.context)
    net = make_net(args, device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr, weight_decay=0.1)
    files = Checkpoints(args, net, optimizer)
    step = files.resume()
    if args.metrics:
        on_rank_0(cut_metrics, args.metrics, step, 2 * args.every if args.checkpoints else math.inf)

    # torchrun and Slurm end a run with SIGTERM, and some time later with SIGKILL. Up to here, SIGTERM may end the
    # process where it stands; from here on it's a request to save a checkpoint first.
    stop_requests = []
    signal.signal(signal.SIGTERM, lambda signum, frame: stop_requests.append(signum))
    began, first = time.perf_counter(), step
    while step < args.steps:
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1, (step + 1) / 20)
        # The rows of a step follow from its number, so there is no state of a loader that a checkpoint must hold, and
        # any number of ranks trains on the same ones.
        rows = sequences(tokens, args.context, args.batch_size, seed_of(args.seed, step))
        loss, norm = train_step(net, optimizer, rows[rank::world_size].to(device), args)
        step += 1

        # SIGTERM reaches the ranks at different steps: all of them have to hear of it, or one would wait forever.
        stop = torch.tensor(len(stop_requests), device=device)
        dist.all_reduce(loss)
        dist.all_reduce(stop)
        loss, norm, stop = loss.item() / world_size, norm.item(), stop.item()
        if not math.isfinite(loss + norm):
            files.finish()
            leave(f"the loss of step {step} is {loss}, the gradient's norm {norm}: not saved")
        if args.metrics:
            on_rank_0(add_metrics, args.metrics, f"{step},{loss!r},{norm!r}\n")
        if rank == 0 and (step % 20 == 0 or step == args.steps):
            speed = (step - first) * args.batch_size * args.context / (time.perf_counter() - began)
            print(f"step {step}: loss {loss:.3f}, gradient {norm:.2f}, {speed:,.0f} tokens/s", flush=True)
        if args.checkpoints and (step % args.every == 0 or stop or step == args.steps):
            files.save(step)
        if stop and step < args.steps:
            files.finish()
            leave(f"stopped by SIGTERM after step {step}", status=0)
    files.finish()
    loss = evaluate(net, test_tokens, args.context, device)
    if rank == 0:
        print(f"test loss {loss:.3f} nats per byte", flush=True)
    if args.export:
        export(net, args.export)


def train_step(net, optimizer, rows, args):
    """One optimizer step with this rank's sequences: their mean loss, and the norm of the gradient over all ranks."""
    losses = torch.zeros((), device=rows.device)
    passes = rows.chunk(args.accumulate)
    for i, part in enumerate(passes):
        # By default every backward pass sends its gradients, and each rank adds up its shard of them. Or a rank keeps
        # whole gradients until the last pass: one reduce-scatter instead of many, for the memory of a whole gradient.
        net.set_requires_gradient_sync(i == len(passes) - 1 or not args.keep_gradients)
        loss = loss_of(net, part) / len(passes)  # the mean over all passes, of all ranks
        loss.backward()
        losses += loss.detach()
    norm = nn.utils.clip_grad_norm_(net.parameters(), args.clip)  # over all shards, as it is a DTensor
    optimizer.step()
    optimizer.zero_grad()
    return losses, norm.full_tensor()


@torch.no_grad()
def evaluate(net, tokens, context, device):
    """Mean loss of 64 sequences, the same ones on any number of ranks. Each rank adds up the losses of its own."""
    rank, world_size, loss = dist.get_rank(), dist.get_world_size(), torch.zeros((), device=device)
    for rows in sequences(tokens, context, 64, seed=0).split(8 * world_size):
        # Perhaps none is left for this rank. But a forward pass gathers parameters, so all ranks run equally many.
        loss += loss_of(net, rows[rank::world_size].to(device), "sum")
    dist.all_reduce(loss)
    return loss.item() / (64 * context)


def loss_of(net, rows, reduction="mean"):
    """Loss of predicting each token of `rows` (sequences, context + 1) from those before it."""
    logits = net(rows[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction=reduction)


# The network


class Layer(nn.Module):
    """A transformer layer: causal attention, then two matrices with a nonlinearity between them."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, X):  # batch, time, channels
        parts = self.qkv(self.norm1(X)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)  # batch, heads, time, ...
        X = X + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return X + self.down(F.gelu(self.up(self.norm2(X))))


class Transformer(nn.Module):
    def __init__(self, layers, width, heads, context, recompute=False):
        super().__init__()
        self.recompute = recompute
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, rows):  # batch, time
        X = self.tokens(rows) + self.positions(torch.arange(rows.shape[1], device=rows.device))
        for layer in self.layers:
            X = checkpoint(layer, X, use_reentrant=False) if self.recompute and torch.is_grad_enabled() else layer(X)
        return self.head(self.norm(X))


def make_net(args, device):
    """The sharded network, with its first values."""
    if args.width % args.heads:
        leave(f"--width {args.width} can't be divided by --heads {args.heads}")
    with torch.device("meta"):  # shapes only: the whole network may be larger than any memory
        net = Transformer(args.layers, args.width, args.heads, args.context, args.recompute)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    dtype = torch.bfloat16 if args.amp == "bf16" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in net.layers:  # each is gathered before it computes, and freed afterwards
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)  # what is left: embeddings, the last norm, the head
    net.to_empty(device=device)  # memory for this rank's shards
    if args.pretrained:
        load_pretrained(net, args.pretrained)
    else:
        initialize(net, args.seed)
    return net


@torch.no_grad()
def initialize(net, seed):
    """Values that depend on the seed and a parameter's name, and not on how many ranks share it.

    Every rank draws a whole parameter, one after the other, and keeps its shard. `to_empty` alone would leave whatever
    lay in memory."""
    for name, parameter in net.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif "norm" in name:
            parameter.fill_(1)
        else:
            generator = torch.Generator(parameter.device).manual_seed(seed_of(seed, name))
            whole = 0.02 * torch.randn(parameter.shape, generator=generator, device=parameter.device)
            parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None))


def load_pretrained(net, path):
    """Rank 0 reads the file, and each rank is sent its shards of one tensor after the other."""
    on_rank_0(check_pretrained, path, {name: tuple(p.shape) for name, p in net.named_parameters()})
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True) if dist.get_rank() == 0 else {}
    set_model_state_dict(net, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))


def check_pretrained(path, shapes):
    try:
        state = torch.load(path, map_location="meta", weights_only=True)  # weights_only: a file can't run code
    except Exception as error:
        raise ValueError(f"{path} can't be read as a state_dict: {error}") from error
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    for name in shapes | found:
        if found.get(name) != shapes.get(name):
            raise ValueError(f"{path} isn't of this network: {name} is {found.get(name)}, not {shapes.get(name)}")


def export(net, path):
    """Write the whole network as one file, gathered on rank 0's processor."""
    state = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    on_rank_0(write_whole, state, path)


def write_whole(state, path):
    torch.save(state, f"{path}.new")
    os.replace(f"{path}.new", path)  # the name is never that of a half-written file


# Checkpoints: a folder for each, in which every rank writes its shards


class Checkpoints:
    """Saves the run in `args.checkpoints` while it goes on, and resumes it. The last whole checkpoint is never removed.

    `dcp.async_save` copies the shards to the processor's memory, and a thread writes them. The file .metadata gets its
    name when all ranks have written theirs, and marks a checkpoint as whole."""

    def __init__(self, args, net, optimizer):
        self.args, self.net, self.optimizer = args, net, optimizer
        self.group = dist.new_group(backend="gloo")  # of the thread's own: its messages cross those of training
        self.writing = None  # the Future of the checkpoint that is being written
        if args.checkpoints:
            check_shared(args.checkpoints)

    def state(self, step):
        net, optimizer = get_state_dict(self.net, self.optimizer)
        settings = {name: getattr(self.args, name) for name in FIXED}
        return {"net": net, "optimizer": optimizer, "step": step, "settings": settings}

    def save(self, step):
        self.finish()  # one at a time: the one before is whole before this one begins
        norm = nn.utils.get_total_norm(self.net.parameters()).full_tensor().item()
        if not math.isfinite(norm):  # the loss is finite if the parameters before the step were
            leave(f"the norm of the parameters is {norm} after step {step}: not saved")
        folder = self.args.checkpoints / f"step-{step:08}"
        on_rank_0(make_room, folder)
        self.writing = dcp.async_save(self.state(step), checkpoint_id=folder, process_group=self.group)

    def finish(self):
        """Wait for the checkpoint that is being written, if one is. Older ones may go then."""
        if self.writing is not None:
            try:
                self.writing.result()
            except dcp.CheckpointException as error:  # on all ranks, also if the disk let only one of them down
                reason = next(iter(error.failures.values()))[0]
                leave(f"can't write to {self.args.checkpoints} ({reason}). The last whole checkpoint is untouched")
            self.writing = None
            on_rank_0(remove_all_but, newest(self.args.checkpoints))

    def resume(self):
        """Continue from the newest whole checkpoint: the number of steps that are done."""
        folder = on_rank_0(newest, self.args.checkpoints)
        if folder is None:
            if self.args.checkpoints and dist.get_rank() == 0:
                print(f"no checkpoint in {self.args.checkpoints}: starting from the beginning", flush=True)
            return 0
        state = self.state(0)
        dcp.load(state, checkpoint_id=folder, process_group=self.group)  # into the shards of as many ranks as there are
        for name, old in state["settings"].items():
            if (new := getattr(self.args, name)) != old:
                leave(f"{folder} was trained with {name} = {old}, not {new}: name another folder")
        set_state_dict(self.net, self.optimizer, model_state_dict=state["net"], optim_state_dict=state["optimizer"])
        if dist.get_rank() == 0:
            print(f"resuming {folder} after step {state['step']}", flush=True)
        return state["step"]


def check_shared(folder):
    """Leave unless all ranks see one folder. Their shards would lie in several, and nobody could read them."""
    mark = folder / "shared"
    on_rank_0(make_room, mark)
    seen = [None] * dist.get_world_size()
    dist.all_gather_object(seen, mark.exists())
    on_rank_0(mark.rmdir)
    if not all(seen):
        leave(f"rank {seen.index(False)} doesn't see rank 0's {folder}: name a folder that all machines see")


def newest(folder):
    """The newest whole checkpoint in a folder."""
    return max((mark.parent for mark in folder.glob("step-*/.metadata")), default=None) if folder else None


def make_room(folder):
    shutil.rmtree(folder, ignore_errors=True)  # what a killed run has left there isn't whole
    folder.mkdir(parents=True)


def remove_all_but(kept):
    for folder in kept.parent.glob("step-*"):
        if folder != kept:
            shutil.rmtree(folder)


# What ranks do alone, and agree on


def on_rank_0(function, *args):
    """What `function` returns on rank 0, for every rank. If it fails there, all of them leave together."""
    answer = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = function(*args)
        except Exception as error:  # whatever it is: alone, the others would wait for this rank forever
            answer[1] = f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(answer)  # also a barrier
    if answer[1]:
        leave(answer[1])
    return answer[0]


def on_each_rank(function, *args):
    """What `function` returns. If it fails on one rank, all of them leave together, with that rank's error."""
    answer, errors = None, [None] * dist.get_world_size()
    try:
        answer = function(*args)
    except Exception as error:  # on whichever rank: alone, the others would wait for it
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


def cut_metrics(path, step, longest):
    """Keep the lines up to the checkpoint's step. `longest`: as many there can be before the first checkpoint."""
    with open(path, "a+") as file:
        file.seek(0)
        lines = file.readlines()
        if step == 0 and len(lines) - 1 > longest:
            raise ValueError(f"{path} has {len(lines) - 1} steps, but their checkpoint is missing: name another file")
        part = HEADER.startswith("".join(lines))  # of the header, which a full disk may have left
        kept = [] if part else lines[: step + 1]
        file.truncate(len("".join(kept)))
        file.write("" if kept else HEADER)


def add_metrics(path, line):
    with open(path, "a") as file:
        file.write(line)


def load_text(path, context):
    """The bytes of a text, for training and for testing, and a hash of it."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: name a text with --text")
    text = bytearray(path.read_bytes())
    tokens, test_tokens = torch.frombuffer(text, dtype=torch.uint8).tensor_split([len(text) * 9 // 10])
    if len(test_tokens) <= context + 1:
        raise ValueError(f"{path} has {len(text)} bytes, too few for a context of {context}")
    return tokens, test_tokens, hashlib.sha256(text).hexdigest()[:16]


def seed_of(*parts):
    """A seed that all the parts decide. Sums won't do: a CPU's generator drops all but the last 32 bits of a seed."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big")


def sequences(tokens, context, count, seed):
    """`count` pieces of the text, (count, context + 1), which begin where the seed says."""
    starts = torch.randint(len(tokens) - context, (count, 1), generator=torch.Generator().manual_seed(seed))
    return tokens[starts + torch.arange(context + 1)].long()


if __name__ == "__main__":
    main()
