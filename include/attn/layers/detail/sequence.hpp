// attn: what the layers take and give, sequences [batch, length, dim]: their views, checks, and access to their tokens.
#pragma once

#include <attn/core/detail/arguments.hpp>
#include <attn/core/detail/check.hpp>
#include <attn/core/detail/gradients.hpp>
#include <attn/core/detail/tile_product.hpp>

namespace attn::inline ATTN_ISA::detail {

/// The view [batch, length, dim] of an argument: such a view or tensor, an Eigen matrix [length, dim], or an mdspan.
template <viewable X>
constexpr auto as_sequence(X&& x) {
  using object = std::remove_cvref_t<X>;
  if constexpr (is_view<object>) {
    static_assert(object::rank == 3, "attn: sequences must be [batch, length, dim]");
    return x;
  } else if constexpr (gives_view<X>) {
    return as_sequence(x.view());
  } else {
    return tensor_view<typename decltype(as_view(x))::element_type, 3>(x);
  }
}

/// The views of x and out, whose types are checked here.
template <class X, class Out>
constexpr auto sequences_of(const X& x, Out& out) {
  using S = element_of<const X&>;
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  static_assert(std::same_as<S, element_of<Out&>>, "attn: the sequences of a layer must have one element type");
  static_assert(!std::is_const_v<typename decltype(as_view(out))::element_type>,
                "attn: out must be writable, but its elements are const");
  return std::pair<tensor_view<const S, 3>, tensor_view<S, 3>>(as_sequence(x), as_sequence(out));
}

/// The views of x and d_out, whose types are checked here.
template <class X, class D>
constexpr auto inputs_of(const X& x, const D& d_out) {
  using S = element_of<const X&>;
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  static_assert(std::same_as<S, element_of<const D&>>, "attn: the sequences of a layer must have one element type");
  return std::pair<tensor_view<const S, 3>, tensor_view<const S, 3>>(as_sequence(x), as_sequence(d_out));
}

/// Mixes the tokens of a sequence: mixer(x, out, execution), both [batch, length, dim]. Out never shares x's memory.
template <class F, class S>
concept token_mixer = std::invocable<F&, const tensor_view<const S, 3>&, const tensor_view<S, 3>&, execution&>;

/// The gradient of a mixer: mixer_backward(x, out, d_out, dx, execution), all [batch, length, dim], with out what the
/// mixer made of x, and dx to be written over.
template <class F, class S>
concept token_mixer_backward =
    std::invocable<F&, const tensor_view<const S, 3>&, const tensor_view<const S, 3>&, const tensor_view<const S, 3>&,
                   const tensor_view<S, 3>&, execution&>;

/// The weights given, which are those of this layer for the element type of x. Where all of them are optional, an
/// execution may be in their place.
template <class Weights, bool optional = false, class Given>
decltype(auto) weights_of(const Given& given) {
  if constexpr (std::same_as<Given, Weights>) {
    return (given);
  } else {
    static_assert(optional && is_execution<Given>,
                  "attn: expected the layer's own weights, of the element type of x, such as {.weight = w, .bias = b}");
    return Weights{};
  }
}

/// A tensor [batch, length, dim] of scratch memory.
template <class S>
tensor_view<S, 3> allocate_sequence(arena& memory, idx_t batch, idx_t length, idx_t dim) {
  return {memory.allocate<S>(batch * length * dim), {batch, length, dim}};
}

// Checks --------------------------------------------------------------------------------------------------------------

/// Checks the sequences and parameters of a call of a layer, or of its backward pass, where d_out is in the place of
/// out, and overlaps are checked separately.
struct layer_validator : validator {
  memory_layout x, out;
  bool backward = false;

  /// Out may be x itself where `in_place`.
  layer_validator(const char* name, const memory_layout& from, const memory_layout& to, bool in_place = true)
      : validator(name), x(from), out(to) {
    readable("x", x);
    writable("out", out);
    if (!in_place || !same_memory(out, x)) no_alias("out", out, "x", x);
  }
  /// Of a backward pass.
  layer_validator(const char* name, const memory_layout& from, const backward_views& views, const memory_layout& d_out)
      : validator(name), x(from), out(d_out), backward(true) {
    views.check(*this);
  }

  /// out is [batch, length, dim] for x [batch, length, ...].
  void out_dim(idx_t dim) const {
    extents({{backward ? "d_out batch = x batch" : "out batch = x batch", x.extents[0], out.extents[0]},
             {backward ? "d_out length = x length" : "out length = x length", x.extents[1], out.extents[1]},
             {backward ? "d_out dim" : "out dim", dim, out.extents[2]}});
    fits("x batch * length", {x.extents[0], x.extents[1]});  // also where the dim is 0
  }

  void separate_from_out(const char* what, const memory_layout& view) const {
    readable(what, view);
    if (!backward) no_alias("out", out, what, view);
  }

  /// A list of parameters, one per `thing`, that may be left out.
  void optional(const char* what, const memory_layout& list, const char* thing, idx_t wanted) const {
    separate_from_out(what, list);
    if (list.data || list.extents[0] != 0) one_per(what, thing, wanted, list.extents[0]);
  }

  /// A weight [m, inputs] and its bias, which may be left out.
  void linear(const char* what, const memory_layout& weight, const char* bias_name, const memory_layout& bias,
              idx_t inputs) const {
    separate_from_out(what, weight);
    if (weight.extents[1] != inputs) fail({what, " columns = dim of its input ", inputs}, weight.extents[1]);
    fits("a packed weight", {round_up(weight.extents[0], panel_width<float>), inputs});
    optional(bias_name, bias, "row of its weight", weight.extents[0]);
  }
};

// Access to tokens ----------------------------------------------------------------------------------------------------

/// Access to memory of one element type in the compute type T, for which alone everything above is compiled.
template <class T>
struct row_access {
  void (*load)(const void* from, idx_t stride, idx_t count, T* to);
  void (*store)(const T* from, idx_t count, void* to, idx_t stride);
  /// As store, to numbers that are added to.
  void (*add)(const T* from, idx_t count, void* to, idx_t stride);
  /// Packs up to tile_rows rows, numbers [k0, k0 + depth) of each, as one tile of operands.
  template <class P>
  using pack = void(const void* const* rows, idx_t count, idx_t k0, idx_t depth, idx_t stride, P* tile);
  pack<T>* pack_numbers;
  pack<bf16_pair>* pack_pairs;
  pack<split_pair>* pack_split;

  template <class P>
  auto pack_as() const {
    if constexpr (std::same_as<P, bf16_pair>)
      return pack_pairs;
    else if constexpr (is_split<P>)
      return pack_split;
    else
      return pack_numbers;
  }

  /// Numbers [begin, begin + count) of a list that may be left out: then all are `otherwise`.
  void load_list(const memory_layout& list, idx_t begin, idx_t count, T otherwise, T* to) const {
    if (list.data)
      load(list.data + begin * list.strides[0] * list.item, list.strides[0], count, to);
    else
      std::fill(to, to + count, otherwise);
  }
};

template <class P, class S>
void pack_token_tile(const void* const* rows, idx_t count, idx_t k0, idx_t depth, idx_t stride, P* tile) {
  const auto row = [&](idx_t i) { return static_cast<const S*>(rows[i]) + k0 * stride; };
  pack_rows<P>(row, count, depth, stride, sum_type<P>(1), tile);
}

template <class T, class S>
inline constexpr row_access<T> row_access_of = {
    .load =
        [](const void* from, idx_t stride, idx_t count, T* to) {
          const S* const row = static_cast<const S*>(from);
          if (stride == 1)
            for (idx_t n = 0; n < count; ++n) to[n] = static_cast<T>(row[n]);
          else
            for (idx_t n = 0; n < count; ++n) to[n] = static_cast<T>(row[n * stride]);
        },
    .store =
        [](const T* from, idx_t count, void* to, idx_t stride) {
          write_row(from, matrix_view<S>{static_cast<S*>(to), 1, count, 0, stride}, 0);
        },
    .add =
        [](const T* from, idx_t count, void* to, idx_t stride) {
          S* const row = static_cast<S*>(to);
          for (idx_t n = 0; n < count; ++n) row[n * stride] = static_cast<S>(static_cast<T>(row[n * stride]) + from[n]);
        },
    .pack_numbers = pack_token_tile<T, S>,
    .pack_pairs = [] {
      if constexpr (has_pairs<T>)
        return pack_token_tile<bf16_pair, S>;
      else
        return nullptr;
    }(),
    .pack_split = [] {
      if constexpr (std::same_as<S, float> && matrix_unit_compiled)
        return pack_token_tile<split_pair, S>;
      else
        return nullptr;
    }()};

/// Tokens of a task where each is independent of the others.
inline constexpr idx_t tokens_per_task = 64;

/// The tokens of a sequence in memory of any element type.
template <class T>
struct input_tokens : memory_layout {
  const row_access<T>* access;
  idx_t count, length, dim;  // tokens of all items, tokens of one, numbers of a token

  template <class S>
  input_tokens(const tensor_view<S, 3>& x)
      : memory_layout(x),
        access(&row_access_of<T, std::remove_const_t<S>>),
        count(extents[0] * extents[1]),
        length(extents[1]),
        dim(extents[2]) {}

  /// Number `d` of token n.
  const char* at(idx_t n, idx_t d = 0) const {
    return data ? data + (n / length * strides[0] + n % length * strides[1] + d * strides[2]) * item : nullptr;
  }
  void load(idx_t n, T* to) const { access->load(at(n), strides[2], dim, to); }
};

template <class T>
struct output_tokens : input_tokens<T> {
  template <class S>
    requires(!std::is_const_v<S>)
  output_tokens(const tensor_view<S, 3>& x) : input_tokens<T>(x) {}

  /// Numbers [begin, begin + numbers) of token n.
  void store(idx_t n, idx_t begin, idx_t numbers, const T* from) const {
    this->access->store(from, numbers, const_cast<char*>(this->at(n, begin)), this->strides[2]);
  }
  void store(idx_t n, const T* from) const { store(n, 0, this->dim, from); }
};

}  // namespace attn::inline ATTN_ISA::detail
