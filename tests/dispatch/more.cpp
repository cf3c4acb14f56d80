#include "kernels.hpp"

double many(double a, double b, double c, double d, double e, double f, double g, double h, double i, int j, int k, int l,
            int m, int n, int o, int p) {
  return a + b + c + d + e + f + g + h + i + j + k + l + m + n + o + p;
}
