"""Made-up results in the form in which the experiments record them, for tests of what reads them."""

import json
import math

from experiments import tuning, tuning_runs

IMAGES = 55_000
LIMITS = {1: 0.1, 4: 0.2, 16: 0.5, 32: 0.7, 64: 0.9, 256: 1.5, 512: 1.5, 1024: 1.5, 4096: 1.5}  # larger rates die
STEADY = {size: 0.7 * limit for size, limit in LIMITS.items()}  # at larger rates the accuracy goes up and down


def run(net, batch_size, lr, seed):
    """One run from a formula: its accuracy rises with the way that it has gone, jumps, or ends."""
    per_epoch = math.ceil(IMAGES / batch_size)
    limit = LIMITS[batch_size] * (2 if net == "lenet_bn" else 1)
    found = {
        "net": net,
        "batch_size": batch_size,
        "seed": seed,
        "lr": lr,
        "diverged_at_step": None,
        "dead_at_step": None,
        "step": [],
        "train_loss": [],
        "validation_accuracy": [],
        "test_accuracy": {},
    }
    for count, step in enumerate(tuning_runs.marks(per_epoch, 4, 215)):
        accuracy = 0.1 + 0.8 * (1 - 1 / (1 + lr * step / 3)) + 0.001 * seed
        accuracy -= 0.15 * (count % 2) * (lr > STEADY[batch_size])
        dead = lr > 3 * limit or (lr > limit and count > 5)
        found["step"].append(step)
        found["train_loss"].append(round(2.5 * (1 - accuracy), 5))
        found["validation_accuracy"].append(round(0.1 if dead else accuracy, 4))
        for budget, steps in (("epochs", 4 * per_epoch), ("steps", 215)):
            if steps == step:
                found["test_accuracy"][budget] = round(accuracy - 0.01, 4)
        if dead:
            found["dead_at_step"] = step
            break
    return found


def write_results(folder, nets=("lenet", "lenet_bn"), seeds=(0, 1, 2)):
    """The grid, and the runs of two more batch sizes, as files in `folder`."""
    runs = [
        run(net, b, lr, seed)
        for net in nets
        for b in tuning.BATCH_SIZES
        for seed in seeds
        for lr in tuning.learning_rates(b)
    ]
    recipe = {"epochs": 4, "steps": 215, "validation": 5000}
    (folder / "tuning.json").write_text(json.dumps({"recipe": recipe, "trained_on": IMAGES, "runs": runs}))
    unseen = {
        f"{b}/{seed}": [run("lenet", b, lr, seed) for lr in tuning.learning_rates(b)]
        for b in (32, 512)
        for seed in seeds
    }
    (folder / "unseen.json").write_text(json.dumps({"recipe": recipe, "runs": unseen}))
