// attn: which of the levels that attn_dispatch (CMake) has compiled a file for runs on this processor.
//
// Every level's file begins with this header and carries the instructions that its compiler was allowed; the file that
// attn_dispatch writes (dispatch.cmake) has a table of the levels and takes the one with the most instructions of those
// that processor and system have. Nothing here belongs to a level: it is compiled with the program's own flags.
#pragma once

#include <attn/core/detail/config.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace attn { inline namespace ATTN_ISA { namespace detail { namespace dispatch {

/// An instruction set: whether the compiler may use it, where the processor says that it has it, and the registers that
/// the system must keep for it.
struct instruction_set {
  bool compiled;
  int word, bit;
  std::uint64_t registers = 0;
};

// Those that config.hpp names, and others that compilers use by themselves.
#define ATTN_ISA_COMPILED(name) ATTN_ISA_BIT(name)  // whose argument is not expanded
#if defined(__x86_64__)
enum cpuid_word { leaf_1_c, leaf_7_b, leaf_7_c, leaf_7_d, leaf_7_1_a, leaf_7_1_d, extended_c, avx10, processor_words };
inline constexpr std::uint64_t ymm = 0x6, zmm = 0xe6, tiles = 0x60000, more_registers = 0x80000;
inline constexpr instruction_set instruction_sets[] = {
    {ATTN_ISA_COMPILED(__SSE3__), leaf_1_c, 0},
    {ATTN_ISA_COMPILED(__SSSE3__), leaf_1_c, 9},
    {ATTN_ISA_COMPILED(__SSE4_1__), leaf_1_c, 19},
    {ATTN_ISA_COMPILED(__SSE4_2__), leaf_1_c, 20},
    {ATTN_ISA_COMPILED(__POPCNT__), leaf_1_c, 23},
    {ATTN_ISA_COMPILED(__LZCNT__), extended_c, 5},
    {ATTN_ISA_COMPILED(__BMI__), leaf_7_b, 3},
    {ATTN_ISA_COMPILED(__BMI2__), leaf_7_b, 8},
    {ATTN_ISA_COMPILED(__MOVBE__), leaf_1_c, 22},
    {ATTN_ISA_COMPILED(__PRFCHW__), extended_c, 8},
    {ATTN_ISA_COMPILED(__GFNI__), leaf_7_c, 8},
    {ATTN_ISA_COMPILED(__APX_F__), leaf_7_1_d, 21, more_registers},
    {ATTN_ISA_COMPILED(__AVX__), leaf_1_c, 28, ymm},
    {ATTN_ISA_COMPILED(__F16C__), leaf_1_c, 29, ymm},
    {ATTN_ISA_COMPILED(__FMA__), leaf_1_c, 12, ymm},
    {ATTN_ISA_COMPILED(__AVX2__), leaf_7_b, 5, ymm},
    {ATTN_ISA_COMPILED(__FMA4__), extended_c, 16, ymm},
    {ATTN_ISA_COMPILED(__XOP__), extended_c, 11, ymm},
    {ATTN_ISA_COMPILED(__TBM__), extended_c, 21},
    {ATTN_ISA_COMPILED(__AVXVNNI__), leaf_7_1_a, 4, ymm},
    {ATTN_ISA_COMPILED(__AVX512F__), leaf_7_b, 16, zmm},
    {ATTN_ISA_COMPILED(__AVX512CD__), leaf_7_b, 28, zmm},
    {ATTN_ISA_COMPILED(__AVX512BW__), leaf_7_b, 30, zmm},
    {ATTN_ISA_COMPILED(__AVX512DQ__), leaf_7_b, 17, zmm},
    {ATTN_ISA_COMPILED(__AVX512VL__), leaf_7_b, 31, zmm},
    {ATTN_ISA_COMPILED(__AVX512VNNI__), leaf_7_c, 11, zmm},
    {ATTN_ISA_COMPILED(__AVX512BF16__), leaf_7_1_a, 5, zmm},
    {ATTN_ISA_COMPILED(__AVX512FP16__), leaf_7_d, 23, zmm},
    {ATTN_ISA_COMPILED(__AVX512IFMA__), leaf_7_b, 21, zmm},
    {ATTN_ISA_COMPILED(__AVX512VBMI__), leaf_7_c, 1, zmm},
    {ATTN_ISA_COMPILED(__AVX512VBMI2__), leaf_7_c, 6, zmm},
    {ATTN_ISA_COMPILED(__AVX512BITALG__), leaf_7_c, 12, zmm},
    {ATTN_ISA_COMPILED(__AVX512VPOPCNTDQ__), leaf_7_c, 14, zmm},
    {ATTN_ISA_COMPILED(__AVX512ER__), leaf_7_b, 27, zmm},
    {ATTN_ISA_COMPILED(__AVX10_1__), avx10, 1, zmm},
    {ATTN_ISA_COMPILED(__AVX10_2__), avx10, 2, zmm},
    {ATTN_ISA_COMPILED(__AVXIFMA__), leaf_7_1_a, 23, ymm},
    {ATTN_ISA_COMPILED(__AVXNECONVERT__), leaf_7_1_d, 5, ymm},
    {ATTN_ISA_COMPILED(__SSE4A__), extended_c, 6},  // AMD's; Clang uses it in permutations
    {ATTN_ISA_COMPILED(__GCC_HAVE_SYNC_COMPARE_AND_SWAP_16), leaf_1_c, 13},
    {ATTN_ISA_COMPILED(__LAHF_SAHF__), extended_c, 0},
    {ATTN_ISA_COMPILED(__PCLMUL__), leaf_1_c, 1},
    {ATTN_ISA_COMPILED(__CMPCCXADD__), leaf_7_1_a, 7},
    {ATTN_ISA_COMPILED(__AVXVNNIINT8__), leaf_7_1_d, 4, ymm},
    {ATTN_ISA_COMPILED(__AVXVNNIINT16__), leaf_7_1_d, 10, ymm},
    {ATTN_ISA_COMPILED(__AMXTILE__), leaf_7_d, 24, tiles},  // as Clang 14 writes it
    {ATTN_ISA_COMPILED(__AMXBF16__), leaf_7_d, 22, tiles},
    {ATTN_ISA_COMPILED(__AMX_TILE__), leaf_7_d, 24, tiles},
    {ATTN_ISA_COMPILED(__AMX_BF16__), leaf_7_d, 22, tiles},
};
#elif defined(__aarch64__)
enum hwcap_word { hwcap, hwcap2, processor_words };
inline constexpr instruction_set instruction_sets[] = {
    {ATTN_ISA_COMPILED(__ARM_FEATURE_FMA), hwcap, 0},
    {ATTN_ISA_COMPILED(__ARM_FEATURE_CRC32), hwcap, 7},
    {ATTN_ISA_COMPILED(__ARM_FEATURE_ATOMICS), hwcap, 8},
    {ATTN_ISA_COMPILED(__ARM_FEATURE_FP16_SCALAR_ARITHMETIC), hwcap, 9},
    {ATTN_ISA_COMPILED(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC), hwcap, 10},
    {ATTN_ISA_COMPILED(__ARM_FEATURE_COMPLEX), hwcap, 14},
    {ATTN_ISA_COMPILED(__ARM_FEATURE_RCPC), hwcap, 15},
    {ATTN_ISA_COMPILED(__ARM_FEATURE_DOTPROD), hwcap, 20},
    {ATTN_ISA_COMPILED(__ARM_FEATURE_SVE), hwcap, 22},
    {ATTN_ISA_COMPILED(__ARM_FEATURE_FP16_FML), hwcap, 23},
    {ATTN_ISA_COMPILED(__ARM_FEATURE_SVE2), hwcap2, 1},
    {ATTN_ISA_COMPILED(__ARM_FEATURE_FRINT), hwcap2, 8},
    {ATTN_ISA_COMPILED(__ARM_FEATURE_MATMUL_INT8), hwcap2, 13},
    {ATTN_ISA_COMPILED(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC), hwcap2, 14},
    {ATTN_ISA_COMPILED(__ARM_FEATURE_MOPS), hwcap2, 43},
};
#else
enum no_word { processor_words = 1 };
inline constexpr instruction_set instruction_sets[] = {{false, 0, 0}};
#endif

/// Those of which `has` says so, one bit each.
template <class Has>
constexpr std::uint64_t those_with(Has has) {
  std::uint64_t sets = 0, bit = 1;
  for (const instruction_set& each : instruction_sets) sets |= has(each) ? bit : 0, bit <<= 1;
  return sets;
}
inline constexpr std::uint64_t compiled_sets = those_with([](const instruction_set& each) { return each.compiled; });

/// What this processor has and this system permits. Whether tiles (AMX) may be used is asked where they are `wanted`.
inline std::uint64_t processor_sets([[maybe_unused]] std::uint64_t wanted) {
  std::uint64_t words[processor_words] = {}, registers = 0;
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d)) {
    words[leaf_1_c] = c;
    constexpr unsigned has_xgetbv = 1u << 27;
    unsigned low = 0, high = 0;
    if (c & has_xgetbv) __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    registers = std::uint64_t(high) << 32 | low;
  }
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
    words[leaf_7_b] = b, words[leaf_7_c] = c, words[leaf_7_d] = d;
    if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) words[leaf_7_1_a] = a, words[leaf_7_1_d] = d;
  }
  if (__get_cpuid(0x80000001, &a, &b, &c, &d)) words[extended_c] = c;
  constexpr std::uint64_t has_avx10 = 1u << 19;
  if (words[leaf_7_1_d] & has_avx10 && __get_cpuid_count(0x24, 0, &a, &b, &c, &d))  // versions include earlier ones
    words[avx10] = (std::uint64_t(2) << ((b & 0xff) < 63 ? b & 0xff : 62)) - 1;
#if defined(__linux__)
  const std::uint64_t with_tiles = those_with([](const instruction_set& each) { return each.registers == tiles; });
  constexpr long request_permission = 0x1023, tile_data = 18;
  if (!(wanted & with_tiles) || (registers & tiles) != tiles ||
      syscall(SYS_arch_prctl, request_permission, tile_data) != 0)
    registers &= ~tiles;
#endif
#elif defined(__aarch64__) && defined(__linux__)
  words[hwcap] = getauxval(AT_HWCAP), words[hwcap2] = getauxval(AT_HWCAP2);
#endif
  return those_with([&](const instruction_set& each) {
    return (words[each.word] >> each.bit & 1) && (registers & each.registers) == each.registers;
  });
}

/// One level of a file: what the compiler was told, what it needs, its functions, and what makes and ends its static
/// objects.
struct level {
  using function = void (*)();
  const char* name;
  const std::uint64_t* needs;
  const function *functions, *init_start, *init_stop, *fini_start, *fini_stop;
};

inline void call_all(const level::function* begin, const level::function* end) {
  for (; begin != end; ++begin) (*begin)();
}

/// The level with the most instructions that this processor has: the last one of several. Null where it has none, or not
/// the one that the environment names.
template <std::size_t Count>
const level* best_level(const level (&levels)[Count]) {
  std::uint64_t wanted = 0;
  for (const level& each : levels) wanted |= *each.needs;
  const std::uint64_t has = processor_sets(wanted);
  const char* asked = std::getenv("ATTN_DISPATCH_LEVEL");
  const level* best = nullptr;
  for (const level& each : levels)
    if (!(*each.needs & ~has) && (!asked || !*asked || !std::strcmp(asked, each.name)) &&
        (!best || __builtin_popcountll(*each.needs) >= __builtin_popcountll(*best->needs)))
      best = &each;
  return best;
}

/// What a call does where best_level finds none.
template <std::size_t Count>
[[noreturn]] void no_level(const level (&levels)[Count]) {
  const char* asked = std::getenv("ATTN_DISPATCH_LEVEL");
  const bool any = !asked || !*asked;
  std::string text = any ? "attn_dispatch: expected a processor that has the instructions of one of"
                         : "attn_dispatch: expected in ATTN_DISPATCH_LEVEL a level that this processor has, of";
  for (const level& each : levels) text.append(" ").append(each.name);
  text += any ? "; found one that lacks them, or a system that does not permit them" : "; found " + std::string(asked);
#if defined(__cpp_exceptions)
  throw std::runtime_error(text);
#else
  std::fprintf(stderr, "%s\n", text.c_str());
  std::abort();
#endif
}

}}}}  // namespace attn::ATTN_ISA::detail::dispatch

#if defined(ATTN_DISPATCH_LEVEL)
#if defined(__ARM_FEATURE_SVE_BITS) && __ARM_FEATURE_SVE_BITS
#error "attn_dispatch: expected levels for SVE of any length; found -msve-vector-bits"
#endif
extern "C" {
extern const std::uint64_t attn_dispatch_needs;
const std::uint64_t attn_dispatch_needs = attn::detail::dispatch::compiled_sets;
}
#endif
