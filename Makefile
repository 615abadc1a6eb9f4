# make demo: install into .venv and let the shipped model tell a story.   make test: run the tests.
# make check: format, lint, types, and C++ warnings as errors.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
NATIVE := pyproject.toml CMakeLists.txt vm/codegen.py vm/config.py vm/constants.py vm/isa.py \
          vm/operands.py vm/program.py vm/tensors.py \
          $(wildcard vm/*.hpp vm/cpu/* vm/verify/*pp server/*.cpp scheduler/engine/*.cpp instructions/*/__init__.py instructions/*/*.hpp)

.PHONY: demo test check clean

demo: $(STAMP)
	$(BIN)/megavm generate stories "Once upon a time" --echo --max-tokens 160 --seed 7 --stream

test: $(DEV_STAMP)
	BIN=$(BIN) scripts/test

check: $(DEV_STAMP)
	BIN=$(BIN) scripts/check

# PIP_EXTRA_ARGS: for machines that get their packages in another way.
# WERROR=ON: warnings are errors in the C++ that is installed, too, so that `make check` need not compile it again.
DEFINES := $(if $(WERROR),-C cmake.define.MEGAVM_WERROR=$(WERROR))

$(STAMP): $(NATIVE) constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt $(PIP_EXTRA_ARGS) \
	    "scikit-build-core>=0.11" "pybind11>=2.13" "cmake>=3.21" ninja
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt $(PIP_EXTRA_ARGS) \
	    $(DEFINES) --no-build-isolation -e .
	touch $@

$(DEV_STAMP): $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt $(PIP_EXTRA_ARGS) \
	    $(DEFINES) --no-build-isolation -e ".[dev]"
	touch $@ $(STAMP)
	touch $@

clean:
	rm -rf build $(STAMP) $(DEV_STAMP)
