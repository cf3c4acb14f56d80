// attn: the keys of a chunk of linear attention with decays, as the forward and the backward pass read them.
#pragma once

#include <attn/kernel/detail/delta_pairs.hpp>
#include <attn/kernel/detail/engine.hpp>

namespace attn::inline ATTN_ISA::detail {

template <class T>
struct decayed_keys {
  panels<T> k, k_end, k_t, v;  // [token][feature]; transposed; [token][column]
  delta_decay<T> decay;
  delta_pair_scratch<T> pairs;
  T* map;

  static decayed_keys layout(arena& memory, const kernel_call<T>& call, idx_t columns, idx_t map_size) {
    decayed_keys s;
    constexpr idx_t chunk = kernel_chunk;
    const idx_t m = call.map->features;
    s.k = s.k_end = panels<T>::layout(memory, chunk, m);
    if (call.decays() != decay_kind::none) s.k_end = panels<T>::layout(memory, chunk, m);
    s.k_t = panels<T>::layout(memory, m, chunk);
    s.v = panels<T>::layout(memory, chunk, columns);
    s.decay = delta_decay<T>::layout(memory, m, call.decays());
    s.pairs = delta_pair_scratch<T>::layout(memory, m, call.decays());
    s.map = memory.allocate<T>(map_size);
    return s;
  }

  /// All but k_t.
  void load(const kernel_call<T>& call, idx_t b, idx_t h, idx_t begin, idx_t count) const {
    const idx_t kv_head = call.kv_head(h);
    call.map->rows(call.k.head(b, kv_head), begin, count, k, map);
    const stored_matrix<T> values = call.v.head(b, kv_head);
    values.access->pack_panels(values, begin, count, v.data);
    if (decay.kind == decay_kind::none) return;
    if (const tensor_view<const T>& g = call.extra.log_decay) {
      decay.load(g, b, call.parameter_head(g.extent(1), h), begin, count);
    } else {
      for (idx_t t = 0; t < count; ++t) decay.gates[t] = call.gate_at(b, h, begin + t);
      decay.multiply_gates(count);
    }
    decay.to_end(k, count, k_end);
  }
};

}  // namespace attn::inline ATTN_ISA::detail
