// attn: the parts of sliding_window_backward (sliding_window_backward_run.hpp), and what one leaves to be added up: its
// shares of the gradients of its keys and its neighbours', of global keys and queries, and of parameters.
#pragma once

#include <attn/softmax/detail/sliding_window_run.hpp>
#include <attn/softmax/detail/softmax_backward_call.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct sliding_window_gradients;

namespace detail {

/// Adjacent in memory: what is added up as a whole.
template <class T>
struct window_partial {
  T *keys, *values;               // [globals][stride]
  T *queries, *relative_queries;  // [group][globals][stride]; the latter of relative keys
  T *slopes, *tables, *end;       // [group], [group][table_size()]
  double *relative, *decay;       // [group][relative_entries()], [group][2 globals]: by global query and key
  double* sums_end;

  void clear() const { std::fill(keys, end, T(0)), std::fill(relative, sums_end, 0.0); }
  void add(const window_partial& more) const {
    for (idx_t x = 0; x < end - keys; ++x) keys[x] += more.keys[x];
    for (idx_t x = 0; x < sums_end - relative; ++x) relative[x] += more.relative[x];
  }
};

/// The keys [k0, k1) of class r of a key head, for the query heads [h, h_end), whose dilation is d.
template <class P>
struct window_part : class_rows {
  using T = sum_type<P>;

  idx_t b = 0, kv = 0, h = 0, h_end = 0, number = 0;  // number: in the class
  idx_t k0 = 0, k1 = 0;
  bool last = false;                                  // of the class
  bool stored = true;                                 // or not a part of the class
  backward_keys<P> sums{};                            // of all keys that it sees, by slot
  double* decay = nullptr;                            // [group][slots]: sums of the gradients of scores by key
  window_partial<T> others{};
};

/// A call with what only sliding_window has, and its division into parts.
template <class S, class Score, class ScoreBackward>
struct window_parts : window_sets {
  using T = compute_type<S>;
  using P = product_type<S>;

  const softmax_backward_call<S, Score, ScoreBackward>& in;
  const sliding_window_options<S>& options;
  const sliding_window_gradients<S>& gradients;  // of which those of the global projections are read
  const attention_shape& shape = in.shape;

  bool own() const { return bool(options.q_global); }  // projections of the global queries
  idx_t global_count() const { return globals.most; }
  /// The keys of a part, at most. Where there are several parts, they have half of that and more: no key is seen by
  /// more than two of them.
  idx_t most_keys() const { return (std::min)(std::max<idx_t>(768, 2 * (left + right)), shape.keys); }
  /// The parts of so many keys.
  idx_t parts_of_keys(idx_t keys) const { return std::max<idx_t>(1, ceil_div(keys, std::max<idx_t>(1, most_keys()))); }
  /// Keys that a part sees, at most.
  idx_t slot_count() const {
    const idx_t before = in.forward.exec.invariant() ? places() : 0;
    return (std::min)(most_keys() + left + right + before, shape.keys);
  }
  /// The first slot of a part of an invariant execution is a multiple of this among the keys of its class.
  idx_t places() const { return unit > key_block ? unit : backward_key_block; }
  idx_t decay_entries() const { return in.d_log_decay ? 2 * global_count() : 0; }
  idx_t query_stride() const { return backward_keys<P>::stride(shape.dim); }
  idx_t value_stride() const { return backward_keys<P>::stride(shape.dim_v); }

  /// Parts of a class of a head, at most, and of all its classes.
  idx_t parts_of_class(idx_t h) const { return parts_of_keys(ceil_div(shape.keys, dilation(h))); }
  idx_t parts(idx_t h) const { return dilation(h) * parts_of_class(h); }
  /// Whether all query heads of a key head have one dilation. Then a part handles them together; else the whole key
  /// head is one task.
  bool one_dilation(idx_t kv) const {
    bool all = true;
    for (idx_t h = kv * shape.group(); h < (kv + 1) * shape.group(); ++h)
      all &= dilation(h) == dilation(kv * shape.group());
    return all;
  }
  /// Number of tasks of a key head.
  idx_t steps(idx_t kv) const { return one_dilation(kv) ? parts(kv * shape.group()) : 1; }

  using partial = window_partial<T>;
  using part_of_class = window_part<P>;
  /// Sums of the gradients of all keys and values of a key head.
  struct key_sums {
    T *keys = nullptr, *values = nullptr;  // [Lk][stride]
  };
  part_of_class layout_part(arena& memory) const {
    const idx_t n = global_count(), key = query_stride(), value = value_stride();
    const idx_t group = shape.group(), queries = group * n * key;
    part_of_class p{class_rows::layout(memory, slot_count(), n > 0, max_rows)};
    p.sums = backward_keys<P>::layout(memory, 0, shape.dim, shape.dim_v, false, false);
    p.sums.layout_sums(memory, round_up(slot_count(), panel_width<P>), bool(in.dk), bool(in.dv),
                       many_queries(slot_count()));
    p.decay = memory.allocate<double>(in.d_log_decay ? group * slot_count() : 0);
    p.others = {.keys = memory.allocate<T>(n * key), .values = memory.allocate<T>(n * value),
                .queries = memory.allocate<T>(queries),
                .relative_queries = memory.allocate<T>(in.d_relative_queries ? queries : 0),
                .slopes = memory.allocate<T>(group), .tables = memory.allocate<T>(group * in.table_size()),
                .end = memory.allocate<T>(0), .relative = memory.allocate<double>(group * in.relative_entries()),
                .decay = memory.allocate<double>(group * decay_entries()), .sums_end = memory.allocate<double>(0)};
    return p;
  }

  struct part_scratch {
    backward_scratch<P> block;
    backward_rows<P> rows;
    T *dq, *d_relative;                    // [max_rows][query_stride]
    mutable backward_keys<P> keys;         // of the class, without the global ones
    mutable backward_keys<P> global_keys;
    mutable backward_keys<P> own_keys;     // k_global and v_global of the part's keys
    key_sums ordinary, projected;          // where heads of a group differ in dilation
  };
  part_scratch layout(arena& memory, bool sums) const {
    const auto all_keys = [&](bool wanted) {
      return wanted ? key_sums{memory.allocate<T>(shape.keys * query_stride()),
                               memory.allocate<T>(shape.keys * value_stride())}
                    : key_sums{};
    };
    const auto keys = [&](idx_t count, bool k, bool v) {
      return backward_keys<P>::layout(memory, count, shape.dim, shape.dim_v, k, v);
    };
    return {.block = in.layout_scratch(memory),
            .rows = backward_rows<P>::layout(memory, max_rows, shape.dim, shape.dim_v, bool(in.terms().by_distance)),
            .dq = memory.allocate<T>(max_rows * query_stride()),
            .d_relative = memory.allocate<T>(in.d_relative_queries ? max_rows * query_stride() : 0),
            .keys = keys(slot_count(), false, false), .global_keys = keys(global_count(), true, true),
            .own_keys = keys(own() ? most_keys() : 0, bool(gradients.k_global), bool(gradients.v_global)),
            .ordinary = all_keys(sums), .projected = all_keys(sums && own())};
  }
};

}  // namespace detail
}}  // namespace attn::ATTN_ISA
