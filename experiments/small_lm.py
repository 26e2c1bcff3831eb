"""A language model at batches 4 times apart, with AdamW: what becomes of the learning rate, and of beta2?

    python -m experiments.small_lm

writes mgpu_lib/recorded/small_lm.json. A small transformer learns "Alice's Adventures in Wonderland" character by
character. All runs read the same number of rows of the text; the rate falls along a cosine, as in practice. For each of
four batch sizes five rates are tried, a factor of 2 apart. Then, from the best rate for batches of 16 rows to 1 row and
to 64, the rate is kept, multiplied by the square root of the factor, or by the factor, and beta2 is kept, or keeps its
half-life in tokens: after as many tokens, not steps, a squared gradient counts half (Marek et al. 2025,
arXiv:2507.07101).
"""

import itertools
import math

import torch
from torch.nn import functional as F

import mgpu_lib as mgpu
from experiments import study
from mgpu_lib.text import load_alice

TOKENS, ROWS = 64, 8_192  # characters in a row, and rows that a run reads: about four times the text
TESTED = 8_192  # last characters of the text, which no step reads
BATCH_SIZE, BETA2 = 16, 0.99  # rows
SWEEP = {  # {batch size: rates tried with BETA2}
    1: (0.0005, 0.001, 0.002, 0.004, 0.008),
    4: (0.001, 0.002, 0.004, 0.008, 0.016),
    16: (0.002, 0.004, 0.008, 0.016, 0.032),
    64: (0.002, 0.004, 0.008, 0.016, 0.032),
}
LR = 0.008  # the best for BATCH_SIZE
OTHERS = (1, 64)
RULES = {"kept": 0, "square root": 0.5, "linear": 1}  # the power of the factor by which the rate changes
SEEDS = range(5)
SAMPLE, TOLERANCE = {"64/0.008/0.99/0": {"eighths": 2}}, 1e-2


def cases():
    """{key: (batch_size, lr, beta2, seed)}: key batch_size/lr/beta2/seed, one seed after the other."""
    settings = [(size, lr, BETA2) for size, rates in SWEEP.items() for lr in rates]
    settings += [
        (size, scaled(size, power), beta2)
        for size in OTHERS
        for power in RULES.values()
        for beta2 in (BETA2, same_half_life(size))
    ]
    return {"/".join(map(str, (*each, seed))): (*each, seed) for seed in SEEDS for each in dict.fromkeys(settings)}


def scaled(batch_size, power):
    """LR times the factor between the batches to this power."""
    return float(f"{LR * (batch_size / BATCH_SIZE) ** power:.3g}")


def same_half_life(batch_size):
    """The beta2 that forgets as fast per token at `batch_size` as BETA2 does at BATCH_SIZE."""
    return float(f"{BETA2 ** (batch_size / BATCH_SIZE):.6g}")


def record(batch_size, lr, beta2, seed, eighths=8):
    """As `trained`, with AdamW."""
    return trained(batch_size, lr, seed, eighths, lambda net: [adamw(net.parameters(), beta2)])


def adamw(params, beta2=BETA2):
    return torch.optim.AdamW(params, betas=(0.9, beta2), foreach=True)


def trained(batch_size, lr, seed, eighths, optimizers_of):
    """Mean cross-entropy per character: train_loss of each eighth of the run, or of the first so many, and test_loss
    then. `optimizers_of(net)` lists the optimizers, all of which take the rate `lr`."""
    torch.manual_seed(seed)
    text = load_alice()
    net = mgpu.Transformer(len(text.characters), width=64, layers=2, heads=2)
    optimizers = optimizers_of(net)
    steps, losses = ROWS // batch_size, []
    for step, rows in enumerate(drawn(text.tokens[:-TESTED], seed)[: ROWS * eighths // 8].split(batch_size)):
        loss = loss_of(net, rows)
        net.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * step / steps)) / 2
            optimizer.step()
        losses.append(loss.item())
    means = torch.tensor(losses).view(eighths, -1).mean(dim=1)
    with torch.no_grad():
        test_loss = loss_of(net, text.tokens[-TESTED:].view(-1, TOKENS)).item()
    return {"train_loss": [finite(loss) for loss in means.tolist()], "test_loss": finite(test_loss)}


def drawn(tokens, seed):
    """The rows of all runs of a seed, in one order for all batch sizes: (ROWS, TOKENS + 1)."""
    starts = torch.randint(len(tokens) - TOKENS, (ROWS,), generator=torch.Generator().manual_seed(seed))
    return tokens[starts[:, None] + torch.arange(TOKENS + 1)]


def loss_of(net, rows):
    """Mean cross-entropy of each character, given those before it in its row."""
    return F.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def finite(loss):
    """None for a loss that is no number: JSON has no other word for it."""
    return round(loss, 5) if math.isfinite(loss) else None


def recipe():
    return {"rows": ROWS, "tokens": TOKENS}


def summary(runs):
    """{batch_size/lr/beta2: test_loss of each seed}."""
    keys = itertools.groupby(sorted(runs), key=lambda key: key.rpartition("/")[0])
    return {name: [runs[key]["test_loss"] for key in each] for name, each in keys}


if __name__ == "__main__":
    study.run("small_lm", cases(), record, recipe(), summary)
