"""Run chapters and store their outputs: python scripts/run_notebooks.py [chapters/NN-name.ipynb ...]

Running an unchanged chapter again changes no byte: times, widget state, execution metadata and the Python version
are left out, printed text is stored in one piece, and cell ids stay. A file is replaced only when its bytes changed,
and only after the whole chapter ran: when a cell fails, the file stays as it was. Training uses the full data set
(MGPU_FULL=1).
"""

import argparse
import hashlib
import json
import os
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the library of this checkout
CELL_TIMEOUT = 3600  # seconds
ENVIRONMENT = {"MGPU_VIRTUAL": "1", "MGPU_FULL": "1", "TQDM_DISABLE": "1"}
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},
}
ANSI = re.compile(r"\x1b\[[\d;]*m")
LEFT_OUT = "    (frames inside of libraries are left out)\n"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"  # names a model by a random id; the figure's HTML is kept


def read(path):
    """The notebook at `path`, with an id on every cell that has none yet."""
    notebook = nbformat.v4.reads(path.read_text(encoding="utf-8"))
    if notebook.nbformat != 4:
        raise ValueError(f"{path} is in notebook format {notebook.nbformat}; save it in format 4 with JupyterLab")
    notebook.nbformat_minor = 5  # the first with cell ids
    for number, cell in enumerate(notebook.cells):  # nbformat would draw them at random
        cell.setdefault("id", hashlib.sha256(f"{number}\0{cell.source}".encode()).hexdigest()[:8])
    return notebook


def execute(notebook, folder):
    """Run all cells in a fresh kernel whose working folder is `folder`, as nbval does."""
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        kernel_name="python3",
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,  # else the chunks in which text arrives would change from run to run
        extra_arguments=["--InteractiveShell.xmode=Context"],
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()


def own_frames(traceback):
    """An error's `traceback`, in IPython's parts, without those from files: they name folders of this machine."""
    parts = []
    for part in traceback:
        text = ANSI.sub("", part)
        if not text.startswith("File ") and text.strip("-"):  # a rule would wrap on a telephone
            parts.append(part)
        elif text.strip("-") and parts[-1:] != [LEFT_OUT]:
            parts.append(LEFT_OUT)
    return parts


def clean(notebook):
    """Take out what would change from run to run or from machine to machine."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        for key in ("execution", "ExecuteTime", "collapsed", "scrolled"):
            cell.metadata.pop(key, None)
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "text/html" in data:
                data.pop(WIDGET_VIEW, None)
            if output.output_type == "error":
                output.traceback = own_frames(output.traceback)


def complaints(notebook):
    """What must not be in a stored output, as sentences that name the cell."""
    for number, cell in enumerate(notebook.cells):
        where = f"cell {number} ({cell.source.partition(chr(10))[0][:60]!r})"
        for output in cell.get("outputs", []):
            text = json.dumps(output)
            for place in (str(ROOT), f"{Path.home()}/", "site-packages"):
                if place in text:
                    yield f"{where}: its output names a place of this machine, {place!r}"
            if WIDGET_VIEW in output.get("data", {}):
                yield f"{where}: a widget without text/html, of which a page would show nothing"


def replace(path, text):
    """Write `text` to `path` in one step; returns False, leaving the file alone, when it holds that already."""
    if path.read_text(encoding="utf-8") == text:
        return False
    from virtual_gpus import replacing  # here, for it takes seconds: PyTorch comes with it

    with replacing(path) as new:
        new.write_text(text, encoding="utf-8")
    return True


def run(path):
    """Run the notebook at `path` in place; returns whether the file changed. Raises what nbclient raises."""
    notebook = read(path)
    execute(notebook, path.parent)
    clean(notebook)
    problems = list(complaints(notebook))
    if problems:
        raise ValueError("\n".join(problems))
    nbformat.validate(notebook)
    return replace(path, nbformat.writes(notebook, version=nbformat.NO_CONVERT) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all of chapters/")
    paths = parser.parse_args().notebooks or sorted((ROOT / "chapters").glob("*.ipynb"))
    os.environ.update(ENVIRONMENT)
    os.environ.pop("MPLBACKEND", None)  # figures go into the notebook
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    failed = 0
    for path in paths:
        try:
            print(f"{path}: {'changed' if run(path) else 'unchanged'}", flush=True)
        except (CellExecutionError, CellTimeoutError, DeadKernelError, ValueError, OSError) as error:
            failed += 1
            print(f"{path}: NOT written\n{error}", file=sys.stderr, flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
