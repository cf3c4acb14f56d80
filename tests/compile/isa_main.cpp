// Files of one program compiled with different -march link, coexist, and each calls its own functions: the inline
// namespace ATTN_ISA tells them apart.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "isa_unit.hpp"

isa_unit plain_unit();
#if defined(ATTN_TEST_AVX2)
isa_unit avx2_unit();
#endif
isa_unit native_unit();

int main() {
  std::vector<isa_unit> units = {plain_unit()};
#if defined(ATTN_TEST_AVX2)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) units.push_back(avx2_unit());
#endif
  units.push_back(native_unit());

  const std::size_t count = isa_length * isa_dim;
  std::vector<float> q(count), k(count), v(count);
  std::vector<double> expected(count);
  for (std::size_t n = 0; n < count; ++n) {
    const auto x = static_cast<float>(n);
    q[n] = std::sin(x), k[n] = std::cos(3 * x), v[n] = std::sin(5 * x);
  }
  for (std::size_t i = 0; i < isa_length; ++i) {
    double sum = 0;
    for (std::size_t j = 0; j < isa_length; ++j) {
      double s = 0;
      for (std::size_t d = 0; d < isa_dim; ++d)
        s += static_cast<double>(q[i * isa_dim + d]) * static_cast<double>(k[j * isa_dim + d]);
      const double weight = std::exp(s / std::sqrt(static_cast<double>(isa_dim)));
      sum += weight;
      for (std::size_t d = 0; d < isa_dim; ++d)
        expected[i * isa_dim + d] += weight * static_cast<double>(v[j * isa_dim + d]);
    }
    for (std::size_t d = 0; d < isa_dim; ++d) expected[i * isa_dim + d] /= sum;
  }

  int wrong = 0;
  for (const isa_unit& unit : units) {
    const auto error_of = [&](auto attend) {
      std::vector<float> out(count, 7);
      attend(q.data(), k.data(), v.data(), out.data());
      double error = 0, norm = 0;
      for (std::size_t n = 0; n < count; ++n) {
        error += std::pow(static_cast<double>(out[n]) - expected[n], 2);
        norm += expected[n] * expected[n];
      }
      return std::sqrt(error / norm);
    };
    const double error = error_of(unit.attend), error_bf16 = error_of(unit.attend_bf16);
    std::printf("%-12s packets of %2d, error %.1e, of bf16 %.1e, attn::execution is %s\n", unit.name, unit.packet,
                error, error_bf16, unit.type);
    if (!(error <= 2e-6) || !(error_bf16 <= 0.03) || !std::strstr(unit.type, unit.name)) ++wrong;
    for (const isa_unit& other : units)
      if ((std::strcmp(unit.name, other.name) == 0) != (std::strcmp(unit.type, other.type) == 0)) ++wrong;
  }
  // The first is the compiler's plain build; with AVX2 there are two kinds at least.
#if defined(ATTN_TEST_AVX2)
  if (units.size() == 3 && std::strcmp(units[0].type, units[1].type) == 0) ++wrong;
#endif
  return wrong;
}
