// attn: softmax attention by the processes of a group: checked together, attended block by block, merged.
#pragma once

#include <attn/mpi/detail/ring.hpp>
#include <attn/softmax/full_softmax.hpp>
#include <attn/softmax/merge_softmax.hpp>

namespace attn::inline ATTN_ISA::detail {

/// The score of a call on a part of the sequence, from positions in the whole one: ALiBi, and the caller's function.
template <class T, class Score>
struct part_score {
  const Score& score;
  std::span<const T> slopes;
  index batch, head, query_shift, key_shift;  // of the part's first

  T operator()(T s, index b, index h, index i, index j) const {
    const index position = i + query_shift, key = j + key_shift;
    if (!slopes.empty())
      s -= slopes[static_cast<std::size_t>(head + h)] * static_cast<T>(std::abs(position - key));
    if constexpr (!std::same_as<Score, no_score>) s = score(s, batch + b, head + h, position, key);
    return s;
  }
};

/// The calls of one process. S are the elements of the call; what is summed over processes is of the compute type.
template <class S>
class softmax_group {
 public:
  using T = compute_type<S>;

  /// check(validator) checks what the process itself brings.
  template <class Options, class Check>
  softmax_group(const char* name, MPI_Comm communicator, const tensor_view<const S>& q, const tensor_view<const S>& k,
                const tensor_view<const S>& v, const Options& options, const Check& check)
      : group_(name, communicator), q_(q), k_(k), v_(v), causal_(options.causal), scale_(options.scale),
        softcap_(options.softcap), slopes_(options.alibi_slopes), sinks_(options.sinks) {
    const auto number = [](const std::optional<T>& x) { return x ? static_cast<double>(*x) : 0.0; };
    process_shape own{.batch = q.extent(0), .heads = q.extent(1), .kv_heads = k.extent(1), .dim = q.extent(3),
                      .dim_v = v.extent(3), .element_bytes = element_id<S>, .queries = q.extent(2), .keys = k.extent(2)};
    const double settings[] = {double(options.causal), double(options.zigzag), double(options.scale.has_value()),
                               number(options.scale), double(options.softcap.has_value()), number(options.softcap),
                               checksum(slopes_), checksum(sinks_)};
    std::copy(std::begin(settings), std::end(settings), own.settings);
    const auto all = agree(group_, own, [&] { check(validator(name)); });
    std::vector<index> queries, keys;
    for (const process_shape& one : all) queries.push_back(one.queries), keys.push_back(one.keys);
    queries_.emplace(queries, options.zigzag), keys_.emplace(keys, options.zigzag);
    queries_->check(group_, "queries"), keys_->check(group_, "keys");
  }

  /// Forward: out, and lse where it is given.
  template <class Score>
  void attend(const tensor_view<S>& out, const tensor_view<T, 3>& lse, const Score& score, execution& exec) {
    tensor<T> sums;
    tensor<T, 3> log_sums;
    tensor_view<T> to;
    if constexpr (std::same_as<S, T>)
      to = out;
    else
      to = (sums = tensor<T>(out.extents())).view();
    tensor_view<T, 3> to_lse = lse;
    if (!lse) to_lse = (log_sums = tensor<T, 3>({out.extent(0), out.extent(1), out.extent(2)})).view();
    each_row(to_lse, [&](index b, index h, index i) {
      to_lse(b, h, i) = -std::numeric_limits<T>::infinity();
      for (index d = 0; d < to.extent(3); ++d) to(b, h, i, d) = T(0);
    });

    converted<const S> queries(q_);
    tensor<T> part;
    tensor<T, 3> part_lse;
    travelling_keys<S> keys(group_, *keys_, k_, v_);
    for (;; keys.end_step()) {
      keys.begin_step();
      const auto here = keys.here();
      const converted<S> k(here.k), v(here.v);
      for_each_call(keys.source(), [&](index b, index h, const block_call& call) {
        const index heads = group();
        const auto rows = [&](const auto& x) { return x.slice(0, b, 1).slice(1, h * heads, heads).slice(2, call.query, call.queries); };
        const auto columns = [&](const auto& x) { return x.slice(0, b, 1).slice(1, h, 1).slice(2, call.key, call.keys); };
        const std::array<index, 4> extents{1, heads, call.queries, to.extent(3)};
        if (part.size() < extents[1] * extents[2] * extents[3] || part_lse.size() < extents[1] * extents[2])
          part = tensor<T>(extents), part_lse = tensor<T, 3>({1, heads, call.queries});
        const tensor_view<T> o(part.data(), extents);
        const tensor_view<T, 3> l(part_lse.data(), {1, heads, call.queries});
        attn::full_softmax_options<T> options{.scale = scale_, .causal = call.causal, .softcap = softcap_, .lse = l};
        if (slopes_.empty() && std::same_as<Score, no_score>)
          attn::full_softmax(rows(queries.view), columns(k.view), columns(v.view), o, options, exec);
        else
          attn::full_softmax(rows(queries.view), columns(k.view), columns(v.view), o, options,
                             part_score<T, Score>{score, slopes_, b, h * heads, call.query_shift, call.key_shift}, exec);
        merge_softmax(rows(to), to_lse.slice(0, b, 1).slice(1, h * heads, heads).slice(2, call.query, call.queries), o, l);
        keys.progress();
      });
      if (keys.last()) break;
    }

    each_row(to_lse, [&](index b, index h, index i) {
      T& log_sum = to_lse(b, h, i);
      if (!sinks_.empty() && log_sum != -std::numeric_limits<T>::infinity()) {
        const T sink = sinks_[static_cast<std::size_t>(h)], highest = std::max(sink, log_sum);
        const T with = highest + std::log(std::exp(sink - highest) + std::exp(log_sum - highest));
        const T factor = std::exp(log_sum - with);
        for (index d = 0; d < to.extent(3); ++d) to(b, h, i, d) *= factor;
        log_sum = with;
      }
      if constexpr (!std::same_as<S, T>)
        for (index d = 0; d < to.extent(3); ++d) out(b, h, i, d) = static_cast<S>(to(b, h, i, d));
    });
  }

 private:
  template <class X>
  static constexpr index element_id =
      std::same_as<X, double> ? 8 : std::same_as<X, float> ? 4 : std::same_as<X, Eigen::half> ? 2 : 3;

  /// Elements in the compute type: a view of them, or a copy.
  template <class X>
  struct converted {
    tensor<T> copy;
    tensor_view<const T> view;

    explicit converted(const tensor_view<X>& x) {
      if constexpr (std::same_as<S, T>) {
        view = x;
      } else {
        copy = tensor<T>(x.extents());
        for (index b = 0; b < x.extent(0); ++b)
          for (index h = 0; h < x.extent(1); ++h)
            for (index i = 0; i < x.extent(2); ++i)
              for (index d = 0; d < x.extent(3); ++d) copy(b, h, i, d) = static_cast<T>(x(b, h, i, d));
        view = copy;
      }
    }
    converted(const converted&) = delete;
  };

  index group() const { return k_.extent(1) > 0 ? q_.extent(1) / k_.extent(1) : 0; }

  template <class Body>
  static void each_row(const tensor_view<T, 3>& x, const Body& body) {
    for (index b = 0; b < x.extent(0); ++b)
      for (index h = 0; h < x.extent(1); ++h)
        for (index i = 0; i < x.extent(2); ++i) body(b, h, i);
  }

  /// body(batch item, key head, block_call) for all that the queries of this process see of the keys of `source`.
  template <class Body>
  void for_each_call(int source, const Body& body) const {
    const index shift = keys_->tokens() - queries_->tokens();
    for (const sequence_range& k : keys_->of(source))
      for (const sequence_range& q : queries_->of(group_.rank()))
        for_each_block(q, k, shift, causal_, [&](const block_call& call) {
          for (index b = 0; b < q_.extent(0); ++b)
            for (index h = 0; h < k_.extent(1); ++h) body(b, h, call);
        });
  }

  process_group group_;
  tensor_view<const S> q_, k_, v_;
  bool causal_;
  std::optional<T> scale_, softcap_;
  std::span<const T> slopes_, sinks_;
  std::optional<sequence_split> queries_, keys_;
};

}  // namespace attn::inline ATTN_ISA::detail
