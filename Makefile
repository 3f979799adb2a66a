# Every target sets up what it needs from nothing; Python 3.11 or newer is all it asks for.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
KERNELS := $(VENV)/.kernels
TORCH ?= torch==2.13.0
PIP_OPTIONS := --quiet --disable-pip-version-check --no-compile

# What one process compiles, the next need not: bytecode is written, whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE

# Packages, or parts of them, of which little or nothing is ever imported.
RARE := tests|testing|_inductor|transformers|ray|selenium|networkx|pip|setuptools|pygments|mypyc?
RARE := $(RARE)|aiohttp|narwhals|plotly|pymdownx|pytorch_lightning

.PHONY: setup bytecode demo browser test test-all lint types docs types-and-docs docs-serve check
.PHONY: check-oldest format clean

setup: $(KERNELS)

# torch comes first and alone: the exact version resolves to the CPU build where one is configured,
# and keeps the packages that depend on torch from choosing another. pip keeps one core busy; the
# other compiles torch meanwhile (without bytecode every import takes twice as long where Python may
# write none), then the kernels, which need no more than the package's own dependencies.
COMPILE := $(BIN)/python -m compileall -qq -x '/($(RARE))/'
COMPILE_KERNELS := $(BIN)/python -m heterog.simulator.compile_kernels
INSTALL := $(BIN)/python -m pip install $(PIP_OPTIONS) "$(TORCH)"
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL)
	$(COMPILE) $(VENV)/lib/python3*/site-packages/torch & $(INSTALL) -e .; code=$$?; wait; exit $$code
	$(COMPILE_KERNELS) & kernels=$$!; $(INSTALL) -e ".[zoo,dev,docs]" && wait $$kernels
	touch $@ $(KERNELS)

# The other packages and ours; what is rare is compiled when it is imported. Some packages carry
# templates that are no Python; those stay as they are.
bytecode: $(STAMP)
	$(COMPILE) --workers 2 $(VENV)/lib heterog || true

# Compiled on time, if not already beside the installation; otherwise the first plan would do it
# (heterog/lowering/kernels.py).
KERNEL_FILES := $(shell find heterog/lowering heterog/pricing heterog/simulator -name "*.py")
$(KERNELS): $(STAMP) $(KERNEL_FILES)
	@test -e $@ && test -z "$$(find $(KERNEL_FILES) -newer $@)" || $(COMPILE_KERNELS)
	@touch $@

demo: $(KERNELS)
	$(BIN)/heterog plan bert_large_24l --cluster paper_8gpu --budget 10s -o plan.json --trace trace.json --report plan.html

# What the tests of the report drive; without it they skip and say so.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null \
	|| { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq \
	     && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	        chromium chromium-driver >/dev/null; } \
	|| echo "no Chromium here, and none can be installed: the report's browser tests will skip"

test: $(KERNELS) browser
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not thorough"

# Also what only repeats: every parameter, and as many random cases as were ever drawn.
test-all: $(KERNELS) browser
	HETEROG_THOROUGH=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP)
	$(BIN)/mypy --num-workers 2

# Stops at a broken link or anchor, a page that nothing leads to, and a public name without a
# docstring. The site is build/website/site/index.html; nothing in it comes from other servers.
docs: $(STAMP)
	$(BIN)/python -m website.stage
	$(BIN)/zensical build --strict --clean

docs-serve: docs
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/website/site 8000

# Types and the site are read beside the tests, in the time in which these wait for something: a
# tenth of a core on two.
check:
	$(MAKE) --jobs 2 setup browser lint
	$(MAKE) bytecode
	$(MAKE) --jobs 2 test types-and-docs

types-and-docs:
	nice -n 10 $(MAKE) types docs

# The oldest versions that pyproject.toml allows, of all but torch, in a folder of their own: what a
# person has who installs into an environment that is there. Outside CI, as it takes long to install.
OLDEST := .venv-oldest
OLDEST_TESTS := tests/envs tests/agents tests/cluster tests/graph tests/report tests/simulator \
	tests/test_cli.py tests/test_cli_listing.py tests/test_cli_outputs.py
check-oldest: pyproject.toml
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(PYTHON) tests/oldest.py > $(OLDEST)/oldest.txt
	$(OLDEST)/bin/python -m pip install $(PIP_OPTIONS) "$(TORCH)"
	$(OLDEST)/bin/python -m pip install $(PIP_OPTIONS) -c $(OLDEST)/oldest.txt -e ".[zoo,contrib]" \
		"pytest>=8.3" "pytest-xdist>=3.6" "hypothesis>=6.115"
	$(OLDEST)/bin/python -m pytest -n 2 --dist loadfile -m "not thorough and not distributed" \
		$(OLDEST_TESTS)

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) $(OLDEST) build *.egg-info plan.json plan.html trace.json
