# Toolchain: Debian's cross compiler for 64-bit RISC-V, programs run under qemu. Debian: packages
# g++-riscv64-linux-gnu, qemu-user-static (or qemu-user) and googletest.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR riscv64)
set(CMAKE_CXX_COMPILER riscv64-linux-gnu-g++)
set(CMAKE_C_COMPILER riscv64-linux-gnu-gcc)
find_program(FUSEDMOE_QEMU NAMES qemu-riscv64-static qemu-riscv64)
set(CMAKE_CROSSCOMPILING_EMULATOR ${FUSEDMOE_QEMU};-L;/usr/riscv64-linux-gnu)
# Their headers are the same for all processors.
set(fmt_DIR /usr/lib/x86_64-linux-gnu/cmake/fmt)
set(FUSEDMOE_FMT fmt::fmt-header-only)
