# make setup       .venv with the package, CPU torch and the developer's tools
# make model       models/smollm2-135m, a real small model
# make quickstart  setup, model, and the main job
# make test        setup, model, lint and every test
#
# Python 3.10 to 3.12; another one than python3: make PYTHON=python3.11 setup.
# torch==2.13.0 is a CUDA build of several GB on some package indexes. Name an index that has the CPU build in the
# environment and pip prefers it: export PIP_EXTRA_INDEX_URL=<index of CPU builds>.

PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
MODEL := models/smollm2-135m
CORE012 := .core012
PYTEST := $(BIN)/python -m pytest

SETUP := $(VENV)/.setup-done
CORE012_DONE := $(CORE012)/.done
MODEL_DONE := $(MODEL)/config.json
# The tests that build or train a model, found by what they import; not those that compare whole runs with TRL, which take their time.
CORE_TESTS = $(shell grep -lE 'mindspeed_odpo(\.| import )(engine|hosts|roles|hf\.(config|weights)|device|train)' tests/ut/test_*.py | grep -v -e test_launch -e test_trl_parity)

.PHONY: setup model quickstart test lint format unit system test-core012 clean
.DELETE_ON_ERROR:

setup: $(SETUP)

# A .venv that was left half-made (no python, no pip) is made anew; a whole one is brought up to date.
$(SETUP): setup.py pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' || \
		{ echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1), 3.10 to 3.12 is needed: make PYTHON=python3.11 setup"; exit 1; }
	@$(BIN)/python -m pip --version 2>/dev/null | grep -q "^pip " || { rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); } || { \
		echo "no ensurepip here: taking pip from $(PYTHON)"; rm -rf $(VENV); \
		$(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip setuptools wheel; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[standalone,dev]' -c constraints.txt
	@touch $@

model: $(MODEL_DONE)

# Not newer than $(SETUP): a new version of ours does not make the weights stale.
$(MODEL_DONE): | $(SETUP)
	$(BIN)/odpo convert smollm2 --out $(MODEL)

quickstart: $(SETUP) $(MODEL_DONE)
	$(BIN)/python ray_gpt.py --config-name online_dpo_quickstart_smollm2

test: lint unit system test-core012

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(SETUP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

unit: $(SETUP) $(MODEL_DONE)
	$(PYTEST) tests/ut --cov

system: $(SETUP) $(MODEL_DONE)
	$(PYTEST) tests/st

# megatron-core 0.12.1, the version of MindSpeed-LLM 2.2 and later, in front of the installed one; without the 65 packages it declares.
$(CORE012_DONE): $(SETUP)
	rm -rf $(CORE012)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(CORE012) megatron-core==0.12.1
	@touch $@

test-core012: $(CORE012_DONE)
	PYTHONPATH=$(CURDIR)/$(CORE012) $(BIN)/python -c 'import megatron.core as core; assert core.__version__ == "0.12.1", core.__version__'
	PYTHONPATH=$(CURDIR)/$(CORE012) $(PYTEST) $(CORE_TESTS)

clean:
	rm -rf $(VENV) $(CORE012) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
