"""The planner: the page computes what mgpu_lib.planning does, and what the figure says and draws of a run."""

import random

import pytest
from figure_pages import picture, sentence

from mgpu_lib import planning
from mgpu_lib.plan_formulas import ROOM
from mgpu_lib.widgets import Planner
from mgpu_lib.widgets.javascript import javascript
from mgpu_lib.widgets.planner import JOB, OFFERED, SPLIT, planner_data

SEED = 2
# What the page computes of runs, or what is wrong with them.
PLANS = """(data, settings) => settings.map((at) => {
    const wrong = fault(runOf(at)), plan = wrong ?? planned(runOf(at), ratesOf(data, at));
    return wrong ?? { ...plan, run: undefined };
})"""
OF_A_PLAN = "capacity", "flops", "peak", "held", "fits", "step", "tokens_per_second", "mfu"


def drawn(seed, count, possible=None):
    """Settings of all controls. `possible`: so many of them are runs that there can be."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        setting = {name: draw.choice(OFFERED[name]) for name in (*JOB, *SPLIT)}
        if len(found) >= (possible or 0) or planning.fault(planning.run_of(**setting)) is None:
            found.append(setting)
    return found


def test_the_page_computes_what_planning_does(calls):
    odd = [{"n_gpus": 12}, {"n_gpus": 2**15}, {"tensor": 3, "n_gpus": 24}, {"heads": 48, "tensor": 32}]
    odd += [{"seq_len": 8200, "tensor": 16, "batch_tokens": 8200 * 512}, {"heads": 48, "tensor": 1}]
    settings = drawn(SEED, 500, possible=150)
    settings += [settings[0] | {"pipeline": 1, "tensor": 1, "zero": 1, "n_gpus": 512} | other for other in odd]
    kinds = {"divide", "whole machines of 8, and", "of 8", "heads", "stages", "tokens", "multiple", "send all", "256"}
    for setting, found in zip(settings, calls(Planner, PLANS, planner_data(), settings), strict=True):
        run = planning.run_of(**setting)
        if wrong := planning.fault(run):
            kinds -= {kind for kind in kinds if kind in wrong}
            assert found == wrong
            continue
        made = planning.plan(run)
        assert found["memory"] == made.memory and list(found["memory"]) == list(made.memory)
        assert list(found["seconds"]) == list(made.seconds)
        for part, seconds in made.seconds.items():  # a bubble is the small difference of large times
            assert found["seconds"][part] == pytest.approx(seconds, rel=1e-9, abs=1e-12 * made.step), (part, setting)
        for name in OF_A_PLAN:
            assert found[name] == pytest.approx(getattr(made, name), rel=1e-9), (name, setting)
    assert not kinds, "no setting has these faults"


@pytest.mark.parametrize(
    "code",
    ["import math", "def f(x):\n    for y in x:\n        print(y)", "x = 1 < 2 < 3", "x = 2**3", "x = f'{1:.2f}'"],
)
def test_formulas_that_would_mean_something_else_are_refused(code):
    with pytest.raises(SyntaxError, match=r"line [12]: "):
        javascript(code)


def best_of(setting):
    """(the best split or None, how many there are, how many fit), as planning finds them."""
    run = planning.run_of(**setting)
    plans = [planning.plan(other) for other in planning.splits(run)]
    best = planning.best_plan(run)
    return best and {name: getattr(best.run, name) for name in SPLIT}, len(plans), sum(made.fits for made in plans)


def test_the_best_split_is_that_of_planning(calls):
    settings = drawn(SEED + 2, 24, possible=20)
    script = "(data, settings) => settings.map((at) => bestSplit(data, at))"
    found = calls(Planner, script, planner_data(), settings)
    for setting, page in zip(settings, found, strict=True):
        best = page["best"] and {name: page["best"][name] for name in SPLIT}
        assert (best, page["tried"], page["fitting"]) == best_of(setting), setting
    assert {page["best"] is None for page in found} == {False, True}


# The words


def test_sentence(says):
    assert says(Planner()) == (
        "Llama 3 70B on 512 H100 (InfiniBand NDR) fits, with 52.8 GiB of 79.1 GiB. A step takes 25.5 s, modelled, at "
        "29% MFU; 15 trillion tokens take 528 days. What costs most beside computing is tensor parallelism: 23% of "
        "the step."
    )
    assert says(Planner(recompute=False)) == (
        "Llama 3 70B on 512 H100 (InfiniBand NDR) may not fit: it needs 78.3 GiB of 79.1 GiB, and real runs typically "
        "held 1.4 times what is counted here. It would fit with ZeRO stage 2, recomputation or 16 GPUs that share each "
        "layer."
    )
    assert says(Planner(zero=2, pipeline=4)) == (
        "Llama 3 70B on 512 H100 (InfiniBand NDR): there is no such run. zero=2 with pipeline=4: each micro-batch "
        "would send all gradients; use 0 or 1. It would run with a single pipeline stage or ZeRO stage 1."
    )
    assert says(Planner(heads=16)).endswith("of 256 numbers at most. It would run with 32 heads.")
    large = {"layers": 128, "width": 16_384, "heads": 128, "n_gpus": 64, "tensor": 1}
    assert says(Planner(**large)) == (
        "A model of 438 B parameters on 64 H100 (InfiniBand NDR) does not fit: it needs 2566 GiB, 2487 GiB more than "
        "one H100 has. Gradients take most of it, 1632 GiB. No single change of the split makes it fit, though several "
        "may. It comes closest with ZeRO stage 3: 177 GiB."
    )


def test_what_it_advises_is_true(says):
    """One change of those that the sentence names makes the run possible, or makes it fit."""
    settings = drawn(SEED + 3, 150)
    for setting, words in zip(settings, says(Planner(), settings), strict=True):
        run = planning.run_of(**setting)
        others = [planning.run_of(**(setting | {name: v})) for name in SPLIT for v in OFFERED[name]]
        others = [other for other in others if planning.fault(other) is None]
        if planning.fault(run):
            assert f"no such run. {planning.fault(run)}." in words
            assert "It would run with" in words or not others
        elif not planning.plan(run).fits:
            assert ("It would fit with" in words) == any(planning.plan(other).fits for other in others)
        else:
            assert " fits, with " in words and "MFU" in words


# In the page


def test_a_model_sets_its_sizes_and_a_slider_makes_it_your_own(page, write, says):
    page.goto(write(Planner()))
    root, model = page.locator("figure.mgpu"), page.get_by_role("combobox", name="Model")
    assert model.input_value() == "Llama 3 70B"
    model.select_option("Llama 3 8B")
    assert sentence(root) == says(Planner(layers=32, width=4096, heads=32))
    assert "8.03 B" in root.locator(".mgpu-follows").first.text_content()
    page.get_by_role("slider", name="Heads").press("ArrowLeft")
    assert sentence(root) == says(Planner(layers=32, width=4096, heads=16))
    assert model.input_value() == "your own"


def test_the_button_finds_the_best_split(page, write, says):
    page.goto(write(Planner()))
    root = page.locator("figure.mgpu")
    start = {name: getattr(Planner(), name) for name in (*JOB, *SPLIT)}
    best, tried, fitting = best_of(start)
    found = f"The fastest of {fitting} splits that fit, of {tried} tried. "
    wanted = found + says(Planner(**best))
    for _ in range(2):  # the second time nothing changes, and it still says so
        page.get_by_role("button").press("Enter")
        assert sentence(root) == wanted
    page.get_by_role("slider", name="Tensor parallel").press("End")
    assert not sentence(root).startswith("The fastest")


def test_the_button_says_so_where_nothing_fits(page, write, says):
    large = {"layers": 128, "width": 16_384, "heads": 128, "n_gpus": 8, "tensor": 1}
    page.goto(write(Planner(**large)))
    root = page.locator("figure.mgpu")
    page.get_by_role("button").click()
    words = "splits tried none fits: use more GPUs, shorter sequences or a smaller model. "
    said = root.locator(".mgpu-sentence").filter(has_text=words + says(Planner(**large)))
    said.wait_for(state="attached")


def test_what_cannot_run_is_said_in_the_picture(page, write):
    page.goto(write(Planner(zero=2, pipeline=4)))
    shown = picture(page).text_content()
    assert "There is no such run." in shown and "zero=2 with pipeline=4" in shown and "ZeRO stage 1" in shown
    assert {*page.locator(".mgpu-tables td").all_text_contents()} == {"–"}
    page.get_by_role("combobox", name="ZeRO stage").select_option("1: optimizer sharded")
    assert "no such run" not in picture(page).text_content()
    assert "–" not in page.locator(".mgpu-tables td").all_text_contents()


@pytest.mark.parametrize("values", [{}, {"tensor": 1, "n_gpus": 64}], ids=["fits", "does not fit"])
def test_bars_are_drawn_to_scale(page, write, values):
    figure = Planner(**values)
    page.goto(write(figure))
    made = figure.plan()
    widths = [float(bar.get_attribute("width")) for bar in page.locator(".mgpu-picture .mgpu-part").all()]
    span = picture(page).evaluate("picture => picture.clientWidth") - 2
    longest = max(made.capacity, made.held)
    assert widths[:5] == pytest.approx([span * n_bytes / longest for n_bytes in made.memory.values()], abs=0.01)
    assert widths[5:] == pytest.approx([span * time / made.step for time in made.seconds.values()], abs=0.01)
    assert (page.locator("rect.mgpu-over").count() > 1) == (made.held > made.capacity)  # one is in the pattern
    assert ("× what it holds" in picture(page).text_content()) == (made.held > made.capacity)
    end, advised = (float(page.locator(f"line.mgpu-{name}").get_attribute("x1")) for name in ("capacity", "advised"))
    assert advised - 1 == pytest.approx(ROOM * (end - 1))
