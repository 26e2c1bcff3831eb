"""The checks of "DataParallel in one line": typical wrong answers are explained, other right ones taken."""

from answers import (  # noqa: F401
    test_a_wrong_answer_is_explained,
    test_every_exercise_of_the_page_has_wrong_answers,
    test_other_right_answers,
)

SIGNATURES = {
    "strip_prefix": "state",
    "halve_every": "optimizer, epochs",
    "unwrap": "net",
}
WRONG = [
    (
        "strip_prefix",
        """
        if not next(iter(state)).startswith("module."):
            return dict(state)
        if not all(name.startswith("module.") for name in state):
            raise ValueError("mixed")
        return {name.removeprefix("module."): value for name, value in state.items()}""",
        "['b', 'module.w'] became",
    ),
    ("strip_prefix", 'return {key.replace("module.", ""): value for key, value in state.items()}', "inside a name"),
    ("strip_prefix", 'return {key.lstrip("module."): value for key, value in state.items()}', "lstrip removes letters"),
    ("strip_prefix", "return {key[7:]: value for key, value in state.items()}", "none may change"),
    ("strip_prefix", 'return {key.split(".", 1)[1]: value for key, value in state.items()}', "none may change"),
    (
        "strip_prefix",
        """
        for key in list(state):
            state[key.removeprefix("module.")] = state.pop(key)""",
        "the caller's dict was changed",
    ),
    ("strip_prefix", 'return {key.removeprefix("module."): value for key, value in state.items()}', "a ValueError"),
    (
        "strip_prefix",
        """
        if not all(key.startswith("module.") for key in state):
            raise ValueError("no prefix")
        return {key.removeprefix("module."): value for key, value in state.items()}""",
        "your code raises ValueError",
    ),
    (
        "strip_prefix",
        """
        def strip(key):
            return strip(key[7:]) if key.startswith("module.") else key
        return {strip(key): value for key, value in state.items()}""",
        "only one goes",
    ),
    ("strip_prefix", 'return {key.removeprefix("module."): value.clone() for key, value in state.items()}', "no clone"),
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
    (
        "strip_prefix",
        """
    from mgpu_lib.checkpoints import strip_prefix""",
    ),
    (
        "unwrap",
        """
    def unwrap(net):
        while type(net) is nn.DataParallel:
            net = net.module
        return net""",
    ),
    (
        "halve_every",
        """
    def halve_every(optimizer, epochs):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5 ** (epoch // epochs))""",
    ),
]
