// Selects the CPU kernels for the instruction set of this processor. Every `*_kernels.cpp` is
// compiled once per instruction set (on x86 three times, elsewhere once), each time into a
// namespace of that name, and defines tables of function pointers there. This header detects the
// best instruction set and selects its tables. On x86, EMBLIB_ISA=baseline|avx2|avx512 in the
// environment lowers the choice; tests use it. Only `*_cpu.cpp` files, and headers that only they
// include, may include this header.
//
// CMakeLists.txt defines EMB_X86 for targets that link the kernels for AVX2 and AVX-512.
#pragma once

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

namespace emb {

enum class Isa { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

// Return the best instruction set that the processor has and EMBLIB_ISA allows. The extensions that
// are tested are those of the compiler's flags in CMakeLists.txt. On x86, throws std::runtime_error
// for an unknown value of EMBLIB_ISA; elsewhere returns kBaseline.
inline Isa detect_isa() {
#if defined(EMB_X86)
  Isa isa = Isa::kBaseline;
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    isa = Isa::kAvx2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      isa = Isa::kAvx512;
    }
  }
  const char* setting = std::getenv("EMBLIB_ISA");
  if (setting == nullptr) return isa;
  const std::string_view name(setting);
  if (name == "baseline") return Isa::kBaseline;
  if (name == "avx2") return isa < Isa::kAvx2 ? isa : Isa::kAvx2;
  if (name == "avx512") return isa;
  throw std::runtime_error("EMBLIB_ISA must be baseline, avx2 or avx512, got '" +
                           std::string(name) + "'");
#else
  return Isa::kBaseline;
#endif
}

// Return detect_isa() of the first call that does not throw: later changes of the environment have
// no effect.
inline Isa cpu_isa() {
  static const Isa isa = detect_isa();
  return isa;
}

// Return the table, among three, whose kernels were compiled for cpu_isa(). `KernelTable` is a
// struct of function pointers.
template <class KernelTable>
const KernelTable& select_table(const KernelTable& baseline, const KernelTable& avx2,
                                const KernelTable& avx512) {
  switch (cpu_isa()) {
    case Isa::kAvx512:
      return avx512;
    case Isa::kAvx2:
      return avx2;
    default:
      return baseline;
  }
}

}  // namespace emb

// Declare the constants `table` of struct `KernelTable`, one in the namespace of each instruction
// set, and define `getter()`, which returns the one for this processor. Use it in namespace emb.
#if defined(EMB_X86)
#define EMB_SELECT_KERNELS(KernelTable, table, getter)                \
  namespace baseline {                                                \
  extern const KernelTable table;                                     \
  }                                                                   \
  namespace avx2 {                                                    \
  extern const KernelTable table;                                     \
  }                                                                   \
  namespace avx512 {                                                  \
  extern const KernelTable table;                                     \
  }                                                                   \
  [[maybe_unused]] static const KernelTable& getter() {               \
    return select_table(baseline::table, avx2::table, avx512::table); \
  }
#else
#define EMB_SELECT_KERNELS(KernelTable, table, getter) \
  namespace baseline {                                 \
  extern const KernelTable table;                      \
  }                                                    \
  [[maybe_unused]] static const KernelTable& getter() { return baseline::table; }
#endif
