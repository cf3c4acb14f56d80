// attn: rotary position embedding of queries or keys.
//
//   (out_a, out_b) = (x_a cos w - x_b sin w, x_b cos w + x_a sin w), w = position * frequency of the dims (a, b)
//                             Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding"
//
//   attn::rotary(q, q);                                               // in place; positions 0, 1, ...
//   attn::rotary(k, rotated, {.first_position = 100}, threads);
//   const auto scaled = attn::rotary_llama3(128, {.base = 500000, .factor = 8, .original_length = 8192});
//   attn::rotary(q, q, {.frequencies = scaled});
//   attn::rotary_backward(d_out, {.x = dx}, {.first_position = 100});
//
// Two dims are rotated together: n and n + dims / 2, as in GPT-NeoX and Llama, or 2 n and 2 n + 1, as in GPT-J. After
// the rotation q_i . k_j depends on i and j through i - j only.
//
// Shapes   x and out [B, H, L, D]; out may be x. float, double, or Eigen::half / Eigen::bfloat16 in memory with float
//          arithmetic. Angles, sines and cosines are computed in double: the relative error of an angle is 2^-53.
// Cost     one pass over x; sines and cosines once for all heads, and for all batch items where they share positions.
//          Scratch: 32 dims numbers per thread.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
#pragma once

#include <attn/core/detail/rotary_call.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Options of rotary for elements of type S.
template <class S>
struct rotary_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  using real = compute_type<S>;

  /// Position of the first token.
  idx_t first_position = 0;
  /// Positions of the tokens, in place of first_position + i: [B or 1, L].
  view_field<const idx_t, 2> positions{};
  /// Whether dims 2 n and 2 n + 1 are rotated together, instead of n and n + dims / 2.
  bool interleaved = false;
  /// How many dims, the first ones, are rotated, an even number; the others are copied. All of them unless given.
  std::optional<idx_t> dims{};
  /// Base of the frequencies base^(-2 n / dims), n = 0, 1, ... dims / 2 - 1.
  double base = 10000;
  /// dims / 2 frequencies in place of those of the base, as the functions below return them.
  list_view<double> frequencies{};
  /// Factor of the rotated dims, as in YaRN.
  double magnitude = 1;
  /// Tables of cosines and sines, [positions, dims / 2], in place of base, frequencies and magnitude.
  view_field<const real, 2> cos{}, sin{};
};

/// The gradient rotary_backward computes.
template <class S>
struct rotary_gradients {
  view_field<S> x{};
  /// Add to what is there instead of writing it over.
  bool accumulate = false;
};

/// Rotates x into out. See the top of the file.
template <viewable X, viewable O, class Options = rotary_options<element_of<const X&>>>
void rotary(const X& x, O&& out, Options&& options = {}, execution_ref exec = {}) {
  using S = element_of<const X&>;
  static_assert(std::same_as<S, element_of<O&>>, "attn: x and out must have one element type");
  const auto& given = detail::options_or_default<rotary_options<S>>(options);
  detail::run_rotary<S>(detail::validator("rotary"), as_view(x), as_view(out), {"x", "out"}, given, false, false,
                        detail::execution_of(exec, options));
}

/// The gradient of rotary, which is the inverse rotation of d_out, with the forward call's options. It may be written
/// over d_out.
template <viewable D, class Options = rotary_options<element_of<const D&>>>
void rotary_backward(const D& d_out, const rotary_gradients<element_of<const D&>>& gradients, Options&& options = {},
                     execution_ref exec = {}) {
  using S = element_of<const D&>;
  const auto& given = detail::options_or_default<rotary_options<S>>(options);
  if (!gradients.x) return;
  detail::run_rotary<S>(detail::validator("rotary_backward"), as_view(d_out), gradients.x,
                        {"d_out", "the gradient of x"}, given, true, gradients.accumulate,
                        detail::execution_of(exec, options));
}

// Frequencies ---------------------------------------------------------------------------------------------------------

/// How a model that was trained with original_length positions is used with `factor` times as many.
struct rotary_scaling {
  double base = 10000, factor = 1;
  idx_t original_length = 2048;
  /// rotary_yarn, rotary_llama3: turns within the original length above which a frequency stays, 32 and 4 unless given,
  /// and below which it is divided.
  std::optional<double> fast_turns{};
  double slow_turns = 1;
  /// rotary_yarn: whether the ramp begins and ends at whole pairs of dims, as in Peng's code and most models; gpt-oss
  /// does not round.
  bool whole_pairs = true;
};

/// base^(-2 n / dims), n < dims / 2. Throws std::invalid_argument for dims that are odd or negative, for bases and
/// factors that are not greater than 0, and, like the functions below, for settings that do not fit.
inline std::vector<double> rotary_frequencies(idx_t dims, double base = 10000) {
  return detail::frequencies_of("rotary_frequencies", dims, {base}, [](idx_t, double f) { return f; });
}

/// Position interpolation (Chen 2023): all frequencies divided by the factor.
inline std::vector<double> rotary_linear(idx_t dims, const rotary_scaling& s) {
  return detail::frequencies_of("rotary_linear", dims, {s.base, s.factor},
                                [&](idx_t, double f) { return f / s.factor; });
}

/// NTK-aware scaling (bloc97 2023): the base times factor^(dims / (dims - 2)), which keeps the highest frequency and
/// divides the lowest one by the factor.
inline std::vector<double> rotary_ntk(idx_t dims, const rotary_scaling& s) {
  const double power = dims > 2 ? static_cast<double>(dims) / static_cast<double>(dims - 2) : 0;
  return detail::frequencies_of("rotary_ntk", dims, {s.base * std::pow(s.factor, power), s.factor},
                                [](idx_t, double f) { return f; });
}

/// YaRN (Peng 2023): frequencies of more than fast_turns turns within the original length stay, those of fewer than
/// slow_turns are divided by the factor, with a ramp over the pairs between. Goes with .magnitude = rotary_magnitude().
inline std::vector<double> rotary_yarn(idx_t dims, const rotary_scaling& s) {
  const double fast_turns =
      detail::checked_turns("rotary_yarn", s.original_length, s.fast_turns.value_or(32), s.slow_turns);
  if (!(s.base > 1)) detail::validator("rotary_yarn").fail("a base > 1", s.base);
  const auto pair_of = [&](double turns) {  // the pair of dims whose frequency makes so many turns
    return static_cast<double>(dims) * std::log(static_cast<double>(s.original_length) / (turns * detail::two_pi)) /
           (2 * std::log(s.base));
  };
  const double last = static_cast<double>(std::max<idx_t>(1, dims) - 1);
  const double first_pair = pair_of(fast_turns), last_pair = pair_of(s.slow_turns);
  const double low = (std::max)(s.whole_pairs ? std::floor(first_pair) : first_pair, 0.0),
               high = (std::max)((std::min)(s.whole_pairs ? std::ceil(last_pair) : last_pair, last), low + 0.001);
  return detail::frequencies_of("rotary_yarn", dims, {s.base, s.factor}, [&](idx_t n, double f) {
    const double divided = std::clamp((static_cast<double>(n) - low) / (high - low), 0.0, 1.0);
    return f * (1 - divided) + f / s.factor * divided;
  });
}
/// 0.1 mscale ln(factor) + 1, 1 for factors up to 1. DeepSeek's models give mscale: their .magnitude is that of mscale
/// over that of mscale_all_dim, and their scale is multiplied by the square of the latter.
inline double rotary_magnitude(double factor, double mscale = 1) {
  return factor <= 1 ? 1 : 0.1 * mscale * std::log(factor) + 1;
}

/// Llama 3.1: wavelengths above original_length / slow_turns are multiplied by the factor, those below
/// original_length / fast_turns stay, with a ramp over the turns between.
inline std::vector<double> rotary_llama3(idx_t dims, const rotary_scaling& s) {
  const double fast = detail::checked_turns("rotary_llama3", s.original_length, s.fast_turns.value_or(4), s.slow_turns);
  return detail::frequencies_of("rotary_llama3", dims, {s.base, s.factor}, [&](idx_t, double f) {
    const double turns = static_cast<double>(s.original_length) * f / detail::two_pi;
    const double stays = std::clamp((turns - s.slow_turns) / (fast - s.slow_turns), 0.0, 1.0);
    return f * stays + f / s.factor * (1 - stays);
  });
}

}}  // namespace attn::ATTN_ISA
