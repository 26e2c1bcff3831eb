"""experiments.restamp: recorded runs go over to changed code only if it does the same, to the last bit."""

import json
import shutil

import pytest

from experiments import fingerprint, restamp

# A made-up study: two networks, four cases, one second of which is never the same
STUDY = """
import time
from experiments import fingerprint
from mgpu_lib.nets import double, triple

NETS = {"double": double, "triple": triple}
SAMPLE = ("double/3", "triple/3")

def cases():
    return {f"{net}/{x}": (net, x) for net in NETS for x in (3, 4)}

def record(net, x):
    return {"value": [round(NETS[net](x), 3)], "seconds": time.perf_counter()}

def recipe():
    return {"sha256": fingerprint.of_training("experiments.made.record"), "factor": 1}
"""
NETS = """
def double(x):
    result = x * 0.2
    return result

def triple(x):
    return x * 0.1 + x * 0.2
"""


@pytest.fixture
def repository(tmp_path):
    """The made-up study in a git repository of its own, with a file that has the fingerprint of its one commit."""
    root = tmp_path / "repository"
    for folder in (restamp.RESULTS, "experiments", "mgpu_lib"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name in ("fingerprint.py", "syntax.py"):
        shutil.copy(fingerprint.ROOT / "experiments" / name, root / "experiments")
    for name, text in {"experiments/made.py": STUDY, "mgpu_lib/nets.py": NETS}.items():
        (root / name).write_text(text)
        (root / name).with_name("__init__.py").write_text("")
    git(root, "init", "--quiet")
    recipe = restamp.run(root, "made", [], 60)["recipe"]
    file(root).write_text(
        json.dumps({"provenance": {"date": "once"}, "recipe": recipe, "runs": {"double/3": {"value": 0.6}}})
    )
    commit(root)
    return root


def file(root):
    return root / restamp.RESULTS / "made.json"


def git(root, *arguments):
    restamp.git(root, "-c", "user.name=A", "-c", "user.email=a@b.example", *arguments)


def commit(root):
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "A commit")


def change(root, old, new, name="mgpu_lib/nets.py"):
    text = (root / name).read_text()
    assert text.count(old) >= 1
    (root / name).write_text(text.replace(old, new))
    commit(root)


def refused(root, message, old="HEAD~", limit=60):
    """That it raises ValueError with this message, changes nothing and leaves nothing behind."""
    before, trees = file(root).read_bytes(), restamp.git(root, "worktree", "list")
    with pytest.raises(ValueError, match=message):
        restamp.restamp("made", old, root, limit)
    assert file(root).read_bytes() == before and restamp.git(root, "worktree", "list") == trees


def test_code_that_does_the_same_takes_over_the_runs(repository):
    change(repository, "result", "value")
    said = restamp.restamp("made", "HEAD~", repository, 60)
    assert said.startswith("made.json: 2 cases are equal to the last bit")
    stored = json.loads(file(repository).read_text())
    assert stored["recipe"] == restamp.run(repository, "made", [], 60)["recipe"]
    assert stored["runs"] == {"double/3": {"value": 0.6}} and stored["provenance"]["date"] == "once"
    (carried,) = stored["provenance"]["restamped"]
    old, new = restamp.git(repository, "rev-parse", "HEAD~", "HEAD").split()
    assert (carried["from"], carried["to"], carried["cases"]) == (old, new, ["double/3", "triple/3"])
    assert restamp.git(repository, "worktree", "list").count("\n") == 0
    assert restamp.restamp("made", "HEAD~", repository, 60) == "made.json has the fingerprint of today's code"
    change(repository, "value", "found")  # from the commit before, whose code has the fingerprint now
    restamp.restamp("made", "HEAD~", repository, 60)
    assert len(json.loads(file(repository).read_text())["provenance"]["restamped"]) == 2


def test_another_last_bit_is_refused_also_where_rounding_hides_it(repository):
    change(repository, "x * 0.1 + x * 0.2", "x * 0.3")
    assert round(3 * 0.1 + 3 * 0.2, 3) == round(3 * 0.3, 3)
    refused(repository, "triple/3/value/0: 0.9000000000000001 before, 0.8999999999999999 now")


def test_every_network_counts(repository):
    change(repository, "x * 0.2\n    return", "x * 0.25\n    return")
    refused(repository, "made has other values with [0-9a-f]{40} than with [0-9a-f]{40}:\ndouble/3")


def test_other_settings_are_refused(repository):
    change(repository, '"factor": 1', '"factor": 2', "experiments/made.py")
    change(repository, "result", "value")
    refused(repository, r"made.json was recorded with other settings \(factor\): record it anew", "HEAD~2")


def test_an_old_commit_that_did_not_make_the_runs_is_refused(repository):
    change(repository, "result", "value")
    change(repository, "value", "found")
    refused(repository, "has not the fingerprint in made.json")


def test_code_that_is_not_committed_is_refused(repository):
    (repository / "mgpu_lib" / "more.py").write_text("")
    refused(repository, r"commit the code first.*\n.*mgpu_lib/more.py", "HEAD")


def test_what_fails_or_takes_too_long_is_refused(repository):
    change(repository, "result", "value")
    refused(repository, "git rev-parse: fatal: Needed a single revision", "nothing")
    refused(repository, "made took more than 0 s with the code in", limit=0)
    change(repository, "x * 0.1", "x / 0", "mgpu_lib/nets.py")
    refused(repository, "made failed with the code in .*exit status 1", "HEAD~2")


def test_old_code_may_keep_results_elsewhere_and_name_its_modules_otherwise(repository):
    git(repository, "mv", "mgpu_lib/nets.py", "mgpu_lib/networks.py")
    git(repository, "mv", "experiments/syntax.py", "experiments/trees.py")
    change(repository, "mgpu_lib.nets", "mgpu_lib.networks", "experiments/made.py")
    change(repository, "experiments.syntax", "experiments.trees", "experiments/fingerprint.py")
    change(repository, "result", "value", "mgpu_lib/networks.py")
    restamp.restamp("made", "HEAD~3", repository, 60)


def test_differences():
    one = {"a": [1, {"b": 2.0}], "seconds": 1}
    assert list(restamp.differences(one, {"a": [1, {"b": 2.0}], "seconds": 2})) == []
    assert list(restamp.differences(one, {"a": [1, {"b": 2}], "seconds": 2})) == ["a/1/b: 2.0 before, 2 now"]
    assert len(list(restamp.differences(one, {"a": [1], "seconds": 1}))) == 1


def test_the_program_refuses_code_of_another_folder(repository, tmp_path, monkeypatch, capfd):
    shutil.copytree(repository, tmp_path / "other")
    shutil.rmtree(repository / "experiments")
    monkeypatch.chdir(tmp_path / "other")
    with pytest.raises(ValueError, match=r"failed with the code in .*repository \(exit status 1\)"):
        restamp.run(repository, "made", [], 60)
    assert "made.py was imported, which is not in" in capfd.readouterr().err
