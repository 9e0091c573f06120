# make lab        from a fresh clone to JupyterLab on your copies of the chapters
# make test       from a fresh clone to all tests passed: first those in a browser, then all others in two processes
# make notebooks  (authors) rebuild chapters/ and solutions/ from chapters/source/
# Each sets up .venv and fetches the model when they are not there yet; the second time that takes seconds.
#
# Variables, for example `make lab PYTHON=python3.12`:
#   PYTHON       the Python that makes .venv (3.11 or newer)
#   EXTRAS       the extras of pyproject.toml that are installed
#   TORCH_BUILD  cpu: the CPU build of torch where the package index offers one, else its default build;
#                default: what the index calls torch (on Linux usually with CUDA, several GB). Decides in a new .venv only.
#   TORCH_INDEX  address of one more package index to look for torch in; none unless you name one

PYTHON ?= python3
EXTRAS ?= course,serve,dev
TORCH_BUILD ?= cpu
TORCH_INDEX ?=

VENV := .venv
ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
else
BIN := $(VENV)/bin
endif
READY := $(VENV)/ready.txt
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PIP_TORCH := $(PIP_INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(shell grep '^torch==' constraints.txt)
# Only an index without that build leads to the default one: after any other failure gigabytes might come unasked.
TRY_CPU_TORCH := said=$$($(PIP_TORCH)+cpu 2>&1) || { \
  case "$$said" in *"No matching distribution"*) ;; *) echo "$$said" >&2; exit 1;; esac; \
  echo "The package index offers no CPU build of torch: taking its default build."; $(PIP_TORCH); }

.DEFAULT_GOAL := help
.PHONY: help setup model lab test notebooks

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

setup: $(READY)

# Scripts in a .venv carry its path, so one that was moved or copied is as broken as one whose Python is gone.
# ready.txt says for which folder the set-up was finished.
ifneq ($(wildcard $(READY)),)
ifneq ($(shell cat $(READY)),$(CURDIR))
BROKEN := was set up in another folder ($(shell cat $(READY)))
else ifneq ($(shell $(BIN)/python -c "import pip; print('runs')" 2>&1),runs)
BROKEN := has a Python that does not run any more
endif
endif
ifdef BROKEN
.PHONY: $(READY)
endif

# torch comes first and alone, so that its build can be chosen; the rest then finds it installed. Our own package is built
# with the pinned setuptools from .venv, not in an isolated environment, which would ignore the pins.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
	  { echo "'$(PYTHON)' is not a Python 3.11 or newer; name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(if $(BROKEN),echo "$(VENV) $(BROKEN): it is made anew."; rm -rf $(VENV))
	@$(BIN)/python -c "import pip" 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@rm -f $(READY)
	@echo "Installing torch and the rest of constraints.txt into $(VENV): a few minutes the first time."
	@$(if $(filter default,$(TORCH_BUILD)),$(PIP_TORCH),$(TRY_CPU_TORCH))
	@$(PIP_INSTALL) setuptools
	@$(PIP_INSTALL) --no-build-isolation -e ".[$(EXTRAS)]"
	@echo "$(CURDIR)" > $(READY)

model: $(READY)
	@$(BIN)/llmfromscratch models --fetch smollm2-135m-instruct

lab: model
	$(BIN)/llmfromscratch lab

test: model
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m browser
	$(BIN)/python -m pytest -m "not browser" -n 2 --dist loadfile

notebooks: model
	$(BIN)/python -m llmfromscratch.course.authoring.builder
