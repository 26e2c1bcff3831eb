"""The batch splitter: who gets which rows."""

import itertools

import pytest
import torch
from figure_pages import picture, sentence

from mgpu_lib.widgets import BatchSplitter


def test_split_equals_torch_for_every_size(calls):
    cases = list(itertools.product(range(1, 65), range(1, 9), ("split_batch", "scatter")))
    in_page = calls(BatchSplitter, "(cases) => cases.map((c) => shards(...c).map((s) => [s.first, s.count]))", cases)
    said = calls(BatchSplitter, "(cases) => cases.map((c) => splitSentence(...c))", cases)
    for (rows, gpus, way), shards, words in zip(cases, in_page, said, strict=True):
        X = torch.arange(rows)
        pieces = X.tensor_split(gpus) if way == "split_batch" else X.chunk(gpus)
        sizes = [len(piece) for piece in pieces] + [0] * (gpus - len(pieces))
        assert [count for _, count in shards] == sizes, (rows, gpus, way)
        firsts = [piece[0].item() for piece in pieces if len(piece)]
        assert [first for first, count in shards if count] == firsts
        busy = sum(map(bool, sizes))
        assert words.lower().count("row") == busy
        assert (" nothing." in words) == (busy < gpus) and ("in the mean over the batch." in words) == (busy > 1)


def test_each_gpu_is_drawn_with_its_rows(page, write):
    for values, cells in (({"way": "scatter"}, [6, 6, 6, 0]), ({"num_gpus": 8}, [4] + [2] * 7)):  # above and below
        page.goto(write(BatchSplitter(batch_size=9, **values)))
        page.locator(".mgpu-picture[viewBox]").wait_for()
        assert [page.locator(f".mgpu-cell.mgpu-gpu{gpu}").count() for gpu in range(len(cells))] == cells
        assert ("nothing" in picture(page).text_content()) == (0 in cells)


def test_sentence(says):
    assert says(BatchSplitter(batch_size=9, way="scatter")) == (
        "Rows 0–2 go to GPU 0, rows 3–5 to GPU 1 and rows 6–8 to GPU 2. GPU 3 gets nothing. "
        "Each of these shards weighs 3/9 in the mean over the batch."
    )
    assert says(BatchSplitter(batch_size=9)) == (
        "Rows 0–2 go to GPU 0, rows 3–4 to GPU 1, rows 5–6 to GPU 2 and rows 7–8 to GPU 3. "
        "The shards weigh 3/9, 2/9, 2/9 and 2/9 in the mean over the batch."
    )
    assert says(BatchSplitter(batch_size=1, num_gpus=3)) == "Row 0 goes to GPU 0. GPUs 1 and 2 get nothing."


@pytest.mark.slow
def test_a_slider_on_its_way_does_not_chatter(page, write, says):
    page.spent = True  # its clock is no other test's
    page.clock.install()
    page.goto(write(BatchSplitter()))
    page.clock.pause_at("2100-01-01")
    said = page.locator("[role=status]")
    before = said.text_content()
    for _ in range(3):
        page.get_by_label("Batch size").press("ArrowRight")
        page.clock.run_for(100)
        assert said.text_content() == before
    page.clock.run_for(1000)
    assert said.text_content() == says(BatchSplitter(batch_size=13)) != before


def test_what_the_reader_has_moved_stays_when_the_same_output_is_added_again(page, write, says):
    page.goto(write(BatchSplitter(), BatchSplitter()))
    figures = page.locator("figure.mgpu")
    figures.nth(0).get_by_label("Batch size").press("End")
    figures.nth(0).get_by_label("nn.parallel.scatter").check()
    chosen = says(BatchSplitter(batch_size=64, way="scatter"))
    assert sentence(figures.nth(0)) == chosen
    assert figures.nth(1).get_by_label("split_batch").is_checked()
    page.add_script_tag(content=page.locator("body > script:not([type])").first.text_content())
    assert sentence(figures.nth(0)) == chosen
    figures.nth(1).get_by_label("Number of GPUs").press("Home")
    assert sentence(figures.nth(1)) == says(BatchSplitter(num_gpus=1))
