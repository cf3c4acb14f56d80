#pragma once
#include <cstddef>

#define EXPORTED __attribute__((visibility("default")))
struct own_error {
  int number;
};
namespace kernels {
EXPORTED const char* level();
EXPORTED float sum_of_squares(const float* x, std::ptrdiff_t count);
EXPORTED int calls();
}  // namespace kernels
double many(double a, double b, double c, double d, double e, double f, double g, double h, double i, int j, int k, int l,
            int m, int n, int o, int p);
