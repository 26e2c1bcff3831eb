"""The checks for anybody's program: each passes what is right, and says what is wrong, on CPUs and virtual GPUs."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn

from virtual_gpus import checks, virtual_gpus


@pytest.fixture
def devices():
    with virtual_gpus(3) as machine:
        yield list(machine.devices)


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def make_replicas(devices, kind):
    """Three equal replicas: modules, dicts, or lists of tensors."""
    nets = [copy.deepcopy(make_net()).to(device) for device in devices]
    return {
        "modules": nets,
        "lists": [list(net.parameters()) for net in nets],
        "state dicts": [net.state_dict() for net in nets],  # with counters, which are whole numbers
    }[kind]


kinds = pytest.mark.parametrize("kind", ["modules", "lists", "state dicts"])


@kinds
def test_equal_replicas_pass_and_one_other_number_does_not(devices, kind):
    for places in (devices, 3 * ["cpu"]):
        replicas = make_replicas(places, kind)
        checks.assert_replicas_equal(replicas)
        with torch.no_grad():
            list(checks.tensors(replicas[2]).values())[1][0] += 0.25
        name = "parameter 1" if kind == "lists" else "0.bias"
        with pytest.raises(AssertionError, match=rf"replica 2 .* 1 of \d tensors.*'{name}', by up to 0.25"):
            checks.assert_replicas_equal(replicas)
        checks.assert_replicas_equal(replicas, atol=0.26)


@pytest.mark.parametrize(
    "replicas, message",
    [
        ([[0, 1], [0, math.nan]], "replica 1 holds NaN in 'parameter 0'"),
        ([[0, math.nan], [0, math.nan]], "replica 0 holds NaN in 'parameter 0'"),
        ([[0, -math.inf], [0, 0]], "replica 1 differs .* by up to inf"),
        ([[0, 0], [0, 0, 0]], r"replica 1 and replica 0 .* 'parameter 0' is \(3,\) and \(2,\)"),
        ([[0, 0], None], r"names or shapes .* 'parameter 0' is missing and \(2,\)"),
    ],
)
def test_nan_infinity_and_other_shapes_differ(devices, replicas, message):
    replicas = [[] if numbers is None else [torch.tensor(numbers, device=devices[0]).float()] for numbers in replicas]
    with pytest.raises(AssertionError, match=message):
        checks.assert_replicas_equal(replicas, atol=1.0)
    checks.assert_replicas_equal([[torch.tensor([math.inf])]] * 2)  # equal to itself


def of_what_is_gone(check):
    """A check of net.parameters() that an optimizer has read before."""
    read = [make_net().parameters() for _ in range(2)]
    for parameters in read:
        torch.optim.SGD(parameters, 0.1)
    check(read)


READ = r"none of the 2 replicas has a tensor .* list\(net.parameters\(\)\)"
OF_REPLICAS = checks.assert_replicas_equal, checks.assert_buffers_equal, checks.assert_no_aliasing
OF_DRAWS = checks.assert_draws_agree, checks.assert_draws_differ
ONE, SAME = [torch.zeros(2)], [[torch.ones(2)]] * 3


@pytest.mark.parametrize(
    ("call", "words"),
    [
        *((partial(check, [ONE]), r"^1 \w+: pass two or more") for check in (*OF_REPLICAS, *OF_DRAWS)),
        (partial(checks.assert_replicas_equal, []), "^0 replicas: pass two or more"),
        *((partial(of_what_is_gone, check), READ) for check in OF_REPLICAS),
        (partial(checks.assert_buffers_equal, [nn.Linear(1, 1)] * 2), "none of the 2 replicas has a tensor"),
        (partial(checks.assert_gradients_fresh, []), "^0 replicas: pass one or more"),
        (partial(checks.assert_step_matches_single_device, [], [], []), "none of the 0 tensors in `before`"),
        (partial(checks.assert_step_matches_single_device, *SAME), "was `before` copied before the step"),
        (partial(checks.assert_draws_agree, [[], []]), "no GPU drew anything"),
        (partial(checks.assert_every_row_once, [], 0), "total is 0"),
        (partial(checks.assert_mean_over_rows, 0.5, [ONE]), "1 part: pass two or more"),
        (partial(checks.assert_mean_over_rows, 0.5, [[], []]), "none of the 2 parts has a row"),
        (partial(checks.assert_every_gpu_works, lambda: None, iter([])), r"devices are \[\]"),
        (partial(checks.assert_every_gpu_works, lambda: None, [torch.device("cpu")]), "pass GPUs, real or virtual"),
    ],
)
def test_what_holds_nothing_is_not_called_right(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_generator_is_read_once():
    net = make_net()
    net[0].weight.grad = torch.ones(4, 3)
    with pytest.raises(AssertionError, match="'parameter 0' of replica 0 still has a gradient"):
        checks.assert_gradients_fresh([net.parameters()])
    checks.assert_step_matches_single_device(*[module.parameters() for module in (net, moved(net, 1), moved(net, 1))])
    with virtual_gpus(2) as machine, pytest.raises(AssertionError, match="cuda:0, cuda:1 did nothing"):
        checks.assert_every_gpu_works(lambda: None, iter(machine.devices))


@pytest.mark.parametrize(
    "ours, others, gap",
    [
        (torch.tensor(1 + 1j), torch.tensor(1 + 9j), "8"),
        (torch.tensor(1 + 1j), torch.tensor(1 + 1j).conj(), "2"),
        (torch.tensor(complex(0, math.inf)), torch.tensor(1j), "inf"),
        (torch.tensor(2**60), torch.tensor(2**60 + 1), "1"),  # float64 holds both as one number
        (torch.tensor(0, dtype=torch.uint8), torch.tensor(255, dtype=torch.uint8), r"2.6e\+02"),
        (torch.tensor(True), torch.tensor(False), "1"),
    ],
)
def test_numbers_of_every_type_are_compared_in_full(ours, others, gap):
    with pytest.raises(AssertionError, match=f"by up to {gap}"):
        checks.assert_replicas_equal([[ours], [others]])
    checks.assert_replicas_equal([[ours], [ours.clone()]])


def test_a_complex_tensor_is_no_real_one_and_takes_steps_of_its_own():
    zero, real = torch.zeros(3, dtype=torch.complex64), torch.zeros(2)
    with pytest.raises(AssertionError, match=r"'parameter 0' is \(3,\) and \(3,\) complex"):
        checks.assert_replicas_equal([[zero], [zero.real]])
    for before in [zero], [zero, real]:
        after, expected = [p + 1 for p in before], [zero + 1 + 5j, real + 1][: len(before)]
        checks.assert_step_matches_single_device(before, expected, expected)
        with pytest.raises(AssertionError, match=r"0\.2[05] times as long"):
            checks.assert_step_matches_single_device(before, after, expected)


def test_buffers_are_looked_at_by_their_own_check(devices):
    replicas = make_replicas(devices, "modules")
    checks.assert_buffers_equal(replicas)
    replicas[1][1].running_mean += 1
    checks.assert_replicas_equal(replicas)
    with pytest.raises(AssertionError, match=r"replica 1 .* 1 of 3 .*'1.running_mean', by up to 1"):
        checks.assert_buffers_equal(replicas)
    with pytest.raises(AssertionError, match=r"replica 1 .* 1 of 9 .*'1.running_mean', by up to 1"):
        checks.assert_buffers_equal([net.state_dict() for net in replicas])


def test_aliases_are_found(devices):
    replicas = make_replicas(devices, "modules")
    checks.assert_no_aliasing(replicas)
    with pytest.raises(AssertionError, match=r"of replica 3 is the same memory as .* of replica 0"):
        checks.assert_no_aliasing([*replicas, replicas[0]])
    with virtual_gpus(1, backing="meta"):  # where no tensor has an address
        one, other = [torch.zeros(2, device="cuda")], [torch.zeros(2, device="cuda")]
        checks.assert_no_aliasing([one, other])
        with pytest.raises(AssertionError, match=r"of replica 2 is the same memory as .* of replica 0"):
            checks.assert_no_aliasing([one, other, one])


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_views_that_overlap_are_aliases_and_tied_weights_are_none(devices, device):
    whole = torch.zeros(4, device=device)
    with pytest.raises(AssertionError, match="'parameter 1' of replica 1"):
        checks.assert_no_aliasing([[whole[:3]], [torch.zeros(2), whole[2:]]])
    with pytest.raises(AssertionError, match="'parameter 0' of replica 1"):
        checks.assert_no_aliasing([[whole.view(2, 2)[:, 1]], [whole[3:]]])
    checks.assert_no_aliasing([[whole[:2]], [torch.zeros(2), whole[2:]]])  # parts of one buffer
    checks.assert_no_aliasing([[whole[:2]], [whole[:0]]])
    checks.assert_no_aliasing([[whole, whole], [torch.zeros(4)]])
    checks.assert_no_aliasing([[torch.zeros(0)], [torch.zeros(0)]])


def test_stale_gradients_are_found(devices):
    replicas = make_replicas(devices, "modules")
    with pytest.raises(ValueError, match="no tensor of replica 0 takes a gradient"):
        checks.assert_gradients_fresh([net.state_dict() for net in replicas])
    checks.assert_gradients_fresh(replicas)
    for p in [p for net in replicas for p in net.parameters()]:
        p.grad = torch.zeros_like(p)
    checks.assert_gradients_fresh(replicas)
    replicas[1][0].weight.grad[0, 0] = math.nan
    with pytest.raises(AssertionError, match="of replica 1 still has a gradient"):
        checks.assert_gradients_fresh(replicas)


def moved(net, factor, noise=0.0):
    """`net` after a step of a given length; the direction is always the same, but for the noise."""
    generator = torch.Generator().manual_seed(0)
    net = copy.deepcopy(net)
    with torch.no_grad():
        for p in net.parameters():
            p += factor * torch.randn(p.shape, generator=generator).to(p)
        for p in net.parameters():
            p += noise * torch.randn(p.shape, generator=generator).to(p)
    return net


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_is_compared_with_a_single_device_s(devices, dtype):
    before = make_net().to(dtype)
    expected, net = moved(before, 1e-3), copy.deepcopy(before).to(devices[1])
    compare = checks.assert_step_matches_single_device
    compare(before, moved(net, 1e-3), expected)
    compare(before, list(moved(net, 1.00005e-3).parameters()), expected)  # a ten-thousandth is rounding
    for after, message in [
        (moved(net, 1.0005e-3), "by 0.0005 of its length"),
        (moved(net, 2e-3), r"2.00 times as long, and the cosine .* is 1.00.* divided by"),
        (moved(net, 5e-4), "0.50 times as long"),
        (moved(net, 1e-3, noise=1e-3), "gradients of all GPUs in it"),
        (net, "0.00 times as long"),
        (moved(net, math.nan), "`after` holds NaN in '0.weight'"),
        ([torch.zeros(3)], r"`after` and `before` .* 'parameter 0' is \(3,\) and \(4, 3\)"),
    ]:
        with pytest.raises(AssertionError, match=message):
            compare(before, after, expected)
    with pytest.raises(AssertionError, match=r"`expected` holds NaN in '0.weight'"):
        compare(before, expected, moved(net, math.nan))


def test_rounding_of_the_parameters_is_no_wrong_step_and_no_step_is_no_longer():
    """Parameters near 1 and a step of 1e-5 leave float32 two or three digits of the step."""
    torch.manual_seed(0)
    before, step = torch.rand(1000) + 1, torch.randn(1000) * 1e-5
    checks.assert_step_matches_single_device([before], [before + step], [before + (step + 1e-9)])
    with pytest.raises(AssertionError):
        checks.assert_step_matches_single_device([before], [before + step], [before + 2 * step])
    half = before.bfloat16()
    with pytest.raises(ValueError, match=r"`before` to `expected` is 0.3\d long, .* Compare in 64 bits"):
        checks.assert_step_matches_single_device([half], [half], [(before - 0.01).bfloat16()])


@pytest.mark.parametrize("roundings", [0, 1.1, 1.5, 3, 9, 12])
def test_half_a_step_is_refused_or_caught_never_passed(roundings):
    """Where a step was once or twice as long as the rounding, half of it passed; where three times, 0.8 of it."""
    before, step = torch.ones(1000), roundings * 4 * torch.finfo(torch.float32).eps
    for part in 0, 0.5, 0.8, 0.9, 1.5, 2:
        with pytest.raises((AssertionError, ValueError)):
            checks.assert_step_matches_single_device([before], [before + part * step], [before + step])


def test_counters_are_no_part_of_a_step():
    """Two batches counted are a longer step than any at a small rate: all of those passed."""
    net = make_net().double()
    before, half, expected = (dict(moved(net, length).state_dict()) for length in (0, 5e-6, 1e-5))
    for state in half, expected:
        state["1.num_batches_tracked"] = torch.tensor(2)
    with pytest.raises(AssertionError, match=r"0\.50 times as long.* is an old gradient in it"):
        checks.assert_step_matches_single_device(before, half, expected)
    counter = [torch.tensor(2)]
    with pytest.raises(ValueError, match="none of the 1 tensors in `before` holds numbers that a step could change"):
        checks.assert_step_matches_single_device(counter, counter, counter)


@pytest.mark.parametrize(
    "rows, message",
    [
        ([[0, 2, 4], [1, 3]], None),
        ([torch.tensor([0, 1, 2]), range(3, 5)], None),
        ([[0, 2], [1, 3]], "of 5 rows 1 were never used (4), and 0 more than once."),
        ([[0, 1, 2], [3, 4, 0]], "of 5 rows 0 were never used, and 1 more than once (0)."),
        ([[0, 0], [0]], "of 5 rows 4 were never used (1, 2, 3 …), and 1 more than once (0)."),
        ([[0, 1, 2, 3, 4, 5]], "there is no row (5) among the 5"),
    ],
)
def test_rows_are_counted(rows, message):
    if message is None:
        checks.assert_every_row_once(rows, 5)
    else:
        with pytest.raises(AssertionError) as error:
            checks.assert_every_row_once(rows, 5)
        assert str(error.value).startswith(message)


def test_draws_agree_or_differ(devices):
    draws = [torch.rand(4, generator=torch.Generator().manual_seed(i)).to(device) for i, device in enumerate(devices)]
    checks.assert_draws_differ(draws)
    checks.assert_draws_differ([[2, 0, 1], [2, 1, 0], (2, 1)])
    with pytest.raises(AssertionError, match=r"draw 3 is the same as draw 1\. .*set_epoch"):
        checks.assert_draws_differ([*draws, draws[1].clone()])
    checks.assert_draws_agree([draws[0], draws[0].cpu(), draws[0].tolist()])
    with pytest.raises(AssertionError, match="GPU 2 drew different"):
        checks.assert_draws_agree([draws[0], draws[0], draws[0] + 1e-7])


def test_the_mean_is_that_over_all_rows(devices):
    parts = [torch.tensor(values, device=device) for values, device in zip([[1.0, 1.0], [0.0], []], devices)]
    checks.assert_mean_over_rows(2 / 3, parts)
    checks.assert_mean_over_rows(torch.tensor(2 / 3, device=devices[0]), [part > 0.5 for part in parts])  # right or not
    for wrong in (1 / 2, 0.667, math.nan):  # the first is the mean of the means
        with pytest.raises(AssertionError, match=r"but the mean over all 3 rows is 0.666667. The GPUs have 2, 1, 0 "):
            checks.assert_mean_over_rows(wrong, parts)
    with pytest.raises(AssertionError, match="rows is nan"):
        checks.assert_mean_over_rows(0.5, [*parts, [math.nan]])
    with pytest.raises(AssertionError, match=r"0\.001 was reported, but the mean over all 2 rows is 0"):
        checks.assert_mean_over_rows(0.001, [[0.0], [0.0]])
    with pytest.raises(AssertionError, match=r"but the mean over all 2 rows is 1\+1j"):
        checks.assert_mean_over_rows(1.0, [[1 + 1j], [1 + 1j]])


def test_a_gpu_that_does_nothing_is_found():
    with virtual_gpus(3) as machine:
        net = make_net().to("cuda:0")
        X = torch.ones(6, 3, device="cuda:0")
        parallel = nn.DataParallel(net, machine.devices)
        checks.assert_every_gpu_works(lambda: parallel(X), machine.devices)
        with pytest.raises(AssertionError, match="cuda:1, cuda:2 did nothing"):
            checks.assert_every_gpu_works(lambda: net(X), machine.devices)


def test_a_module_is_no_tensor():
    with pytest.raises(TypeError, match=r"a Sequential is a module, .* pass dict\(net.named_parameters\(\)\)"):
        checks.on_cpu([make_net()])
