// attn: softmax attention by the processes of a communicator: checked together, attended block by block, merged.
#pragma once

#include <attn/mpi/detail/ring.hpp>
#include <attn/softmax/full_softmax.hpp>
#include <attn/softmax/merge_softmax.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The options of a call whose results are part of a sum, with where they go instead of out: in the compute type.
template <class S>
struct partial_softmax_options : full_softmax_options<S> {
  static constexpr unsigned shared = full_softmax_options<S>::shared | fields::sums;
  tensor_view<compute_type<S>> sums{};
};

/// What such a call reads, and where its result goes: `sums` and lse. out has their shape; it is not written.
template <class S>
struct partial_call {
  tensor_view<const S> q, k, v;
  tensor_view<S> out;
  tensor_view<compute_type<S>> sums;
  tensor_view<compute_type<S>, 3> lse;
};
template <class S, class Score>
void attend_part(const char* name, const partial_call<S>& x, partial_softmax_options<S>& options, Score& score,
                 execution& exec) {
  options.sums = x.sums, options.lse = x.lse;
  execution_ref reference = exec;
  run_full_softmax(checked_call<partial_softmax_options>(name, x.q, x.k, x.v, x.out, options, score, reference));
}

/// What a process brings to a call, with the settings that must be the same on all.
template <class S, class Options>
process_shape shape_of_process(const tensor_view<const S>& q, const tensor_view<const S>& k,
                               const tensor_view<const S>& v, const Options& options,
                               std::initializer_list<double> more, std::uint64_t wants = 0) {
  using T = compute_type<S>;
  process_shape own{.batch = q.extent(0), .heads = q.extent(1), .kv_heads = k.extent(1), .dim = q.extent(3),
                    .dim_v = v.extent(3), .element_bytes = element_code<S>, .queries = q.extent(2),
                    .keys = k.extent(2), .wants = wants};
  const auto number = [](const std::optional<T>& x) { return x ? static_cast<double>(*x) : 0.0; };
  const double settings[] = {double(options.causal), double(options.scale.has_value()), number(options.scale),
                             double(options.softcap.has_value()), number(options.softcap),
                             checksum<T>(options.alibi_slopes), checksum<T>(options.sinks)};
  std::copy(more.begin(), more.end(), std::copy(std::begin(settings), std::end(settings), own.settings));
  return own;
}

/// A score function, or its derivative, of a call on a part of a batch: from positions in the whole sequence.
template <class F>
struct part_function {
  F& function;
  idx_t head, shift;  // of the part's first

  template <class T>
  T operator()(T s, idx_t b, idx_t h, idx_t i, idx_t j) const {
    return static_cast<T>(function(s, b, head + h, i + shift, j + shift));
  }
  template <class T>
  T operator()(T s, T d, idx_t b, idx_t h, idx_t i, idx_t j) const {
    return static_cast<T>(function(s, d, b, head + h, i + shift, j + shift));
  }
};
/// The same for none.
template <class F>
auto function_of_part(F* function, idx_t head, idx_t shift) {
  using plain = std::remove_const_t<F>;
  if constexpr (std::is_empty_v<plain> && !std::is_invocable_v<F&, double, idx_t, idx_t, idx_t, idx_t> &&
                !std::is_invocable_v<F&, double, double, idx_t, idx_t, idx_t, idx_t>)
    return plain{};
  else
    return part_function<F>{*function, head, shift};
}

/// `count` entries of a list per head, or none.
template <class T>
list_view<T> part_of_list(std::span<const T> list, idx_t first, idx_t count) {
  return list.empty() ? list_view<T>() : list_view<T>(list.data() + first, static_cast<std::size_t>(count));
}

/// Adds the sinks to finished rows (their weight in the denominator), then rounds them to out.
template <class T, class S>
void add_sinks(std::span<const T> sinks, const tensor_view<T>& sums, const tensor_view<T, 3>& lse,
               const tensor_view<S>& out) {
  for_each_row(sums, [&](idx_t b, idx_t h, idx_t i) {
    T& log_sum = lse(b, h, i);
    T factor = 1;
    const T sink = sinks.empty() ? log_sum : sinks[static_cast<std::size_t>(h)], highest = (std::max)(sink, log_sum);
    if (!sinks.empty() && highest != -std::numeric_limits<T>::infinity()) {
      const T with = highest + std::log(std::exp(sink - highest) + std::exp(log_sum - highest));
      factor = std::exp(log_sum - with);
      log_sum = with;
    }
    for (idx_t d = 0; d < sums.extent(3); ++d) out(b, h, i, d) = static_cast<S>(factor * sums(b, h, i, d));
  });
}

/// The results of a process's queries over the keys so far. For each range of queries and bundle of key heads, the
/// first block's results are stored, and those of later blocks are merged.
template <class T>
struct row_sums {
  idx_t group = 1, step = 1;  // query heads of a key head, key heads of a bundle
  T *part = nullptr, *part_lse = nullptr;  // memory for the results of a block
  tensor_view<T> out{};
  tensor_view<T, 3> lse{};
  std::vector<std::array<bool, 2>> begun{};  // per bundle: the ranges of queries that have results

  /// Adds a block for `count` key heads from h on: attend(out, lse) writes its results.
  template <class Attend>
  void add(idx_t h, idx_t count, const block_call& call, const sequence_range& range, const Attend& attend) {
    const auto rows = [&](const auto& x) {
      return x.slice(1, h * group, count * group).slice(2, call.query, call.queries);
    };
    bool& known = begun[static_cast<std::size_t>(h / step)][call.range];
    if (!std::exchange(known, true)) {
      if (call.whole_range) return attend(rows(out), rows(lse));
      clear(h, count, range);
    }
    const std::array<idx_t, 4> extents = rows(out).extents();
    const tensor_view<T> block(part, extents);
    const tensor_view<T, 3> block_lse(part_lse, {extents[0], extents[1], extents[2]});
    attend(block, block_lse);
    merge_softmax(rows(out), rows(lse), block, block_lse);
  }
  /// Ranges without results have seen no key.
  void finish(const std::array<sequence_range, 2>& ranges, idx_t kv_heads) const {
    for (std::size_t bundle = 0; bundle < begun.size(); ++bundle)
      for (std::size_t n = 0; n < ranges.size(); ++n)
        if (const idx_t h = static_cast<idx_t>(bundle) * step; !begun[bundle][n])
          clear(h, (std::min)(step, kv_heads - h), ranges[n]);
  }

 private:
  void clear(idx_t h, idx_t count, const sequence_range& range) const {
    for (idx_t b = 0; b < out.extent(0); ++b)
      for (idx_t head = h * group; head < (h + count) * group; ++head)
        clear_rows(head_of(out, b, head), range.local, range.local + range.length, row_of(lse, b, head), lse.stride(2));
  }
};

/// Bits: what a process lacks or wants.
inline constexpr std::uint64_t lacks_lse = 1, wants_keys = 2, wants_values = 4, wants_slopes = 8, wants_sinks = 16;

/// The calls of one process. S are the elements of the call; what is summed over processes is of the compute type.
template <class S>
class distributed_softmax {
 public:
  using T = compute_type<S>;

  /// check() checks what the process itself brings.
  template <class Options, class Check>
  distributed_softmax(const char* name, MPI_Comm communicator, const tensor_view<const S>& own_q,
                      const tensor_view<const S>& own_k, const tensor_view<const S>& v, const Options& options,
                      std::uint64_t wants, const Check& check)
      : processes(name, communicator), q(own_q), k(own_k), causal(options.causal), scale(options.scale),
        softcap(options.softcap), slopes(options.alibi_slopes), sinks(options.sinks) {
    const auto all =
        agree(processes, shape_of_process<S>(q, k, v, options, {double(options.zigzag)}, wants), check);
    for (const process_shape& one : all) wants_ |= one.wants;
    queries = split_of(all, &process_shape::queries, options.zigzag);
    keys = split_of(all, &process_shape::keys, options.zigzag);
    queries.validate(processes, "queries"), keys.validate(processes, "keys");
  }

  /// Whether any process lacks or wants this.
  bool any(std::uint64_t want) const { return (wants_ & want) != 0; }
  idx_t group() const { return k.extent(1) > 0 ? q.extent(1) / k.extent(1) : 0; }

  /// Forward: out, and lse where it is given.
  template <class Score>
  void attend(const tensor_view<const S>& v, const tensor_view<S>& out, const tensor_view<T, 3>& lse, Score* score,
              execution& exec) const {
    const idx_t step = heads_of_bundle(v.extent(3)), rows = out.extent(0) * out.extent(1) * out.extent(2),
                dim_v = out.extent(3);
    const idx_t part = out.extent(0) * (std::min)(step, k.extent(1)) * group() * out.extent(2);
    struct memory {
      std::array<key_buffer<S>, 2> keys;
      T *part, *part_lse, *sums, *lse;
    };
    const auto scratch = exec.workspace([&](arena& m) {
      return memory{.keys = layout_key_buffers<S>(m, k.extents(), v.extents(), keys),
                    .part = m.allocate<T>(part * dim_v), .part_lse = m.allocate<T>(part),
                    .sums = m.allocate<T>(std::same_as<S, T> ? 0 : rows * dim_v), .lse = m.allocate<T>(lse ? 0 : rows)};
    });
    row_sums<T> total{.group = group(), .step = step, .part = scratch->part, .part_lse = scratch->part_lse};
    if constexpr (std::same_as<S, T>)
      total.out = out;
    else
      total.out = {scratch->sums, out.extents()};
    total.lse = lse ? lse : tensor_view<T, 3>(scratch->lse, {out.extent(0), out.extent(1), out.extent(2)});
    total.begun.resize(static_cast<std::size_t>(ceil_div(k.extent(1), step)));

    travelling_keys<S> travelling(processes, keys, k, v, scratch->keys);
    for (;; travelling.end_step()) {
      travelling.begin_step();
      const auto here = travelling.here();
      for_each_call(travelling.source(), step, [&](idx_t h, idx_t count, const block_call& call) {
        total.add(h, count, call, queries.of(processes.rank())[call.range],
                  [&](const tensor_view<T>& sums, const tensor_view<T, 3>& sums_lse) {
                    attend_block({this->rows(q, h, count, call), columns(here.k, h, count, call),
                                  columns(here.v, h, count, call), this->rows(out, h, count, call), sums, sums_lse},
                                 h, call, score, exec);
                  });
        travelling.progress();
      });
      if (travelling.last()) break;
    }
    total.finish(queries.of(processes.rank()), k.extent(1));
    if (!std::same_as<S, T> || !sinks.empty()) add_sinks(std::span<const T>(sinks), total.out, total.lse, out);
  }

  /// Key heads that are computed and sent together.
  idx_t heads_of_bundle(idx_t dim_v) const {
    const double scores = static_cast<double>(queries.tokens()) / queries.processes() *
                         (static_cast<double>(keys.tokens()) / keys.processes());
    return heads_together(k.extent(1), 2 * scores * static_cast<double>(q.extent(0) * q.extent(1)) *
                                           static_cast<double>(q.extent(3) + dim_v));
  }

  /// The options of a block of `count` key heads from h on, but for lse.
  template <class Options>
  void set_options(Options& options, idx_t h, idx_t count, const block_call& call) const {
    options.scale = scale, options.softcap = softcap;
    options.causal = call.causal, options.first_position = call.first_position;
    options.alibi_slopes = part_of_list<T>(slopes, h * group(), count * group());
  }

  /// The query heads of `count` key heads from h on, of the rows of a call.
  template <class X>
  auto rows(const X& x, idx_t h, idx_t count, const block_call& call) const {
    return x.slice(1, h * group(), count * group()).slice(2, call.query, call.queries);
  }
  template <class X>
  auto columns(const X& x, idx_t h, idx_t count, const block_call& call) const {
    return x.slice(1, h, count).slice(2, call.key, call.keys);
  }

  /// body(block_call) for all that the queries of this process see of the keys of `source`.
  template <class Body>
  void for_each_call(int source, const Body& body) const {
    const idx_t shift = keys.tokens() - queries.tokens();
    for (const sequence_range& part : keys.of(source))
      for (std::size_t n = 0; const sequence_range& own : queries.of(processes.rank()))
        for_each_block(own, n++, part, shift, causal, body);
  }
  /// The same, in bundles of `step` key heads: body(first key head, key heads, block_call).
  template <class Body>
  void for_each_call(int source, idx_t step, const Body& body) const {
    for (idx_t h = 0; h < k.extent(1); h += step)
      for_each_call(source, [&](const block_call& call) { body(h, (std::min)(step, k.extent(1) - h), call); });
  }

  const process_communicator processes;
  const tensor_view<const S> q, k;
  const bool causal;
  const std::optional<T> scale, softcap;
  const list_view<T> slopes, sinks;
  sequence_split queries, keys;

 private:
  template <class Score>
  void attend_block(const partial_call<S>& x, idx_t h, const block_call& call, Score* score, execution& exec) const {
    partial_softmax_options<S> options;
    set_options(options, h, x.k.extent(1), call);
    auto function = function_of_part(score, h * group(), call.shift);
    attend_part(processes.name(), x, options, function, exec);
  }

  std::uint64_t wants_ = 0;
};

}}}  // namespace attn::ATTN_ISA::detail
