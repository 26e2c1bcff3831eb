"""How the museum examines a program for several GPUs: it trains, and the checks look at two steps of it."""

from functools import partial, wraps

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from mgpu_lib.data import load_digits
from mgpu_lib.models import lenet, lenet_params
from mgpu_lib.parallel import get_params, max_divergence
from mgpu_lib.text import load_alice
from mgpu_lib.training import evaluate
from virtual_gpus import checks

TINY = 1e-4  # the learning rate of the two steps: a wrong first one hardly changes the second gradient


class Museum:
    """A museum on `devices`. Programs train LeNet for `epochs` epochs on a thousand handwritten digits, in 64 bits.

    start    the parameters that all replicas start from, a list of tensors on the CPU; `seed` chooses them
    catalog  what has been shown, {name: (accuracy, what the meter says, {check: its message})}
    A step is called as step(X, y, replicas, devices, lr), and trains the replicas in place.
    """

    def __init__(self, devices, epochs=2, seed=0):
        _, X_train, y_train, X_test, self.y_test = load_digits()
        self.X_train, self.y_train = X_train[:1000].double(), y_train[:1000]
        self.X_test = X_test.double()
        self.devices, self.epochs, self.seed = devices, epochs, seed
        self.start = [p.double() for p in lenet_params(seed)]
        self.two_batches = [(self.X_train[:20], self.y_train[:20]), (self.X_train[20:27], self.y_train[20:27])]
        self.catalog = {}

    def shuffled(self, epoch, rows=1000):
        """The row numbers of each batch of an epoch, the same for every program."""
        generator = torch.Generator().manual_seed(99 * self.seed + epoch)
        return torch.randperm(rows, generator=generator).split(20)

    def run_epochs(self, step, replicas, devices=None, lr=0.1, order=None):
        """Train `replicas` with `step`; order(epoch) gives the row numbers of each batch."""
        for epoch in range(self.epochs):
            for rows in (order or self.shuffled)(epoch):
                step(self.X_train[rows], self.y_train[rows], replicas, devices or self.devices, lr)

    def trained(self, step, lr=0.1, order=None):
        """Replicas, one for each device, that `step` has trained."""
        replicas = [get_params(self.start, device) for device in self.devices]
        self.run_epochs(step, replicas, lr=lr, order=order)
        return replicas

    def accuracy(self, net, device=None):
        """The share of the test images that `net` is right about: a replica, or a function of images on `device`."""
        net = partial(lenet, params=net) if isinstance(net, list) else net
        return evaluate(net, self.X_test, self.y_test, device or self.devices[0])

    def exhibit(self, name, step, replicate=get_params, devices=None, lr=0.1, clip=None):
        """Examine a step: whole epochs for its accuracy and the meter, and two steps for the checks.

        If the step is meant to clip the batch's mean gradient to a length, `clip` is this length.
        """
        devices = devices or self.devices
        source = [p.clone() for p in self.start]
        replicas = [replicate(source, device) for device in devices]
        self.run_epochs(step, replicas, devices, lr)
        questions = self.questions(step, replicate, devices, clip)
        self.show(name, self.accuracy(replicas[0], devices[0]), max_divergence(replicas), *questions)

    def questions(self, step, replicate=get_params, devices=None, clip=None):
        """Take two steps; the checks to make afterwards, each with what it takes."""
        devices = devices or self.devices
        source = [p.clone() for p in self.start]
        stepped = [replicate(source, device) for device in devices]
        for X, y in self.two_batches:
            step(X, y, stepped, devices, TINY)
        return [
            (checks.assert_no_aliasing, stepped),
            (checks.assert_replicas_equal, stepped),
            (checks.assert_gradients_fresh, stepped),
            (every_step_matches, self.start, stepped, one_device(self.start, self.two_batches, mean_loss, clip=clip)),
        ]

    def exhibit_tokens(self, name, step, loss, lr=20.0):
        """Examine a step on paragraphs of a text; loss(X, y, params) is a single device's, over all of a batch.

        X and y are (rows, characters), with -100 in y where a row has none; `params` is [W], of (65, 65). The accuracy
        is the share of characters that the last hundred paragraphs go on with as the model expects.
        """
        texts, start = paragraphs(), [torch.zeros(65, 65, dtype=torch.float64)]
        replicas, stepped = ([get_params(start, device) for device in self.devices] for _ in range(2))
        for epoch in range(self.epochs):
            for rows in self.shuffled(epoch, len(texts) - 100):
                step(*batch_of([texts[row] for row in rows]), replicas, self.devices, lr)
        two_batches = [batch_of(texts[:20]), batch_of(texts[20:27])]
        for X, y in two_batches:
            step(X, y, stepped, self.devices, TINY)
        expected = one_device(start, two_batches, loss)
        X, y = batch_of(texts[-100:])
        right = replicas[0][0].detach().cpu()[X].argmax(dim=2)[y >= 0] == y[y >= 0]
        question = every_step_matches, start, stepped, expected
        self.show(name, right.double().mean().item(), max_divergence(replicas), question)

    def show(self, name, accuracy, divergence, *questions):
        """Put a program into the catalog, and print what people look at. Each question is (check, argument, ...)."""
        meter = "none" if divergence is None else f"{divergence:.2g}"
        self.catalog[name] = accuracy, meter, objections(questions)
        print(f"accuracy {accuracy:.2f}, meter {meter}")

    def caught(self, name):
        """What the checks say of a program, folded, for a notebook to display."""
        from IPython.display import Markdown

        said = [f"- `{check}`: {message}" for check, message in self.catalog[name][2].items()]
        if not said:
            return Markdown("No check objects.")
        return Markdown("\n".join(["<details><summary>What the checks say</summary>\n", *said, "\n</details>"]))


def objections(questions):
    """{check: its message}, of the checks that object. Each question is (check, argument, ...)."""
    found = {}
    for check, *arguments in questions:
        try:
            check(*arguments)
        except AssertionError as error:
            found[check.__name__] = str(error)
    return found


@wraps(checks.assert_step_matches_single_device)
def every_step_matches(before, replicas, expected):
    """Asks of each replica; what is said of all is said once."""
    said = {}
    for number, replica in enumerate(replicas):
        found = objections([(checks.assert_step_matches_single_device, before, replica, expected)])
        if found:
            [said[number]] = found.values()
    if len(said) == len(replicas) and len(set(said.values())) == 1:
        raise AssertionError(said[0])
    if said:
        parts = {number: message.partition(". ") for number, message in said.items()}
        each = [f"Replica {number}: {gap.rstrip('.')}." for number, (gap, _, _) in parts.items()]
        raise AssertionError(" ".join([*each, *dict.fromkeys(advice for *_, advice in parts.values())]))


def mean_loss(X, y, params):
    return F.cross_entropy(lenet(X, params), y)


def one_device(start, batches, loss, lr=TINY, clip=None):
    """The parameters after a step of plain PyTorch for each batch, with gradients clipped to a length or not."""
    params = get_params(start, "cpu")
    optimizer = torch.optim.SGD(params, lr)
    for X, y in batches:
        optimizer.zero_grad()
        loss(X, y, params).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()
    return params


def paragraphs():
    """The first five hundred paragraphs of "Alice's Adventures in Wonderland", each as its characters' numbers."""
    alice = load_alice()
    texts = alice.decode(alice.tokens).split("\n\n")[:500]
    return [torch.tensor([alice.characters.index(character) for character in text]) for text in texts]


def batch_of(texts):
    """(X, y) for predicting each next character: rows as long as the longest text, and -100 in y behind the others."""
    X = pad_sequence([text[:-1] for text in texts], batch_first=True)
    return X, pad_sequence([text[1:] for text in texts], batch_first=True, padding_value=-100)
