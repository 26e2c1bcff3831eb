"""The napkin's formulas against dry runs and counted bytes. Chapter 14 prints them side by side."""

import pytest

import mgpu_lib as mgpu
from experiments import large_scaling
from mgpu_lib import plan_formulas, recorded, thresholds
from virtual_gpus import GPUS

RUNS = recorded.study("large_scaling")["runs"]
H100 = GPUS["H100"].bf16
NODE = {"InfiniBand NDR": 400e9, "RoCE 100": 100e9, "Ethernet 100": 12.5e9}  # bytes per second of a node's cards


def mfu(*plan, **options):
    run = RUNS[large_scaling.plan(*plan, **options)[0]]
    return run["flops"] / run["seconds"] / H100


def reached(best):
    """FLOP per second, with what is computed once more."""
    return 4 / 3 * best * H100


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("network", ["RoCE 100", "Ethernet 100"])
def test_sharding_below_the_threshold(rows, network):
    """What a fast network reaches says what a slow one will: within four points."""
    best = mfu("70B", 256, **({} if rows == 1 else {"rows": 4}))
    found = thresholds.sharded_mfu(best, 4096 * rows, thresholds.sharding_threshold(reached(best), NODE[network]))
    assert found == pytest.approx(mfu("70B", 256, network, **({} if rows == 1 else {"rows": 4})), abs=0.04)


def test_at_the_threshold_computing_and_sending_take_as_long():
    tokens = thresholds.sharding_threshold(5e14, 1e11)
    computing, sending = thresholds.sharded_step(70e9, tokens, 5e14, 1e11)
    assert computing == sending == 8 * 70e9 / 1e11
    assert thresholds.sharded_mfu(0.4, tokens / 2, tokens) == 0.2 and thresholds.sharded_mfu(0.4, 2e9, tokens) == 0.4


def test_a_copy_in_each_node_hides_behind_the_backward_pass_alone():
    assert thresholds.hybrid_mfu(0.4, 4000, 3000) == 0.4  # three quarters of the tokens: not yet
    assert thresholds.hybrid_mfu(0.4, 3000, 3000) == pytest.approx(0.4 * 8 / 10)
    best = mfu("8B", 256, rows=4)
    for network in ("RoCE 100", "Ethernet 100"):
        threshold = thresholds.sharding_threshold(reached(best), NODE[network])
        found = thresholds.hybrid_mfu(best, 4096, threshold)
        assert found == pytest.approx(mfu("8B", 256, network, rows=1, copies=32), abs=0.05)


@pytest.mark.parametrize("ranks, turned", [(2, False), (4, False), (8, False), (2, True), (8, True)])
def test_tensor_parallelism_by_its_limit(ranks, turned):
    best = mfu("70B", 256)
    limit = thresholds.tensor_limit(8192, reached(best), 50e9 if turned else 450e9)
    options = {"tensor": ranks, "rows": ranks} | ({"turned": True} if turned else {})
    assert thresholds.tensor_mfu(best, ranks, limit) == pytest.approx(mfu("70B", 256, **options), abs=0.035)
    assert thresholds.tensor_mfu(best, limit, limit) == pytest.approx(best / 2)


def test_a_layer_has_the_parameters_that_the_limit_counts_on():
    """5 sums of 4 · width bytes against 8 FLOPs for each of 12.5 · width² parameters."""
    sizes = mgpu.LLAMA["70B"]
    layer = plan_formulas.parameters(sizes) - plan_formulas.parameters(sizes | {"layers": sizes["layers"] - 1})
    assert layer == pytest.approx(12.5 * sizes["width"] ** 2, rel=0.03)


def test_pipelines_wait_for_each_other_and_not_for_bytes():
    assert thresholds.bubble(16, 16) == 15 / 16 and thresholds.bubble(16, 16, 8) == 15 / 128
    assert thresholds.bubble(1, 4) == 0
    stage = 405e9 / 16
    share = thresholds.message_share(16_384, stage, 5e14, 50e9)
    tokens = 8192
    assert share == pytest.approx(2 * (2 * 16_384 * tokens / 50e9) / (6 * stage * tokens / 5e14))
    assert share < 0.01


def test_long_sequences_and_experts():
    tokens = thresholds.ring_threshold(1 / 8, 5e14, 50e9)
    width = 8192
    assert 2 * tokens**2 * width / 5e14 == pytest.approx(4 * tokens * width / 8 / 50e9)
    inner = thresholds.expert_limit(5e14, 50e9)
    assert 8 * width / 50e9 == pytest.approx(18 * width * inner / 5e14)
