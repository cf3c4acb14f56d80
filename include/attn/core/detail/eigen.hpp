// attn: Eigen, without a false alarm: GCC 12 sees uninitialised variables in its own AVX-512 intrinsics (bug 105593).
#pragma once

#include <attn/core/detail/config.hpp>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <Eigen/Core>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
