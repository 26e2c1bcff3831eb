"""Put the notebooks that Colab and Kaggle open on a branch of their own: python scripts/push_notebooks.py [REMOTE]

The branch, `notebooks`, has one commit, with the files of _build/html/notebooks; the one before it is replaced. REMOTE
is a repository or the name of one, by default origin. The checkout and its branches stay as they are.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from standalone import BRANCH, FOLDER

ROOT = Path(__file__).resolve().parent.parent


def git(*command, folder, **environment):
    done = subprocess.run(
        ["git", *command], cwd=folder, env=os.environ | environment, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(f"git {command[0]} failed; look above")
    return done.stdout.strip()


def push(notebooks, remote, checkout=ROOT):
    """Make a commit of the folder `notebooks`, beside the checkout's index and work tree, and send it to `remote`."""
    who, email, commit = git("log", "-1", "--format=%cn%n%ce%n%H", folder=checkout).splitlines()
    names = dict.fromkeys(["GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME"], who)
    names |= dict.fromkeys(["GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"], email)
    with tempfile.TemporaryDirectory() as folder:
        place = {"GIT_DIR": git("rev-parse", "--absolute-git-dir", folder=checkout), "GIT_WORK_TREE": str(notebooks)}
        place["GIT_INDEX_FILE"] = str(Path(folder, "index"))
        git("add", "--force", "--all", ".", folder=notebooks, **place)
        tree = git("write-tree", folder=notebooks, **place)
    message = f"The chapters of {commit}, each as one file that runs anywhere"
    made = git("commit-tree", tree, "-m", message, folder=checkout, **names)
    git("push", "--force", remote, f"{made}:refs/heads/{BRANCH}", folder=checkout)


if __name__ == "__main__":
    remote = sys.argv[1] if len(sys.argv) > 1 else "origin"
    push(ROOT / "_build" / "html" / FOLDER, remote)
