// ggml refers to these two functions even when it is built without its flash attention, which
// compiles for minutes. A MoE layer calls neither.
#include <cstdlib>

extern "C" void iqk_flash_attn_noalibi() {
  std::abort();
}
extern "C" void iqk_fa_work_buffer_size() {
  std::abort();
}
