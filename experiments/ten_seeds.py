"""Seven more seeds for the comparisons that carry a verdict, so that with the grid's and `scaling`'s three it is ten.

    python -m experiments.ten_seeds

writes mgpu_lib/recorded/ten_seeds.json. Runs of the grid, `experiments.tuning`: LeNet with batches of up to 256, each
at the rate that was best over the grid's seeds. Runs of `experiments.scaling`: batches of 1024, with the rate of 256
kept and with the linear rule and warm-up. Seeds were chosen before any of these runs was made, and no rate was chosen
by them. There is no sample: only ends of runs are kept. The runs are those of `tuning` and `scaling`, which have one.
"""

from experiments import scaling, study, tuning
from experiments.tuning_runs import NETS, train_runs

SEEDS = range(3, 10)
BEST = {1: 0.01, 4: 0.025, 16: 0.063, 64: 0.4, 256: 0.4}  # {batch size: rate} at equal epochs; held against the grid
RULES = {"kept": ("kept", False), "linear, warm-up": ("linear", True)}  # rule, warmed: as `scaling.record` takes them
LARGER = 1024


def cases():
    """{key: arguments of `record`}: keys net/batch_size/rate or rule/seed, one seed after the other."""
    found = {}
    for seed in SEEDS:
        found |= {f"lenet/{size}/{lr}/{seed}": ("lenet", size, lr, seed) for size, lr in BEST.items()}
        found |= {f"{net}/{LARGER}/{rule}/{seed}": (net, LARGER, rule, seed) for net in NETS for rule in RULES}
    return found


def record(net, batch_size, lr, seed):
    """Test accuracy after the grid's epochs, None if the run ended before, at `ended_at_step`; `lr` is a rate of the
    grid or one of RULES."""
    if lr in RULES:
        run = scaling.record(net, batch_size, *RULES[lr], seed)
        accuracy = run["test_accuracy"]
    else:
        data, epochs, steps = tuning.fashion_mnist(), tuning.EPOCHS, tuning.STEPS
        [run] = train_runs(net, batch_size, [lr], seed, data, tuning.VALIDATION, epochs, steps)
        accuracy = run["test_accuracy"].get("epochs")
    return {"test_accuracy": accuracy, "ended_at_step": run["diverged_at_step"] or run["dead_at_step"]}


def recipe():
    return {
        "epochs": tuning.EPOCHS,
        "steps": tuning.STEPS,
        "validation": tuning.VALIDATION,
    }


def summary(runs):
    """{net/batch_size/rate or rule: {seed: test accuracy, None for a run that ended early}}."""
    found = {}
    for key, run in runs.items():
        name, _, seed = key.rpartition("/")
        found.setdefault(name, {})[seed] = run["test_accuracy"]
    return found


if __name__ == "__main__":
    study.run("ten_seeds", cases(), record, recipe(), summary)
