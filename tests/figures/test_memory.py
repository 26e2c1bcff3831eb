"""The memory explorer: what fills a GPU's memory, and how that is measured."""

import itertools

import pytest
import torch
from figure_pages import picture
from figure_samples import BATCH_SIZES, PRECISIONS, memory, memory_data
from torch import nn

from mgpu_lib.widgets import MemoryExplorer
from mgpu_lib.widgets.memory import memory_table
from virtual_gpus import virtual_gpus


def test_data_that_is_not_a_memory_table_is_refused():
    incomplete, uneven = memory_data(), memory_data()
    del incomplete["networks"]["LeNet"]["scratch"]
    del uneven["networks"]["LeNet"]["activations"]["amp"][4096]
    bad = {"scratch": incomplete, "same batch sizes": uneven, "0 GPUs": memory_data() | {"gpus": {}}, "NoneType": None}
    for words, data in bad.items():
        with pytest.raises(ValueError, match=words):
            MemoryExplorer(data)


def test_sentence(says):
    assert says(memory(gpu="T4")) == (
        "ResNet-18 with Adam at batch 512 in FP32 needs 1.97 GiB, 13% of the memory of one T4; "
        "89% of that is activations."
    )
    assert says(memory(gpu="tiny", optimizer="sgd", batch_size=64)) == (
        "ResNet-18 with SGD at batch 64 in FP32 needs 316 MiB. That does not fit: 188 MiB too much for one tiny; "
        "the largest batch that fits is 8."
    )


def test_every_state_says_whether_it_fits(says):
    names, data = ("network", "optimizer", "precision", "gpu"), memory_data()
    figure, ends = memory(batch_size=1), set()
    for case in itertools.product(data["networks"], OPTIMIZERS, PRECISIONS, data["gpus"]):
        state = dict(zip(names, case, strict=True))
        figure.set_state(state)
        fits = {}
        for figure.batch_size in BATCH_SIZES:
            fits[figure.batch_size] = sum(figure.parts().values()) <= data["gpus"][figure.gpu]
        largest = max((n for n, ok in fits.items() if ok), default=None)
        unfit = f"the largest batch that fits is {largest}." if largest else "no batch size fits."
        said = says(memory(), [state | {"batch_size": batch_size} for batch_size in BATCH_SIZES])
        for fit, words in zip(fits.values(), said, strict=True):
            assert words.endswith("of that is activations." if fit else f"too much for one {figure.gpu}; {unfit}")
        ends.add(unfit[:9])
    assert len(ends) == 2


def test_it_says_what_does_not_fit(page, write):
    page.goto(write(memory(gpu="tiny", optimizer="sgd", batch_size=64)))
    assert [text[0] for text in page.locator(".mgpu-marks span").all_text_contents()] == ["●"] * 4 + ["×"] * 9
    assert "188 MiB too much" in picture(page).text_content()
    assert page.get_by_label("Batch size").get_attribute("aria-valuetext") == "64, does not fit"
    page.get_by_label("Batch size").press("Home")
    assert "too much" not in picture(page).text_content()
    assert "MiB free" in picture(page).text_content()


def test_bars_are_drawn_to_scale(page, write):
    figure = memory(gpu="T4", batch_size=4096)
    page.goto(write(figure))
    bars = page.locator(".mgpu-picture .mgpu-part").all()
    starts, widths = ([float(bar.get_attribute(name)) for bar in bars] for name in ("x", "width"))
    whole, magnified = widths[:5], widths[5:]
    for begin, drawn in ((starts[:5], whole), (starts[5:], magnified)):  # each begins where the one before it ends
        assert begin == pytest.approx(list(itertools.accumulate(drawn[:-1], initial=1)))
    total = sum(figure.parts().values())
    span = picture(page).evaluate("picture => picture.clientWidth") - 2
    for drawn, per_byte in ((whole, span / figure.data["gpus"]["T4"]), (magnified, span / total)):
        assert drawn == pytest.approx([n_bytes * per_byte for n_bytes in figure.parts().values()], abs=0.01)


# The numbers


def make_net():
    return nn.Sequential(nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(20 * 13 * 13, 500))


def make_reader():
    """A network that reads tokens, such that each of them has logits."""
    return nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 50))


NETWORKS = {"net": (make_net, (1, 28, 28)), "reader": (make_reader, (16,), torch.int64)}
OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    "adam": torch.optim.Adam,
}


@pytest.fixture(scope="module")
def measured():
    return memory_table(NETWORKS, [1, 2, 4, 256], ["T4", "A100-80"])


def test_memory_table_counts_parameters_gradients_and_optimizer_state(measured):
    assert list(measured["gpus"]) == ["T4", "A100-80"]
    net = measured["networks"]["net"]
    parameters = sum(-(-p.numel() * 4 // 512) * 512 for p in make_net().parameters())  # in blocks of 512 bytes
    assert net["parameters"] == net["gradients"] == net["optimizer"]["momentum"] == parameters
    assert net["optimizer"]["sgd"] == 0
    assert 2 * parameters <= net["optimizer"]["adam"] <= 2 * parameters + 4 * 512  # and maybe its step counters


@pytest.mark.parametrize(("network", "optimizer"), [*(("net", name) for name in OPTIMIZERS), ("reader", "sgd")])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("batch_size", [1, 2, 4, 256])
@pytest.mark.sweep(4)
def test_memory_table_adds_up_to_the_peak_of_an_ordinary_training_loop(
    measured, network, optimizer, precision, batch_size
):
    chosen = {"network": network, "optimizer": optimizer, "precision": precision, "batch_size": batch_size}
    make, shape, *kind = NETWORKS[network]
    with virtual_gpus(1, gpu="T4", backing="meta"):
        X = torch.zeros(batch_size, *shape, dtype=kind[0] if kind else None, device="cuda:0")
        y = torch.zeros(X.shape if kind else batch_size, dtype=torch.int64, device="cuda:0")  # one for each token
        net = make().to("cuda:0")
        trainer = OPTIMIZERS[optimizer](net.parameters())
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            with torch.autocast("cuda", torch.bfloat16, enabled=precision == "amp"):
                loss = nn.functional.cross_entropy(net(X).flatten(0, -2), y.flatten())
            trainer.zero_grad(set_to_none=False)
            loss.backward()
            trainer.step()
            del loss
        assert sum(MemoryExplorer(measured, **chosen).parts().values()) == torch.cuda.max_memory_allocated(0)
