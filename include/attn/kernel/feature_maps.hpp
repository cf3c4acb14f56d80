// attn: feature maps of linear attention, as values.
//
//   attn::linear(q, k, v, out, {}, attn::feature_maps::relu{});
//   attn::linear(q, k, v, out, {}, [](float x) { return x * x; });      // your own, number by number
//
// A map need not compute one feature of each number. It may also be a type with
//   attn::idx_t features(attn::idx_t dim) const;                        // how many
//   void operator()(std::span<const T> token, std::span<T> phi) const;  // all of them, of one token
// Maps are called in no particular order and from all threads of the execution at once; T is float or double.
#pragma once

#include <attn/kernel/detail/features.hpp>

#include <span>

namespace attn { inline namespace ATTN_ISA {

namespace feature_maps {

/// elu(x) + 1: x + 1 for x > 0, e^x below (Katharopoulos 2020).
struct elu_plus_one {
  auto operator()(std::floating_point auto x) const { return x > 0 ? x + 1 : std::exp(x); }
};

/// max(x, 0).
struct relu {
  auto operator()(std::floating_point auto x) const { return x < 0 ? 0 : x; }
};

/// x: features computed elsewhere.
struct identity {
  auto operator()(std::floating_point auto x) const { return x; }
};

}  // namespace feature_maps

namespace detail {

template <class F, class T>
concept number_map = requires(const F& f, T x) {
  { f(x) } -> std::convertible_to<T>;
};

template <class F, class T>
concept token_map = requires(const F& f, std::span<const T> token, std::span<T> phi, idx_t dim) {
  { f.features(dim) } -> std::convertible_to<idx_t>;
  f(token, phi);
};

template <class F, class T>
constexpr bool require_feature_map() {
  constexpr bool fits = number_map<F, T> || token_map<F, T>;
  static_assert(fits,
                "attn: a feature map must be callable as map(x) and return a number, or have features(dim) and be "
                "callable as map(token, phi) on spans");
  return fits;
}

/// Number of features of a map. The caller's map is asked once, because memory is allocated accordingly.
template <class F>
idx_t features_of(const F& map, idx_t dim) {
  if constexpr (requires { map.features(dim); })
    return map.features(dim);
  else
    return dim;
}

/// Applies one of the library's maps to a packet.
template <class F, class T>
ATTN_INLINE packet<T> map_packet(const packet<T>& x) {
  if constexpr (std::same_as<F, feature_maps::elu_plus_one>)
    return if_less(zero<T>(), x, add(x, broadcast<T>(T(1))), exp_weight<T>(x));
  else if constexpr (std::same_as<F, feature_maps::relu>)
    return if_less(x, zero<T>(), zero<T>(), x);
  else
    return x;
}

/// A map, the caller's or the library's, in the form in which kernels take it: small, because it is compiled for
/// every map and element type.
template <class S, class F>
struct mapped_features final : feature_map<compute_type<S>> {
  using T = compute_type<S>;

  const F& map;
  idx_t dim;

  mapped_features(const F& f, idx_t d, idx_t count) : map(f), dim(d) {
    this->features = count;
    if constexpr (token_map<F, T>) this->scratch_size = dim * kernel_chunk + dim + count + width<T>;
  }

  void keys(const token_rows<T>& x, idx_t, T* phi, T*, [[maybe_unused]] T* work) const override {
    [[maybe_unused]] const idx_t count = this->features;
    if constexpr (token_map<F, T>) {
      T *const columns = work, *const token = work + dim * kernel_chunk, *const made = token + dim;
      access_to<S, T>.pack_columns(x, dim, columns);
      for (idx_t t = 0; t < x.lanes; ++t) {
        for (idx_t d = 0; d < dim; ++d) token[d] = columns[d * kernel_chunk + (std::min)(t, x.count - 1)];
        if (t < x.count)
          map(std::span<const T>(token, static_cast<std::size_t>(dim)),
              std::span<T>(made, static_cast<std::size_t>(count)));
        for (idx_t r = 0; r < count; ++r) phi[r * kernel_chunk + t] = made[r];
      }
    } else if constexpr (std::same_as<F, feature_maps::elu_plus_one> || std::same_as<F, feature_maps::relu>) {
      pack_columns<S>(x, dim, phi, [](const packet<T>& p) { return map_packet<F, T>(p); });
    } else {
      access_to<S, T>.pack_columns(x, dim, phi);
      if constexpr (!std::same_as<F, feature_maps::identity>)
        for (idx_t r = 0; r < dim; ++r)
          for (idx_t t = 0; t < x.count; ++t)
            phi[r * kernel_chunk + t] = static_cast<T>(map(phi[r * kernel_chunk + t]));
    }
  }

  void rows(const stored_matrix<T>& x, idx_t begin, idx_t count, const panels<T>& to,
            [[maybe_unused]] T* work) const override {
    if constexpr (token_map<F, T>) {
      T *const token = work, *const made = token + dim;
      for (idx_t t = 0; t < count; ++t) {
        x.read_row(begin + t, token);
        map(std::span<const T>(token, static_cast<std::size_t>(dim)),
            std::span<T>(made, static_cast<std::size_t>(this->features)));
        std::fill_n(made + this->features, width<T>, T(0));
        for (idx_t r = 0; r < this->features; r += width<T>) store<T>(to.at(t, r), load<T>(made + r));
      }
    } else {
      x.access->pack_panels(x, begin, count, to.data);
      if constexpr (std::same_as<F, feature_maps::elu_plus_one> || std::same_as<F, feature_maps::relu>)
        each_packet(count, dim, [](idx_t, idx_t, const auto& p) { return map_packet<F, T>(p); }, to, to);
      else if constexpr (!std::same_as<F, feature_maps::identity>)
        for (idx_t t = 0; t < count; ++t)
          for (idx_t r = 0; r < dim; ++r) *to.at(t, r) = static_cast<T>(map(*to.at(t, r)));
      for (idx_t r = dim; r < round_up(dim, width<T>); ++r)
        for (idx_t t = 0; t < count; ++t) *to.at(t, r) = T(0);
    }
  }
};

template <class S, class F>
mapped_features<S, F> map_features(const F& map, idx_t dim) {
  return {map, dim, features_of(map, dim)};
}

}  // namespace detail
}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) struct mapped_features<S, feature_maps::elu_plus_one>
#include <attn/core/detail/compiled.hpp>
