// attn: what every header needs before anything else: the version, the language, and the namespace of this build.
#pragma once

#define ATTN_VERSION_MAJOR 0
#define ATTN_VERSION_MINOR 2
#define ATTN_VERSION_PATCH 0
/// 10000 major + 100 minor + patch
#define ATTN_VERSION (ATTN_VERSION_MAJOR * 10000 + ATTN_VERSION_MINOR * 100 + ATTN_VERSION_PATCH)

// Including a file that does not exist stops the compiler at once: otherwise thousands of errors would follow the
// first.
#if __cplusplus < 202002L
#error "attn needs C++20: compile with -std=c++20 or later"
#include <attn/stopped_by_the_error_above>
#endif
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "attn must not be compiled with -ffast-math: masks are infinities, and rounding is used on purpose"
#include <attn/stopped_by_the_error_above>
#endif

// Everything lies in an inline namespace named after the vector instructions of this build. Files of one program that
// are compiled with different -march then each call their own functions, where the one-definition rule would otherwise
// let the linker pick one for all. Objects cannot cross from one to the other: that does not link.
#if defined(ATTN_AMX_MODEL)
#define ATTN_ISA amx_model
#elif defined(ATTN_BF16_MODEL)
#define ATTN_ISA bf16_model
#elif defined(EIGEN_DONT_VECTORIZE)
#define ATTN_ISA scalar
#elif defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define ATTN_ISA amx
#elif defined(__AVX512BF16__)
#define ATTN_ISA avx512_bf16
#elif defined(__AVX512F__)
#define ATTN_ISA avx512
#elif defined(__AVX2__) && defined(__FMA__)
#define ATTN_ISA avx2_fma
#elif defined(__AVX__) && defined(__FMA__)
#define ATTN_ISA avx_fma
#elif defined(__AVX__)
#define ATTN_ISA avx
#elif defined(__SSE4_2__)
#define ATTN_ISA sse4
#elif defined(__SSE2__)
#define ATTN_ISA sse2
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define ATTN_ISA neon_bf16
#elif defined(__ARM_NEON)
#define ATTN_ISA neon
#else
#define ATTN_ISA generic
#endif
