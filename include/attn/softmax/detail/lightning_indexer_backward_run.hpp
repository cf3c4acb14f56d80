// attn: the driver of lightning_indexer_backward, query by query, with the rows of the chosen keys read where they lie.
// The name of a block becomes its key with the largest score, computed again. With z_hs = scale q_h . k_s and dI_s at
// the keys s of a list:
//   dw_h = sum_s dI_s act(z_hs),  dz_hs = dI_s w_h act'(z_hs)
//   dq_h = scale sum_s dz_hs k_s,  dk_s += scale sum_h dz_hs q_h
#pragma once

#include <attn/core/detail/waves.hpp>
#include <attn/softmax/detail/indexer_call.hpp>
#include <attn/softmax/detail/listed_gradients.hpp>
#include <attn/softmax/detail/selected_rows.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct lightning_indexer_gradients;

namespace detail {

template <class S>
struct lightning_indexer_backward_driver {
  using T = compute_type<S>;
  static constexpr idx_t tile = stream_tile_of<S>, store_step = 128;

  const indexer_call<S>& in;
  index_view indices;
  tensor_view<const T> d_scores;
  tensor_view<S> dq, dk;
  tensor_view<T, 3> dw;
  bool accumulate;
  const attention_shape& shape = in.shape;

  idx_t parts() const { return parts_of(shape.queries, 4); }

  struct scratch {
    idx_t* list;
    T* given;  // dI of the list
    row_list<S> keys;
    padded_rows<T> query, dq;
    T *z, *d_weights, *key_numbers;  // [heads][stream_tile], [heads], a tile that cannot be read in place
  };
  scratch scratch_of(int worker) const {
    return in.exec.scratch(worker, [&](arena& memory) {
      return scratch{.list = memory.allocate<idx_t>(in.entries()), .given = memory.allocate<T>(in.entries()),
                     .keys = row_list<S>::layout(memory, in.entries()),
                     .query = padded_rows<T>::layout(memory, shape.heads, shape.dim),
                     .dq = padded_rows<T>::layout(memory, shape.heads, shape.dim),
                     .z = memory.allocate<T>(shape.heads * stream_tile),
                     .d_weights = memory.allocate<T>(shape.heads),
                     .key_numbers = memory.allocate<T>(tile * round_up(shape.dim, width<T>))};
    });
  }

  /// z of heads [first, first + heads of a list) and a tile of keys.
  template <class Keys>
  void products(idx_t first, const Keys& keys, const scratch& s) const {
    by_rows<T>(in.heads_of_list(), [&](idx_t r, auto R) {
      row_scores<T, R.value>(s.query.row(first + r), s.query.stride, in.scale, keys, s.z + r * stream_tile,
                             prefetch_nothing());
    });
  }

  /// `count` <= tile keys of a list: z becomes dz.
  template <class Keys>
  void differentiate_tile(idx_t b, idx_t i, idx_t first, idx_t part, const idx_t* list, const T* given, idx_t count,
                          const Keys& keys, bool finite, const listed_sums<T>& sums, const scratch& s) const {
    products(first, keys, s);
    for (idx_t h = 0; h < in.heads_of_list(); ++h) {
      T* const z = s.z + h * stream_tile;
      const T weight = in.weight(b, i, first + h);
      T d_weight = 0;
      for (idx_t n = 0; n < count; ++n) {
        const bool passes = given[n] != T(0) && (in.activation == indexer_activation::none || !(z[n] <= T(0)));
        d_weight += passes ? given[n] * z[n] : T(0);
        z[n] = passes ? given[n] * weight : T(0);
      }
      s.d_weights[first + h] += d_weight;
    }
    T ones[4] = {1, 1, 1, 1};
    by_rows<T>(in.heads_of_list(), [&](idx_t r, auto R) {
      if (dq)
        row_output<T, R.value>(s.z + r * stream_tile, true, ones, keys, s.dq.row(first + r), s.dq.stride,
                               prefetch_nothing());
      sums.template add<R.value>(part, list, count, s.z + r * stream_tile, s.query, first + r, finite);
    });
  }

  /// The key of [begin, end) with the largest score, as the forward call found it.
  idx_t best_key(idx_t b, idx_t i, idx_t first, idx_t begin, idx_t end, const scratch& s) const {
    const cache_rows<const S> keys(head_of(in.k, b, 0));
    candidate<T> best(-std::numeric_limits<T>::infinity(), begin);
    for (idx_t some; begin < end; begin += some) {
      some = (std::min)(tile, end - begin);
      with_whole_packets<T>(rows_from(keys, begin), some, s.key_numbers, true,
                            [&](const auto& k) { products(first, k, s); });
      for (idx_t n = 0; n < some; ++n) {
        T sum = 0;
        for (idx_t h = 0; h < in.heads_of_list(); ++h) {
          const T z = s.z[h * stream_tile + n];
          sum += (in.activation == indexer_activation::none || !(z <= T(0)) ? z : T(0)) * in.weight(b, i, first + h);
        }
        best = (std::max)(best, candidate<T>(sum, begin + n));
      }
    }
    return best.key();
  }

  /// List `list` of query i.
  void differentiate_list(idx_t b, idx_t i, idx_t list, idx_t part, bool finite, const listed_sums<T>& sums,
                          const scratch& s) const {
    const idx_t end = in.end_of(b, i), first = list * in.heads_of_list();
    idx_t count = 0;
    indices.typed([&](const auto& x) {
      for (idx_t n = 0; n < in.entries(); ++n)
        if (const idx_t name = x(b, list, i, n); name >= 0 && name < ceil_div(end, in.block)) {
          s.list[count] = in.block == 1 ? name
                                        : best_key(b, i, first, name * in.block,
                                                   (std::min)((name + 1) * in.block, end), s);
          s.given[count++] = d_scores(b, list, i, n);
        }
    });
    const auto keys = s.keys.of(cache_rows<const S>(head_of(in.k, b, 0)), {s.list, static_cast<std::size_t>(count)});
    for (idx_t from = 0, some; from < count; from += some) {
      some = (std::min)(tile, count - from);
      with_whole_packets<T>(rows_from(keys, from), some, s.key_numbers, true, [&](const auto& k) {
        differentiate_tile(b, i, first, part, s.list + from, s.given + from, some, k, finite, sums, s);
      });
    }
  }

  void differentiate_query(idx_t b, idx_t i, idx_t part, const listed_sums<T>& sums, const scratch& s) const {
    bool finite = true;
    for (idx_t h = 0; h < shape.heads; ++h) finite &= s.query.load(h, head_of(in.q, b, h), i);
    std::fill_n(s.dq.data, shape.heads * s.dq.stride, T(0));
    std::fill_n(s.d_weights, shape.heads, T(0));
    for (idx_t list = 0; list < in.lists(); ++list) differentiate_list(b, i, list, part, finite, sums, s);
    for (idx_t h = 0; h < shape.heads; ++h) {
      if (dq) store_gradient_row(s.dq.row(h), in.scale, head_of(dq, b, h), i, accumulate);
      if (dw) store_gradient(dw(b, i, h), s.d_weights[h], accumulate);
    }
  }

  void clear_padding(idx_t b) const {
    const idx_t begin = in.lengths.queries(b);
    for (idx_t h = 0; h < shape.heads && !accumulate; ++h) {
      if (dq) clear_rows(head_of(dq, b, h), begin, shape.queries);
      for (idx_t i = begin; dw && i < shape.queries; ++i) dw(b, i, h) = T(0);
    }
  }

  void run() const {
    if (!dq && !dk && !dw) return;
    const double keys = static_cast<double>(in.topk) * static_cast<double>((std::min)(in.block, shape.keys)),
                 pairs = static_cast<double>(shape.batch * shape.queries) * keys;
    const auto limit = in.exec.limit_threads({.operations = 6 * pairs * static_cast<double>(shape.heads * shape.dim)});
    const auto layout = [&](arena& memory) {
      return listed_sums<T>::layout(memory, bool(dk), shape.keys, shape.dim, parts(), many_queries(shape.queries));
    };
    for (const auto& items : waves_of(in.exec, shape.batch, layout)) {
      items.for_each(parts(), [&](idx_t b, const listed_sums<T>& sums, idx_t part, int worker) {
        const idx_t queries = in.lengths.queries(b), own = parts_of(queries, 4);
        sums.clear(part);
        if (part == 0) clear_padding(b);
        const scratch s = scratch_of(worker);
        for (idx_t i = queries * part / own; part < own && i < queries * (part + 1) / own; ++i)
          differentiate_query(b, i, part, sums, s);
      });
      if (!dk) continue;
      items.for_each(ceil_div(shape.keys, store_step), [&](idx_t b, const listed_sums<T>& sums, idx_t step, int) {
        const idx_t begin = step * store_step;
        sums.store_rows(head_of(dk, b, 0), begin, (std::min)(begin + store_step, shape.keys), in.lengths.keys(b),
                        parts_of(in.lengths.queries(b), 4), in.scale, accumulate);
      });
    }
  }
};

template <class S>
void run_lightning_indexer_backward(const indexer_call<S>& call, const index_view& indices,
                                    const tensor_view<const compute_type<S>>& d_scores,
                                    const lightning_indexer_gradients<S>& to) {
  lightning_indexer_backward_driver<S>{call, indices, d_scores, to.q, to.k, to.w, to.accumulate}.run();
}

}  // namespace detail
}}  // namespace attn::ATTN_ISA
