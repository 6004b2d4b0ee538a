# One command for hand, hook and CI. `make` alone lists what there is.
#
# BUDGET   quick (minutes), standard or thorough: how long calibrate and validate may measure
# OUT      folder of results: OUT/calibration, OUT/validation, OUT/report
# PYTHON   interpreter that the virtual environment is made from, 3.11 or newer
# WITHOUT  packages that a wheelhouse leaves out, since they are installed there
# FOR      Python of the machine that a wheelhouse is for, 3.11 or 3.12 (Linux, x86-64)

PYTHON ?= python3
VENV ?= .venv
OUT ?= runs
BUDGET ?= standard
DEVICES ?= 1,2,4,8,16,32,64,128,256,512,1024
PYTEST_FLAGS ?=
# tests/conftest.py says how many processes there are and what runs where, the longest first.
PYTEST := pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# pip leaves compiling to the first start (--no-compile): where nothing compiled may be kept, every
# start would compile torch again.
unexport PYTHONDONTWRITEBYTECODE

RUN := $(VENV)/bin/python -m
PROFILE = $(OUT)/calibration/profile.json
VALIDATION = $(OUT)/validation/validation.json
# Validation knows two budgets.
VALIDATION_BUDGET = $(if $(filter thorough,$(BUDGET)),standard,$(BUDGET))

INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Two measurements at once would measure each other.
.NOTPARALLEL:
.PHONY: help quickstart install wheelhouse doctor calibrate validate report reference site test check fuzz bench record clean

help: ## list these targets
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile
	@echo '  variables: BUDGET=quick|standard|thorough  OUT=folder  PYTHON=python3.11'

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'make: PYTHON must be Python 3.11 or newer; for example: make PYTHON=python3.11' >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -f $(VENV)/bin/python; \
		echo 'make: venv failed; on Debian and Ubuntu: apt install python3-venv' >&2; exit 1; }

$(INSTALLED): pyproject.toml | $(VENV)/bin/python
	@echo 'Installing perfmodel and torch into $(VENV); the first time takes some minutes.'
	@$(RUN) pip install --quiet --quiet --no-compile -e ".[calibrate,report]"
	@touch $@

$(INSTALLED_DEV): pyproject.toml | $(VENV)/bin/python
	@echo 'Installing perfmodel, torch and the test tools into $(VENV); the first time takes some minutes.'
	@$(RUN) pip install --quiet --quiet --no-compile -e ".[dev]"
	@touch $@ $(INSTALLED)

install: $(INSTALLED) ## make the virtual environment and install everything needed to measure

# Torch and torchvision stay behind: their builds belong to the machine's driver. NumPy comes along, and pip
# takes it only where the one that is installed does not do.
WHEELHOUSE = $(OUT)/wheelhouse
FOR ?= 3.11
wheelhouse: $(VENV)/bin/python ## collect perfmodel and its dependencies as wheels, for a machine without a network
	@rm -rf build $(WHEELHOUSE); mkdir -p $(WHEELHOUSE)
	@$(RUN) pip wheel --quiet --no-deps --wheel-dir $(WHEELHOUSE) .
	@$(RUN) pip download --quiet --quiet --only-binary=:all: --implementation cp --python-version $(FOR) \
		--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
		--dest $(WHEELHOUSE) $(WHEELHOUSE)/perfmodel-*.whl psutil
	@rm -f $(foreach name,$(WITHOUT),$(WHEELHOUSE)/$(name)-*.whl)
	@size=$$(du -s --block-size=1000000 $(WHEELHOUSE) | cut -f1); test $$size -le 64 || \
		{ echo "make: $(WHEELHOUSE) must have at most 64 MB, got $$size" >&2; exit 1; }; \
		echo "$(WHEELHOUSE): $$size MB for Python $(FOR). There:"; \
		echo '  python -m pip install --no-index --find-links wheelhouse perfmodel psutil'

# Repeated, it continues where it was interrupted and measures nothing twice. Tables go to OUT/*.txt, so that
# what is read is the end. Gates that the quick budget misses are said there; `make validate` fails on them.
quickstart: BUDGET = quick
quickstart: $(INSTALLED) ## install, calibrate, predict up to 1,024 devices, validate, write a report (3 to 6 minutes)
	@mkdir -p $(OUT)
	@$(RUN) perfmodel doctor > $(OUT)/doctor.txt || true; tail -n 1 $(OUT)/doctor.txt
	@test -f $(PROFILE) || $(RUN) perfmodel calibrate --budget $(BUDGET) --models lenet,resnet18 \
		--out $(OUT)/calibration --resume > $(OUT)/calibrate.txt
	@for model in lenet resnet18; do \
		$(RUN) perfmodel predict --profile $(PROFILE) --workload $$model --devices $(DEVICES) > $(OUT)/predict-$$model.txt || exit $$?; \
	done
	@$(RUN) perfmodel validate --profile $(PROFILE) --budget $(VALIDATION_BUDGET) --soon --out $(OUT)/validation --resume \
		> $(OUT)/validate.txt || { status=$$?; [ $$status -eq 4 ] || exit $$status; }
	@$(RUN) perfmodel report --profile $(PROFILE) --validation $(VALIDATION) --out $(OUT)/report > $(OUT)/report.txt
	@$(RUN) validate.quickstart $(OUT)

doctor: $(INSTALLED) ## say whether this machine is fit to be measured
	$(RUN) perfmodel doctor

calibrate: $(INSTALLED) ## measure this machine by real training -> OUT/calibration/profile.json
	$(RUN) perfmodel calibrate --budget $(BUDGET) --out $(OUT)/calibration --resume

validate: $(INSTALLED) ## judge the predictions by fresh runs; exit code 4 if a gate fails
	$(RUN) perfmodel validate --profile $(PROFILE) --budget $(VALIDATION_BUDGET) --out $(OUT)/validation --resume

report: $(INSTALLED) ## write OUT/report/report.html and its figures
	$(RUN) perfmodel report --profile $(PROFILE) --out $(OUT)/report \
		$$(test -f $(VALIDATION) && echo --validation $(VALIDATION))

reference: $(INSTALLED_DEV) ## write the reference of the Python interface from its docstrings -> OUT/reference
	$(RUN) pdoc --docformat numpy --no-show-source -o $(OUT)/reference perfmodel.api perfmodel.documents perfmodel.errors

site: $(INSTALLED_DEV) ## build the documentation as pages that need no network -> OUT/site
	$(RUN) mkdocs build --quiet --strict -f - -d "$(abspath $(OUT))/site" < docs/mkdocs.yml

test: $(INSTALLED_DEV) ## run all tests
	$(RUN) $(PYTEST) $(PYTEST_FLAGS)

check: $(INSTALLED_DEV) ## format, lint, types, import contracts, tests: what CI runs
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy
	$(VENV)/bin/lint-imports
	$(RUN) $(PYTEST) $(PYTEST_FLAGS)

fuzz: MINUTES = 30
fuzz: $(INSTALLED_DEV) ## attack every reader and command with hostile input for MINUTES
	$(RUN) tests.fuzz $(MINUTES)

bench: $(INSTALLED_DEV) ## time commands, growth and large files -> docs/performance.md
	$(RUN) tests.benchmarks.scale

record: $(INSTALLED_DEV) ## keep OUT as docs/records
	$(RUN) tests.benchmarks.record --runs $(OUT)

clean: ## delete caches and build products; results and the virtual environment stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage
	find perfmodel calibrate validate tests -name __pycache__ -type d -prune -exec rm -rf {} +
