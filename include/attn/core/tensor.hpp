// attn: a tensor that owns its memory: what the draw functions return.
//
//   const attn::tensor<float, 3> features = attn::draw_features<float>(256, 64, {.seed = 7});
//   attn::performer(q, k, v, out, features);          // an operator takes it as a view
#pragma once

#include <attn/core/detail/check.hpp>
#include <attn/core/detail/pages.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Contiguous, the last axis fastest.
template <class T, int Rank = 4>
class tensor {
 public:
  using extents_type = std::array<idx_t, detail::array_size<Rank>>;

  tensor() = default;
  /// Filled with `value`. Throws std::invalid_argument for negative extents or sizes no memory can hold.
  explicit tensor(const extents_type& extents, const T& value = T(0)) : extents_(extents) {
    const detail::validator check{"tensor"};
    idx_t count = 1;
    for (idx_t n : extents) {
      check.at_least("extents", 0, n);
      count = check.fits("a tensor", {count, n});
    }
    if constexpr (std::same_as<stored, T>) elements_.assign(static_cast<std::size_t>(count), value);
    else elements_.assign(static_cast<std::size_t>(count), stored{value});
  }

  T* data() { return const_cast<T*>(std::as_const(*this).data()); }
  const T* data() const {
    if constexpr (std::same_as<stored, T>) return elements_.data();
    else return reinterpret_cast<const T*>(elements_.data());
  }
  idx_t size() const { return static_cast<idx_t>(elements_.size()); }
  idx_t extent(int axis) const { return extents_[static_cast<std::size_t>(axis)]; }
  const extents_type& extents() const { return extents_; }

  tensor_view<T, Rank> view() { return {data(), extents_}; }
  tensor_view<const T, Rank> view() const { return {data(), extents_}; }
  operator tensor_view<T, Rank>() { return view(); }
  operator tensor_view<const T, Rank>() const { return view(); }

  template <std::convertible_to<idx_t>... Index>
  T& operator()(Index... i) {
    return view()(i...);
  }
  template <std::convertible_to<idx_t>... Index>
  const T& operator()(Index... i) const {
    return view()(i...);
  }

 private:
  struct flag {
    bool value;
  };
  using stored = std::conditional_t<std::same_as<T, bool>, flag, T>;  // a std::vector<bool> has no addresses

  extents_type extents_{};
  detail::memory_vector<stored> elements_;
};

}}  // namespace attn::ATTN_ISA
