// attn: attention by locality-sensitive hashing.
//
//   Queries are keys: k_j = q_j / |q_j|. In each of several rounds a random rotation R puts every token into a bucket,
//   argmax [q R; -q R]; tokens are sorted by (bucket, position) and cut into chunks; a chunk's queries see the keys of
//   their own chunk and of the one before it. out_i is the softmax attention (full_softmax.hpp) over the keys of all
//   rounds, where a key seen in several rounds counts in each, and over the query's own key only if it sees no other.
//                                                                        Kitaev, Kaiser, Levskaya 2020, "Reformer"
//
//   attn::lsh(q, v, out, {.rounds = 4, .buckets = 64, .chunk = 64, .seed = 7});
//   const auto rotations = attn::draw_rotations<float>(4, dim, 64, {.seed = 7, .heads = heads});   // for many calls
//   attn::lsh(q, v, out, {.causal = true, .rounds = 4, .buckets = 64, .rotations = rotations});
//
// Shapes   q [B, H, L, D], v [B, Hkv, L, Dv], out [B, H, L, Dv]; Hkv divides H; rotations
//          [H or 1, rounds, D, buckets / 2].
// Cost     2 B H L rounds (2 chunk (D + Dv) + D buckets / 2) operations, and rounds D buckets / 2 random numbers unless
//          rotations are given, whatever L: 2^24 buckets take seconds for a few tokens. Scratch: 4 L rounds numbers and
//          the packed rotations for every head in progress (L Dv more where rows of out cannot hold unfinished sums:
//          16-bit types, strides, dims that are no multiple of a vector), and the keys of 512 tokens, or more for long
//          chunks, per thread.
// Values   `out` is finite where |v| times the number of keys that a row sees, in all rounds, is below the largest
//          number of the compute type (float: 3.4e38), for sums precede the division.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
//
// In float, norms below 1e-18 count as 0 and those above 1e18 overflow. With causal, a query sees no key after its
// position; but which earlier ones it sees depends on how all tokens sort, the later ones included, as in the original.
#pragma once

#include <attn/core/detail/arguments.hpp>
#include <attn/core/tensor.hpp>
#include <attn/softmax/detail/lsh_run.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Options of draw_rotations.
struct rotations_options {
  std::uint64_t seed = 0;
  idx_t heads = 1;
};

/// Draws rotations for lsh, [heads, rounds, dim, buckets / 2] unit normal numbers: a seed gives the same numbers on
/// every machine, and head 0 has the numbers that lsh itself draws from the seed. T is float or double, the compute
/// type. Throws std::invalid_argument for sizes that do not fit.
template <class T>
tensor<T> draw_rotations(idx_t rounds, idx_t dim, idx_t buckets, const rotations_options& options = {}) {
  static_assert(std::same_as<T, float> || std::same_as<T, double>, "attn: rotations are float or double");
  const detail::validator check{"draw_rotations"};
  check.at_least("heads", 0, options.heads);
  detail::check_rounds(check, rounds);
  check.at_least("dim", 0, dim);
  detail::check_buckets(check, buckets);
  const idx_t count = check.fits("rotations", {rounds, dim, buckets}) / 2;
  check.fits("rotations", {options.heads, rounds, dim, buckets});
  tensor<T> rotations({options.heads, rounds, dim, buckets / 2});
  for (idx_t h = 0; h < options.heads; ++h)
    detail::fill_rotations(rotations.data() + h * count, count, options.seed, h);
  return rotations;
}

/// Options of lsh for elements of type S: those of pattern_softmax, and
template <class S>
struct lsh_options {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::causal | detail::fields::of_softmax | detail::fields::skip;

  /// Factor of q.k: `scale` if given, else 1 / sqrt(D), or 1 unless `scaled`, as in the original.
  std::optional<real> scale{};
  bool causal = false;
  list_view<idx_t> lengths{};
  /// Hashes of every token, from 1 to 2^16: with more rounds more of the important keys are found.
  idx_t rounds = 4;
  /// Buckets of a hash, even, from 2 to 2^24.
  idx_t buckets = 64;
  /// Tokens of a chunk, >= 1.
  idx_t chunk = 64;
  /// Chunks seen before and after the own one. No chunk is seen twice: where there are too few, `lookback` counts
  /// first.
  idx_t lookback = 1, lookahead = 0;
  /// The chunks of all rounds form one ring, as published: the first of a round sees the last of the round before.
  bool wrap = false;
  bool scaled = true;
  /// k = q / sqrt(|q|^2 + D norm_eps), >= 0.
  real norm_eps = 0;
  /// Seed of the rotations, which are the same for all heads, unless rotations are given.
  std::uint64_t seed = 0;
  view_field<const real, 4> rotations{};
  std::optional<real> softcap{};
  list_view<real> alibi_slopes{}, sinks{};
  view_field<real, 3> lse{};
  std::optional<real> skip_below{}, skip_share{};
  skipped_tiles* skipped = nullptr;
};

/// Attention by locality-sensitive hashing; score as in full_softmax.hpp.
template <viewable Q, viewable V, viewable O, class Options = lsh_options<element_of<const Q&>>,
          class Score = detail::no_score>
void lsh(const Q& q, const V& v, O&& out, Options&& options = {}, Score&& score = {}, execution_ref exec = {}) {
  const auto keys = detail::lsh_keys("lsh", q, v);
  auto call = detail::checked_call<lsh_options>("lsh", q, keys, v, out, options, score, exec);
  detail::set_lsh_options(call.views, call, call.options);
  detail::run_lsh(call, call.options);
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void run_lsh(const softmax_call<S, no_score>&, const lsh_options<S>&)
#include <attn/core/detail/compiled.hpp>
