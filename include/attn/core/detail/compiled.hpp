// attn: the runs that the library attn::compiled holds. A header of runs names each of them at its end, by a macro,
// and includes this file, which has no guard for that reason:
//     #define ATTN_RUN(S) void run_full_softmax(const softmax_call<S, no_score>&) // S: types of elements
//     #include <attn/core/detail/compiled.hpp>
// ATTN_RUN_IN(T) is of compute types; ATTN_RUN_OVER(S, C) of queries S over a cache of other elements C, and
// ATTN_RUN_OVER_ROWS likewise without caches in blocks of channels. Kernels that a call reaches by a table or by
// virtual functions are named in the same way. CMake makes a source of each such header and each type that is compiled;
// without attn::compiled nothing is declared.
#include <attn/core/detail/config.hpp>

#ifdef ATTN_COMPILED
#if defined(ATTN_COMPILED_SOURCE) && __INCLUDE_LEVEL__ == 2  // of the header that a source of attn::compiled is of
#define ATTN_RUN_TEMPLATE template
#else
#define ATTN_RUN_TEMPLATE extern template
#endif
#ifdef ATTN_RUN_OVER
#define ATTN_RUN_OVER_ROWS(S, C) ATTN_RUN_OVER(S, C)
#endif

namespace attn { inline namespace ATTN_ISA { namespace detail {

#ifdef ATTN_COMPILED_FLOAT
#if defined(ATTN_RUN)
ATTN_RUN_TEMPLATE ATTN_RUN(float);
#elif defined(ATTN_RUN_IN)
ATTN_RUN_TEMPLATE ATTN_RUN_IN(float);
#elif defined(ATTN_RUN_OVER_ROWS)
ATTN_RUN_TEMPLATE ATTN_RUN_OVER_ROWS(float, Eigen::half);
ATTN_RUN_TEMPLATE ATTN_RUN_OVER_ROWS(float, Eigen::bfloat16);
ATTN_RUN_TEMPLATE ATTN_RUN_OVER_ROWS(float, float8_e4m3);
ATTN_RUN_TEMPLATE ATTN_RUN_OVER_ROWS(float, float8_e5m2);
ATTN_RUN_TEMPLATE ATTN_RUN_OVER_ROWS(float, std::int8_t);
#endif
#ifdef ATTN_RUN_OVER
ATTN_RUN_TEMPLATE ATTN_RUN_OVER(float, int8_channels);
ATTN_RUN_TEMPLATE ATTN_RUN_OVER(float, int4);
#endif
#endif

#ifdef ATTN_COMPILED_DOUBLE
#if defined(ATTN_RUN)
ATTN_RUN_TEMPLATE ATTN_RUN(double);
#elif defined(ATTN_RUN_IN)
ATTN_RUN_TEMPLATE ATTN_RUN_IN(double);
#endif
#endif

#ifdef ATTN_COMPILED_HALF
#if defined(ATTN_RUN)
ATTN_RUN_TEMPLATE ATTN_RUN(Eigen::half);
#elif defined(ATTN_RUN_OVER_ROWS)
ATTN_RUN_TEMPLATE ATTN_RUN_OVER_ROWS(Eigen::half, std::int8_t);
#endif
#ifdef ATTN_RUN_OVER
ATTN_RUN_TEMPLATE ATTN_RUN_OVER(Eigen::half, int8_channels);
ATTN_RUN_TEMPLATE ATTN_RUN_OVER(Eigen::half, int4);
#endif
#endif

#ifdef ATTN_COMPILED_BFLOAT16
#if defined(ATTN_RUN)
ATTN_RUN_TEMPLATE ATTN_RUN(Eigen::bfloat16);
#elif defined(ATTN_RUN_OVER_ROWS)
ATTN_RUN_TEMPLATE ATTN_RUN_OVER_ROWS(Eigen::bfloat16, std::int8_t);
#endif
#ifdef ATTN_RUN_OVER
ATTN_RUN_TEMPLATE ATTN_RUN_OVER(Eigen::bfloat16, int8_channels);
ATTN_RUN_TEMPLATE ATTN_RUN_OVER(Eigen::bfloat16, int4);
#endif
#endif

}}}  // namespace attn::ATTN_ISA::detail
#undef ATTN_RUN_TEMPLATE
#endif

#undef ATTN_RUN
#undef ATTN_RUN_IN
#undef ATTN_RUN_OVER
#undef ATTN_RUN_OVER_ROWS
