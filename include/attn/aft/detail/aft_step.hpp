// attn: what the steps of the attention-free family share: sums of one row at a time, and the check of a step.
#pragma once

#include <attn/aft/detail/aft_tensors.hpp>
#include <attn/aft/detail/sums_array.hpp>
#include <attn/core/state_extents.hpp>

namespace attn::inline ATTN_ISA {

/// Options of a step.
struct aft_step_options {
  /// Multiply by sigmoid(q); without, q is not read.
  bool gate = true;
};

namespace detail {

/// Checks q, k, v and out of a step against one another and against the state.
template <class T>
void check_aft_step(const validator& check, const state_extents& state, aft_tensors<T>& x,
                    aft_keys keys = aft_keys::per_channel) {
  check_aft(check, x, keys);
  check.extents({{"query batch = state batch", state.batch, x.batch},
                 {"query heads = state heads", state.heads, x.heads},
                 {"query dim = state dim", state.dim, x.dim}});
}

/// Checks the extents of a state, whose keys and values have one dim.
inline state_extents check_aft_state(const validator& check, state_extents extents) {
  extents = check_state_extents(check, extents);
  check.equal("value_dim = dim", extents.dim, extents.value_dim);
  return extents;
}

/// Checks tokens k, v to append, and gives them as views of a call without queries.
template <class S>
aft_tensors<compute_type<S>> tokens_of(const validator& check, const state_extents& state,
                                       const tensor_view<const S>& k, const tensor_view<const S>& v,
                                       aft_keys keys = aft_keys::per_channel) {
  const bool one_key = keys == aft_keys::per_head_too && k.extent(3) == 1;
  tensor_view<const S> checked = k;
  if (one_key) checked = {k.data(), {k.extent(0), k.extent(1), k.extent(2), state.dim}, {k.stride(0), k.stride(1), k.stride(2), 0}};
  check_tokens(check, state.batch, state.heads, state.dim, state.dim, checked, v);
  const tensor_view<const S> none;
  return {.q = none, .k = checked, .v = v, .out = none, .w = none, .elements = &elements_of<S>,
          .batch = state.batch, .heads = state.heads, .length = k.extent(2), .dim = state.dim};
}

/// Sums in memory become row t of the output.
template <class T>
void write_row(const aft_tensors<T>& x, const aft_head& head, index t, const T* sums) {
  for (index p = 0; p < x.parts(); ++p) {
    const auto s = key_sums<T>::read(sums + p * key_sums<T>::size);
    x.elements->write(head, x.gate, p * width<T>, t, 1, &s);
  }
}

}  // namespace detail
}  // namespace attn::inline ATTN_ISA
