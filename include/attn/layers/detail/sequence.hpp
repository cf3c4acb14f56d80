// attn: what the layers take and give, sequences [batch, length, dim], and the checks they share.
#pragma once

#include <attn/core/detail/arguments.hpp>
#include <attn/core/detail/check.hpp>
#include <attn/core/detail/tile_product.hpp>

namespace attn::inline ATTN_ISA::detail {

/// The view [batch, length, dim] of an argument: of such a view or tensor itself, or of an Eigen matrix [length, dim], or
/// of an mdspan.
template <viewable X>
constexpr auto as_sequence(X&& x) {
  using object = std::remove_cvref_t<X>;
  if constexpr (is_view<object>) {
    static_assert(object::rank == 3, "attn: sequences must be [batch, length, dim]");
    return x;
  } else if constexpr (eigen_memory<X>) {
    return tensor_view<eigen_element<X>, 3>(x);
  } else if constexpr (gives_view<X>) {
    return as_sequence(x.view());
  } else {
    return tensor_view<typename object::element_type, 3>(x);
  }
}

/// What mixes the tokens of a sequence: mixer(x, out, execution), both [batch, length, dim]. It fills out, which may lie
/// in any memory but x's.
template <class F, class S>
concept token_mixer = std::invocable < F&,
        const tensor_view<const S, 3>
&, const tensor_view<S, 3>&, execution& > ;

/// Types of a call of a layer, checked where the compiler can.
template <class X, class Out>
constexpr void require_sequences() {
  static_assert(element<element_of<X>>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  static_assert(std::same_as<element_of<X>, element_of<Out>>,
                "attn: the sequences of a layer must have one element type");
  static_assert(!std::is_const_v<typename decltype(as_view(std::declval<Out>()))::element_type>,
                "attn: out must be writable, but its elements are const");
}

/// The weights given, which are those of this layer for the element type of x.
template <class Weights, class Given>
decltype(auto) weights_of(const Given& given) {
  if constexpr (std::same_as<Given, Weights>) {
    return (given);
  } else {
    static_assert(std::same_as<Given, Weights>,
                  "attn: expected the layer's own weights, of the element type of x, such as {.weight = w, .bias = b}");
    return Weights{};
  }
}

/// The same where all weights have defaults, so that an execution may be in their place.
template <class Weights, class Given>
decltype(auto) weights_or_default(const Given& given) {
  if constexpr (is_execution<Given>)
    return Weights{};
  else
    return weights_of<Weights>(given);
}

/// Checks that out is [batch, length, dim] for x [batch, length, ...].
inline void check_extents(const validator& check, const memory_layout& x, const memory_layout& out, index dim) {
  check.extents({{"out batch = x batch", x.extents[0], out.extents[0]},
                 {"out length = x length", x.extents[1], out.extents[1]},
                 {"out dim", dim, out.extents[2]}});
  check.fits("x batch * length", {x.extents[0], x.extents[1]});  // also where the dim is 0
}

/// Are x and out the same view, so that the layer works in place?
inline bool in_place(const memory_layout& x, const memory_layout& out) {
  bool same = x.data == out.data;
  for (int axis = 0; axis < 3; ++axis)
    same &= x.extents[axis] == out.extents[axis] && (x.extents[axis] < 2 || x.strides[axis] == out.strides[axis]);
  return same;
}

/// Checks the memory of x and of out, which is x itself or separate from it.
inline void check_sequences(const validator& check, const memory_layout& x, const memory_layout& out) {
  check.readable("x", x);
  check.writable("out", out);
  if (!in_place(x, out)) check.no_alias("out", out, "x", x);
}

/// Checks a parameter [wanted] that may be left out.
inline void check_optional(const validator& check, const char* what, index wanted, const memory_layout& list) {
  if (list.data || list.extents[0] != 0) check.equal(what, wanted, list.extents[0]);
}

/// A row of numbers to and from memory of any stride.
template <class T, class S>
void read_numbers(const void* from, index stride, index count, T* to) {
  const S* const row = static_cast<const S*>(from);
  if (stride == 1)
    for (index n = 0; n < count; ++n) to[n] = static_cast<T>(row[n]);
  else
    for (index n = 0; n < count; ++n) to[n] = static_cast<T>(row[n * stride]);
}
template <class T, class S>
void write_numbers(const T* from, index count, void* to, index stride) {
  S* const row = static_cast<S*>(to);
  if (stride == 1)
    for (index n = 0; n < count; ++n) row[n] = static_cast<S>(from[n]);
  else
    for (index n = 0; n < count; ++n) row[n * stride] = static_cast<S>(from[n]);
}

/// Packs up to tile_rows rows of S, numbers [k0, k0 + depth) of each, as one tile.
template <class T, class S>
void pack_tile(const void* const* rows, index count, index k0, index depth, index stride, T* tile) {
  pack_rows<T>([&](index i) { return static_cast<const S*>(rows[i]) + k0 * stride; }, count, depth, stride, T(1), tile);
}

/// Tokens of a task where each is independent of the others.
inline constexpr index tokens_per_task = 64;

/// Where the tokens of a sequence lie. Bytes instead of elements: everything above the functions that read and write
/// single rows is compiled for the compute type alone.
template <class Byte>
struct token_memory {
  Byte* data = nullptr;
  index count = 0, length = 0, dim = 0;  // tokens of all items, tokens of one, numbers of a token
  index item_step = 0, token_step = 0;   // in bytes
  index stride = 1;                      // in elements
  int element_size = 0;

  template <class S>
  explicit token_memory(const tensor_view<S, 3>& x)
      : data(reinterpret_cast<Byte*>(x.data())),
        count(x.extent(0) * x.extent(1)),
        length(x.extent(1)),
        dim(x.extent(2)),
        item_step(x.stride(0) * index(sizeof(S))),
        token_step(x.stride(1) * index(sizeof(S))),
        stride(x.stride(2)),
        element_size(sizeof(S)) {}

  /// Number `d` of token n.
  Byte* at(index n, index d = 0) const {
    return data ? data + n / length * item_step + n % length * token_step + d * stride * element_size : nullptr;
  }
};

template <class T>
struct input_tokens : token_memory<const std::byte> {
  void (*load_numbers)(const void* from, index stride, index count, T* to);
  void (*pack_tile)(const void* const* rows, index count, index k0, index depth, index stride, T* tile);

  template <class S>
  explicit input_tokens(const tensor_view<S, 3>& x)
      : token_memory(x),
        load_numbers(read_numbers<T, std::remove_const_t<S>>),
        pack_tile(detail::pack_tile<T, std::remove_const_t<S>>) {}
  void load(index n, T* to) const { load_numbers(at(n), stride, dim, to); }
};

template <class T>
struct output_tokens : token_memory<std::byte> {
  void (*store_numbers)(const T* from, index count, void* to, index stride);

  template <class S>
  explicit output_tokens(const tensor_view<S, 3>& x) : token_memory(x), store_numbers(write_numbers<T, S>) {}
  void store(index n, const T* from) const { store_numbers(from, dim, at(n), stride); }
  /// Numbers [begin, begin + numbers) of token n.
  void store(index n, index begin, index numbers, const T* from) const {
    store_numbers(from, numbers, at(n, begin), stride);
  }
};

}  // namespace attn::inline ATTN_ISA::detail
