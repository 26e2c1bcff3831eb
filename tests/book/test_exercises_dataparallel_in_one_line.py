"""The checks of "DataParallel in one line": typical wrong answers are explained, other right ones taken."""

from answers import (  # noqa: F401
    test_a_wrong_answer_is_explained,
    test_every_exercise_of_the_page_has_wrong_answers,
    test_other_right_answers,
    variants,
)

SIGNATURES = {
    "strip_prefix": "state",
    "halve_every": "optimizer, epochs",
    "unwrap": "net",
}
STRIP = """
    wrapped = [name.startswith("module.") for name in state]
    if any(wrapped) and not all(wrapped):
        raise ValueError("mixed")
    return {name.removeprefix("module."): value for name, value in state.items()}"""
IN_PLACE = """
    for key in list(state):
        state[key.removeprefix("module.")] = state.pop(key)"""
RECURSIVE = """
    def strip(key):
        return strip(key[7:]) if key.startswith("module.") else key
    return {strip(key): value for key, value in state.items()}"""

WRONG = [
    *variants(
        "strip_prefix",
        STRIP,
        ("any(wrapped)", "wrapped[0]", "['b', 'module.w'] became"),
        ("any(wrapped) and ", "", "your code raises ValueError"),
        ("any(wrapped) and not all(wrapped)", "False", "a ValueError"),
        ('name.removeprefix("module.")', 'name.replace("module.", "")', "inside a name"),
        ('name.removeprefix("module.")', 'name.lstrip("module.")', "lstrip removes letters"),
        ('name.removeprefix("module.")', "name[7:]", "none may change"),
        ('name.removeprefix("module.")', 'name.split(".", 1)[1]', "none may change"),
        (": value for", ": value.clone() for", "no clone"),
    ),
    ("strip_prefix", IN_PLACE, "the caller's dict was changed"),
    ("strip_prefix", RECURSIVE, "only one goes"),
    ("halve_every", "return torch.optim.lr_scheduler.StepLR(optimizer, epochs)", "falls to a tenth"),
    ("halve_every", "return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)", "after every epoch"),
    ("halve_every", "return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)", "after every epoch"),
    ("halve_every", "return torch.optim.lr_scheduler.StepLR(optimizer, epochs, 2)", "it grows"),
    ("halve_every", "return optimizer", "a scheduler is asked for"),
    (
        "halve_every",
        """
        return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda e: 0.5 ** (e // epochs), lambda e: 1])""",
        "second parameter group",
    ),
    ("unwrap", "return net.module", "has no .module"),
    ("unwrap", 'return getattr(net, "module", net)', "only has a part called module"),
    ("unwrap", "return net.module if hasattr(net, 'module') else net", "only has a part called module"),
    ("unwrap", "return copy.deepcopy(net.module)", "no copy"),
    ("unwrap", "return net", "the wrapper came back"),
]
RIGHT = [
    ("strip_prefix", "from mgpu_lib.checkpoints import strip_prefix"),
    ("unwrap", "while type(net) is nn.DataParallel:\n    net = net.module\nreturn net"),
    ("halve_every", "return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5 ** (epoch // epochs))"),
]
