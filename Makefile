# Thin names for the commands that people and CI run; the build itself is CMake's.
JOBS ?= $(shell nproc)
CONFIGURE = cmake -Wno-dev --log-level=WARNING -DCMAKE_UNITY_BUILD=ON

PYTHON ?= python3

.PHONY: demo test build release format format-check interop check-clang check-tidy check-tsan \
	check-python-asan check-aarch64 check-riscv64 docs install-deps clean

demo:
	@scripts/install-deps.sh demo
	$(CONFIGURE) --preset demo
	cmake --build --preset demo -j $(JOBS)
	scripts/demo.sh

test: build
	ctest --preset default -j $(JOBS) $(CTEST_FLAGS)

build: install-deps
	$(CONFIGURE) --preset default
	cmake --build --preset default -j $(JOBS)

# What a release consists of, into dist/ (scripts/release.sh says more). RELEASE_PARTS="source wheels
# debs" leaves out what compiles CUDA kernels for an hour.
release:
	@scripts/install-deps.sh release
	scripts/release.sh $(RELEASE_PARTS)

format:
	scripts/format.sh

format-check:
	scripts/format.sh --check

# Other compilers and another processor: run before a larger change is closed (CONTRIBUTING.md).
check-clang: install-deps
	$(CONFIGURE) --preset clang
	cmake --build --preset clang -j $(JOBS)
	ctest --preset clang -j $(JOBS) $(CTEST_FLAGS)

check-tidy: install-deps
	$(CONFIGURE) --preset tidy -DCMAKE_UNITY_BUILD=OFF
	cmake --build --preset tidy -j $(JOBS) -- -k 0

# The executor, and random layers, under ThreadSanitizer.
check-tsan: install-deps
	$(CONFIGURE) --preset tsan
	cmake --build --preset tsan -j $(JOBS)
	ctest --preset tsan $(CTEST_FLAGS)

# Ten thousand random wrong calls of each Python function, with AddressSanitizer. Python itself is
# not built with it, so its libraries come first.
check-python-asan: install-deps
	$(CONFIGURE) --preset asan -DFUSEDMOE_PYTHON=ON
	cmake --build build-asan --target fusedmoe_python -j $(JOBS)
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=halt_on_error=1 \
	  PYTHONMALLOC=malloc PYTHONPATH=build-asan/python:.deps/python \
	  FUSEDMOE_GOLDEN_DIR=build-asan/tests/golden/public FUSEDMOE_WRONG_CALLS=10000 \
	  $$($(PYTHON) -c 'import sys; print(sys.executable)') -m pytest -q -p no:cacheprovider \
	  tests/python/test_experts.py tests/python/test_layer.py

check-aarch64: install-deps
	$(CONFIGURE) --preset aarch64
	cmake --build --preset aarch64 -j $(JOBS)
	ctest --preset aarch64 -j $(JOBS) $(CTEST_FLAGS)

# The library as it is for every other processor: it builds and its layers agree with the reference.
check-riscv64: install-deps
	$(CONFIGURE) --preset riscv64
	cmake --build --preset riscv64 -j $(JOBS)
	$$(command -v qemu-riscv64-static || command -v qemu-riscv64) -L /usr/riscv64-linux-gnu \
	  build-riscv64/tests/unit_tests --gtest_brief=1 \
	  --gtest_filter='*Golden*Cpu*:RouterConfig*:QuantTest.*:RuntimeTest.*'

# The documentation site in build/site; needs doxygen.
docs: install-deps
	$(CONFIGURE) --preset default
	cmake --build --preset default --target fusedmoe_python_stub -j $(JOBS)
	scripts/make-docs.sh

# Against transformers and quantization tools, in a virtual environment of its own
# (docs/families.md, docs/checkpoint-layouts.md).
interop: install-deps
	$(CONFIGURE) --preset default
	cmake --build --preset default --target fusedmoe_cpu -j $(JOBS)
	PYTHON=$(PYTHON) tests/interop/make-env.sh .deps/interop
	.deps/interop/bin/python tests/interop/all.py build/cli/fusedmoe_cpu

install-deps:
	@scripts/install-deps.sh

clean:
	rm -rf build build-* dist
