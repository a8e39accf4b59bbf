# Thin names for the commands that people and CI run; the build itself is CMake's.
JOBS ?= $(shell nproc)

.PHONY: demo test build format format-check install-deps clean

demo: install-deps
	cmake --preset default -Wno-dev --log-level=WARNING
	cmake --build --preset default --target fusedmoe_cli -j $(JOBS)
	scripts/demo.sh

test: build
	ctest --preset default -j $(JOBS) $(CTEST_FLAGS)

build: install-deps
	cmake --preset default -Wno-dev --log-level=WARNING
	cmake --build --preset default -j $(JOBS)

format:
	scripts/format.sh

format-check:
	scripts/format.sh --check

install-deps:
	@scripts/install-deps.sh

clean:
	rm -rf build build-*
