// attn: the views in options, weights and gradients.
//
//   attn::project(x, out, {.weight = w, .bias = b});   // weight is a view_field<const float, 2>, bias one of rank 1
//
// A view_field is a tensor_view that may be left out. It is made from whatever its view can be made from; one of rank 1
// also from a matrix of one row or one column, as files keep vectors (any other throws std::invalid_argument). Anything
// else does not compile, and one sentence says why: numbers of another type, an expression. A temporary that owns its
// memory, such as the matrix `MatrixXf(2 * w)`, does not compile either, because options and weights may outlive it.
// (The transpose or a block of a temporary does compile, for it has the type of one of a named matrix: give such a
// matrix a name.)
#pragma once

#include <attn/core/detail/error_text.hpp>
#include <attn/core/errors.hpp>
#include <attn/core/tensor_view.hpp>

#include <stdexcept>

namespace attn { inline namespace ATTN_ISA {
namespace detail {

/// Whether what is given as X&& is a temporary that ends with its memory: a matrix, a tensor, a container.
template <class X>
constexpr bool is_owning_temporary() {
  if constexpr (std::is_reference_v<X>) return false;
  else if constexpr (eigen_memory<X>) return std::same_as<typename X::PlainObject, std::remove_const_t<X>>;
  else return gives_view<X> || (std::ranges::range<X> && !std::ranges::borrowed_range<X>);
}

/// Says in one sentence why x is no view of T.
template <class T, int Rank, class X>
constexpr void explain_not_field() {
  constexpr bool right = sizeof(X) == 0;
  constexpr not_viewable why = why_not_viewable<X>();
  if constexpr (why == not_viewable::expression) {
    static_assert(right, "attn: an Eigen expression such as x * w has no memory of its own: evaluate it first");
  } else if constexpr (why == not_viewable::list && Rank > 1) {
    static_assert(right, "attn: a list of numbers has no shape: pass attn::tensor_view<float, 2>(list.data(), {rows, "
                         "columns}), with as many extents as the field has axes");
  } else if constexpr (why == not_viewable::other) {
    static_assert(right, "attn: expected a tensor_view, an Eigen matrix or something else a view can be made of");
  } else if constexpr (why == not_viewable::list || !std::same_as<element_of<X&>, std::remove_const_t<T>>) {
    static_assert(right, "attn: weights, gradients and parameters are of the element type of the call, other views in "
                         "options of its compute type (float for 16-bit elements); found numbers of another type");
  } else if constexpr (!std::is_const_v<T> && std::is_const_v<element_type_of<X&>>) {
    static_assert(right, "attn: a gradient or result must be writable, but its elements are const");
  } else {
    static_assert(right, "attn: expected a view with as many axes as the field has; found another number of them");
  }
}

/// A matrix of one row or one column as a vector.
template <class T>
constexpr tensor_view<T, 1> vector_of(const tensor_view<T, 2>& x) {
  if (!x) return {};
  if (x.extent(0) != 1 && x.extent(1) != 1)
    raise<std::invalid_argument>(
        error_text{"attn: expected a vector, or a matrix of one row or one column; found a matrix ",
                   error_text::list(x.extents().data(), 2)}.c_str());
  const int axis = x.extent(0) == 1 ? 1 : 0;
  return {x.data(), {x.extent(axis)}, {x.stride(axis)}};
}

template <class T, int Rank, class X>
concept matrix_for_vector = Rank == 1 && has_view<X> && std::is_constructible_v<tensor_view<T, 2>, X&>;

/// The view of what a field is given as X&&.
template <class T, int Rank, class X>
constexpr tensor_view<T, Rank> view_of_field(std::remove_reference_t<X>& x) {
  constexpr bool stays = !is_owning_temporary<X>();
  static_assert(stays, "attn: a temporary is gone before the view of it is read: name the matrix or list");
  if constexpr (std::is_constructible_v<tensor_view<T, Rank>, std::remove_reference_t<X>&>) return x;
  else if constexpr (matrix_for_vector<T, Rank, std::remove_reference_t<X>>) return vector_of(tensor_view<T, 2>(x));
  else return explain_not_field<T, Rank, std::remove_reference_t<X>>(), tensor_view<T, Rank>();
}

}  // namespace detail

template <class T, int Rank = 4>
class view_field : public tensor_view<T, Rank> {
  using view = tensor_view<T, Rank>;

 public:
  constexpr view_field() noexcept = default;
  constexpr view_field(const view& x) : view(x) {}
  template <class X>
  constexpr view_field(X&& x) : view(detail::view_of_field<T, Rank, X>(x)) {}
  /// {pointer, extents} and {pointer, extents, strides}, as of a tensor_view.
  template <std::size_t N>
  constexpr view_field(T* data, const idx_t (&extents)[N]) : view(data, extents) {}
  template <std::size_t N, std::size_t M>
  constexpr view_field(T* data, const idx_t (&extents)[N], const idx_t (&strides)[M]) : view(data, extents, strides) {}
  template <std::same_as<typename view::extents_type> Extents>
  constexpr view_field(T* data, const Extents& extents) : view(data, extents) {}
  template <std::same_as<typename view::extents_type> Extents>
  constexpr view_field(T* data, const Extents& extents, const Extents& strides) : view(data, extents, strides) {}
};

}}  // namespace attn::ATTN_ISA
