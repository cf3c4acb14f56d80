// attn: fields of a matrix, or of one for each head.
#pragma once

#include <attn/core/execution.hpp>
#include <attn/core/view_field.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Whether X gives a view of three axes and no matrix.
template <class T, class X>
concept three_axes =
    std::is_constructible_v<tensor_view<T, 3>, X&> && !std::is_constructible_v<tensor_view<T, 2>, X&>;

/// Head h of matrices [heads, rows, columns].
template <class T>
constexpr tensor_view<T, 2> matrix_of_head(const tensor_view<T, 3>& x, idx_t h) {
  return {x.data() ? x.data() + h * x.stride(0) : nullptr, {x.extent(1), x.extent(2)}, {x.stride(1), x.stride(2)}};
}

/// A Field, which is of matrices of T, or a view [heads, rows, columns]. Of the latter it has the extents of one head.
template <class Field, class T>
class field_per_head : public Field {
 public:
  constexpr field_per_head() = default;
  constexpr field_per_head(const Field& x) : Field(x) {}
  template <class X>
    requires(!std::derived_from<std::remove_cvref_t<X>, Field>)
  constexpr field_per_head(X&& x) : Field(matrix_of<X>(x)), all_(all_of<X>(x)) {}
  /// {pointer, extents} and {pointer, extents, strides}, as of a tensor_view.
  template <std::size_t N>
  constexpr field_per_head(T* data, const idx_t (&extents)[N]) : field_per_head(view<N>(data, extents)) {}
  template <std::size_t N, std::size_t M>
  constexpr field_per_head(T* data, const idx_t (&extents)[N], const idx_t (&strides)[M])
      : field_per_head(view<N>(data, extents, strides)) {}
  template <std::size_t N>
  constexpr field_per_head(T* data, const std::array<idx_t, N>& extents) : field_per_head(view<N>(data, extents)) {}
  template <std::size_t N>
  constexpr field_per_head(T* data, const std::array<idx_t, N>& extents,
                           const std::type_identity_t<std::array<idx_t, N>>& strides)
      : field_per_head(view<N>(data, extents, strides)) {}

  /// [heads, rows, columns], or null where it is one matrix.
  constexpr const tensor_view<T, 3>& per_head() const { return all_; }
  constexpr tensor_view<T, 2> head(idx_t h) const { return matrix_of_head(all_, h); }

 private:
  template <std::size_t N>
  using view = tensor_view<T, static_cast<int>(N)>;

  template <class X>
  static constexpr tensor_view<T, 3> all_of([[maybe_unused]] std::remove_reference_t<X>& x) {
    if constexpr (three_axes<T, std::remove_reference_t<X>>) return view_of_field<T, 3, X>(x);
    else return {};
  }
  template <class X>
  static constexpr Field matrix_of(std::remove_reference_t<X>& x) {
    if constexpr (three_axes<T, std::remove_reference_t<X>>) return matrix_of_head(all_of<X>(x), 0);
    else return Field(static_cast<X&&>(x));
  }

  tensor_view<T, 3> all_{};
};

/// run(head, execution) for every head: each by one thread where there are at least so many heads, else by all.
template <class Run>
void for_each_head(idx_t heads, idx_t least, execution& exec, Run&& run) {
  if (exec.active_threads() == 1 || heads < least) {
    for (idx_t h = 0; h < heads; ++h) run(h, exec);
    return;
  }
  const auto serial = exec.serial_executions();
  exec.for_each(heads, [&](idx_t h, int worker) { run(h, serial[static_cast<std::size_t>(worker)]); });
}

}}}  // namespace attn::ATTN_ISA::detail
