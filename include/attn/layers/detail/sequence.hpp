// attn: what the layers take and give, sequences [batch, length, dim]: their views, checks, and access to their tokens.
#pragma once

#include <attn/core/detail/any_rows.hpp>
#include <attn/core/detail/arguments.hpp>
#include <attn/core/detail/call_views.hpp>
#include <attn/core/detail/function_ref.hpp>
#include <attn/core/detail/gradients.hpp>
#include <attn/core/detail/product_choice.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

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

/// Layers are compiled once for an element type, not for every mixer.
template <class S>
using mixer_ref = function_ref<void(const tensor_view<const S, 3>& x, const tensor_view<S, 3>& out, execution&)>;
template <class S>
using mixer_backward_ref =
    function_ref<void(const tensor_view<const S, 3>& x, const tensor_view<const S, 3>& out,
                      const tensor_view<const S, 3>& d_out, const tensor_view<S, 3>& dx, execution&)>;

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
[[gnu::noinline]] tensor_view<S, 3> allocate_sequence(arena& memory, idx_t batch, idx_t length, idx_t dim) {
  return {memory.allocate<S>(batch * length * dim), {batch, length, dim}};
}

// Checks --------------------------------------------------------------------------------------------------------------

/// What the checks of a layer see of a weight: a view, or a weight_field, which may be of packed weights.
struct given_weight : memory_layout {
  bool is_packed = false;

  template <class Weight>
  given_weight(const Weight& w) : memory_layout(w) {
    if constexpr (requires { w.packed(); }) is_packed = w.packed();
  }
};

/// The views of a call of a layer, or of its backward pass, where d_out is in the place of out.
struct layer_views : call_views {
  struct backward_pass {
    bool in_place = false;  // dx is d_out
  };
  memory_layout x, out;
  bool backward = false;

  /// Out may be x itself where `in_place`.
  layer_views(const char* name, const memory_layout& from, const memory_layout& to, bool in_place = true)
      : call_views(name), x(from), out(to) {
    if (in_place && same_memory(out, x))
      readable("x", x);
    else
      read("x", x);
    write("out", out);
  }
  layer_views(const char* name, const memory_layout& from, const memory_layout& d_out, backward_pass pass)
      : call_views(name), x(from), out(d_out), backward(true) {
    read("x", x);
    if (pass.in_place)
      readable("d_out", d_out);
    else
      read("d_out", d_out);
  }

  /// out is [batch, length, dim] for x [batch, length, ...]; `of` says what the dim must be equal to.
  void out_dim(idx_t dim, const char* of = "") const {
    extents({{backward ? "d_out batch = x batch" : "out batch = x batch", x.extents[0], out.extents[0]},
             {backward ? "d_out length = x length" : "out length = x length", x.extents[1], out.extents[1]}});
    if (out.extents[2] != dim) fail({backward ? "d_out dim" : "out dim", of, " ", dim}, out.extents[2]);
    fits("x batch * length", {x.extents[0], x.extents[1]});  // also where the dim is 0
  }

  /// A list of parameters, one per `thing`, that may be left out.
  void list(const char* what, const memory_layout& numbers, const char* thing, idx_t wanted) {
    option(what, numbers);
    if (numbers.given()) one_per(what, thing, wanted, numbers.extents[0]);
  }

  /// A weight [m, inputs] and its bias, which may be left out.
  void linear(const char* what, const given_weight& weight, const char* bias_name, const memory_layout& bias,
              idx_t inputs) {
    if (!weight.is_packed) read(what, weight);
    if (weight.is_packed && backward)
      fail({what, " as a view: gradients are computed from the weight itself"}, "packed weights");
    const bool turned = weight.extents[0] == inputs;
    if (weight.extents[1] != inputs)
      fail({what, " [outputs, inputs] with columns = dim of its input ", inputs},
           !weight.given() ? error_text{"none"}
                           : error_text{error_text::list(weight.extents, 2),
                                        turned ? ": give the transpose of an [inputs, outputs] matrix" : ""});
    fits("a packed weight", {round_up(weight.extents[0], panel_width<float>), inputs});
    list(bias_name, bias, "row of its weight", weight.extents[0]);
  }
};

// Access to tokens ----------------------------------------------------------------------------------------------------

/// Packs up to tile_rows rows, numbers [k0, k0 + depth) of each, as one tile of operands; for elements of one type.
template <class T>
struct token_packing {
  template <class P>
  using pack = void(const void* const* rows, idx_t count, idx_t k0, idx_t depth, idx_t stride, P* tile);
  pack<T>* numbers;
  pack<bf16_pair>* pairs;
  pack<split_pair>* split;

  template <class P>
  auto as() const {
    if constexpr (std::same_as<P, bf16_pair>)
      return pairs;
    else if constexpr (is_split<P>)
      return split;
    else
      return numbers;
  }
};

template <class P, class S>
inline constexpr bool multiplied_as = std::same_as<P, product_type<S>> || std::same_as<P, fast_product_type<S>>;

template <class P, class S, bool compiled = true>
constexpr auto pack_token_tile() -> typename token_packing<sum_type<P>>::template pack<P>* {
  if constexpr (!compiled)
    return nullptr;
  else
    return [](const void* const* rows, idx_t count, idx_t k0, idx_t depth, idx_t stride, P* tile) {
      const auto row = [&](idx_t i) { return static_cast<const S*>(rows[i]) + k0 * stride; };
      pack_rows<P>(row, count, depth, stride, sum_type<P>(1), tile);
    };
}

/// For the operands of products of such elements, standard and fast.
template <class T, class S>
inline constexpr token_packing<T> token_packing_of = {
    pack_token_tile<T, S, multiplied_as<T, S>>(), pack_token_tile<bf16_pair, S, multiplied_as<bf16_pair, S>>(),
    pack_token_tile<split_pair, S, multiplied_as<split_pair, S>>()};

/// A weight as its transpose.
template <class S>
tensor_view<S, 2> transposed(const tensor_view<S, 2>& w) {
  return {w.data(), {w.extent(1), w.extent(0)}, {w.stride(1), w.stride(0)}};
}

/// Tokens of a task where each is independent of the others.
inline constexpr idx_t tokens_per_task = 64;

/// The tokens of a sequence in memory of any element type.
template <class T>
struct input_tokens : any_rows<T> {
  const token_packing<T>* packing;
  idx_t count, length, dim;  // tokens of all items, tokens of one, numbers of a token

  template <class S>
  input_tokens(const tensor_view<S, 3>& x)
      : any_rows<T>(x),
        packing(&token_packing_of<T, std::remove_const_t<S>>),
        count(x.extent(0) * x.extent(1)),
        length(x.extent(1)),
        dim(x.extent(2)) {}

  using any_rows<T>::load;
  void load(idx_t n, T* to) const { load(n, 0, dim, to); }
};

template <class T>
struct output_tokens : any_rows<T> {
  idx_t count, dim;

  template <class S>
    requires(!std::is_const_v<S>)
  output_tokens(const tensor_view<S, 3>& x)
      : any_rows<T>(x), count(x.extent(0) * x.extent(1)), dim(x.extent(2)) {}

  using any_rows<T>::store;
  void store(idx_t n, const T* from) const { store(n, 0, dim, from); }
};

/// each(token, numbers of a row, rows) for all tokens, with rows of memory for the numbers of a token, one after the
/// other. `work` is that of a number.
template <class T, class Each>
void for_each_token(idx_t count, idx_t dim, idx_t most_rows, work_estimate work, execution& exec, Each&& each) {
  work.operations *= static_cast<double>(count * dim), work.bytes *= static_cast<double>(count * dim);
  const auto limit = exec.limit_threads(work);
  exec.for_each(ceil_div(count, tokens_per_task), [&](idx_t task, int worker) {
    const idx_t stride = round_up(dim, width<T>);
    T* const rows = exec.scratch(worker, [&](arena& memory) { return memory.allocate<T>(most_rows * stride); });
    std::fill_n(rows, most_rows * stride, T(0));
    for (idx_t n = task * tokens_per_task; n < (std::min)(count, (task + 1) * tokens_per_task); ++n)
      each(n, stride, rows);
  });
}

}}}  // namespace attn::ATTN_ISA::detail
