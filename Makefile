# `make demo` shows the main job, `make test` builds and tests everything; `make help` lists more.
#
# Every run configures anew (about a second): so the CPU is detected again, and a tree that moved
# to another machine rebuilds itself for it.
SHELL := /bin/bash
.DEFAULT_GOAL := release
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

JOBS ?= $(shell nproc)
PYTHON ?= python3
CTEST_FLAGS ?=
export JOBS
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)

SOURCES = $(shell find src apps tests bench -name '*.cc' -o -name '*.h' 2>/dev/null | sort)

.PHONY: help
help:  ## List the targets
	@grep -hE '^[a-z -]+:.*## ' Makefile | sed -E 's/^([a-z-]+).*## /\1\t/' | \
	  awk -F'\t' '{ printf "  make %-12s %s\n", $$1, $$2 }'

.PHONY: release debug
release debug: deps  ## Build the program: build/release/bin/hcache (or build/debug/…)
	@scripts/build.sh $@

.PHONY: demo
demo: release  ## Show the main job on the default model
	@HCACHE_MODEL="$${HCACHE_MODEL:-$$($(MAKE) -s print-model)}" scripts/demo.sh

.PHONY: serve
serve: release  ## Serve the default model with its page on http://127.0.0.1:8080
	@HCACHE_MODEL="$${HCACHE_MODEL:-$$($(MAKE) -s print-model)}" build/release/bin/hcache serve

.PHONY: test
test: deps  ## Build everything and run all tests, the format and the layering check
	@scripts/build.sh release
	@scripts/run_tests.sh release $(CTEST_FLAGS)
	@$(MAKE) check-format check-layering

.PHONY: test-clients
test-clients: release build/clients/ready  ## Run official clients, made-up requests and an S3 server against it
	@build/clients/bin/python tests/e2e/clients_test.py build/release/bin/hcache
	@build/clients/bin/python tests/e2e/openapi_test.py build/release/bin/hcache
	@HCACHE_TEST_MOTO=build/clients/bin/moto_server build/release/tests/store_s3_test --gtest_brief=1
	@HCACHE_TEST_MOTO=build/clients/bin/moto_server $(PYTHON) tests/e2e/remote_test.py \
	  build/release/bin/hcache ObjectStore

.PHONY: test-page
test-page: release build/clients/ready  ## Run the page in a browser (installs Debian's chromium)
	@scripts/deps.sh chromium
	@HCACHE_REQUIRE_BROWSER=1 build/clients/bin/python tests/e2e/page_test.py \
	  build/release/bin/hcache "$$($(MAKE) -s print-model)"

build/clients/ready: tests/e2e/requirements.txt | deps
	@$(PYTHON) -m venv build/clients
	@build/clients/bin/python -m pip install -q --disable-pip-version-check -r $<
	@touch $@

.PHONY: asan tsan
asan: deps  ## Build and run the tests under address and undefined sanitizers
	@scripts/build.sh asan-ubsan
	@scripts/run_tests.sh asan-ubsan $(CTEST_FLAGS)
tsan: deps  ## Build and run the tests under the thread sanitizer
	@scripts/build.sh tsan
	@scripts/run_tests.sh tsan $(CTEST_FLAGS)

.PHONY: cuda
cuda: deps  ## Build with ggml's CUDA backend (HCACHE_CUDA_ARCHS, default 90)
	@scripts/build.sh cuda

.PHONY: print-model
print-model: deps  ## Print the default model's path, fetching it if needed
	@$(PYTHON) scripts/third_party.py model

.PHONY: peer
peer: deps  ## Build llama-server and llama-bench from the same tree; print their paths
	@$(PYTHON) scripts/third_party.py peer

.PHONY: deps
deps:  ## Install the Debian packages that the build needs, or print the line that does
	@scripts/deps.sh

.PHONY: format check-format check-layering tidy
format:  ## Format all sources
	@clang-format -i $(SOURCES)
check-format:
	@clang-format --dry-run -Werror $(SOURCES) && echo "format: ok"
check-layering:
	@$(PYTHON) scripts/check_layering.py
tidy: release  ## Run clang-tidy on all sources (minutes)
	@scripts/tidy.sh build/release

.PHONY: clean
clean:  ## Remove the build folder (the cache outside the checkout stays)
	@rm -rf build
