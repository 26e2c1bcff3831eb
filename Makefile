# Two commands do it: `make book` and `make test`. Each sets up .venv by itself, once per state of the requirements.
#   make book                 build the static book and print where to open it
#   make test                 linters, and pytest --nbval over tests/ and the quickest chapters; long sweeps in part
#   make test ALL=1           the same with all of them
#   make serve                build the book and serve it at http://localhost:8000
#   make lab                  open the chapters in JupyterLab
#   make run-notebooks        run all chapters and store their outputs
#                             one chapter: make run-notebooks CHAPTER=chapters/NN-name.ipynb
#   make pictures             take the pictures that figures show where no JavaScript runs, of the stored outputs
#                             a figure's look changed: make pictures, then run-notebooks, which puts them in
#                             its values or data changed: run-notebooks, pictures, run-notebooks
#   make clean                remove what was built (the environment stays: delete .venv to have it set up anew)
# Another Python: make book PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
ALL ?=
CHAPTER ?=

BIN := $(VENV)/bin
HASH := $(shell cat requirements.txt requirements-dev.txt | cksum | cut -d ' ' -f 1)
READY := $(VENV)/.ready-$(HASH)
# The library of this checkout, also where the environment was set up for another one.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: book test serve lab run-notebooks pictures clean
.DEFAULT_GOAL := book

$(READY):
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' || \
	  { echo "$(PYTHON) is not a Python from 3.10 to 3.13; name one: make book PYTHON=python3.12"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || \
	  { echo "Setting up $(VENV) (some minutes, once)"; $(PYTHON) -m venv --clear $(VENV); }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@rm -f $(VENV)/.ready-*
	@touch $@

book: $(READY)
	@$(BIN)/python scripts/build_book.py

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	MGPU_ALL=$(ALL) $(BIN)/python -m pytest --nbval -q -n $(JOBS) --dist loadscope --no-loadscope-reorder --durations 10

serve: book
	$(BIN)/python -m http.server 8000 --bind 127.0.0.1 --directory _build/html

lab: $(READY)
	$(BIN)/jupyter lab --notebook-dir=. chapters

run-notebooks: $(READY)
	$(BIN)/python scripts/run_notebooks.py $(CHAPTER)

pictures: $(READY)
	$(BIN)/python scripts/take_pictures.py

clean:
	rm -rf _build .pytest_cache .ruff_cache .hypothesis *.egg-info
	find mgpu_lib scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
