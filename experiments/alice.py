"""A small transformer learns "Alice's Adventures in Wonderland" character by character, on one GPU and on eight.

    python -m experiments.alice

writes mgpu_lib/recorded/alice.json: the loss of each step, that on the last characters of the text, which no step
reads, and how the trained network continues a few words. The eight share one batch and shard the network, with ZeRO-3.
Network, batches and optimizer are chapter 12's.
"""

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn import functional as F

import mgpu_lib as mgpu
from experiments import study
from experiments.record import ROOT
from mgpu_lib.text import load_alice
from mgpu_lib.zero import ZeRO

GPUS, STEPS = (1, 8), 600
ROWS, TOKENS = 8, 64  # of text in a batch, and characters in a row
TESTED, BEGIN, CONTINUED = 8_192, "Alice was ", 200  # characters
LIMIT = 3600  # seconds
SAMPLE, TOLERANCE = {"1": {"steps": 3}}, 1e-3
adam = partial(torch.optim.Adam, lr=0.003)


def cases():
    return {str(n_gpus): (n_gpus,) for n_gpus in GPUS}


def record(n_gpus, steps=STEPS):
    """{"losses": of each step, "test_loss", "text": the continuation}; the losses are means over the GPUs."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        with patch.dict(os.environ, PYTHONPATH=str(ROOT)):  # where the ranks find this package
            mgpu.launch(__file__, n_gpus, steps, out, seconds=LIMIT)
        return json.loads(out.read_text())


def main_of_rank(steps, out):
    """What each rank runs."""
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    net = small_net()
    zero = ZeRO(net, adam, 3, layers=net.layers)
    losses = trained(zero, steps, lambda rows: rows.chunk(ranks)[rank])
    dist.all_reduce(losses)
    found = {"losses": (losses / ranks).tolist(), "test_loss": tested(zero), "text": continued(zero)}
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


def small_net():
    torch.manual_seed(0)
    return mgpu.Transformer(len(load_alice().characters), width=128, layers=4, heads=4)


def batch(step, text):
    """The same rows of text on every rank: (ROWS, TOKENS + 1)."""
    generator = torch.Generator().manual_seed(step)
    last = len(text) - TOKENS
    starts = torch.randint(last, (ROWS,), generator=generator)
    return torch.stack([text[i : i + TOKENS + 1] for i in starts])


def loss_of(net, tokens):
    """Mean cross-entropy of each character, given those before it."""
    logits = net(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def trained(zero, steps, part):
    """The losses of so many steps, on the GPU; `part` says which rows of a batch are this rank's."""
    text, losses = load_alice().tokens[:-TESTED], []
    for i in range(steps):
        loss = loss_of(zero, part(batch(i, text)).cuda())
        loss.backward()
        zero.step()
        losses.append(loss.detach())
    return torch.stack(losses).double()


@torch.no_grad()
def tested(net):
    rows = load_alice().tokens[-TESTED:].view(-1, TOKENS)
    return loss_of(net, rows.cuda()).item()


@torch.no_grad()
def continued(net):
    """The characters after BEGIN, each drawn from what the network says of the next one."""
    text, generator = load_alice(), torch.Generator().manual_seed(0)
    tokens = [text.characters.index(character) for character in BEGIN]
    for _ in range(CONTINUED):
        logits = net(torch.tensor([tokens[-TOKENS:]]).cuda())[0, -1].double().cpu()
        tokens.append(torch.multinomial(logits.softmax(0), 1, generator=generator).item())
    return text.decode(tokens)


def recipe():
    return {"steps": STEPS}


def summary(runs):
    """How far apart the losses are, at most, up to some steps, and the mean of each over the last hundred."""
    losses = {name: torch.tensor(run["losses"], dtype=torch.float64) for name, run in runs.items()}
    ends = {name: found[-100:].mean().item() for name, found in losses.items()}
    if len(losses) < len(GPUS):
        return {"ends": ends}
    gaps = (losses["1"] - losses["8"]).abs()
    return {"ends": ends, "gaps": {str(steps): gaps[:steps].max().item() for steps in (1, 10, 100, STEPS)}}


def main():
    study.run("alice", cases(), record, recipe(), summary)


if __name__ == "__main__":
    if "RANK" in os.environ:
        main_of_rank(int(sys.argv[1]), sys.argv[2])
    else:
        main()
