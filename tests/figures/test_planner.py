"""The planner: its formulas in the page are those of mgpu_lib.planning, and what the figure says of a run."""

import json
import random

import figure_pages
import pytest
from figure_pages import click_at, picture, sentence
from traitlets import TraitError

from mgpu_lib import planning
from mgpu_lib.plan_rates import NODES, constants
from mgpu_lib.widgets import Planner
from mgpu_lib.widgets.planner import JOB, OFFERED, SPLIT, planner_data

write, says, calls = figure_pages.write, figure_pages.says, figure_pages.calls
SETTINGS, SEED = 200, 2
# What the page computes of runs, or what is wrong with them.
PLANS = """(data, settings) => settings.map((at) => {
    const wrong = fault(runOf(at));
    if (wrong) return wrong;
    const { memory, capacity, seconds, flops, tokensPerSecond, mfu, fits, step } = planOf(data, at);
    return { memory, capacity, seconds, flops, tokensPerSecond, mfu, fits, step };
})"""
BEST = """(data, settings) => settings.map((at) => {
    const { best, tried, fitting } = bestPlan(runOf(at), constants(data, at.gpu, at.network), data.choices);
    return { step: best?.step ?? null, tried, fitting };
})"""


def drawn(seed, count, possible=None):
    """Settings of all controls. `possible`: so many of them are runs that there can be."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        setting = {name: draw.choice(OFFERED[name]) for name in (*JOB, *SPLIT)}
        if len(found) >= (possible or 0) or planning.fault(planning.run_of(**setting)) is None:
            found.append(setting)
    return found


def select(page, name):
    return page.get_by_role("combobox", name=name)


def slider(page, name):
    return page.get_by_role("slider", name=name)


# Values and data


def test_values_are_read_and_set_from_python():
    figure = Planner(gpu="H200", tokens=1e12)
    figure.tensor, figure.recompute = 4, True
    assert repr(figure) == (
        "Planner(layers=80, width=8192, heads=64, seq_len=8192, batch_tokens=8388608, gpu='H200', n_gpus=512, "
        "network='InfiniBand NDR', tensor=4, pipeline=1, zero=1, micro_batch=1, recompute=True, tokens=1000000000000.0)"
    )
    made = figure.plan()
    assert made.run.gpu == "H200" and made.run.data == 128 and made.run.sizes["inner"] == 28_672
    figure.pipeline, figure.zero = 2, 3  # no error: the figure says what is wrong
    with pytest.raises(ValueError, match="zero=3 with pipeline=2"):
        figure.plan()


def test_the_controls_are_those_of_planning():
    assert {*JOB, *SPLIT, "tokens"} == OFFERED.keys()
    figure = Planner()
    for name, values in OFFERED.items():
        for value in values:
            setattr(figure, name, value)
            assert getattr(figure, name) == value


@pytest.mark.parametrize(
    ("name", "value", "names"),
    [
        ("layers", 33, "16, 24, 32"),
        ("n_gpus", 100, "8, 16, 32"),
        ("gpu", "T4", "'A100-80', 'H100', 'H200'"),
        ("network", "NVLink", "'InfiniBand HDR', 'InfiniBand NDR'"),
        ("zero", 4, "0, 1, 2, 3"),
        ("tensor", 3, "1, 2, 4, 8, 16"),
        ("tokens", 2e12, "100000000000.0, 300000000000.0"),
        ("recompute", "yes", "recompute"),
    ],
)
def test_what_is_not_offered_is_refused_and_it_says_what_would_do(name, value, names):
    figure = Planner()
    before = getattr(figure, name)
    with pytest.raises(TraitError, match=names):
        setattr(figure, name, value)
    assert getattr(figure, name) == before
    with pytest.raises(TraitError, match=names):
        Planner(**{name: value})


def test_the_page_has_the_rates_of_planning_with_six_digits(calls):
    data = planner_data()
    assert len(json.dumps(data)) < 60_000
    for gpu in NODES:
        for network in OFFERED["network"]:
            found, wanted = calls(Planner, "constants", data, gpu, network), constants(gpu, network)
            assert found["peak"] == wanted["peak"] and found["memory"] == wanted["memory"]
            collectives = found.pop("collectives")
            assert found == pytest.approx({name: wanted[name] for name in found}, rel=1e-5)
            assert {*found, "collectives"} == wanted.keys()
            assert collectives.keys() == wanted["collectives"].keys()
            for name, kinds in wanted["collectives"].items():
                assert collectives[name].keys() == kinds.keys()
                for kind, line in kinds.items():
                    assert collectives[name][kind] == pytest.approx(line, rel=1e-5)


# The formulas


def test_plans_of_the_page_are_those_of_planning(calls):
    settings = drawn(SEED, SETTINGS, possible=160)
    faults = 0
    for setting, found in zip(settings, calls(Planner, PLANS, planner_data(), settings), strict=True):
        run = planning.run_of(**setting)
        if wrong := planning.fault(run):
            faults += 1
            assert found == wrong
            continue
        made = planning.plan(run)
        assert found["memory"] == pytest.approx(made.memory, rel=1e-9, abs=2), setting
        for part, wanted in made.seconds.items():  # a bubble is the small difference of large times
            slack = 1e-5 * made.step if part == "bubble" else 0
            assert found["seconds"][part] == pytest.approx(wanted, rel=1e-4, abs=slack), (part, setting)
        assert list(found["memory"]) == list(made.memory) and list(found["seconds"]) == list(made.seconds)
        assert found["step"] == pytest.approx(made.step, rel=1e-4)
        assert found["flops"] == pytest.approx(made.flops, rel=1e-9)
        assert found["tokensPerSecond"] == pytest.approx(made.tokens_per_second, rel=1e-4)
        assert found["mfu"] == pytest.approx(made.mfu, rel=1e-4)
        assert (found["capacity"], found["fits"]) == (made.capacity, made.fits)
    assert 20 <= faults <= SETTINGS - 160


def test_every_fault_has_the_words_of_planning(calls):
    settings = drawn(SEED + 1, 2000)
    odd = [{"n_gpus": 12}, {"n_gpus": 2**15}, {"tensor": 3, "n_gpus": 24}, {"heads": 48, "tensor": 32}]
    odd += [{"seq_len": 8200, "tensor": 16, "batch_tokens": 8200 * 512}, {"heads": 48, "tensor": 1}]
    settings += [settings[0] | {"pipeline": 1, "tensor": 1, "zero": 1, "n_gpus": 512} | other for other in odd]
    found = calls(Planner, "(settings) => settings.map((at) => fault(runOf(at)))", settings)
    wanted = [planning.fault(planning.run_of(**setting)) for setting in settings]
    assert found == wanted
    kinds = ("does not divide", "whole machines of 8, and", "whole machines of 8", "heads can't", "stages")
    for kind in (*kinds, "tokens can't", "not a multiple", "would send all"):
        assert any(kind in (words or "") for words in wanted), kind


def best_of(setting):
    """(seconds of the best plan's step or None, splits, those that fit), as planning finds them."""
    run = planning.run_of(**setting)
    plans = [planning.plan(other) for other in planning.splits(run)]
    best = planning.best_plan(run)
    return best and best.step, len(plans), sum(made.fits for made in plans)


def test_the_best_split_is_that_of_planning(calls):
    settings = drawn(SEED + 2, 24, possible=20)
    found = calls(Planner, BEST, planner_data(), settings)
    for setting, page in zip(settings, found, strict=True):
        step, tried, fitting = best_of(setting)
        assert (page["tried"], page["fitting"]) == (tried, fitting), setting
        assert page["step"] == (step and pytest.approx(step, rel=1e-3)), setting
    assert {page["step"] is None for page in found} == {False, True}


# The words


def test_sentence(says):
    assert says(Planner()) == (
        "Llama 3 70B on 512 H100 (InfiniBand NDR) fits, with 52.8 GiB of 79.1 GiB. A step takes 25.7 s, modelled, at "
        "29% MFU; 15 trillion tokens take 532 days. What costs most beside computing is tensor parallelism: 21% of "
        "the step."
    )
    assert says(Planner(recompute=False)) == (
        "Llama 3 70B on 512 H100 (InfiniBand NDR) may not fit: it needs 78.3 GiB of 79.1 GiB, and real runs typically "
        "held 1.4 times what is counted here. It would fit with ZeRO stage 2, recomputation or 16 GPUs that share each "
        "layer."
    )
    assert says(Planner(n_gpus=2048, pipeline=8, tensor=4, recompute=True, tokens=1e11)) == (
        "Llama 3 70B on 2,048 H100 (InfiniBand NDR) fits, with 17.6 GiB of 79.1 GiB. A step takes 8.06 s, modelled, at "
        "23% MFU; 0.1 trillion tokens take 1.11 days. What costs most beside computing is the pipeline’s bubble: 33% "
        "of the step."
    )
    assert says(Planner(tensor=1, n_gpus=64)) == (
        "Llama 3 70B on 64 H100 (InfiniBand NDR) does not fit: it needs 422 GiB, 343 GiB more than one H100 has. "
        "Gradients take most of it, 263 GiB. It would fit with ZeRO stage 3 or 16 GPUs that share each layer."
    )
    assert says(Planner(zero=2, pipeline=4)) == (
        "Llama 3 70B on 512 H100 (InfiniBand NDR): there is no such run. zero=2 with pipeline=4: each micro-batch "
        "would send all gradients; use 0 or 1. It would run with a single pipeline stage or ZeRO stage 1."
    )
    large = {"layers": 128, "width": 16_384, "heads": 128, "n_gpus": 64, "tensor": 1}
    assert says(Planner(**large)) == (
        "A model of 438 B parameters on 64 H100 (InfiniBand NDR) does not fit: it needs 2566 GiB, 2487 GiB more than "
        "one H100 has. Gradients take most of it, 1632 GiB. No single change of the split makes it fit, though several "
        "may. It comes closest with ZeRO stage 3: 174 GiB."
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


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.slow
def test_it_is_moved_by_keyboard_and_by_pointer(page, write, says, theme):
    page.goto(write(Planner()))
    page.evaluate("theme => document.documentElement.dataset.theme = theme", theme)
    root = page.locator("figure.mgpu")
    assert sentence(root) == says(Planner())
    before = picture(page).screenshot()

    slider(page, "Tensor parallel").focus()
    page.keyboard.press("ArrowLeft")
    assert sentence(root) == says(Planner(tensor=4))
    assert slider(page, "Tensor parallel").get_attribute("aria-valuetext") == "4"
    assert picture(page).screenshot() != before

    click_at(page, slider(page, "Number of GPUs"), 1)
    select(page, "ZeRO stage").select_option("3: parameters, too")
    select(page, "Activations").focus()
    page.keyboard.press("ArrowDown")
    select(page, "GPU").select_option("A100-80")
    select(page, "Between nodes").select_option("RoCE 100")
    slider(page, "Layers").press("End")
    chosen = {"tensor": 4, "n_gpus": 16_384, "zero": 3, "recompute": True, "gpu": "A100-80", "network": "RoCE 100"}
    assert sentence(root) == says(Planner(layers=128, **chosen))
    assert select(page, "Model").input_value() == "your own"


def test_a_model_sets_its_sizes_and_a_slider_makes_it_your_own(page, write, says):
    page.goto(write(Planner()))
    root, model = page.locator("figure.mgpu"), select(page, "Model")
    assert model.input_value() == "Llama 3 70B"
    assert "70.6 B" in root.locator(".mgpu-follows").first.text_content()
    model.select_option("Llama 3 8B")
    assert sentence(root) == says(Planner(layers=32, width=4096, heads=32))
    assert "8.03 B" in root.locator(".mgpu-follows").first.text_content()
    slider(page, "Heads").press("ArrowLeft")
    assert sentence(root) == says(Planner(layers=32, width=4096, heads=16))
    assert model.input_value() == "your own"


def test_one_stage_has_no_bubble(page, write):
    figure = Planner(n_gpus=1024, tensor=4, zero=3)
    assert figure.plan().seconds["bubble"] == 0
    page.goto(write(figure))
    assert page.locator("tr", has_text="Pipeline bubble").locator("td").all_text_contents() == ["0 s", "0%"]


def test_the_button_finds_the_best_split(page, write, says):
    page.goto(write(Planner()))
    root = page.locator("figure.mgpu")
    start = {name: getattr(Planner(), name) for name in (*JOB, *SPLIT)}
    best = planning.best_plan(planning.run_of(**start)).run
    _, tried, fitting = best_of(start)
    found = f"The fastest of {fitting} splits that fit, of {tried} tried. "
    wanted = found + says(Planner(**{name: getattr(best, name) for name in SPLIT}))
    for _ in range(2):  # the second time nothing changes, and it still says so
        page.get_by_role("button").press("Enter")
        assert sentence(root) == wanted
    slider(page, "Tensor parallel").press("End")
    assert not sentence(root).startswith("The fastest")


def test_the_button_says_so_where_nothing_fits(page, write, says):
    large = {"layers": 128, "width": 16_384, "heads": 128, "n_gpus": 8, "tensor": 1}
    page.goto(write(Planner(**large)))
    root = page.locator("figure.mgpu")
    page.get_by_role("button").click()
    words = "splits tried none fits: use more GPUs, shorter sequences or a smaller model. "
    page.wait_for_function("words => document.querySelector('.mgpu-sentence').textContent.includes(words)", arg=words)
    assert sentence(root).endswith(words + says(Planner(**large)))


def test_what_cannot_run_is_said_in_the_picture(page, write):
    page.goto(write(Planner(zero=2, pipeline=4)))
    shown = picture(page).text_content()
    assert "There is no such run." in shown and "zero=2 with pipeline=4" in shown and "ZeRO stage 1" in shown
    assert {*page.locator(".mgpu-tables td").all_text_contents()} == {"–"}
    select(page, "ZeRO stage").select_option("1: optimizer sharded")
    assert "no such run" not in picture(page).text_content()
    assert "–" not in page.locator(".mgpu-tables td").all_text_contents()


@pytest.mark.parametrize(
    "values",
    [{}, {"recompute": False}, {"tensor": 1, "n_gpus": 64}],
    ids=["fits", "may not fit", "does not fit"],
)
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
    assert advised - 1 == pytest.approx(planning.ROOM * (end - 1))


def test_a_number_and_its_unit_stay_on_one_line(page, write):
    page.set_viewport_size({"width": 320, "height": 800})
    page.goto(write(Planner(layers=128, width=16_384, heads=128, n_gpus=16_384)))
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
