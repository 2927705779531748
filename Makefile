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
	  awk -F'\t' '{ printf "  make %-13s %s\n", $$1, $$2 }'

.PHONY: release debug
release debug: build-deps  ## Build the program: build/release/bin/hcache (or build/debug/…)
	@scripts/build.sh $@ hcache

.PHONY: demo
demo: build-deps  ## Show the main job on the default model (builds the program the fastest way)
	@scripts/build.sh demo hcache
	@$(PYTHON) scripts/demo.py --program build/demo/bin/hcache $(if $(HCACHE_MODEL),-m "$(HCACHE_MODEL)")

.PHONY: install package
PREFIX ?= /usr/local
install: build-deps  ## Install the program under PREFIX (default /usr/local; DESTDIR is honoured)
	@HCACHE_INSTALL_PREFIX="$(abspath $(PREFIX))" scripts/build.sh release hcache man
	@cmake --install build/release --strip
package: build-deps  ## Build a Debian package for any x86-64 machine: build/package/hcache_*.deb
	@scripts/build.sh package hcache man
	@cd build/package && rm -f hcache_*.deb && cpack >cpack.log || { cat cpack.log; exit 1; }
	@ls build/package/hcache_*.deb

.PHONY: serve
serve: release  ## Serve the default model with its page on http://127.0.0.1:8080
	@HCACHE_MODEL="$${HCACHE_MODEL:-$$($(MAKE) -s print-model)}" build/release/bin/hcache serve

.PHONY: test
test: deps  ## Build everything, run all tests and check docs, locks, format and layering
	@scripts/build.sh release
	@scripts/thread_safety.py build/release
	@scripts/run_tests.sh release $(CTEST_FLAGS)
	@$(MAKE) check-format check-layering

.PHONY: test-clients
test-clients: build/clients/ready  ## Run official clients, made-up requests and an S3 server against it
	@scripts/build.sh release hcache store_s3_test
	@build/clients/bin/python tests/e2e/clients_test.py build/release/bin/hcache
	@build/clients/bin/python tests/e2e/openapi_test.py build/release/bin/hcache
	@HCACHE_TEST_MOTO=build/clients/bin/moto_server build/release/tests/store_s3_test --gtest_brief=1
	@HCACHE_TEST_MOTO=build/clients/bin/moto_server $(PYTHON) tests/e2e/remote_test.py \
	  build/release/bin/hcache ObjectStore

.PHONY: test-llama-server
test-llama-server: release build/clients/ready  ## Run llama-server's own tests against it
	@build/clients/bin/python tests/e2e/llama_server_test.py build/release/bin/hcache

.PHONY: test-archs
test-archs: release peer  ## Run models of every architecture against llama-server, and over a kill
	@$(PYTHON) tests/e2e/archs_test.py build/release/bin/hcache \
	  "$$($(PYTHON) scripts/third_party.py peer | sed -n 1p)" "$$($(PYTHON) scripts/third_party.py archs)"
	@for script in media encoders; do $(PYTHON) tests/e2e/$${script}_test.py build/release/bin/hcache \
	  "$$($(PYTHON) scripts/third_party.py peer | sed -n 1p)" LikeLlamaServer || exit; done

.PHONY: test-page
test-page: release build/clients/ready  ## Run the page in a browser (installs Debian's chromium)
	@scripts/deps.sh chromium
	@HCACHE_REQUIRE_BROWSER=1 build/clients/bin/python tests/e2e/page_test.py \
	  build/release/bin/hcache "$$($(MAKE) -s print-model)"

.PHONY: test-proxy
test-proxy: release build/clients/ready  ## Run three servers behind HAProxy (installs Debian's haproxy)
	@scripts/deps.sh haproxy
	@build/clients/bin/python tests/e2e/proxy_test.py build/release/bin/hcache

.PHONY: test-package test-bench
test-package: release package  ## Install the package in a folder of its own, serve with it, remove it
	@scripts/deps.sh fakeroot groff-base qemu-user
	@$(PYTHON) tests/e2e/package_test.py build/package/hcache_*.deb build/release/bin/hcache \
	  "$$($(MAKE) -s print-model)"
test-bench: release peer  ## Run the demo and every script of bench/ once, with tiny settings
	@scripts/deps.sh haproxy
	@scripts/build.sh demo hcache
	@$(PYTHON) tests/e2e/bench_scripts_test.py

.PHONY: lint
lint: build/lint/ready  ## Lint the Python scripts (ruff.toml)
	@build/lint/bin/ruff check --quiet . && echo "lint: ok"

RUFF = ruff==0.17.6
build/lint/ready: Makefile | deps
	@$(PYTHON) -m venv build/lint
	@build/lint/bin/python -m pip install -q --disable-pip-version-check $(RUFF)
	@touch $@

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

.PHONY: vulkan test-vulkan
vulkan: deps  ## Build with ggml's Vulkan backend, for GPUs of any vendor
	@scripts/deps.sh vulkan
	@scripts/build.sh vulkan hcache
test-vulkan: deps  ## Run the tests of devices, and the bars of a GPU, on Mesa's software device for Vulkan
	@scripts/deps.sh vulkan-test
	@scripts/build.sh vulkan-tested hcache device_tests
	@HCACHE_TEST_DEVICE=vulkan:0 scripts/run_on_lavapipe.sh \
	  scripts/run_tests.sh vulkan-tested -L 'device|bars' $(CTEST_FLAGS)

.PHONY: print-model
print-model: build-deps  ## Print the default model's path, fetching it if needed
	@$(PYTHON) scripts/third_party.py model

.PHONY: peer
peer: build-deps  ## Build llama-server, llama-bench, llama-perplexity of the same tree; print paths
	@$(PYTHON) scripts/third_party.py peer

.PHONY: deps build-deps
deps:  ## Install the Debian packages that building and testing need, or print the line that does
	@scripts/deps.sh
build-deps:  ## Only those that building the program needs
	@scripts/deps.sh build

.PHONY: format check-format check-layering check-docs thread-safety tidy tidy-changed
format:  ## Format all sources
	@clang-format -i $(SOURCES)
check-format:
	@clang-format --dry-run -Werror $(SOURCES) && echo "format: ok"
check-layering:
	@$(PYTHON) scripts/check_layering.py
check-docs: release
	@$(PYTHON) scripts/check_docs.py build/release/bin/hcache
thread-safety: deps  ## Let clang check every lock (-Wthread-safety -Werror)
	@scripts/build.sh --configure release
	@scripts/thread_safety.py build/release
tidy: build/analysis  ## Run clang-tidy on all sources (minutes)
	@scripts/tidy.sh build/analysis
tidy-changed: build/analysis  ## Run clang-tidy on what changed since BASE, for at most MINUTES (5)
	@scripts/tidy_changed.py build/analysis $(if $(BASE),--base $(BASE)) $(if $(MINUTES),--minutes $(MINUTES))
.PHONY: build/analysis
build/analysis: deps
	@scripts/build.sh --configure analysis

.PHONY: clean
clean:  ## Remove the build folder (the cache outside the checkout stays)
	@rm -rf build
