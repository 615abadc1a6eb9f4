#include "vm/cpu/levels.hpp"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace megavm {

namespace generic {
extern const Level kLevel;
}
#if defined(MEGAVM_HAVE_AVX2)
namespace avx2 {
extern const Level kLevel;
}
#endif
#if defined(MEGAVM_HAVE_AVX512)
namespace avx512 {
extern const Level kLevel;
}
#endif
#if defined(MEGAVM_HAVE_AVX512BF16)
namespace avx512bf16 {
extern const Level kLevel;
}
#endif
#if defined(MEGAVM_HAVE_AMX)
namespace amx {
extern const Level kLevel;
}
#endif

namespace {

#if defined(MEGAVM_HAVE_AMX)
// Linux gives a process access to AMX's 8 KiB of registers only on request.
bool amx_permitted() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool has_amx() {
  unsigned int a, b, c, d;
  asm volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
  constexpr unsigned int kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  return (d & kAmxBf16) && (d & kAmxTile) && amx_permitted();
}
#endif

std::vector<const Level*> find_levels() {
  std::vector<const Level*> found = {&generic::kLevel};
#if defined(MEGAVM_HAVE_AVX2)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    found.push_back(&avx2::kLevel);
#endif
#if defined(MEGAVM_HAVE_AVX512)
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512) found.push_back(&avx512::kLevel);
  [[maybe_unused]] const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
#if defined(MEGAVM_HAVE_AVX512BF16)
  if (bf16) found.push_back(&avx512bf16::kLevel);
#endif
#if defined(MEGAVM_HAVE_AMX)
  if (bf16 && has_amx()) found.push_back(&amx::kLevel);
#endif
#endif
  return found;
}

}  // namespace

const std::vector<const Level*>& levels() {
  static const std::vector<const Level*> found = find_levels();
  return found;
}

}  // namespace megavm
