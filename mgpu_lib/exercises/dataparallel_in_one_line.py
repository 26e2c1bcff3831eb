"""Checks for "DataParallel in one line": prefixes of checkpoints, schedulers, and what is inside the wrapper."""

import torch
from torch import nn

from mgpu_lib.exercises.framework import exercise, expect, filled


@exercise
def check_strip_prefix(answer):
    """strip_prefix(state): a new dict whose names have lost one leading 'module.'."""
    for names, right, wrong in [
        (["module.conv1.weight", "module.conv1.bias"], ["conv1.weight", "conv1.bias"], ""),
        (
            ["module.layer.w"],
            ["layer.w"],
            "lstrip removes letters (m, o, d, u, l, e and the dot), not the word; there is removeprefix",
        ),
        (["module.submodule.w"], ["submodule.w"], "only the one at the front goes, nothing inside a name"),
        (["module.module.w"], ["module.w"], "only one goes: a network may have a part called module"),
        (
            ["conv1.weight", "submodule.w"],
            ["conv1.weight", "submodule.w"],
            "no name begins with 'module.', so none may change",
        ),
    ]:
        state = {name: torch.zeros(1) for name in names}
        given = dict(state)
        stripped = answer(state)
        expect(state.keys() == given.keys(), "the caller's dict was changed: return a new one, and leave `state` alone")
        stripped = filled(stripped)
        expect(stripped is not state or right == names, "return a new dict, and leave `state` alone")
        expect(list(stripped) == right, f"{names} became {list(stripped)}, expected {right}. {wrong}")
        expect(
            all(new is old for new, old in zip(stripped.values(), given.values())),
            "the values must be the same tensors: no clone, no detach",
        )
    for names in (["module.w", "b"], ["b", "module.w"]):
        try:
            mixed = answer({name: torch.zeros(1) for name in names})
        except ValueError:
            continue
        expect(
            False,
            f"{names} became {list(mixed)}. Some names begin with 'module.' and some don't: whatever file "
            "that is, raise a ValueError",
        )
    return "every name at its front, nothing else, and mixed files are refused"


@exercise
def check_halve_every(answer):
    """halve_every(optimizer, epochs): a scheduler that halves every learning rate after each `epochs` epochs."""
    for epochs in (2, 3):
        optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": lr} for lr in (0.8, 0.08)])
        scheduler = filled(answer(optimizer, epochs))
        expect(
            hasattr(scheduler, "step") and scheduler is not optimizer,
            f"a scheduler is asked for, and {type(scheduler).__name__} came",
        )
        rates = []
        for _ in range(7):
            rates.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            scheduler.step()
        right = [[first * 0.5 ** (epoch // epochs) for first in (0.8, 0.08)] for epoch in range(7)]
        if not torch.allclose(torch.tensor(rates), torch.tensor(right)):
            expect(False, slip([rate for rate, _ in rates], [rate for rate, _ in right], epochs))
    return "0.8, 0.8, 0.4, 0.4, 0.2"


def slip(rates, right, epochs):
    """What is wrong with these learning rates of the first group."""
    seen = (
        f"with epochs={epochs} the rates are {', '.join(f'{rate:.3g}' for rate in rates[:5])}, expected "
        f"{', '.join(f'{rate:.3g}' for rate in right[:5])}"
    )
    if torch.allclose(torch.tensor(rates), torch.tensor(right)):
        return "the second parameter group isn't halved"
    if abs(rates[1] - 0.4) < 1e-9:
        return f"{seen}: it halves after every epoch. Where does `epochs` come in?"
    if abs(rates[epochs] - 0.08) < 1e-9:
        return f"{seen}: it falls to a tenth, which is the default of gamma"
    if rates[epochs] > 0.8:
        return f"{seen}: it grows. The rate is multiplied by gamma"
    return seen


@exercise
def check_unwrap(answer):
    """unwrap(net): the network inside nn.DataParallel, or `net` itself."""
    plain = nn.Linear(2, 2)
    wrapped = nn.DataParallel(plain)
    namesake = nn.Sequential()
    namesake.module = nn.Linear(2, 2)
    expect(filled(answer(wrapped)) is not wrapped, "the wrapper came back: the network inside is net.module")
    expect(type(answer(wrapped)) is nn.Linear, "a wrapped network must give what is inside")
    expect(
        answer(wrapped) is plain,
        "return the network itself, no copy: an optimizer that holds its parameters would lose them",
    )
    try:
        itself = answer(plain)
    except AttributeError:
        expect(False, "a network that isn't wrapped has no .module: return it as it is")
    expect(itself is plain, "a network that isn't wrapped must come back as it is")
    expect(
        answer(namesake) is namesake,
        "this network isn't wrapped, it only has a part called module: ask for the "
        "type, isinstance(net, nn.DataParallel)",
    )
    return "the same object, wrapped or not"
