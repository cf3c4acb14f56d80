#pragma once
// FAVOR+ (Choromanski 2021) by the formula of the paper; nothing is stabilised.
#include "reference/kernel.hpp"

namespace reference {

enum class performer_kernel { positive, hyperbolic, trigonometric, relu };

struct performer_options : kernel_options {
  performer_kernel kernel = performer_kernel::positive;
  std::optional<double> scale, feature_eps;
  bool center_keys = false;
  tensor<double> features;  // [1, H, Hkv or 1, m, D]
};

// W x̃ of one token, x̃ = √scale (x - centre).
inline features projected(const performer_options& options, const tensor<double>& x, index b, index x_head, index head,
                          index heads, index i, const features& centre, long double& half_square) {
  const tensor<double>& w = options.features;
  const long double root =
      std::sqrt(static_cast<long double>(options.scale.value_or(1 / std::sqrt(static_cast<double>(x.dim())))));
  const auto at = [&](index d) {
    return root * (x(b, x_head, i, d) - (centre.empty() ? 0 : centre[static_cast<std::size_t>(d)]));
  };
  half_square = 0;
  for (index d = 0; d < x.dim(); ++d) half_square += at(d) * at(d) / 2;
  features u;
  for (index r = 0; r < w.length(); ++r) {
    long double sum = 0;
    for (index d = 0; d < x.dim(); ++d) sum += w(0, head / (heads / w.heads()), r, d) * at(d);
    u.push_back(sum);
  }
  return u;
}

// `top` is given where ε is added as published: the maximum that is subtracted.
inline features performer_features(const performer_options& options, const features& u, long double half_square,
                                   std::optional<long double> top) {
  const auto m = static_cast<long double>(u.size());
  const double eps = options.feature_eps.value_or(0);
  features phi;
  switch (options.kernel) {
    case performer_kernel::positive:
      for (auto x : u)
        phi.push_back((top ? std::exp(x - half_square - *top) + eps : std::exp(x - half_square)) / std::sqrt(m));
      break;
    case performer_kernel::hyperbolic:
      for (auto x : u) phi.push_back(std::exp(x - half_square) / std::sqrt(2 * m));
      for (auto x : u) phi.push_back(std::exp(-x - half_square) / std::sqrt(2 * m));
      break;
    case performer_kernel::trigonometric:
      for (auto x : u) phi.push_back(std::exp(half_square) * std::sin(x) / std::sqrt(m));
      for (auto x : u) phi.push_back(std::exp(half_square) * std::cos(x) / std::sqrt(m));
      break;
    case performer_kernel::relu:
      for (auto x : u) phi.push_back((x > 0 ? x : 0) + options.feature_eps.value_or(1e-3));
  }
  return phi;
}

inline result performer(const tensor<double>& q, const tensor<double>& k, const tensor<double>& v,
                        const performer_options& options) {
  const index group = k.heads() ? q.heads() / k.heads() : 1;
  const bool published = options.kernel == performer_kernel::positive && options.feature_eps.value_or(0) > 0;
  // Of one head's keys: their mean, and the largest W x̃ of all; both stay until another head is asked for.
  struct {
    index b = -1, h = -1;
    features centre;
    long double top = 0;
  } known;
  const auto key = [&](index b, index h, index j, long double& half_square) {
    return projected(options, k, b, h / group, h, q.heads(), j, known.centre, half_square);
  };
  const auto largest = [](const features& u) { return *std::max_element(u.begin(), u.end()); };
  const auto learn = [&](index b, index h) {
    if (known.b == b && known.h == h) return;
    known.b = b, known.h = h;
    known.centre.clear();
    const index keys = true_length(options.lengths, options.key_lengths, b, k.length());
    for (index d = 0; options.center_keys && d < k.dim(); ++d) {
      known.centre.push_back(0);
      for (index j = 0; j < keys; ++j) known.centre.back() += k(b, h / group, j, d) / static_cast<long double>(keys);
    }
    known.top = -static_cast<long double>(infinity);
    long double unused = 0;
    for (index j = 0; published && j < keys; ++j) known.top = std::max(known.top, largest(key(b, h, j, unused)));
  };
  return kernel_attention(
      q, k, v, options,
      [&](index b, index h, index i) {
        long double half_square = 0;
        const features u = projected(options, q, b, h, h, q.heads(), i, {}, half_square);
        return performer_features(options, u, half_square, published ? std::optional(largest(u)) : std::nullopt);
      },
      [&](index b, index h, index j) {
        long double half_square = 0;
        learn(b, h);
        const features u = key(b, h, j, half_square);
        return performer_features(options, u, half_square, published ? std::optional(known.top) : std::nullopt);
      });
}

}  // namespace reference
