// attn: what every header needs before anything else: the version, the language, and the namespace of this build.
#pragma once

#define ATTN_VERSION_MAJOR 0
#define ATTN_VERSION_MINOR 3
#define ATTN_VERSION_PATCH 0
/// 10000 major + 100 minor + patch
#define ATTN_VERSION (ATTN_VERSION_MAJOR * 10000 + ATTN_VERSION_MINOR * 100 + ATTN_VERSION_PATCH)

// Including a file that does not exist stops the compiler at once: otherwise thousands of errors would follow the
// first.
#if defined(__clang__) ? __clang_major__ < 14 : __GNUC__ < 12
#error "attn needs GCC 12 or newer, or Clang 14 or newer (on Windows by MinGW-w64 or clang-cl)"
#include <attn/stopped_by_the_error_above>
#endif
#if __cplusplus < 202002L
#error "attn needs C++20: compile with -std=c++20 or later"
#include <attn/stopped_by_the_error_above>
#endif
#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "attn must not be compiled with -ffast-math or -fassociative-math: masks are infinities, rounding is on purpose"
#include <attn/stopped_by_the_error_above>
#endif

// Everything lies in an inline namespace named after the instructions of this build. Files of one program that are
// compiled with different -march then each call their own functions, where the one-definition rule would otherwise let
// the linker pick one for all. Objects cannot cross from one to the other: that does not link.
//
// The name is that of the vectors, and in hexadecimal digits which of the macros below are defined: those of
// instructions that attn and Eigen test for, and that compilers use by themselves. tests/compile/isa_names.cmake finds
// what is missing here. The helpers stay defined, because a macro is expanded where it is used.
#if defined(EIGEN_DONT_VECTORIZE)
#define ATTN_ISA_VECTORS scalar
#elif defined(__AVX512F__)
#define ATTN_ISA_VECTORS avx512
#elif defined(__AVX2__)
#define ATTN_ISA_VECTORS avx2
#elif defined(__AVX__)
#define ATTN_ISA_VECTORS avx
#elif defined(__SSE2__)
#define ATTN_ISA_VECTORS sse2
#elif defined(__ARM_FEATURE_SVE_BITS)
#define ATTN_ISA_VECTORS ATTN_ISA_JOIN(sve, __ARM_FEATURE_SVE_BITS, , , )
#elif defined(__ARM_NEON)
#define ATTN_ISA_VECTORS neon
#else
#define ATTN_ISA_VECTORS generic
#endif

#define ATTN_ISA_IS_ , 1
#define ATTN_ISA_IS_1 , 1
#define ATTN_ISA_IS_1000000 , 1  // RISC-V has versions
#define ATTN_ISA_SECOND(first, second, ...) second
#define ATTN_ISA_CHOOSE(...) ATTN_ISA_SECOND(__VA_ARGS__)
#define ATTN_ISA_BIT(value) ATTN_ISA_CHOOSE(ATTN_ISA_IS_##value, 0, )
#define ATTN_ISA_PASTE(a, b, c, d, e) a##b##c##d##e
#define ATTN_ISA_JOIN(...) ATTN_ISA_PASTE(__VA_ARGS__)
#define ATTN_ISA_HEX_0000 0
#define ATTN_ISA_HEX_0001 1
#define ATTN_ISA_HEX_0010 2
#define ATTN_ISA_HEX_0011 3
#define ATTN_ISA_HEX_0100 4
#define ATTN_ISA_HEX_0101 5
#define ATTN_ISA_HEX_0110 6
#define ATTN_ISA_HEX_0111 7
#define ATTN_ISA_HEX_1000 8
#define ATTN_ISA_HEX_1001 9
#define ATTN_ISA_HEX_1010 a
#define ATTN_ISA_HEX_1011 b
#define ATTN_ISA_HEX_1100 c
#define ATTN_ISA_HEX_1101 d
#define ATTN_ISA_HEX_1110 e
#define ATTN_ISA_HEX_1111 f
#define ATTN_ISA_HEX(a, b, c, d)                                                                                       \
  ATTN_ISA_JOIN(ATTN_ISA_HEX_, ATTN_ISA_BIT(a), ATTN_ISA_BIT(b), ATTN_ISA_BIT(c), ATTN_ISA_BIT(d))

#if defined(__riscv)
#define ATTN_ISA_EXTENSIONS                                                                                            \
  ATTN_ISA_JOIN(ATTN_ISA_HEX(__riscv_compressed, __riscv_v, __riscv_zfh, __riscv_zfa),                                 \
                ATTN_ISA_HEX(__riscv_zba, __riscv_zbb, __riscv_zbs, __riscv_zicond), , , )
#elif defined(__ARM_ARCH)
#define ATTN_ISA_EXTENSIONS                                                                                            \
  ATTN_ISA_JOIN(                                                                                                       \
      ATTN_ISA_HEX(__ARM_FEATURE_FMA, __ARM_FEATURE_FP16_SCALAR_ARITHMETIC, __ARM_FEATURE_FP16_VECTOR_ARITHMETIC,      \
                   __ARM_FEATURE_FP16_FML),                                                                            \
      ATTN_ISA_HEX(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC, __ARM_FEATURE_DOTPROD, __ARM_FEATURE_MATMUL_INT8,             \
                   __ARM_FEATURE_COMPLEX),                                                                             \
      ATTN_ISA_HEX(__ARM_FEATURE_SVE, __ARM_FEATURE_SVE2, __ARM_FEATURE_ATOMICS, __ARM_FEATURE_RCPC),                  \
      ATTN_ISA_HEX(__ARM_FEATURE_FRINT, __ARM_FEATURE_CRC32, __ARM_FEATURE_MOPS, __ARM_FEATURE_NUMERIC_MAXMIN), )
#else
#define ATTN_ISA_EXTENSIONS                                                                                            \
  ATTN_ISA_JOIN(                                                                                                       \
      ATTN_ISA_JOIN(ATTN_ISA_HEX(__SSE3__, __SSSE3__, __SSE4_1__, __SSE4_2__),                                         \
                    ATTN_ISA_HEX(__POPCNT__, __LZCNT__, __BMI__, __BMI2__),                                            \
                    ATTN_ISA_HEX(__MOVBE__, __PRFCHW__, __GFNI__, __APX_F__),                                          \
                    ATTN_ISA_HEX(__AVX__, __F16C__, __FMA__, __AVX2__),                                                \
                    ATTN_ISA_HEX(__FMA4__, __XOP__, __TBM__, __AVXVNNI__)),                                            \
      ATTN_ISA_JOIN(ATTN_ISA_HEX(__AVX512F__, __AVX512CD__, __AVX512BW__, __AVX512DQ__),                               \
                    ATTN_ISA_HEX(__AVX512VL__, __AVX512VNNI__, __AVX512BF16__, __AVX512FP16__),                        \
                    ATTN_ISA_HEX(__AVX512IFMA__, __AVX512VBMI__, __AVX512VBMI2__, __AVX512BITALG__),                   \
                    ATTN_ISA_HEX(__AVX512VPOPCNTDQ__, __AVX512ER__, __AVX10_1__, __AVX10_2__),                         \
                    ATTN_ISA_HEX(__AVXIFMA__, __AVXNECONVERT__, __AMX_TILE__, __AMX_BF16__)), , , )
#endif

#define ATTN_ISA                                                                                                       \
  ATTN_ISA_JOIN(ATTN_ISA_VECTORS, _, ATTN_ISA_EXTENSIONS, ATTN_ISA_HEX(ATTN_BF16_MODEL, ATTN_AMX_MODEL, 0, 0), )
