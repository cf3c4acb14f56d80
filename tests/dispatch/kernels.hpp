#pragma once
#include <cstddef>

struct own_error {
  int number;
};
namespace kernels {
const char* level();
float sum_of_squares(const float* x, std::ptrdiff_t count);
int calls();
}  // namespace kernels
double many(double a, double b, double c, double d, double e, double f, double g, double h, double i, int j, int k, int l,
            int m, int n, int o, int p);
