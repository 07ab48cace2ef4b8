# Everything runs in .venv, which is created from uv.lock; uv is installed into .uv if the machine has none.
SHELL := /bin/sh
PYTHON ?= python3
export UV_PYTHON_PREFERENCE ?= system
UV := $(shell command -v uv 2>/dev/null || echo .uv/bin/uv)
RUN := .venv/bin
NAME ?= demo
# The folder of results.
export DPGEN_RESULTS ?= results

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format lint types tests test-portable portable docs pages browser test-slow test-gpu tables tables-check report sweep bench bench-scaling gpu-day wheelhouse clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: .venv/.locked ## create the virtual environment from the lock file

.venv/.locked: pyproject.toml uv.lock | $(UV)
	$(UV) sync --locked --compile-bytecode --python $(PYTHON)
	@touch $@

.uv/bin/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "dpgen_bench needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv .uv
	.uv/bin/pip install --quiet uv

demo: setup ## execute the runs of the demo table, on digits that need no download, and write the table (seven minutes)
	$(RUN)/dpgen sweep demo
	$(RUN)/dpgen tables demo

sweep: setup ## execute the runs that a table lacks: make sweep NAME=demo
	$(RUN)/dpgen sweep $(NAME)

tables: setup ## write every table and plot to results/tables and results/plots, and the tables of pages, from records alone
	$(RUN)/dpgen tables --all --recorded
	$(RUN)/python docs/make_results.py
	$(RUN)/python docs/make_league.py
	$(RUN)/python docs/make_searches.py
	$(RUN)/python docs/make_reproduced.py
	$(RUN)/python docs/make_claims.py
	$(RUN)/python docs/make_published_epsilons.py
	$(RUN)/python docs/make_method_epsilons.py
	$(RUN)/python docs/make_picture.py

tables-check: setup ## make the tables again from the records alone, and compare them with the committed ones
	folder=$$(mktemp -d) && $(RUN)/dpgen tables --all --recorded --no-plots --results $$folder && \
	  diff -r -x 'demo.*' $$folder/tables results/tables && rm -r $$folder

report: setup ## write all results to one HTML file, results/report.html
	$(RUN)/dpgen report

check: setup format lint types tests ## format, lint, check types and run fast tests, before a commit

test: setup ## run what CI runs: formatting, lint, types, documentation, fast tests, and numeric tests with perturbed rounding
	$(RUN)/ruff format --check .
	$(MAKE) lint types pages tests portable tables-check

pages: setup ## build the documentation into site/; a broken link or an undocumented public name is an error
	NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build --strict

docs: pages ## build the documentation, and put the report of the records into site/
	$(RUN)/dpgen report --recorded --out site/report.html

format:
	$(RUN)/ruff format .

lint:
	$(RUN)/ruff check .

types:
	$(RUN)/mypy -p dpgen_bench -p methods

tests:
	$(RUN)/python -m pytest -q -n auto --dist loadscope --durations=10

# Tests that compute with networks, except those that replay or account whole runs, which take most of the time.
NUMERIC := $(patsubst %,tests/test_%.py,annealing audit_bounds audit_oracle augmentation batch_statistics behaviour bias_variance \
	calibrated_accuracy classifier_cache classifiers clip_per_tensor compiled copies datalens dp_cgan dp_gauss dp_hp \
	dp_merf dp_ntk dp_sinkhorn dp_sinkhorn_privacy dpdm dpgan dpgan_settings edm factors fed_gs_wgan fed_gs_wgan_client \
	fedavg_gan fedavg_nets fidelity g_pate generator gradients gradients_bound gradients_limits gs_wgan gs_wgan_privacy \
	hermite inception_score kid learning_law memorisation nets network_training networks noise_ahead padding pate_gan prdc \
	precision pretraining privacy_core processes psg record_rng record_rng_mechanisms shrinkage spectral stack step_frequency \
	transport utility wgan_nets)
NOT_NUMERIC := conform or detected or half_its_noise or published_setting or presets or few_images
PERTURB ?= 1

test-portable: setup portable ## run numeric tests with perturbed rounding, as on another machine; PERTURB=2 for another one

portable:
	$(RUN)/python -m pytest -q -n auto --dist loadscope --perturb $(PERTURB) -k "not ($(NOT_NUMERIC))" $(NUMERIC)

test-slow: setup ## run the tests that take minutes
	$(RUN)/python -m pytest -q -m slow --ignore tests/test_ray.py
	$(RUN)/python -m pytest -q -m slow tests/test_ray.py  # on its own, because tests must not fork a process that uses Ray

test-gpu: setup ## run the tests that need a GPU
	$(RUN)/python -m pytest -q -m gpu

bench: setup ## measure speed, as ratios within one process, into results/bench
	$(RUN)/python -m tests.bench

bench-scaling: setup ## measure how cost grows with records, batch, image side, width, shards, clients and workers
	$(RUN)/python -m tests.scaling

gpu-day: setup ## on a GPU: its tests, the bench and the papers' headline runs, which can be resumed; else the plan
	$(RUN)/python -m tests.gpu_day --results $(DPGEN_RESULTS)

wheelhouse: setup ## collect wheels, MNIST and FID weights for a machine without network, in wheelhouse/
	$(RUN)/python -m dpgen_bench.wheelhouse.collect wheelhouse --data mnist fashion_mnist --weights

browser: ## install Chromium for the tests of the report, if the machine has no browser (Debian and Ubuntu, as root)
	@command -v chromium || command -v chromium-browser || command -v google-chrome || \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get; then \
	    (apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends chromium) || \
	      echo "Chromium cannot be installed: the tests of the report in a browser will be skipped."; \
	  else echo "No browser is installed: the tests of the report in a browser will be skipped."; fi

clean: ## remove the environment and caches, but no results
	rm -rf site .venv .uv .pytest_cache .ruff_cache .mypy_cache .hypothesis
