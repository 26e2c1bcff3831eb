"""Plans of large runs. That the formulas equal dry runs of 60 settings: tests/experiments/test_validations.py."""

import pytest
import torch

import mgpu_lib as mgpu
from experiments import planner_validation
from mgpu_lib import plan_formulas, planning
from mgpu_lib.planning import TrainingRun, best_plan, plan

SMALL = {"vocab": 32_000, "width": 2048, "layers": 4, "heads": 16, "kv_heads": 8, "inner": 7168}


def run(**options):
    made = TrainingRun(SMALL, **{"n_gpus": 32, "seq_len": 4096, "batch": 1, **options})
    return made._replace(batch=3 * made.data * made.micro_batch)


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.15", reason="older pipelines hold 1 to 2 % more than is predicted")
def test_two_short_steps_say_how_long_a_long_one_takes():
    setting = {"layers": 4, "width": 2048, "heads": 16, "seq_len": 4096, "batch_tokens": 2**16, "n_gpus": 8}
    setting |= {"gpu": "H100", "network": "EFA", "tensor": 2, "pipeline": 2, "zero": 1, "micro_batch": 1}
    found = planner_validation.record(setting | {"recompute": False})
    whole = planning.run_of(**setting)
    assert whole.micro_batches == 8
    assert (found["seconds"], found["bytes"]) == pytest.approx(planner_validation.dry_run(whole, 8), rel=2e-3)


def test_a_model_has_the_parameters_and_flops_of_the_network():
    with mgpu.virtual_gpus(1, backing="meta"):
        net = mgpu.Transformer(**SMALL)
        assert plan_formulas.parameters(SMALL) == sum(p.numel() for p in net.parameters())
    found = run(zero=3, tensor=2, n_gpus=8)
    program = planner_validation.planned_runs.program(found, found.micro_batches, {})
    assert plan(found).flops / 8 == pytest.approx(mgpu.dry_run(program, 8).flops, rel=1e-6)


def test_a_layer_has_the_parameters_that_chapter_14_counts_on():
    """5 sums of 4 · width bytes against 8 FLOPs for each of 12.5 · width² parameters."""
    sizes = mgpu.LLAMA["70B"]
    layer = plan_formulas.parameters(sizes) - plan_formulas.parameters(sizes | {"layers": sizes["layers"] - 1})
    assert layer == pytest.approx(12.5 * sizes["width"] ** 2, rel=0.03)


def test_a_plan_leaves_the_room_that_real_runs_have_needed_and_says_so():
    errors = mgpu.recorded.study("run_validation")["summary"]["memory"]["both"]["all"]
    assert 1 + errors["typically"] == pytest.approx(plan_formulas.ROOM, abs=0.03)
    words = {"": True, ", with little room": False, ", too much": False}
    for (word, fits), recompute, n_gpus in zip(words.items(), (True, False, False), (512, 512, 64), strict=True):
        made = plan(planning.run_of(80, 8192, 64, 2**23, 8192, n_gpus=n_gpus, tensor=8, zero=1, recompute=recompute))
        assert made.fits == fits and f" of 79.1 GiB on a GPU{word}, " in repr(made)
        assert made.fits == (made.held <= plan_formulas.ROOM * made.capacity)
        assert repr(made).endswith("% MFU (modelled)>")
        assert made.tokens_per_second == pytest.approx(2**23 / n_gpus / made.step)
        assert tuple(made.memory) == plan_formulas.PARTS_OF_MEMORY
        assert tuple(made.seconds) == plan_formulas.PARTS_OF_STEP


def test_the_best_plan_is_the_fastest_that_fits():
    asked = TrainingRun(mgpu.LLAMA["8B"], n_gpus=64, batch=512, seq_len=4096)
    tried = [plan(other) for other in planning.splits(asked)]
    found = best_plan(asked)
    assert found.fits and not all(made.fits for made in tried)
    assert found.step == min(made.step for made in tried if made.fits)
    assert best_plan(asked._replace(sizes=SMALL | {"layers": 128, "width": 16_384, "heads": 128}, n_gpus=8)) is None


@pytest.mark.parametrize(
    "split, words",
    [
        ({"tensor": 3}, "tensor=3 × pipeline=1 does not divide n_gpus=32"),
        ({"tensor": 32}, "tensor=32: 16 heads"),
        ({"pipeline": 8}, "pipeline=8: 4 layers"),
        ({"n_gpus": 12}, "n_gpus=12: 1, 2, 4, or whole machines of 8"),
        ({"zero": 3, "pipeline": 2}, "zero=3 with pipeline=2"),
        ({"zero": 4}, "zero=4: use one of 0, 1, 2, 3"),
        ({"gpu": "T4"}, "gpu='T4': use one of A100-80, H100, H200"),
        ({"network": "string"}, "network='string': use one of InfiniBand HDR"),
        ({"micro_batch": 0}, "micro_batch"),
        ({"batch": 100}, "batch=100: not a multiple of 32 × 1"),
        (
            {"sizes": SMALL | {"heads": 4, "kv_heads": 4}},
            "heads=4: PyTorch's fast attention takes heads of 256 numbers at most",
        ),
    ],
    ids=str,
)
def test_a_split_that_there_can_not_be_is_named(split, words):
    with pytest.raises((ValueError, TypeError), match=words):
        plan(TrainingRun(**{"sizes": SMALL, "n_gpus": 32, "batch": 96, "seq_len": 4096, **split}))


def test_a_recorded_plan_is_found_by_its_options_and_the_nearest_is_named():
    found = planning.recorded_plan("70B", 256, rows=4)
    assert (found["model"], found["n_gpus"], found["rows"]) == ("70B", 256, 4) and found["seconds"] > 0
    assert sum(found["memory"].values()) == pytest.approx(found["gib"], rel=0.01)
    assert planning.recorded_plan("70B", 16)["seconds"] is None
    with pytest.raises(KeyError, match=r"the nearest is .*'rows': 4"):
        planning.recorded_plan("70B", 256, rows=4, micro_batches=7)
