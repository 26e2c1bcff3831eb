"""The page "Test your own multi-GPU program": its files, run by its commands, say what it shows.

A block of code whose first line is a comment with a name is that file. A block of shell is a command, and a block of
text right after it what the command says, but for lines `…`. "In `FILE`, replace `A` with `B`" is a mistake to make;
the blocks of text below it, down to the next one or a heading, are what is said then.
"""

import re

import pytest
import running
import torch.distributed as dist
import yaml

from virtual_gpus import virtual_gpus

PAGE = (running.ROOT / "test-your-own-program.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^```\w+\n# (\S+)\n(.*?)^```$", PAGE, re.M | re.S))
COMMANDS = [line for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S) for line in block.splitlines()]
SAYS = dict(re.findall(r"^```sh\n([^\n]*)\n```\n\n```text\n(.*?)^```$", PAGE, re.M | re.S))
PARTS = re.split(r"in `(\S+)`, replace `(.+?)` with `(.+?)`", PAGE)[1:]
MISTAKES = list(zip(PARTS[::4], PARTS[1::4], PARTS[2::4]))
CONSEQUENCES = [re.findall(r"^```text\n(.*?)^```$", text.partition("\n## ")[0], re.M | re.S) for text in PARTS[3::4]]
WORKFLOW = yaml.safe_load(FILES[".github/workflows/test.yml"])
TORCH, LIBRARY, RUN, PLAN = COMMANDS
PYTEST = "python -m pytest"
NUMBER = re.compile(r"\b\d+\.\d+\b")


def says(shown, said):
    """Whether all `shown` lines stand in what was `said`, in their order; a number with a point may be another one in
    its last digits."""
    said = " ".join(said.replace("\nE  ", " ").split())
    for part in re.split(r"^…$", shown, flags=re.M):
        part = " ".join(part.split())
        pattern = NUMBER.sub(r"(\\d+\\.\\d+)", re.escape(part).replace(r"\.", "."))
        found = re.search(pattern, said)
        if found is None:
            return False
        for ours, there in zip(found.groups(), NUMBER.findall(part), strict=True):
            if float(ours) != pytest.approx(float(there), rel=0.05, abs=0.015):
                return False
        said = said[found.end() :]
    return True


def run(command, folder, status=0):
    """What this command of the page says; it runs as a fork, and so do ranks of `virtual-gpus run`."""
    environment = {
        "PYTEST_ADDOPTS": "-p no:cacheprovider",
        "PET_MASTER_PORT": str(running.free_port()),  # torchrun's own is for one run at a time
    }
    return running.done(running.forked(command), folder, status, **environment)


@pytest.fixture
def project(tmp_path):
    """A folder with the page's files."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def make_mistake(project, name, right, wrong):
    text = (project / name).read_text()
    assert text.count(right) == 1, right
    (project / name).write_text(text.replace(right, wrong))


def test_the_page_has_the_parts_that_these_tests_run():
    assert list(FILES) == ["train.py", "test_train.py", ".github/workflows/test.yml"]
    assert list(SAYS) == [RUN, PLAN]
    assert [len(texts) for texts in CONSEQUENCES] == [1, 1]
    assert len(SAYS) + 2 == PAGE.count("```text"), "each block of text has its test"


def test_the_workflow_runs_the_commands_of_the_page():
    [job] = WORKFLOW["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [TORCH, LIBRARY, "pytest", RUN, PLAN]
    assert [step["uses"].partition("@")[0] for step in job["steps"] if "uses" in step] == [
        "actions/checkout",
        "actions/setup-python",
    ]
    assert job["timeout-minutes"] and WORKFLOW[True] == ["push", "pull_request"]  # YAML reads `on` as a truth value
    [version] = [step["with"]["python-version"] for step in job["steps"] if "with" in step]
    assert version in (running.ROOT / "README.md").read_text()


def test_a_dry_run_and_one_with_a_fast_host_which_takes_less_than_half_of_the_time(project):
    fast = PLAN.replace(" plan ", " plan --host 0.33 ")
    assert "With `--host 0.33`" in PAGE and fast != PLAN
    said = [run(line, project) for line in (PLAN, fast)]
    assert says(SAYS[PLAN], said[0])
    slow, quick = (float(re.search(r"(\d+\.\d+) ms from one optimizer step", text)[1]) for text in said)
    assert quick < slow / 2


@pytest.mark.slow
@pytest.mark.parametrize("command, said", [(PYTEST, "…\n2 passed"), (RUN, SAYS[RUN])])
def test_a_command_says_what_the_page_shows(command, said, project):
    assert says(said, run(command, project))


@pytest.mark.slow
def test_gradients_that_stay_at_home_fail_the_test_and_not_the_script(project):
    make_mistake(project, *MISTAKES[0])
    [of_pytest] = CONSEQUENCES[0]
    said = run(PYTEST, project, status=1)
    assert says(of_pytest, said) and "1 failed, 1 passed" in said
    [end] = re.findall(r"ends with `(step 40: loss .*?)`", PAGE)
    assert says(end, run(RUN, project))


@pytest.mark.slow
def test_a_forgotten_rank_fails_the_test_without_gpus(project):
    make_mistake(project, *MISTAKES[1])
    [shown] = CONSEQUENCES[1]
    assert says(shown, run(f"{PYTEST} -k every_row", project, status=1))


def test_in_one_process_nobody_notices(capsys):
    """As the page begins: with and without the mistake, the losses are the same."""
    right, (_, *mistake) = FILES["train.py"], MISTAKES[0]
    with virtual_gpus(1):
        dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
        said = []
        for text in right, right.replace(*mistake):
            exec(text, program := {"__name__": "train"})
            program["train"](40)
            said.append(capsys.readouterr().out)
        dist.destroy_process_group()
    assert said[0] == said[1] and "step 40: loss" in said[0]
