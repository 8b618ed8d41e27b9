# make quickstart | quickstart-vl | quickstart-audio | test | layers | browser | numeric | chain | newest | oracles | peers | gpu
#      registry | gpu-reduced | gpu-image | format | fcheck | docs | docs-live | dbuild | dpush | constraints
# All targets use .venv, which is created with the first Python >= 3.10 on PATH. The tests of SGLang use .venv-sglang, which
# extends .venv. Each requirements file is installed once, and again when it changes.
VENV ?= .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.installed-core
DEV := $(VENV)/.installed-dev
VISION := $(VENV)/torchvision/.installed
SGLANG := $(VENV)-sglang
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
CHECKED := lightrft
SOURCES := lightrft examples benchmarks $(wildcard docs/*.py) setup.py conftest.py
ARGS ?=
# Two workers, each with whole modules, in the order of conftest.py. The twenty slowest tests are reported.
PYTEST_ARGS ?= -q -n 2 --dist loadfile --no-loadscope-reorder --durations 20
ENGINE ?= vllm
# Name and version of the image; dpush needs the registry in front: IMAGE_NAME=HOST/NAME/lightrft:VERSION.
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' lightrft/__init__.py)
IMAGE_NAME ?= lightrft:$(VERSION)$(if $(filter-out vllm,$(ENGINE)),-$(ENGINE))
GPU = $(VENV)-gpu$(if $(filter-out vllm,$(ENGINE)),-$(ENGINE))

.DEFAULT_GOAL := help
.PHONY: help quickstart quickstart-vl quickstart-audio test layers registry browser numeric chain chain-answers chain-agents chain-whole newest oracles peers gpu gpu-reduced gpu-image format fcheck docs docs-live dbuild dpush constraints

help:
	@head -3 $(firstword $(MAKEFILE_LIST)) | sed 's/^# //'

quickstart: $(CORE)
	PYTHON="$(abspath $(BIN)/python)" bash examples/quickstart/run_quickstart.sh $(ARGS)

quickstart-vl: $(VISION)
quickstart-audio: $(CORE)
quickstart-vl quickstart-audio: quickstart-%:
	PYTHON="$(abspath $(BIN)/python)" bash examples/quickstart_$*/run_quickstart_$*.sh $(ARGS)

# Bytecode is always cached. Otherwise each of the many processes would compile lightrft again.
test: $(DEV) $(SGLANG)/.installed
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest $(PYTEST_ARGS) $(ARGS)

# What a change of names or imports breaks first.
layers: $(DEV)
	$(BIN)/python -m pytest -q lightrft/tests/test_layering.py lightrft/tests/test_docs.py $(ARGS)

# What the package registry resolves for the sets in constraints/. It waits for the network, so CI runs it beside others.
registry: $(DEV)
	$(BIN)/python -m pytest -q -m whole lightrft/tests/test_installs.py $(ARGS)

# The browser of the tests of report.html. Without one they are skipped; in CI they fail.
browser:
	command -v chromium || command -v chromium-browser || command -v google-chrome || \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; }

# The numeric tests again, as on another CPU: with other vector instructions and two threads. Tests of files, logs, signals,
# alarms, plans of batches and the order of prompts are not numeric. oneDNN must be limited too: on CPUs with AMX it packs
# bfloat16 for attention, for which torch then lacks the instructions.
NOT_NUMERIC := $(addprefix trainer/tests/test_,frozen_model garbage hub_files offloader prompt_source batch_plan \
  resumed_options run_log sample_recorder session tripwires) \
  $(addprefix models/tests/test_,foreign_folders tokenizer weight_files)
OTHER := import torch; print("avx2" if torch.backends.cpu.get_cpu_capability() != "AVX2" else "default")
numeric: $(DEV)
	ATEN_CPU_CAPABILITY=$$($(BIN)/python -c '$(OTHER)') ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive \
	  $(BIN)/python -m pytest $(PYTEST_ARGS) -m "not engine and not dist and not slow" \
	  $(patsubst %,--ignore lightrft/%.py,$(NOT_NUMERIC)) $(addprefix lightrft/,ops algorithms models trainer) $(ARGS)

# Everything that learns from answers, on one seed: it ends with an error if one of them misses its aim. Its student is at
# its teacher after two epochs, a third of those of the docs. The examples of agents, which learn from nothing. And the
# tests of whole quickstarts that see and hear, of the examples that train on pairs, of further families in vLLM, and of
# every command of docs/word_for_word.md. About twenty minutes; `make -j2 chain` runs two at once, each on one core.
chain: chain-answers chain-agents chain-whole

chain-answers: $(DEV)
	$(BIN)/python -W ignore benchmarks/preference_chain.py --seeds 1 --student_epochs 2 $(ARGS)

chain-agents: $(DEV)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -q -m whole --durations 4 lightrft/tests/test_agent_examples.py

chain-whole: $(DEV)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -q -m whole --durations 5 \
	  lightrft/tests/test_quickstart_vl.py lightrft/tests/test_quickstart_hybrid.py lightrft/tests/test_examples.py \
	  lightrft/tests/test_openrlhf_loops.py lightrft/tests/test_word_for_word.py lightrft/rollout/tests/test_vllm_ranks.py \
	  lightrft/rollout/tests/test_vllm_families.py

# The newest transformers, in a folder of its own before the rest, and the suite without engines, which hold it back.
# Releases of torch without a build for CPUs cannot be tried here.
newest: $(DEV)
	rm -rf $(VENV)/newest
	$(PIP) --no-deps --target $(VENV)/newest transformers huggingface_hub tokenizers
	PYTHONPATH="$(abspath $(VENV)/newest):$(CURDIR):$$PYTHONPATH" OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} \
	  $(BIN)/python -m pytest $(PYTEST_ARGS) -m "not engine and not whole" $(ARGS)

oracles: $(VENV)/oracles/.installed
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -W ignore benchmarks/oracles.py $(ARGS)

# Side by side with TRL's GRPO, on CPUs.
peers: $(VENV)/oracles/.installed
	$(BIN)/python -W ignore benchmarks/peers.py $(ARGS)

# The engine, DeepSpeed, Liger's kernels, TRL and pytest are installed in an environment of their own, one per ENGINE.
# With PYTHON, the Python at hand measures and nothing is installed. OUT: folder of the results and the page.
gpu: $(if $(PYTHON),,$(GPU)/.installed)
	$(or $(PYTHON),$(GPU)/bin/python) -m benchmarks.gpu $(if $(MINUTES),--minutes $(MINUTES)) $(if $(OUT),--out "$(OUT)") $(ARGS)

# TRL takes part where `make oracles` has put it. ENGINE=sglang measures in the environment of the tests of SGLang, whose
# kernels have a stand-in there.
REDUCED = $(if $(filter sglang,$(ENGINE)),$(SGLANG),$(VENV))
gpu-reduced: $(if $(PYTHON),,$(DEV) $(if $(filter sglang,$(ENGINE)),$(SGLANG)/.installed))
	PYTHONPATH="$(VENV)/oracles:$(if $(filter sglang,$(ENGINE)),lightrft/tests/support/sglang_cpu_shim:)$$PYTHONPATH" \
	  $(or $(PYTHON),$(REDUCED)/bin/python) -m benchmarks.gpu --reduced $(if $(OUT),--out "$(OUT)") $(ARGS)

# The Python of a machine without a network, for a short stay on its GPU: what measures there can be tried here first.
IMAGE := $(VENV)-gpu-image
gpu-image: $(IMAGE)/.installed
	@echo "Measure with it: make gpu-reduced PYTHON=$(IMAGE)/bin/python"

format: $(DEV)
	$(BIN)/yapf --in-place --recursive --parallel $(wildcard $(SOURCES))

fcheck: $(DEV)
	$(BIN)/flake8 $(wildcard $(SOURCES))
	$(BIN)/mypy $(CHECKED)

docs: $(DEV)
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo "The pages: $(CURDIR)/docs/_build/html/index.html"

docs-live: $(DEV)
	$(BIN)/sphinx-autobuild --watch lightrft --ignore "docs/generated/*" docs docs/_build/html

dbuild:
	docker build --build-arg ENGINE=$(ENGINE) --tag $(IMAGE_NAME) .

dpush:
	docker push $(IMAGE_NAME)

# Each set is resolved for Python 3.11, then for 3.12, which keeps every version that both can use. Packages that are
# already in a file keep their version as long as it fits. SGLang's wheels need glibc 2.34.
RESOLVE = $(BIN)/uv pip compile setup.py --quiet --no-annotate --custom-compile-command "make constraints" \
  --python-platform x86_64-manylinux_2_34 \
  --extra deepspeed --extra liger --extra bitsandbytes --extra vl --extra audio --extra video --extra wandb --extra trackio
constraints: $(DEV)
	for python in 3.11 3.12; do \
	  $(RESOLVE) --python-version $$python --output-file constraints/core.txt && \
	  $(RESOLVE) --python-version $$python --extra vllm --output-file constraints/vllm.txt && \
	  $(RESOLVE) --python-version $$python --extra sglang --output-file constraints/sglang.txt || exit 1; \
	done

$(BIN)/python:
	@for python in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then \
	    echo "$$python -m venv $(VENV)"; exec $$python -m venv $(VENV); \
	  fi; \
	done; echo "lightrft needs Python >= 3.10, none found on PATH" >&2; exit 1

$(CORE): requirements.txt setup.py | $(BIN)/python
	@echo "Installing PyTorch, transformers and the rest of requirements.txt in $(VENV): about 1.6 GB, some minutes, once"
	$(subst --quiet,,$(PIP)) -r requirements.txt
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(DEV): requirements-dev.txt requirements-vllm.txt $(CORE) | $(VISION)
	@echo "Installing what the tests need in $(VENV), vLLM among it: several GB, some minutes, once"
	$(PIP) -r requirements-dev.txt
	$(PIP) --no-deps -r requirements-vllm.txt
	@touch $@

# torchvision in a folder of its own, that every process of the environment finds: examples/torchvision_on_cpu.py
PURELIB := import sysconfig; print(sysconfig.get_path("purelib"))
$(VISION): requirements-vision.txt examples/torchvision_on_cpu.py $(CORE)
	$(PIP) --no-deps --upgrade --target $(VENV)/torchvision -r requirements-vision.txt
	cp examples/torchvision_on_cpu.py $(VENV)/torchvision/
	printf '%s\n' ../../../torchvision 'import torchvision_on_cpu' \
	  > "$$($(BIN)/python -c '$(PURELIB)')/torchvision_on_cpu.pth"
	@touch $@

$(GPU)/.installed: constraints/$(ENGINE).txt requirements-oracles.txt requirements-dev.txt setup.py | $(BIN)/python
	$(BIN)/python -m venv $(GPU)
	$(GPU)/bin/python -m pip install --quiet -c constraints/$(ENGINE).txt -e ".[$(ENGINE),deepspeed,liger]" \
	  $(shell grep -hE "^pytest(-timeout)?==" requirements-dev.txt)
	$(GPU)/bin/python -m pip install --quiet --no-deps $(shell grep -h ^trl== requirements-oracles.txt)
	@touch $@

$(IMAGE)/.installed: requirements-gpu-image.txt
	$(or $(PYTHON),python3.12) -m venv $(IMAGE)
	$(IMAGE)/bin/python -m pip install --quiet --disable-pip-version-check --no-cache-dir -r requirements-gpu-image.txt
	@touch $@

$(VENV)/oracles/.installed: requirements-oracles.txt | $(DEV)
	$(PIP) --no-deps --upgrade --target $(VENV)/oracles -r requirements-oracles.txt
	@touch $@

# What vLLM needs for LLaVA and Mistral, in a folder that their test alone reads.
$(VENV)/mistral/.installed: requirements-mistral.txt | $(DEV)
	$(PIP) --no-deps --upgrade --target $(VENV)/mistral -r requirements-mistral.txt
	@touch $@

$(SGLANG)/.installed: requirements-sglang.txt | $(DEV)
	$(BIN)/python -m venv --clear --without-pip $(SGLANG)
	$(BIN)/python -m pip --python $(SGLANG)/bin/python install --quiet --disable-pip-version-check --no-compile --no-deps \
	  -r requirements-sglang.txt
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(PURELIB)')')" \
	  > "$$($(SGLANG)/bin/python -c '$(PURELIB)')/venv.pth"
	@touch $@
