// attn: the matrix unit of Intel's processors (AMX), which multiplies tiles of bf16 numbers and sums in float.
//
// A product of a tile A [rows][16 pairs] and a tile B [16 pairs][16 columns] is added to a tile C [rows][16 columns],
// in about the time of two loads. Compiled where the compiler's flags have AMX (-march=sapphirerapids); at run time the
// processor must have it, and the operating system must permit it, which is asked for once; otherwise vector
// instructions are used. A thread's tiles are set up by the first product of an operator and released when the operator
// ends (matrix_unit_use), so that other libraries find them as they expect.
//
// ATTN_AMX_MODEL puts plain loops in place of the instructions: for tests, in builds of 16 lanes.
#pragma once

#include <attn/core/detail/config.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(ATTN_AMX_MODEL)
#define ATTN_HAS_AMX 1
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__) && \
    !defined(EIGEN_DONT_VECTORIZE)
#define ATTN_HAS_AMX 1
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#define ATTN_HAS_AMX 0
#endif

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Whether this build has code for the matrix unit.
inline constexpr bool matrix_unit_compiled = ATTN_HAS_AMX;

#if ATTN_HAS_AMX

inline constexpr int unit_pairs = 16, unit_columns = 16;  // pairs along the depth of a product; columns of a tile
inline constexpr int unit_rows = 12;                      // of A and C: those of the largest tile of tile_product

namespace amx {

/// What a thread's tiles look like: 0 to 3 and 4 have unit_rows rows, 5 and 6 sixteen, each of 64 bytes.
struct alignas(64) tile_shapes {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {unit_rows, unit_rows, unit_rows, unit_rows, unit_rows, unit_pairs, unit_pairs};
};
inline constexpr tile_shapes shapes{};

#if defined(ATTN_AMX_MODEL)

struct model_tiles {
  std::uint8_t bytes[7][16][64];
};
inline thread_local model_tiles model{};

inline bool present() { return true; }
inline bool available() { return true; }
inline void configure(const tile_shapes& = shapes) { std::memset(&model, 0x7f, sizeof model); }
inline void release() {}
template <int Tile>
void clear() {
  std::memset(model.bytes[Tile], 0, sizeof model.bytes[Tile]);
}
template <int Tile>
void load(const void* from, std::ptrdiff_t stride) {
  for (int r = 0; r < shapes.rows[Tile]; ++r)
    std::memcpy(model.bytes[Tile][r], static_cast<const char*>(from) + r * stride, 64);
}
template <int Tile>
void store(void* to, std::ptrdiff_t stride) {
  for (int r = 0; r < shapes.rows[Tile]; ++r)
    std::memcpy(static_cast<char*>(to) + r * stride, model.bytes[Tile][r], 64);
}
template <int C, int A, int B>
void multiply_add() {
  const auto number = [](std::uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  };
  for (int m = 0; m < unit_rows; ++m)
    for (int n = 0; n < unit_columns; ++n) {
      float sum;
      std::memcpy(&sum, &model.bytes[C][m][4 * n], sizeof sum);
      for (int k = 0; k < unit_pairs; ++k) {
        std::uint32_t a, b;
        std::memcpy(&a, &model.bytes[A][m][4 * k], sizeof a);
        std::memcpy(&b, &model.bytes[B][k][4 * n], sizeof b);
        sum += number(a << 16) * number(b << 16);
        sum += number(a & 0xffff0000) * number(b & 0xffff0000);
      }
      std::memcpy(&model.bytes[C][m][4 * n], &sum, sizeof sum);
    }
}

#else

/// Whether the processor has it.
inline bool present() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned has_bf16 = 1u << 22, has_tiles = 1u << 24;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & has_bf16) && (d & has_tiles);
}
inline bool available() {
  static const bool allowed = [] {
    if (!present()) return false;
    constexpr long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  }();
  return allowed;
}
// Assembly instead of intrinsics: GCC's need the number of a tile as a literal, and do not declare that they read and
// write memory.
inline void configure(const tile_shapes& s = shapes) { __asm__ volatile("ldtilecfg %0" ::"m"(s)); }
inline void release() { __asm__ volatile("tilerelease" ::); }
template <int Tile>
void clear() {
  __asm__ volatile("{tilezero %%tmm%c0|tilezero tmm%c0}" ::"i"(Tile));
}
template <int Tile>
void load(const void* from, std::ptrdiff_t stride) {
  __asm__ volatile("{tileloadd (%0,%1,1), %%tmm%c2|tileloadd tmm%c2, [%0+%1*1]}" ::"r"(from), "r"(stride), "i"(Tile)
                   : "memory");
}
template <int Tile>
void store(void* to, std::ptrdiff_t stride) {
  __asm__ volatile("{tilestored %%tmm%c2, (%0,%1,1)|tilestored [%0+%1*1], tmm%c2}" ::"r"(to), "r"(stride), "i"(Tile)
                   : "memory");
}
template <int C, int A, int B>
void multiply_add() {
  __asm__ volatile("{tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0|tdpbf16ps tmm%c0, tmm%c1, tmm%c2}" ::"i"(C), "i"(A),
                   "i"(B));
}

#endif
}  // namespace amx

/// Whether this thread has its tiles set up.
inline constinit thread_local bool matrix_unit_ready = false;

/// Sets them up. False where there is no matrix unit.
inline bool prepare_matrix_unit() {
  if (matrix_unit_ready) return true;
  if (!amx::available()) return false;
  amx::configure();
  return matrix_unit_ready = true;
}

#endif

/// While this object lives, its thread may use the matrix unit, whatever other code left there before. Uses may be
/// nested: the inner one releases the unit, and the next product of the outer one sets it up again.
struct matrix_unit_use {
#if ATTN_HAS_AMX
  matrix_unit_use() { matrix_unit_ready = false; }
  ~matrix_unit_use() {
    if (matrix_unit_ready) amx::release();
    matrix_unit_ready = false;
  }
  matrix_unit_use(const matrix_unit_use&) = delete;
  matrix_unit_use& operator=(const matrix_unit_use&) = delete;
#endif
};

}}}  // namespace attn::ATTN_ISA::detail
