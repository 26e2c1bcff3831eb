"""What the museum's program whose ranks all begin at position 0 costs a network that trains for longer.

    python -m experiments.positions

writes mgpu_lib/recorded/positions.json. Network, text and test are those of the museum's second half, with Adam. One
device stands for its four ranks, with the positions that they give to the characters of the whole text.
"""

import torch
from torch.nn import functional as F

import mgpu_lib as mgpu
from experiments import study
from mgpu_lib.text import load_alice
from mgpu_lib.transformer import rotary_angles

STEPS, EVERY, RUNS = 800, 100, range(3)
ROWS, TOKENS, RANKS = 2, 256, 4  # texts in a step, characters in each
SAMPLE, TOLERANCE = {"shown/0": {"steps": EVERY}}, 1e-3


def cases():
    """{key: ("shown" or "mended", which run)}"""
    return {f"{version}/{run}": (version, run) for run in RUNS for version in ("shown", "mended")}


def record(version, run, steps=STEPS):
    """{"test_loss": after every 100 steps}. Each run begins with the same parameters and reads other texts."""
    tokens, found = load_alice().tokens, []
    test = tokens[-2049:-1].unfold(0, 65, 64)
    angles = rotary_angles(TOKENS, 8, "cpu", torch.float64)
    if version == "shown":
        angles = [each[positions_on_ranks()] for each in angles]
    torch.manual_seed(0)
    net = mgpu.Transformer(len(load_alice().characters), 16, 1, 2).double()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for step in range(steps):
        rows = batch(tokens, STEPS * run + step)
        loss_of(logits_of(net, rows[:, :-1], angles), rows).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % EVERY == 0:
            with torch.no_grad():
                found.append(loss_of(net(test[:, :-1]), test).item())
    return {"test_loss": found}


def positions_on_ranks():
    """(TOKENS,): rank r has pieces r and 7 - r of eight, and numbers their characters from 0."""
    piece = TOKENS // (2 * RANKS)
    first, second = torch.arange(2 * piece).split(piece)
    return torch.cat([first] * RANKS + [second] * RANKS)


def batch(tokens, seed):
    """(ROWS, TOKENS + 1), as the page draws them."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - TOKENS, (ROWS,), generator=generator)
    return torch.stack([tokens[i : i + TOKENS + 1] for i in starts])


def logits_of(net, tokens, angles):
    """What net(tokens) computes, with these angles."""
    X = net.embedding(tokens)
    for layer in net.layers:
        X = layer(X, angles)
    return net.head(net.norm(X))


def loss_of(logits, rows):
    return F.cross_entropy(logits.mT, rows[:, 1:])


def recipe():
    return {"steps": STEPS, "every": EVERY, "rows": ROWS}


def summary(runs):
    """{steps: {"shown" and "mended": the losses, run by run}} after 200 steps and at the end."""
    found = {str(steps): {"shown": [], "mended": []} for steps in (200, STEPS)}
    for key, run in runs.items():
        for steps, losses in found.items():
            losses[key.split("/")[0]].append(run["test_loss"][int(steps) // EVERY - 1])
    return found


if __name__ == "__main__":
    study.run("positions", cases(), record, recipe(), summary)
