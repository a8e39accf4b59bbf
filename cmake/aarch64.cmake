# Toolchain: Debian's cross compiler for 64-bit ARM, programs run under qemu. Debian: packages
# g++-aarch64-linux-gnu, qemu-user-static (or qemu-user) and googletest.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
find_program(FUSEDMOE_QEMU NAMES qemu-aarch64-static qemu-aarch64)
set(CMAKE_CROSSCOMPILING_EMULATOR ${FUSEDMOE_QEMU};-L;/usr/aarch64-linux-gnu)
# Their headers are the same for all processors.
set(fmt_DIR /usr/lib/x86_64-linux-gnu/cmake/fmt)
set(FUSEDMOE_FMT fmt::fmt-header-only)
