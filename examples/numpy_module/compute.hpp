// What crosses between the module and its levels.
#pragma once
#include <cstddef>
#include <map>
#include <string>
/// NumPy's memory as [batch, head, length, dim], strides in elements.
struct numpy_view {
  void* data;
  std::ptrdiff_t extents[4], strides[4];
};
const char* level();
/// `type` is NumPy's letter: e, f, d for 16, 32, 64 bits.
void compute(const std::string& name, char type, const numpy_view& q, const numpy_view& k, const numpy_view& v,
             const numpy_view& out, const std::map<std::string, double>& options);
