"""The all-reduce stepper: what each GPU holds, round by round, and what each link has carried."""

import re

import pytest
import torch
from figure_pages import drawn_boxes, picture, sentence
from traitlets import TraitError

from mgpu_lib.collectives import Send, bytes_per_link, execute, ring, star, tree
from mgpu_lib.widgets import AllReduceStepper
from virtual_gpus import virtual_gpus

MAKE = {"star": star, "ring": ring, "tree": tree}
ROUNDS = {"star": [2 * (k - 1) for k in range(9)], "ring": [2 * (k - 1) for k in range(9)]}
ROUNDS["tree"] = [0, 0, 2, 4, 4, 6, 6, 6, 6]
STATES = [(kind, k, step) for kind in MAKE for k in (2, 3, 5, 8) for step in range(ROUNDS[kind][k] + 1)]
FOLLOW = """(data, states) => states.map((state) => {
    const at = follow(data, ...state);
    return {...at, links: [...at.links.entries()], said: stepSentence(at)};
})"""


def stepper(kind="ring", num_gpus=4, step=0):
    return AllReduceStepper(kind=kind, num_gpus=num_gpus, step=step)


def radio(root, kind):
    return root.get_by_role("radio", name=re.compile(f"^{kind}:"))


def button(root, name):
    return root.get_by_role("button", name=name)


def test_bad_values_are_refused_and_say_what_would_do():
    for values, words in (({"num_gpus": 1}, "num_gpus.*2"), ({"step": -1}, "step")):
        with pytest.raises(TraitError, match=words):
            AllReduceStepper(**values)
    for nbytes in (0, -4, 8190, 4096, "1 MiB", 8192.0):
        with pytest.raises(ValueError, match=re.escape(f"nbytes={nbytes!r}: give a multiple of 4")):
            AllReduceStepper(nbytes)


@pytest.mark.slow
def test_the_page_holds_and_carries_what_a_machine_does_when_the_rounds_are_run(calls):
    """For every kind, number of GPUs and step, in chunks of unequal size."""
    figure, numbers = AllReduceStepper(4 * 2053), 2053
    for (kind, k, step), at in zip(STATES, calls(AllReduceStepper, FOLLOW, figure.data, STATES), strict=True):
        schedule = MAKE[kind](k)
        assert (at["now"], at["rounds"]) == (step, len(schedule)) == (step, ROUNDS[kind][k])
        with virtual_gpus(k) as machine:
            tensors = [torch.full((numbers,), 10.0**i, device=device) for i, device in enumerate(machine.devices)]
            before = machine.traffic.copy()
            execute(schedule[:step], tensors)
            counted = machine.traffic - before
            first = [[chunk[0].item() for chunk in tensor.cpu().tensor_split(k)] for tensor in tensors]
        links = {name: link["sofar"] for name, link in at["links"]}
        assert {name: n for name, n in links.items() if n} == {
            f"{source[5:]} → {target[5:]}": n for (source, target), n in counted.items()
        }
        whole = bytes_per_link(schedule, 4 * numbers, k)
        assert {name: link["whole"] for name, link in at["links"]} == {f"{i} → {j}": n for (i, j), n in whole.items()}
        holds = [row if kind == "ring" else row * k for row in at["holds"]]
        assert first == [[sum(10**i for i in range(k) if shares >> i & 1) for shares in row] for row in holds]
        assert [at["moved"], at["all"]] == [sum(links.values()), sum(whole.values())]
        assert at["busiest"] == max(links.values())
        assert step < len(schedule) or at["moved"] == at["all"] == 2 * (k - 1) * 4 * numbers


def test_sentence(says):
    assert says(stepper()) == (
        "Ring on 4 GPUs, before the first of 6 rounds: each GPU holds its own gradient of 504 KiB."
    )
    assert says(stepper(step=3)) == (
        "Ring on 4 GPUs, round 3 of 6: each GPU sends one chunk (126 KiB) to the next, which adds it to its own; "
        "1.48 MiB have moved, at most 378 KiB over one link; 4 of 16 chunks are complete."
    )
    assert "round 3 of 4: GPU 0 sends to GPU 1, which keeps it; " in says(stepper("star", 3, 3))
    assert "GPU 1 sends to GPU 0 and GPU 3 to GPU 2, which add it to their own; " in says(stepper("tree", 4, 1))
    assert says(stepper("star", 4, 3)).endswith("at most 504 KiB over one link; 1 of 4 GPUs is complete.")
    for kind, wholes in {"star": 14, "ring": 1.75, "tree": 6}.items():
        ending = f"every GPU holds the sum, in the time that {wholes} whole gradients take over one link."
        assert says(stepper(kind, 8, ROUNDS[kind][8])).endswith(ending)


@pytest.mark.parametrize("state", [("ring", 5, 4), ("ring", 2, 1), ("star", 4, 2), ("tree", 6, 1), ("tree", 3, 4)])
@pytest.mark.sweep(3)
def test_it_draws_what_each_gpu_holds_the_sends_and_the_links(page, write, state):
    kind, k, step = state
    figure, schedule = stepper(*state), MAKE[kind](k)
    held = [torch.full((k,), 2**gpu) for gpu in range(k)]  # the sum of any of them says which they were
    execute(schedule[:step], held)
    held = [int(total) for row in held for total in (row if kind == "ring" else row[:1])]
    page.goto(write(figure))
    for gpu in range(k):
        assert page.locator(f".mgpu-share.mgpu-gpu{gpu}").count() == sum(total >> gpu & 1 for total in held)
    assert page.locator(".mgpu-full").count() == held.count(2**k - 1)
    sends = schedule[step - 1]
    around = sum(send.chunk is not None and send.target < send.source for send in sends)  # drawn in two pieces
    assert page.locator(".mgpu-head").count() == len(sends) + around
    carried, whole = ([width for *_, width, _ in drawn_boxes(page, f".mgpu-{bar}")] for bar in ("carried", "room"))
    in_all, sofar = (bytes_per_link(rounds, figure.data["nbytes"], k) for rounds in (schedule, schedule[:step]))
    scale = max(whole) / max(in_all.values())
    assert carried == pytest.approx([sofar.get(link, 0) * scale for link in in_all], abs=0.01)
    assert whole == pytest.approx([n * scale for n in in_all.values()], abs=0.01)
    assert all(f"{i} → {j}" in picture(page).text_content() for i, j in in_all)


def test_arrows_lead_from_the_source_to_the_target(page, write):
    """The rows that the arrows of a star's round join, by where they lie in the picture."""
    page.goto(write(stepper("star", 4, 2)))
    boxes = page.locator(".mgpu-chunk").evaluate_all("boxes => boxes.map((box) => +box.getAttribute('y') + 11)")
    start, *_, end = re.findall(r"[\d.]+,[\d.]+", page.locator(".mgpu-send").get_attribute("d"))
    assert [boxes.index(float(point.split(",")[1])) for point in (start, end)] == [2, 0]
    assert star(4)[1] == [Send(2, 0, None, True)]


@pytest.mark.slow
def test_a_kind_with_fewer_rounds_takes_the_step_with_it(page, live, says):
    """In Python, and in the page before Python's next message says which step goes with it."""
    figure = stepper("ring", 8, 14)
    figure.kind = "tree"
    assert figure.step == 6
    figure.num_gpus = 2
    assert figure.step == 2
    root = live(stepper("ring", 8, 13))
    button(root, "Next").click()
    radio(root, "tree").click()
    button(root, "Back").click()
    saved = page.evaluate("saved.map((values) => [values.kind, values.num_gpus, values.step])")
    assert saved == [["ring", 8, 14], ["tree", 8, 6], ["tree", 8, 5]]
    page.evaluate("model.set('num_gpus', 2)")  # as when Python sets it
    assert picture(page).get_attribute("aria-label") == says(stepper("tree", 2, 2))
    page.evaluate("model.set('step', 2)")
    assert sentence(root) == says(stepper("tree", 2, 2))
