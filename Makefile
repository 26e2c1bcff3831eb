# Three commands do it: `make book` to read, `make lab` to run, `make test` to check. The first sets up .venv with what builds
# the book (0.3 GB), the second adds what chapters run with (6 GB), the third what tests need (0.5 GB), each once.
#   make book                 build the static book and print where to open it
#                             to publish it: make book REPOSITORY=https://github.com/owner/name
#   make lab                  open the chapters in JupyterLab
#   make test                 linters, and pytest --nbval over tests/ and the quickest chapters; long sweeps in part
#   make test ALL=1           the same with all of them; JOBS=3 tests at a time, one more than two cores, since some wait
#   make test-virtual TORCH=2.11   the simulator's tests with another PyTorch, in an environment of its own (5 GB); or nightly.
#                                  WITH=[test,frameworks]: also with the libraries and frameworks whose programs they run
#   make serve                build the book and serve it at http://localhost:8000
#   make run-notebooks        run all chapters and store their outputs
#                             one chapter: make run-notebooks CHAPTER=chapters/NN-name.ipynb
#   make pictures             take the pictures that figures show where no JavaScript runs, of the stored outputs
#                             a figure's look changed: make pictures, then run-notebooks, which puts them in
#                             its values or data changed: run-notebooks, pictures, run-notebooks
#   make links                ask each address outside of the book whether it is still there
#   make pdf                  the whole book as _build/book.pdf, made by an installed Chromium or Chrome
#   make dist                 wheels and sdists of both libraries, in dist
#   make clean                remove what was built (the environment stays: delete .venv to have it set up anew)
# Without NVIDIA's libraries, 4 GB less: make lab CPU=1, make test CPU=1, as an environment grows
# Another Python: make book PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 3
ALL ?=
TORCH ?= newest
CPU ?=
WITH ?=
CHAPTER ?=
LAB_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check
CPU_INDEX := https://download.pytorch.org/whl/cpu
NIGHTLY_INDEX := https://download.pytorch.org/whl/nightly/cpu
CPU_BUILDS = grep '^torch' requirements.txt | $(PIP) --timeout 15 --retries 1 --index-url $(CPU_INDEX) -r /dev/stdin || \
  echo "CPU=1: no PyTorch from $(CPU_INDEX) (see above). The next step takes the builds with NVIDIA's libraries."
HASH := $(shell cat requirements*.txt | cksum | cut -d ' ' -f 1)
# One environment that grows: the marks $(READY)-book, -run and -dev say how far it is. Each stage holds those before it.
READY := $(VENV)/.ready-$(HASH)
# The libraries of this checkout, also where the environment was set up for another one.
export PYTHONPATH := $(CURDIR):$(CURDIR)/virtual-gpus$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: book test test-virtual serve lab run-notebooks pictures links pdf dist clean
.DEFAULT_GOAL := book

$(READY)-book: NEEDS = requirements-book.txt
$(READY)-book: MARKS = $(READY)-book
$(READY)-run: NEEDS = requirements.txt
$(READY)-run: MARKS = $(READY)-book $(READY)-run
$(READY)-dev: NEEDS = requirements-dev.txt
$(READY)-dev: MARKS = $(READY)-book $(READY)-run $(READY)-dev
$(READY)-run $(READY)-dev: FIRST = $(if $(CPU),$(CPU_BUILDS))

$(READY)-book $(READY)-run $(READY)-dev:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || \
	  { echo "$(PYTHON) is not a Python from 3.11 to 3.14; name one: make book PYTHON=python3.12"; exit 1; }
	@echo "Setting up $(VENV): $(NEEDS)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@rm -f $(VENV)/.ready-*
	@$(FIRST)
	$(PIP) -r $(NEEDS)
	@touch $(MARKS)

book: $(READY)-book
	@$(BIN)/python scripts/build_book.py

test: $(READY)-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/oxlint
	$(BIN)/lint-imports --no-cache
	$(BIN)/lint-imports --no-cache --config virtual-gpus/pyproject.toml
	$(BIN)/mypy --config-file virtual-gpus/pyproject.toml virtual-gpus/virtual_gpus
	MGPU_ALL=$(ALL) $(BIN)/python -m pytest --nbval -q -n $(JOBS) --dist loadscope --no-loadscope-reorder --durations 10

test-virtual: PY = .venv-torch-$(TORCH)/bin/python
test-virtual: OF = $(if $(filter newest nightly,$(TORCH)),,==$(TORCH).*)
test-virtual: FROM = $(if $(filter nightly,$(TORCH)),--pre --extra-index-url $(NIGHTLY_INDEX),$(if $(CPU),--extra-index-url $(CPU_INDEX)))
test-virtual:
	@[ -x $(PY) ] || $(PYTHON) -m venv $(PY:/bin/python=)
	$(PY) -m pip install -q --disable-pip-version-check $(FROM) 'torch$(OF)'
	$(PY) -m pip install -q --disable-pip-version-check pytest psutil numpy expecttest hypothesis setuptools matplotlib -e './virtual-gpus$(WITH)'
	cd virtual-gpus && MGPU_ALL=$(ALL) $(CURDIR)/$(PY) -m pytest -q

serve: book
	$(BIN)/python -m http.server 8000 --bind 127.0.0.1 --directory _build/html

lab: $(READY)-run
	$(BIN)/jupyter lab --notebook-dir=. --preferred-dir=chapters $(LAB_ARGS)

run-notebooks: $(READY)-run
	$(BIN)/python scripts/run_notebooks.py $(CHAPTER)

pictures: $(READY)-dev
	$(BIN)/python scripts/take_pictures.py

links: $(READY)-book
	$(BIN)/python scripts/build_book.py links

pdf: $(READY)-dev book
	$(BIN)/python scripts/make_pdf.py

dist: $(READY)-dev
	rm -rf dist
	$(BIN)/python -m build --outdir dist virtual-gpus
	$(BIN)/python -m build --outdir dist .

clean:
	rm -rf _build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info virtual-gpus/*.egg-info
	find mgpu_lib scripts tests virtual-gpus -name __pycache__ -type d -prune -exec rm -rf {} +
