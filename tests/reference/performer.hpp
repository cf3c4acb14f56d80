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
template <class N>
features_of_numbers<N> projected(const performer_options& options, const tensor<N>& w, const tensor<N>& x, idx_t b,
                                 idx_t x_head, idx_t head, idx_t heads, idx_t i, const features_of_numbers<N>& centre,
                                 wide<N>& half_square) {
  using number = wide<N>;
  const long double root =
      std::sqrt(static_cast<long double>(options.scale.value_or(1 / std::sqrt(static_cast<double>(x.dim())))));
  const auto at = [&](idx_t d) -> number {
    return static_cast<number>(static_cast<std::conditional_t<std::is_same_v<N, double>, long double, double>>(root)) *
           (x(b, x_head, i, d) - (centre.empty() ? number(0) : centre[static_cast<std::size_t>(d)]));
  };
  half_square = 0;
  for (idx_t d = 0; d < x.dim(); ++d) half_square += at(d) * at(d) / 2;
  features_of_numbers<N> u;
  for (idx_t r = 0; r < w.length(); ++r) {
    number sum = 0;
    for (idx_t d = 0; d < x.dim(); ++d) sum += w(0, head / (heads / w.heads()), r, d) * at(d);
    u.push_back(sum);
  }
  return u;
}

// `top` is given where ε is added as published: the maximum that is subtracted.
template <class number>
std::vector<number> performer_features(const performer_options& options, const std::vector<number>& u,
                                       number half_square, std::optional<number> top) {
  using std::cos, std::exp, std::sin, std::sqrt;
  const number m = static_cast<double>(u.size()), root = sqrt(m), double_root = sqrt(2 * m);
  const double eps = options.feature_eps.value_or(0);
  std::vector<number> phi;
  switch (options.kernel) {
    case performer_kernel::positive:
      for (auto x : u) phi.push_back((top ? exp(x - half_square - *top) + eps : exp(x - half_square)) / root);
      break;
    case performer_kernel::hyperbolic:
      for (auto x : u) phi.push_back(exp(x - half_square) / double_root);
      for (auto x : u) phi.push_back(exp(-x - half_square) / double_root);
      break;
    case performer_kernel::trigonometric:
      for (auto x : u) phi.push_back(exp(half_square) * sin(x) / root);
      for (auto x : u) phi.push_back(exp(half_square) * cos(x) / root);
      break;
    case performer_kernel::relu:
      for (auto x : u) phi.push_back((x > 0 ? x : number(0)) + options.feature_eps.value_or(1e-3));
  }
  return phi;
}

// `w` as options.features.
template <class N>
tensor<N> performer(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v, const tensor<N>& w,
                    const performer_options& options) {
  using number = wide<N>;
  using numbers = features_of_numbers<N>;
  const idx_t group = k.heads() ? q.heads() / k.heads() : 1;
  const bool published = options.kernel == performer_kernel::positive && options.feature_eps.value_or(0) > 0;
  // Of one head's keys: their mean, and the largest W x̃ of all; both stay until another head is asked for.
  struct {
    idx_t b = -1, h = -1;
    numbers centre;
    number top = 0;
  } known;
  const auto key = [&](idx_t b, idx_t h, idx_t j, number& half_square) {
    return projected(options, w, k, b, h / group, h, q.heads(), j, known.centre, half_square);
  };
  const auto largest = [](const numbers& u) { return *std::max_element(u.begin(), u.end()); };
  const auto learn = [&](idx_t b, idx_t h) {
    if (known.b == b && known.h == h) return;
    known.b = b, known.h = h;
    known.centre.clear();
    const idx_t keys = true_length(options.lengths, options.key_lengths, b, k.length());
    std::vector<idx_t> seen;
    for (idx_t j = 0; j < keys; ++j)
      if (!key_hidden(options.key_mask, b, j)) seen.push_back(j);
    for (idx_t d = 0; options.center_keys && d < k.dim(); ++d) {
      number mean = 0;
      for (idx_t j : seen) mean += k(b, h / group, j, d) / static_cast<number>(static_cast<double>(seen.size()));
      known.centre.push_back(mean);  // after the last is there, all are: keys before it are not centred yet
    }
    number unused = 0;
    for (idx_t j : published ? seen : std::vector<idx_t>()) {
      const number here = largest(key(b, h, j, unused));
      if (j == seen[0] || here > known.top) known.top = here;
    }
  };
  return kernel_attention(
      q, k, v, tensor<N>(), options,
      [&](idx_t b, idx_t h, idx_t i) {
        number half_square = 0;
        const numbers u = projected(options, w, q, b, h, h, q.heads(), i, numbers(), half_square);
        return performer_features<number>(options, u, half_square,
                                          published ? std::optional<number>(largest(u)) : std::nullopt);
      },
      [&](idx_t b, idx_t h, idx_t j) {
        number half_square = 0;
        learn(b, h);
        const numbers u = key(b, h, j, half_square);
        return performer_features<number>(options, u, half_square,
                                          published ? std::optional<number>(known.top) : std::nullopt);
      });
}

inline result performer(const tensor<double>& q, const tensor<double>& k, const tensor<double>& v,
                        const performer_options& options) {
  return {performer(q, k, v, options.features, options), {}};
}

}  // namespace reference
