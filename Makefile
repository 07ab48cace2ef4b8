# Everything runs in .venv, made from uv.lock; uv itself is put into .uv if the machine has none.
SHELL := /bin/sh
PYTHON ?= python3
export UV_PYTHON_PREFERENCE ?= system
UV := $(shell command -v uv 2>/dev/null || echo .uv/bin/uv)
RUN := .venv/bin
NAME ?= demo
# Where results go; the tests and a sweep of one's own may set another place.
export DPGEN_RESULTS ?= results

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format lint types tests test-portable portable test-slow test-gpu tables report sweep bench clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: .venv/.locked ## the virtual environment, from the lock file

.venv/.locked: pyproject.toml uv.lock | $(UV)
	$(UV) sync --locked --compile-bytecode --python $(PYTHON)
	@touch $@

.uv/bin/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "dpgen_bench needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv .uv
	.uv/bin/pip install --quiet uv

demo: setup ## a real sweep on the embedded digits, then its table (about six minutes; again: seconds)
	$(RUN)/dpgen sweep demo
	$(RUN)/dpgen tables demo --overwrite

sweep: setup ## launch what a table lacks: make sweep NAME=demo
	$(RUN)/dpgen sweep $(NAME)

tables: setup ## regenerate every table and plot into results/tables and results/plots
	$(RUN)/dpgen tables --all

report: setup ## everything under results/ as one HTML file, results/report.html
	$(RUN)/dpgen report

check: setup format lint types tests ## before a commit: format, lint, types, fast tests

test: setup ## what CI runs: formatting, lint, types, the fast test suite, its numeric tests perturbed
	$(RUN)/ruff format --check .
	$(MAKE) lint types tests portable

format:
	$(RUN)/ruff format .

lint:
	$(RUN)/ruff check .

types:
	$(RUN)/mypy -p dpgen_bench -p methods

tests:
	$(RUN)/python -m pytest -q -n auto --dist loadscope --durations=10

# The tests that compute with networks, but for those that replay or account whole runs, which take most of the time.
NUMERIC := $(patsubst %,tests/test_%.py,batch_statistics behaviour bias_variance calibrated_accuracy \
	classifier_cache classifiers dp_merf dp_sinkhorn dp_sinkhorn_privacy dpgan dpgan_settings fed_gs_wgan \
	fed_gs_wgan_client fedavg_gan fedavg_nets fidelity generator gradients gradients_bound gradients_limits gs_wgan \
	gs_wgan_privacy inception_score kid memorisation nets network_training networks prdc privacy_core record_rng \
	record_rng_mechanisms spectral stack step_frequency transport utility wgan_nets)
NOT_NUMERIC := conform or caught or published_setting or presets or few_images
PERTURB ?= 1

test-portable: setup portable ## numeric tests with rounding as on another machine: make test-portable PERTURB=2

portable:
	$(RUN)/python -m pytest -q -n auto --dist loadscope --perturb $(PERTURB) -k "not ($(NOT_NUMERIC))" $(NUMERIC)

test-slow: setup ## tests that take minutes
	$(RUN)/python -m pytest -q -m slow

test-gpu: setup ## tests that need an accelerator
	$(RUN)/python -m pytest -q -m gpu

bench: setup ## speed, as ratios measured in one process, into results/bench
	$(RUN)/python -m tests.bench

clean: ## remove the environment and caches, never results
	rm -rf .venv .uv .pytest_cache .ruff_cache .mypy_cache .hypothesis
