// attn: the driver of linformer: keys and values are projected, then queries attend to what they become.
#pragma once

#include <attn/low_rank/detail/project.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class S>
struct linformer_call {
  using T = compute_type<S>;

  const attention_views<S>& views;
  tensor_view<const S, 3> e, f;
  score_terms<T, no_score> terms;
  key_flags seen;
  tensor_view<T, 3> lse{};

  /// Whether E is F.
  bool shared() const { return e.data() == f.data() && e.extents() == f.extents() && e.strides() == f.strides(); }
  template <class P>
  sequence_projection<S, P> side(const tensor_view<const S, 3>& by, const tensor_view<const S>& x) const {
    return {.e = by, .x = x, .heads = by.extent(0) == 1 ? views.shape.kv_heads : views.shape.heads, .seen = seen};
  }
};

inline void check_projections(call_views& views, const attention_shape& s, const memory_layout& e,
                              const memory_layout& f) {
  views.read("e", e, {{"heads of e", s.heads, or_one}});
  views.read("f", f, {{"heads of f", s.heads, or_one}});
  views.at_least("rank of e", 1, e.extents[1]);
  views.at_least("rank of f", 1, f.extents[1]);
  views.extents({{"projection columns = key length", s.keys, e.extents[2]},
                 {"projection columns of f = key length", s.keys, f.extents[2]},
                 {"rank of f = rank of e", e.extents[1], f.extents[1]}});
}

/// Projected keys and values of one batch item, as project() computes them and packed for the kernel.
template <class P>
struct linformer_item {
  sum_type<P> *keys = nullptr, *values = nullptr;
  packed_keys<P>* packed = nullptr;  // [max(heads of keys, heads of values)]
};

/// One call, after its checks.
template <class S, class P>
struct linformer_driver {
  using T = compute_type<S>;

  const linformer_call<S>& call;
  const attention_views<S>& views = call.views;
  sequence_projection<S, P> keys = call.template side<P>(call.e, views.k),
                            values = call.template side<P>(call.f, views.v);
  bool shared = call.shared();

  void run(execution& exec) {
    const attention_shape& shape = views.shape;
    const double scores = static_cast<double>(keys.rank()) * static_cast<double>(shape.queries + shape.keys);
    const auto limit = exec.limit_threads({.operations = scores * shape.operations_per_score()});
    const idx_t heads = (std::max)(keys.heads, values.heads), rank = keys.rank();
    const auto packed = exec.workspace([&](arena& memory) {
      P* const first = memory.allocate<P>(keys.packed_size());
      return std::array{first, shared ? first : memory.allocate<P>(values.packed_size())};
    });
    keys.packed = (*packed)[0], values.packed = (*packed)[1];
    const auto packed_head = [&](arena& memory) {
      return packed_keys<P>::layout(memory, rank, shape.dim, shape.dim_v);
    };
    const auto layout = [&](arena& memory) {
      return linformer_item<P>{.keys = memory.allocate<T>(keys.memory_size()),
                               .values = memory.allocate<T>(values.memory_size()),
                               .packed = memory.allocate_list(heads, packed_head)};
    };
    // 32 heads share the packing of E and F.
    for (const auto& w : waves_of(exec, shape.batch, std::max<idx_t>(1, 32 / shape.heads), layout)) run_wave(w, heads);
  }

  /// `heads` are those of the packed keys.
  void run_wave(const wave<linformer_item<P>>& w, idx_t heads) const {
    project(keys, values, shared, views.lengths, w);
    w.for_each(heads, [&](idx_t, const linformer_item<P>& item, idx_t h, int) {
      item.packed[h].pack(keys.result(item.keys, h * keys.heads / heads),
                          values.result(item.values, h * values.heads / heads), 0, keys.rank());
    });
    // All rows of one head are computed before the next: its packed keys stay in the cache.
    const idx_t all = views.shape.heads, row_blocks = ceil_div(views.shape.queries, max_rows);
    w.exec.for_each(w.count * all * row_blocks, [&](idx_t task, int worker) {
      const idx_t n = task / row_blocks / all, h = task / row_blocks % all, b = w.first + n;
      const idx_t seen = views.lengths.keys(b) > 0 ? keys.rank() : 0;
      attend_rows(views, b, h, task % row_blocks * max_rows, w.scratch[n].packed[h * heads / all], seen, call.terms,
                  call.lse, w.exec, worker, [](auto&) {});
    });
  }
};

template <class S>
void run_linformer(const linformer_call<S>& call, execution& exec) {
  if (call.views.shape.heads == 0) return;
  with_products<S>(exec, [&]<class P>(std::type_identity<P>) { linformer_driver<S, P>{call}.run(exec); });
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_linformer(const linformer_call<S>&, execution&)
#include <attn/core/detail/compiled.hpp>
