"""The language model of `small_lm` with Muon, at 16 rows and at 64.

    python -m experiments.small_muon

writes mgpu_lib/recorded/small_muon.json. Muon steps along the matrices of the layers, as its authors advise, and AdamW
along embedding, norms and output layer. Both take one rate, since Muon's steps are scaled to be as long as AdamW's.
"""

import itertools

import torch

from experiments import small_lm, study
from experiments.small_lm import recipe, summary

BATCH_SIZES, RATES = (16, 64), (0.008, 0.016, 0.032)
SEEDS = range(3)
SAMPLE, TOLERANCE = {"64/0.016/0": {"eighths": 1}}, 1e-2


def cases():
    """{key: (batch_size, lr, seed)}: key batch_size/lr/seed, one seed after the other."""
    return {
        f"{batch_size}/{lr}/{seed}": (batch_size, lr, seed)
        for seed, batch_size, lr in itertools.product(SEEDS, BATCH_SIZES, RATES)
    }


def record(batch_size, lr, seed, eighths=8):
    """As `small_lm.trained`."""
    return small_lm.trained(batch_size, lr, seed, eighths, muon_and_adamw)


def muon_and_adamw(net):
    matrices = [p for p in net.layers.parameters() if p.dim() == 2]
    others = [p for p in net.parameters() if all(p is not matrix for matrix in matrices)]
    muon = torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")  # AdamW's decay
    return [muon, small_lm.adamw(others)]


if __name__ == "__main__":
    study.run("small_muon", cases(), record, recipe(), summary)
