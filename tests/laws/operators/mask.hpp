#pragma once
// What the entries of the softmax family share: a mask, by row of q and k, and a score function.
#include "laws/law.hpp"

namespace testing {

// Of rows as they are in the larger batch. Where every row has its own position's key or the first, none sees nothing.
inline bool mask_sees(idx_t b, idx_t h, idx_t i, idx_t j) {
  return i == j || j == 0 || (7 * i + 13 * j + 3 * b + h) % 5 < 3;
}

class law_mask {
 public:
  law_mask() = default;
  explicit law_mask(const law_shape& s) : extents_{s.batch, s.heads, s.queries, s.keys} {
    for (idx_t b = 0; b < s.batch; ++b)
      for (idx_t h = 0; h < s.heads; ++h)
        for (idx_t i = 0; i < s.queries; ++i)
          for (idx_t j = 0; j < s.keys; ++j) bytes_.push_back(mask_sees(s.first_batch + b, s.first_head + h, i, j));
  }
  attn::mask_view view() const { return attn::tensor_view<const std::uint8_t>(bytes_.data(), extents_); }

 private:
  std::vector<std::uint8_t> bytes_;
  std::array<idx_t, 4> extents_{};
};

template <class N>
N own_score(N x, idx_t h, idx_t i, idx_t j) {
  return x / 2 + static_cast<N>((h + i + 3 * j) % 5) / 4;
}
template <class T>
score_of<T> own_score_of(const law_shape& s) {
  return [first = s.first_head](T x, idx_t, idx_t h, idx_t i, idx_t j) { return own_score(x, first + h, i, j); };
}
template <class T>
T own_score_backward(T, T d, idx_t, idx_t, idx_t, idx_t) {
  return d / 2;
}

// Where the queries of a call begin, so that the last one is at the last key.
inline void set_first_positions(const law_shape& s, const auto& call, std::vector<idx_t>& to) {
  for (idx_t b = 0; b < s.batch; ++b)
    to[static_cast<std::size_t>(b)] = reference::true_length(call.lengths, call.key_lengths, b, s.keys) -
                                      reference::true_length(call.lengths, call.query_lengths, b, s.queries);
}

// The same for a reference, whose score functions get the position of a query; that of row 0 is `first`, if given.
inline reference::score_function mask_for_reference(const law_shape& s, const law_reference_call& call, bool masked,
                                                    bool scored, std::optional<idx_t> first = {}) {
  if (!masked && !scored) return {};
  std::vector<idx_t> begin(static_cast<std::size_t>(s.batch), first.value_or(0));
  if (!first) set_first_positions(s, call, begin);
  return [=](double x, idx_t b, idx_t h, idx_t position, idx_t j) {
    const idx_t i = position - begin[static_cast<std::size_t>(b)];
    if (masked && !mask_sees(s.first_batch + b, s.first_head + h, i, j)) return -reference::infinity;
    return scored ? own_score(x, s.first_head + h, position, j) : x;
  };
}

// Relative keys up to distance 7, [1, H, 15, D].
template <class T>
tensor<T> law_relative_keys(const law_shape& s) {
  tensor<T> table(1, s.heads, 15, s.dim);
  for (idx_t h = 0; h < s.heads; ++h)
    for (idx_t e = 0; e < 15; ++e)
      for (idx_t d = 0; d < s.dim; ++d)
        table(0, h, e, d) = static_cast<T>((5 * e + 3 * d + 7 * (s.first_head + h)) % 11 - 5) / 8;
  return table;
}

// Position queries up to distance 3, [1, H, 7, D].
template <class T>
tensor<T> law_position_queries(const law_shape& s) {
  tensor<T> table(1, s.heads, 7, s.dim);
  for (idx_t h = 0; h < s.heads; ++h)
    for (idx_t e = 0; e < 7; ++e)
      for (idx_t d = 0; d < s.dim; ++d)
        table(0, h, e, d) = static_cast<T>((3 * e + 5 * d + 2 * (s.first_head + h)) % 13 - 6) / 8;
  return table;
}

// A mask of keys, which never hides the first.
inline bool key_mask_sees(idx_t b, idx_t j) { return (3 * j + b) % 7 != 5 || j == 0; }
inline std::vector<std::uint8_t> law_key_mask(const law_shape& s) {
  std::vector<std::uint8_t> bytes;
  for (idx_t b = 0; b < s.batch; ++b)
    for (idx_t j = 0; j < s.keys; ++j) bytes.push_back(key_mask_sees(s.first_batch + b, j));
  return bytes;
}
inline tensor<double> key_mask_for_reference(const std::vector<std::uint8_t>& bytes, const law_shape& s) {
  tensor<double> mask(s.batch, 1, 1, s.keys);
  for (std::size_t n = 0; n < bytes.size(); ++n) mask.data[n] = bytes[n];
  return mask;
}

// Log decays, [B, H, Lk, 1].
template <class T>
tensor<T> law_log_decay(const law_shape& s) {
  tensor<T> decay(s.batch, s.heads, s.keys, 1);
  for (idx_t b = 0; b < s.batch; ++b)
    for (idx_t h = 0; h < s.heads; ++h)
      for (idx_t j = 0; j < s.keys; ++j)
        decay(b, h, j, 0) = -static_cast<T>((5 * (s.first_batch + b) + 3 * (s.first_head + h) + 7 * j) % 11) / 16;
  return decay;
}

// ALiBi's slopes and sinks by head of the larger batch.
template <class T>
std::vector<T> law_slopes(const law_shape& s) {
  std::vector<T> slopes;
  for (idx_t h = 0; h < s.heads; ++h) slopes.push_back(static_cast<T>(std::exp2(-(s.first_head + h + 1))));
  return slopes;
}
// Of skip-softmax: slopes by which keys at a distance of 64 are left out, and a threshold so low that what is left out
// is less than the tolerance. The rows of a tile leave out keys together, so that a row does not depend on what it sees
// alone (law 5, law 10).
template <class T>
std::vector<T> law_steep_slopes(const law_shape& s) {
  std::vector<T> slopes;
  for (idx_t h = 0; h < s.heads; ++h) slopes.push_back(1 + static_cast<T>(s.first_head + h) / 4);
  return slopes;
}
template <class T>
inline constexpr T law_skip_below = sizeof(T) > sizeof(float) ? T(38) : T(18);

template <class T>
std::vector<T> law_sinks(const law_shape& s) {
  std::vector<T> sinks;
  for (idx_t h = 0; h < s.heads; ++h) sinks.push_back(static_cast<T>(s.first_head + h) - 1);
  return sinks;
}

// A bias by distance, up to 9: for each head of the larger batch, or one for all.
template <class T>
tensor<T> law_relative_bias(const law_shape& s, bool one_for_all = false) {
  tensor<T> table(1, 1, one_for_all ? 1 : s.heads, 19);
  for (idx_t h = 0; h < table.length(); ++h)
    for (idx_t e = 0; e < table.dim(); ++e)
      table(0, 0, h, e) = static_cast<T>((7 * e + 5 * (one_for_all ? 0 : s.first_head + h)) % 13) / 8;
  return table;
}

}  // namespace testing
