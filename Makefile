# make train | make test | make test-all: each makes its environment in .venv first; env-trl adds one with TRL, which
# the slow parity tests compare with.
PYTHON ?= python3
VENV   := .venv
TRL    := .venv-trl
PY     := $(VENV)/bin/python
ARGS   ?=
# Tests run side by side, one thread each; see tests/conftest.py. Slow ones by file: many share runs of their file.
JOBS   ?= 2

.PHONY: env env-trl train test test-all lint typecheck clean

env: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --progress-bar off -c constraints.txt -e ".[dev]" 2>&1 | grep -v "^WARNING: Location" || true
	@$(PY) -c "import lmtrain, torch, lightning, transformers, pytest"
	@touch $@

# TRL alone, on top of the packages of .venv: all that it requires is there.
env-trl: $(TRL)/.installed

$(TRL)/.installed: $(VENV)/.installed
	@test -x $(TRL)/bin/python || $(PY) -m venv $(TRL)
	@$(PY) -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  > "$$($(TRL)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/lmtrain_packages.pth"
	$(TRL)/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off --no-deps -c constraints.txt trl 2>&1 | grep -v "^WARNING: Location" || true
	@$(TRL)/bin/python -c "from trl import DPOTrainer, SFTTrainer"
	@touch $@

train: env
	$(PY) -m lmtrain.train $(ARGS)

test: env lint typecheck
	$(PY) -m pytest -q -n $(JOBS) -m "not slow and not gpu" $(ARGS)

test-all: env env-trl
	$(PY) -m pytest -q -n $(JOBS) --dist loadfile -m "slow" $(ARGS)

lint: env
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

typecheck: env
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) $(TRL) .pytest_cache .mypy_cache .ruff_cache dist build
