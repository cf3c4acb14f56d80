// What crosses between a program and its levels: functions of plain types.
#pragma once

#include <cstddef>

struct attend_shape {
  std::ptrdiff_t heads, length, dim;
};

/// Causal attention over arrays [heads, length, dim].
void attend(const float* q, const float* k, const float* v, float* out, attend_shape shape);

/// The level that this processor runs.
const char* attend_level();
