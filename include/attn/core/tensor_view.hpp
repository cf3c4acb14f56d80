// attn: the one view type of the library.
//
// A tensor_view<T> is a non-owning, strided view of the caller's memory with the axes [batch, head, length, dim].
// tensor_view<T, 3> has no dim and one number per query (the log-sum-exp), or is a sequence [batch, length, dim];
// tensor_view<T, 2> is a matrix, tensor_view<T, 1> a vector. Nothing is copied, any stride is accepted; unit stride in
// the last axis is the fast path. A view is made, implicitly where no information is missing, from
//   - a pointer with extents (contiguous, last axis fastest), or with extents and strides (in elements);
//   - an Eigen matrix, map, block or ref with direct access, row- or column-major: [length, dim], batch 1, head 1;
//   - [batch, length, head, dim] memory: blhd_view; an Eigen matrix [length, heads * dim] or a sequence: split_heads;
//   - std::mdspan of rank 2 to 4, where the standard library has it;
//   - for a vector: an Eigen vector, std::vector, std::array or std::span.
#pragma once

#include <attn/core/detail/eigen.hpp>
#include <attn/core/detail/error_text.hpp>
#include <attn/core/errors.hpp>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <ranges>
#include <span>
#include <type_traits>
#include <utility>
#if __has_include(<mdspan>)
#include <mdspan>
#endif

namespace attn { inline namespace ATTN_ISA {

using idx_t = std::ptrdiff_t;

/// Element types. Arithmetic on float and double is done in these types, that on 16-bit types in float.
template <class T>
concept element = std::same_as<T, float> || std::same_as<T, double> || std::same_as<T, Eigen::half> ||
                  std::same_as<T, Eigen::bfloat16>;

/// The type in which arithmetic on elements of type S is done. (Products of bf16 numbers may use the processor's
/// instructions; it is then the type of their sums.)
template <class S>
using compute_type = std::conditional_t<std::same_as<S, double>, double, float>;

template <class T, int Rank = 4>
class tensor_view;

namespace detail {

/// N as the size of an array. With -Wsign-conversion, GCC warns of an int there that depends on a template's arguments,
/// although it is a constant.
template <idx_t N>
inline constexpr std::size_t array_size = static_cast<std::size_t>(N);

/// Eigen expressions with direct access to memory: a pointer and two strides.
template <class M>
concept eigen_memory = requires(std::remove_reference_t<M>& m) {
  { m.rows() } -> std::convertible_to<idx_t>;
  { m.innerStride() } -> std::convertible_to<idx_t>;
  { m.outerStride() } -> std::convertible_to<idx_t>;
  m.data();
  { std::remove_reference_t<M>::IsRowMajor };
  { std::remove_reference_t<M>::IsVectorAtCompileTime };
};

template <class M>
using eigen_element = std::remove_pointer_t<decltype(std::declval<std::remove_reference_t<M>&>().data())>;

#if defined(__cpp_lib_mdspan)
template <class X>
concept is_mdspan = requires(const std::remove_cvref_t<X>& x) {
  x.data_handle();
  x.mapping();
};
#else
template <class>
concept is_mdspan = false;
#endif

template <class>
inline constexpr bool is_view = false;
template <class T, int Rank>
inline constexpr bool is_view<tensor_view<T, Rank>> = true;

/// Objects that own memory, such as drawn parameters, and return a view of it.
template <class X>
concept gives_view = requires(const std::remove_cvref_t<X>& x) { x.view(); } &&
                     is_view<std::remove_cvref_t<decltype(std::declval<const std::remove_cvref_t<X>&>().view())>>;

}  // namespace detail

template <class T, int Rank>
class tensor_view {
  static_assert(Rank >= 1 && Rank <= 4);

 public:
  using element_type = T;
  using value_type = std::remove_const_t<T>;
  using extents_type = std::array<idx_t, detail::array_size<Rank>>;
  static constexpr int rank = Rank;

  /// The null view: every extent 0. As an optional argument it means "not given".
  constexpr tensor_view() = default;

  /// Contiguous memory, the last axis fastest. One extent for every axis.
  template <std::size_t N>
  constexpr tensor_view(T* data, const idx_t (&extents)[N]) : tensor_view(data, axes(extents)) {}
  template <std::same_as<extents_type> Extents>
  constexpr tensor_view(T* data, const Extents& extents) : data_(data), extents_(extents) {
    idx_t stride = 1;
    for (std::size_t axis = Rank; axis-- > 0;) {
      strides_[axis] = stride;
      stride *= extents_[axis];
    }
  }

  /// Any strides, in elements.
  template <std::size_t N, std::size_t M>
  constexpr tensor_view(T* data, const idx_t (&extents)[N], const idx_t (&strides)[M])
      : tensor_view(data, axes(extents), axes(strides)) {}
  template <std::same_as<extents_type> Extents>
  constexpr tensor_view(T* data, const Extents& extents, const Extents& strides)
      : data_(data), extents_(extents), strides_(strides) {}

  template <class U>
    requires(std::is_const_v<T> && std::same_as<U, value_type>)
  constexpr tensor_view(const tensor_view<U, Rank>& other)
      : data_(other.data()), extents_(other.extents()), strides_(other.strides()) {}

  /// A matrix becomes the last two axes; with Rank 1 and 3 a vector becomes the last one.
  template <detail::eigen_memory M>
    requires(std::convertible_to<detail::eigen_element<M>*, T*> &&
             (Rank > 1 || bool(std::remove_reference_t<M>::IsVectorAtCompileTime)))
  constexpr tensor_view(M&& m) : data_(m.data()) {
    using matrix = std::remove_reference_t<M>;
    extents_.fill(1);
    if constexpr ((Rank == 1 || Rank == 3) && matrix::IsVectorAtCompileTime) {
      extents_[Rank - 1] = m.rows() * m.cols();
      strides_[Rank - 1] = m.innerStride();
    } else {
      extents_[Rank - 2] = m.rows();
      extents_[Rank - 1] = m.cols();
      strides_[Rank - 2] = matrix::IsRowMajor ? m.outerStride() : m.innerStride();
      strides_[Rank - 1] = matrix::IsRowMajor ? m.innerStride() : m.outerStride();
    }
  }

  template <class R>
    requires(Rank == 1 && !detail::eigen_memory<R> && std::ranges::contiguous_range<R> &&
             std::convertible_to<decltype(std::ranges::data(std::declval<R&>())), T*>)
  constexpr tensor_view(R&& range)
      : data_(std::ranges::data(range)), extents_{static_cast<idx_t>(std::ranges::size(range))}, strides_{1} {}

#if defined(__cpp_lib_mdspan)
  /// The last axes of the mdspan become the last axes of the view; the leading ones have extent 1.
  template <class U, class Extents, class Layout, class Accessor>
    requires(std::convertible_to<U*, T*> && Extents::rank() >= 2 && Extents::rank() <= Rank &&
             std::same_as<typename std::mdspan<U, Extents, Layout, Accessor>::data_handle_type, U*>)
  constexpr tensor_view(const std::mdspan<U, Extents, Layout, Accessor>& source) : data_(source.data_handle()) {
    extents_.fill(1);
    for (std::size_t axis = 0; axis < Extents::rank(); ++axis) {
      extents_[Rank - Extents::rank() + axis] = static_cast<idx_t>(source.extent(axis));
      strides_[Rank - Extents::rank() + axis] = static_cast<idx_t>(source.stride(axis));
    }
  }
#endif

  constexpr T* data() const { return data_; }
  constexpr idx_t extent(int axis) const { return extents_[static_cast<std::size_t>(axis)]; }
  constexpr idx_t stride(int axis) const { return strides_[static_cast<std::size_t>(axis)]; }
  constexpr const extents_type& extents() const { return extents_; }
  constexpr const extents_type& strides() const { return strides_; }
  /// Whether the view was given. Only the null view was not; a view of shape [1, 2, 0, 64] was, even without memory.
  constexpr explicit operator bool() const {
    if (data_ != nullptr) return true;
    idx_t any = 0;
    for (idx_t n : extents_) any |= n;  // == of arrays calls memcmp
    return any != 0;
  }

  constexpr idx_t size() const {
    idx_t n = 1;
    for (idx_t e : extents_) n *= e;
    return n;
  }
  constexpr bool empty() const { return size() == 0; }

  template <std::convertible_to<idx_t>... Index>
    requires(sizeof...(Index) == Rank)
  constexpr T& operator()(Index... i) const {
    idx_t offset = 0;
    std::size_t axis = 0;
    ((offset += static_cast<idx_t>(i) * strides_[axis++]), ...);
    return data_[offset];
  }

  /// The elements [begin, begin + count) of one axis.
  constexpr tensor_view slice(int axis, idx_t begin, idx_t count) const {
    tensor_view part = *this;
    if (data_) part.data_ += begin * stride(axis);
    part.extents_[static_cast<std::size_t>(axis)] = count;
    return part;
  }

 private:
  template <std::size_t N>
  static constexpr extents_type axes(const idx_t (&list)[N]) {
    static_assert(N == Rank, "attn::tensor_view: expected one extent, and one stride, for each axis (4, or Rank)");
    extents_type all{};
    std::copy_n(list, N < Rank ? N : Rank, all.begin());
    return all;
  }

  T* data_ = nullptr;
  extents_type extents_{};
  extents_type strides_{};
};

namespace detail {

template <class X>
inline constexpr bool has_view =
    is_view<std::remove_cvref_t<X>> || eigen_memory<X> || gives_view<X> || is_mdspan<std::remove_cvref_t<X>>;

template <class X>
concept eigen_expression = std::derived_from<std::remove_cvref_t<X>, Eigen::EigenBase<std::remove_cvref_t<X>>>;

/// What is wrong with an argument of which no view can be made.
enum class not_viewable { no, expression, list, other };
template <class X>
constexpr not_viewable why_not_viewable() {
  if constexpr (has_view<X>) return not_viewable::no;
  else if constexpr (eigen_expression<X>) return not_viewable::expression;
  else if constexpr (std::ranges::range<X>) return not_viewable::list;
  else return not_viewable::other;
}

/// A sentence that compilers print where `right`, a part of a constraint, is false.
template <std::size_t N>
struct sentence {
  char text[N];
  consteval sentence(const char (&literal)[N]) { std::copy_n(literal, N, text); }
};
template <sentence, bool right>
inline constexpr bool says_unless = right;

}  // namespace detail

/// What every operator takes: a view or anything a view can be made of.
template <class X>
concept viewable =
    detail::says_unless<"attn: an Eigen expression such as x * w has no memory of its own: evaluate it first",
                        detail::why_not_viewable<X>() != detail::not_viewable::expression> &&
    detail::says_unless<"attn: a list of numbers has no shape: pass attn::tensor_view<float>(list.data(), {batch, "
                        "heads, length, dim})",
                        detail::why_not_viewable<X>() != detail::not_viewable::list> &&
    detail::says_unless<"attn: expected a tensor_view, an Eigen matrix or something else a view can be made of",
                        detail::why_not_viewable<X>() != detail::not_viewable::other>;

/// The view of a viewable argument; its element type is const where the argument is.
template <viewable X>
constexpr auto as_view(X&& x) {
  using object = std::remove_cvref_t<X>;
  if constexpr (detail::is_view<object>) {
    return x;
  } else if constexpr (detail::eigen_memory<X>) {
    return tensor_view<detail::eigen_element<X>>(x);
  } else if constexpr (detail::gives_view<X>) {
    return x.view();
  } else {
    return tensor_view<typename object::element_type>(x);
  }
}

namespace detail {

/// The view of an argument; of one that is not viewable some view, so that the concept gives the error message.
template <class X>
constexpr auto view_or_any() {
  if constexpr (has_view<X>) return decltype(as_view(std::declval<X>()))();
  else return tensor_view<float>();
}
template <class X>
using element_type_of = typename decltype(view_or_any<X>())::element_type;

}  // namespace detail

/// The element type of a viewable argument, without const.
template <class X>
using element_of = typename decltype(detail::view_or_any<X>())::value_type;

namespace detail {

[[noreturn, gnu::cold, gnu::noinline]] inline void fail_stride(idx_t stride) {
  raise<std::invalid_argument>(error_text{"attn: expected a list with stride 1; found stride ", stride}.c_str());
}

}  // namespace detail

/// A list of numbers in the caller's memory, such as lengths, one for each batch item: std::vector<idx_t>, std::array,
/// an array, a std::span, an Eigen vector, or a tensor or view of rank 1. Their stride must be 1.
template <class T>
class list_view : public std::span<const T> {
 public:
  constexpr list_view() noexcept = default;
  constexpr list_view(const T* data, std::size_t count) : std::span<const T>(data, count) {}
  template <class List>
    requires(!std::same_as<List, list_view>)
  constexpr list_view(const List& list) : std::span<const T>(checked(list)) {}
  template <class U>
  constexpr list_view(std::initializer_list<U>) {
    static_assert(sizeof(U) == 0, "attn: a list in braces is gone before it is read: name a std::vector or std::array");
  }

 private:
  template <class List>
  static constexpr std::span<const T> checked(const List& list) {
    constexpr bool right = std::is_constructible_v<tensor_view<const T, 1>, const List&>;
    static_assert(right || !std::integral<T>,
                  "attn: lengths, positions and dilations are lists of attn::idx_t (std::ptrdiff_t)");
    static_assert(right || std::integral<T>,
                  "attn: sinks and slopes are lists of float, of double for double elements; frequencies of rotations "
                  "are a list of double");
    if constexpr (right) {
      const tensor_view<const T, 1> x(list);
      if (x.extent(0) > 1 && x.stride(0) != 1) detail::fail_stride(x.stride(0));
      return {x.data(), static_cast<std::size_t>(x.extent(0))};
    } else {
      return {};
    }
  }
};

/// Contiguous [batch, length, head, dim] memory, as most frameworks' projections leave it.
template <class T>
constexpr tensor_view<T> blhd_view(T* data, idx_t batch, idx_t length, idx_t heads, idx_t dim) {
  return {data, {batch, heads, length, dim}, {length * heads * dim, dim, heads * dim, 1}};
}

namespace detail {

[[noreturn, gnu::cold, gnu::noinline]] inline void fail_heads(idx_t columns, idx_t heads) {
  raise<std::invalid_argument>(
      error_text{"attn::split_heads: expected heads that divide the columns ", columns, "; found ", heads}.c_str());
}

}  // namespace detail

/// A sequence [batch, length, heads * dim] as [batch, heads, length, dim]. Throws std::invalid_argument unless `heads`
/// divides the last extent.
template <class T>
constexpr tensor_view<T> split_heads(const tensor_view<T, 3>& x, idx_t heads) {
  if (heads < 1 || x.extent(2) % heads != 0) detail::fail_heads(x.extent(2), heads);
  const idx_t dim = x.extent(2) / heads;
  return {x.data(), {x.extent(0), heads, x.extent(1), dim}, {x.stride(0), dim * x.stride(2), x.stride(1), x.stride(2)}};
}

/// An Eigen matrix [length, heads * dim] as [1, heads, length, dim].
template <detail::eigen_memory M>
constexpr auto split_heads(M&& m, idx_t heads) {
  using element = detail::eigen_element<M>;
  const tensor_view<element> whole(m);
  return split_heads(tensor_view<element, 3>(whole.data(), {1, whole.extent(2), whole.extent(3)},
                                             {0, whole.stride(2), whole.stride(3)}),
                     heads);
}

/// A tensor that owns a sequence, or a std::mdspan of one.
template <class X>
  requires(detail::gives_view<X> || detail::is_mdspan<std::remove_cvref_t<X>>)
constexpr auto split_heads(X&& x, idx_t heads) {
  constexpr bool sequence = std::is_constructible_v<tensor_view<detail::element_type_of<X>, 3>, X&>;
  static_assert(sequence, "attn: expected a sequence [batch, length, heads * dim], of rank 3");
  return split_heads(tensor_view<detail::element_type_of<X>, 3>(x), heads);
}

namespace detail {

/// One head, or any other matrix: the form in which kernels see data.
template <class T>
struct matrix_view {
  T* data = nullptr;
  idx_t rows = 0, cols = 0;
  idx_t row_stride = 0, col_stride = 1;

  T* row(idx_t i) const { return data + i * row_stride; }
};

template <class T>
matrix_view<T> matrix_of(const tensor_view<T, 2>& x) {
  return {x.data(), x.extent(0), x.extent(1), x.stride(0), x.stride(1)};
}

template <class T>
matrix_view<T> head_of(const tensor_view<T>& x, idx_t batch, idx_t head) {
  if (!x.data()) return {nullptr, x.extent(2), x.extent(3), 0, x.stride(3)};  // rows of no elements have no address
  return {x.data() + batch * x.stride(0) + head * x.stride(1), x.extent(2), x.extent(3), x.stride(2), x.stride(3)};
}

/// The row of one head, or null where the view is not given.
template <class T>
T* row_of(const tensor_view<T, 3>& x, idx_t batch, idx_t head) {
  return x.data() ? x.data() + batch * x.stride(0) + head * x.stride(1) : nullptr;
}

/// Writes row i of x, converted.
template <class T, class S>
void write_row(const T* from, const matrix_view<S>& x, idx_t i) {
  S* const row = x.row(i);
  if (x.col_stride == 1)
    for (idx_t d = 0; d < x.cols; ++d) row[d] = static_cast<S>(from[d]);
  else
    for (idx_t d = 0; d < x.cols; ++d) row[d * x.col_stride] = static_cast<S>(from[d]);
}

/// Zeros for rows [begin, end): padding, at the speed of memory.
template <class S>
void clear_rows(const matrix_view<S>& x, idx_t begin, idx_t end) {
  if (begin >= end || x.cols == 0) return;
  const auto clear = [](S* to, idx_t count) {
    std::memset(static_cast<void*>(to), 0, static_cast<std::size_t>(count) * sizeof(S));
  };
  if (x.col_stride == 1 && x.row_stride == x.cols) return clear(x.row(begin), (end - begin) * x.cols);
  for (idx_t i = begin; i < end; ++i)
    if (x.col_stride == 1)
      clear(x.row(i), x.cols);
    else
      for (idx_t d = 0; d < x.cols; ++d) x.row(i)[d * x.col_stride] = static_cast<S>(0.0f);
}

}  // namespace detail
}}  // namespace attn::ATTN_ISA
