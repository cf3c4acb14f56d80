#pragma once
// Reverse-mode differentiation: run over tensors of `variable`, a reference records every operation it does, and going
// back over the record gives its gradients. The naive reverse pass of each operator is thus that of its naive forward
// pass, in double, operation by operation, with no code of the library.
//
//   const auto x = independent(q);                  // forgets what was recorded before
//   const auto y = some_reference(x);
//   const reverse_pass back({{y.out, d_out}});
//   back.gradient(x)                                // a tensor<double>
#include <cmath>
#include <cstdint>
#include <vector>

#include "support/tensor.hpp"

namespace reference {

using testing::idx_t;
using testing::tensor;

class variable {
 public:
  variable() = default;
  variable(double value) : value_(value) {}

  double value() const { return value_; }
  std::uint32_t entry() const { return entry_; }
  explicit operator double() const { return value_; }

  // f(a, b) with its derivatives.
  static variable of(double value, const variable& a, double by_a) { return of(value, a, by_a, variable(), 0); }
  static variable of(double value, const variable& a, double by_a, const variable& b, double by_b) {
    variable x(value);
    if (a.entry_ == 0 && b.entry_ == 0) return x;  // of constants
    x.entry_ = static_cast<std::uint32_t>(record().size());
    record().push_back({a.entry_, b.entry_, by_a, by_b});
    return x;
  }
  static variable independent(double value) {
    variable x(value);
    x.entry_ = static_cast<std::uint32_t>(record().size());
    record().push_back({});
    return x;
  }

  struct operation {
    std::uint32_t a = 0, b = 0;
    double by_a = 0, by_b = 0;
  };
  // Entry 0 stands for all constants.
  static std::vector<operation>& record() {
    static thread_local std::vector<operation> all(1);
    return all;
  }
  static void forget() { record().resize(1); }

  variable& operator+=(const variable& b) { return *this = of(value_ + b.value_, *this, 1, b, 1); }
  variable& operator-=(const variable& b) { return *this = of(value_ - b.value_, *this, 1, b, -1); }
  variable& operator*=(const variable& b) { return *this = of(value_ * b.value_, *this, b.value_, b, value_); }
  variable& operator/=(const variable& b) {
    return *this = of(value_ / b.value_, *this, 1 / b.value_, b, -(value_ / b.value_) / b.value_);
  }
  friend variable operator+(variable a, const variable& b) { return a += b; }
  friend variable operator-(variable a, const variable& b) { return a -= b; }
  friend variable operator*(variable a, const variable& b) { return a *= b; }
  friend variable operator/(variable a, const variable& b) { return a /= b; }
  friend variable operator-(const variable& a) { return of(-a.value_, a, -1); }
  friend bool operator==(const variable& a, const variable& b) { return a.value_ == b.value_; }
  friend auto operator<=>(const variable& a, const variable& b) { return a.value_ <=> b.value_; }

  friend variable exp(const variable& a) { return of(std::exp(a.value_), a, std::exp(a.value_)); }
  friend variable log(const variable& a) { return of(std::log(a.value_), a, 1 / a.value_); }
  friend variable sqrt(const variable& a) { return of(std::sqrt(a.value_), a, 0.5 / std::sqrt(a.value_)); }
  friend variable sin(const variable& a) { return of(std::sin(a.value_), a, std::cos(a.value_)); }
  friend variable cos(const variable& a) { return of(std::cos(a.value_), a, -std::sin(a.value_)); }
  friend variable tanh(const variable& a) {
    const double t = std::tanh(a.value_);
    return of(t, a, (1 - t) * (1 + t));
  }
  friend variable erf(const variable& a) {
    return of(std::erf(a.value_), a, 2 / std::sqrt(std::acos(-1.0)) * std::exp(-a.value_ * a.value_));
  }
  friend variable abs(const variable& a) { return a.value_ < 0 ? -a : a; }
  friend bool isnan(const variable& a) { return std::isnan(a.value_); }
  friend bool isinf(const variable& a) { return std::isinf(a.value_); }
  friend bool isfinite(const variable& a) { return std::isfinite(a.value_); }

 private:
  double value_ = 0;
  std::uint32_t entry_ = 0;
};

// Independent variables with these values.
inline tensor<variable> independent(const tensor<double>& x) {
  tensor<variable> all;
  all.extents = x.extents;
  all.data.reserve(x.data.size());
  for (double value : x.data) all.data.push_back(variable::independent(value));
  return all;
}
inline tensor<double> values(const tensor<variable>& x) { return testing::cast<double>(x); }

// The backward pass over what is recorded, from the gradients of some results.
class reverse_pass {
 public:
  struct result {
    const tensor<variable>& x;
    const tensor<double>& gradient;
  };
  explicit reverse_pass(std::initializer_list<result> results) : reverse_pass(std::vector<result>(results)) {}
  explicit reverse_pass(const std::vector<result>& results) : adjoints_(variable::record().size(), 0.0) {
    for (const result& r : results)
      for (std::size_t n = 0; n < r.x.data.size(); ++n) adjoints_[r.x.data[n].entry()] += r.gradient.data[n];
    for (std::size_t n = adjoints_.size() - 1; n > 0; --n) {
      const double d = adjoints_[n];
      if (d == 0) continue;  // what it does not depend on may be infinite
      const variable::operation& x = variable::record()[n];
      adjoints_[x.a] += d * x.by_a;
      adjoints_[x.b] += d * x.by_b;
    }
  }

  tensor<double> gradient(const tensor<variable>& x) const {
    tensor<double> g;
    g.extents = x.extents;
    g.data.reserve(x.data.size());
    for (const variable& v : x.data) g.data.push_back(v.entry() == 0 ? 0 : adjoints_[v.entry()]);
    return g;
  }

 private:
  std::vector<double> adjoints_;
};

}  // namespace reference
