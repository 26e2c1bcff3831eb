"""What a dry run doesn't know, what it takes for granted, and what it is told."""

import json
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import Variable

from virtual_gpus import dry_run, virtual_gpus


def dry(function, n_gpus=2, **options):
    """The Prediction of a step in which function() is called."""

    def program():
        net = nn.Linear(4, 4).cuda()

        def step():
            net(torch.zeros(2, 4, device="cuda")).sum().backward()
            function()

        return step

    return dry_run(program, n_gpus, **options)


def drawn(*shape, dtype=torch.float32):
    """A tensor on the GPU of which nothing is known."""
    return torch.empty(shape, dtype=dtype, device="cuda").random_()


def in_a_tensor(write):
    """What print shows of a tensor on the CPU, and of its mean, after write(tensor, unknown number)."""
    tensor = torch.zeros(4)
    write(tensor, drawn().item())
    return f"{tensor} {tensor.mean():.3f} {tensor.tolist()[0]}"


PUT = "tensor(?, size=(4,)) ? ?"
SHOWN = {
    "a quotient in a text": (lambda u: f"{2 * u / 3:.3f} {round(u, 2)} {-u}", "? ? ?"),
    "a text of the old form": (lambda u: "loss %.3f" % u, "loss nan"),  # noqa: UP031
    "one of a number on the GPU": (lambda u: "loss %.3f" % drawn(), "loss nan"),  # noqa: UP031
    "a comparison": (lambda u: f"{u > 3} {u == u}", "? ?"),
    "a perplexity": (lambda u: f"{math.exp(u):.2f}", "?"),
    "JSON": (lambda u: json.dumps({"loss": u}), '{"loss": "?"}'),
    "a mean by NumPy": (lambda u: str(pytest.importorskip("numpy").mean([u, u])), "?"),
    "a sum": (lambda u: str(sum([u, 1.0])), "?"),
    "a list on the CPU": (lambda u: str(torch.tensor([u, 1.0])), "tensor(?, size=(2,))"),
    "one number of a tensor on the CPU": (lambda u: in_a_tensor(lambda x, u: x.__setitem__(0, u)), PUT),
    "one that is on the GPU": (lambda u: in_a_tensor(lambda x, u: x.__setitem__(0, drawn())), PUT),
    "a tensor that is multiplied": (lambda u: in_a_tensor(lambda x, u: x.mul_(u)), PUT),
    "a tensor that is filled through a view": (lambda u: in_a_tensor(lambda x, u: x[:2].fill_(u)), PUT),
    "a loss on the GPU": (lambda u: f"{drawn():.2f} {drawn(2).tolist()} {u}", "? [?, ?] ?"),
    "a copy from the GPU": (lambda u: in_a_tensor(lambda x, u: x.copy_(drawn(4))), PUT),
}


def test_an_unknown_number_may_be_reckoned_with_and_shown():
    said = {}
    dry(lambda: said.update({name: show(drawn().item()) for name, (show, _) in SHOWN.items()}))
    assert said == {name: expected for name, (_, expected) in SHOWN.items()}


USES = {
    "x[0] = u": lambda x, u: x.__setitem__(0, u),
    "x / u": lambda x, u: x / u,
    "u - x": lambda x, u: u - x,
    "x.mul_(u)": lambda x, u: x.mul_(u),
    "_foreach_mul_": lambda x, u: torch._foreach_mul_([x], u),
    "full": lambda x, u: torch.full((4,), u, device="cuda"),
    "tensor": lambda x, u: torch.tensor([u, 1.0], device="cuda"),
    "a tensor on the CPU": lambda x, u: x + torch.tensor(u),
    "there and back": lambda x, u: (x + u).cpu().cuda(),
}


def test_a_tensor_on_a_gpu_takes_an_unknown_number_and_has_a_gradient():
    found = {}

    def function():
        for name, use in USES.items():
            w = torch.ones(4, device="cuda", requires_grad=True)
            x = w * 1
            y = use(x, drawn().item())
            y = x if y is None or isinstance(y, (list, tuple)) else y
            found[name] = y.device.type, y.dtype, str(y.sum().item())
            if y.requires_grad:
                y.sum().backward()
                assert w.grad.shape == w.shape

    dry(function)
    assert found == dict.fromkeys(USES, ("cuda", torch.float32, "?"))


def test_what_is_unknown_in_a_whole_number_is_not_taken_for_known():
    seen = []
    dry(lambda: seen.extend((torch.tensor([1, 2], device="cuda") * drawn(dtype=torch.int64).item()).tolist()))
    assert {str(number) for number in seen} == {"?"}


def test_masks_positions_and_lengths_are_known_whatever_their_size():
    seen = {}

    def function():
        ones = torch.ones(64, 65_536, dtype=torch.int64, device="cuda")  # more than are tracked one by one
        loaded = torch.ones(3_000_000, dtype=torch.int64).cuda()
        positions = torch.arange(5000, device="cuda").repeat(2, 1)
        seen["ones"] = bool((ones == 1).all()), bool((loaded == 0).any())
        seen["starts"] = (positions == 0).nonzero().tolist()
        seen["tokens"] = positions[positions > 4997].tolist(), drawn(2, 5000)[positions > 4997].shape
        seen["count"] = f"{(positions != 3).sum().float().item() / 2:.1f}"
        ones[0, 0] = 0
        seen["changed"] = str(ones[0, 0].item())

    dry(function)
    assert seen == {
        "ones": (True, False),
        "starts": [[0, 0], [1, 0]],
        "tokens": ([4998, 4999, 4998, 4999], (4,)),
        "count": "4999.0",
        "changed": "?",  # only what all of so many numbers are is kept
    }


FINITE = [
    lambda loss: bool(torch.isnan(loss).any()),
    lambda loss: not torch.isfinite(loss).all(),
    lambda loss: bool((loss == float("inf")).any()),
    lambda loss: bool((loss != loss).any()),
    lambda loss: math.isnan(loss.sum().item()),
    lambda loss: bool(sum(torch.zeros(1, device="cuda") + torch.isinf(loss).any() for _ in range(3))),
]


def test_numbers_are_taken_for_finite_and_the_prediction_says_where():
    [words] = dry(lambda: any(test(drawn(2_000_000)) for test in FINITE) and pytest.fail("not finite")).assumed
    lines = [f"test_unknown.py, line {test.__code__.co_firstlineno}" for test in FINITE]
    assert words == f"no number is infinite or NaN: tested at {'; '.join(lines)}"


def test_without_a_dry_run_no_values_are_kept_that_nobody_follows():
    with virtual_gpus(1, backing="meta"):
        x = torch.tensor([1, 2]).cuda()
        x += 1
        with pytest.raises(RuntimeError, match="there are no values here"):
            x.cpu()


def test_what_the_program_decides_by_is_told():
    decisions = []

    def function():
        decisions.append("more" if drawn() > 3 else "less")

    line = function.__code__.co_firstlineno + 1
    for value, words in ((True, "more"), (False, "less")):
        decisions.clear()
        made = dry(function, assume={f"tests/test_unknown.py:{line}": value})
        assert set(decisions) == {words}
        assert made.assumed == [f"tests/test_unknown.py:{line} = {str(value).lower()}"]
    with pytest.raises(RuntimeError, match=f"--assume test_unknown.py:{line}=true"):
        dry(function, assume={f"other/test_unknown.py:{line}": True})
    with pytest.raises(ValueError, match="write it as 'train"):
        dry(function, assume={"test_unknown.py": True})


def test_truncated_normal_numbers_are_drawn_once():
    dry(lambda: nn.init.trunc_normal_(torch.empty(64, 64, device="cuda"), std=0.02))


def test_a_backward_pass_takes_as_long_when_the_engine_is_called_as_such():
    """As pipelines of Megatron-LM do."""

    def by_hand(loss):
        given = {"tensors": (loss,), "grad_tensors": (torch.ones_like(loss),), "inputs": (), "keep_graph": False}
        options = {"create_graph": False, "allow_unreachable": True, "accumulate_grad": True}
        Variable._execution_engine.run_backward(**given, **options)

    def program(backward):
        net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]).cuda()
        return lambda: backward(net(torch.zeros(2, 64, device="cuda")).sum())

    ways = by_hand, lambda loss: loss.backward(torch.ones_like(loss))
    seconds = [dry_run(partial(program, way), 2).seconds for way in ways]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.01)


@pytest.mark.filterwarnings("ignore:virtual GPUs don't compile")
def test_a_plan_says_that_nothing_was_compiled():
    [words] = dry(lambda: torch.compile(torch.relu)(drawn(4))).assumed
    assert words.startswith("torch.compile at test_unknown.py, line ") and "planned as eager code" in words
    assert dry(lambda: torch.compile(torch.relu, disable=True)(drawn(4))).assumed == []
