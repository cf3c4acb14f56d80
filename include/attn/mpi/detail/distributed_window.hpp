// attn: sliding-window attention by the processes of a communicator.
//
//   1. every process gets the keys its own queries see by their windows, from its neighbours within reach; queries
//      whose windows lie in its own keys read them in place
//   2. ... and the global keys beyond them; it attends both, and merges the results by lse
//   3. global queries, which see every key, go to all processes instead; what they find there comes back, and is merged
//      in the order of the processes
#pragma once

#include <attn/mpi/detail/row_exchange.hpp>
#include <attn/mpi/detail/distributed_softmax.hpp>
#include <attn/softmax/sliding_window.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// partial_softmax_options of sliding_window.
template <class S>
struct partial_window_options : sliding_window_options<S> {
  static constexpr unsigned shared = sliding_window_options<S>::shared | fields::sums;
  tensor_view<compute_type<S>> sums{};
};

/// Positions in the whole sequence: a list, or `first` and those that follow.
struct row_positions {
  const idx_t* list = nullptr;
  idx_t first = 0;
  idx_t operator[](idx_t n) const { return list ? list[n] : first + n; }
};

/// The terms of a score that need positions, where those of a call are not contiguous.
template <class T, class Score>
struct score_by_position {
  Score* score;
  std::span<const T> slopes;
  bool causal;
  row_positions queries, keys;

  T operator()(T s, idx_t b, idx_t h, idx_t i, idx_t j) const {
    const idx_t position = queries[i], key = keys[j];
    if (causal && key > position) return -std::numeric_limits<T>::infinity();
    if (!slopes.empty()) s -= slopes[static_cast<std::size_t>(h)] * static_cast<T>(std::abs(position - key));
    if constexpr (score_terms<T, Score>::scored) s = static_cast<T>((*score)(s, b, h, position, key));
    return s;
  }
};

template <class S, class Score>
class distributed_window {
 public:
  using T = compute_type<S>;

  /// The call has the views of this process; the options are those of attn::sliding_window for the whole.
  distributed_window(const process_communicator& group, const std::vector<process_shape>& all,
                     const softmax_call<S, Score>& call, const sliding_window_options<S>& options)
      : group_(group), x_(call), options_(options), score_(call.terms.score), exec_(call.exec),
        queries_(split_of(all, &process_shape::queries)), keys_(split_of(all, &process_shape::keys)) {
    shift_ = keys_.tokens() - queries_.tokens();
    globals_.assign(options_.global_positions.begin(), options_.global_positions.end());
    std::sort(globals_.begin(), globals_.end());
    globals_.erase(std::unique(globals_.begin(), globals_.end()), globals_.end());
    globals_.erase(std::lower_bound(globals_.begin(), globals_.end(), keys_.tokens()), globals_.end());
    for (idx_t g : globals_)
      if (g >= shift_) global_queries_.push_back(g - shift_);
  }

  void attend() const {
    const auto by_window = [&](int p) { return windows_of(p); };
    const auto others = [&](int p) { return ranges_of(globals_beyond(p)); };
    const auto to_all = [&](int p) { return keys_.length(p) > 0 ? ranges_of(global_queries_) : row_ranges(); };
    const bool own = bool(options_.q_global);
    row_exchange<S> keys(group_, keys_, x_.k, by_window), values(group_, keys_, x_.v, by_window);
    row_exchange<S> global_keys(group_, keys_, x_.k, others), global_values(group_, keys_, x_.v, others);
    row_exchange<S> global_queries(group_, queries_, own ? options_.q_global : x_.q, to_all);
    for (row_exchange<S>* messages : {&keys, &values, &global_keys, &global_values, &global_queries}) messages->wait();
    if (global_keys.rows.rows > 0)
      attend_with_globals(keys.rows, values.rows, global_keys.rows, global_values.rows);
    else
      attend_windows(keys.rows, values.rows);
    attend_global_queries(global_queries.rows);
  }

 private:
  /// Position of the first query of a process.
  idx_t first_position(int p) const { return queries_.of(p)[0].begin + shift_; }

  /// Queries of a process with the keys they see by their windows: its own, in place, or some that are gathered.
  struct window_task {
    row_range queries, keys;
    bool in_place = false;
  };

  /// How far a window of so many keys reaches, in positions.
  idx_t reach(idx_t keys) const {
    const idx_t all = queries_.tokens() + keys_.tokens();
    idx_t widest = 1;
    for (idx_t d : options_.dilation) widest = (std::max)(widest, d);
    return keys > all / widest ? all : keys * widest;
  }
  idx_t right() const { return options_.causal ? 0 : options_.right; }

  /// The keys that these queries of process p see by their windows.
  row_range window_of(int p, const row_range& rows) const {
    if (rows.length() == 0) return {};
    const idx_t first = first_position(p) + rows.begin, end = first + rows.length() + reach(right());
    const idx_t begin = std::clamp(first - reach(options_.left), idx_t(0), keys_.tokens());
    return {begin, std::clamp(end, begin, keys_.tokens())};
  }

  /// All queries of process p. Those that see own keys alone are cut off at chunks of sliding_window; with global keys
  /// all go together.
  std::vector<window_task> tasks_of(int p) const {
    const idx_t rows = queries_.length(p), first = first_position(p), chunk = window_chunk(options_.left, right());
    const sequence_range own = keys_.of(p)[0];
    const idx_t end = own.begin + own.length;
    idx_t begin_own = 0, end_own = rows;
    if (own.begin > 0) begin_own = round_up((std::max)(own.begin + reach(options_.left) - first, idx_t(0)), chunk);
    if (end < keys_.tokens()) end_own = (std::min)(floor_div(end - reach(right()) - first, chunk) * chunk, rows);
    std::vector<window_task> all;
    const auto gather = [&](idx_t from, idx_t to) {
      if (from < to) all.push_back({{from, to}, window_of(p, {from, to})});
    };
    if (!globals_.empty() || begin_own >= end_own) {
      gather(0, rows);
    } else {
      gather(0, begin_own);
      all.push_back({{begin_own, end_own}, {own.begin, end}, true});
      gather(end_own, rows);
    }
    return all;
  }
  /// The keys that are gathered for them.
  row_ranges windows_of(int p) const {
    row_ranges ranges;
    for (const window_task& one : tasks_of(p))
      if (!one.in_place && one.keys.length() > 0) ranges.push_back(one.keys);
    join(ranges);
    return ranges;
  }
  /// The global keys beyond them that they see, too.
  std::vector<idx_t> globals_beyond(int p) const {
    std::vector<idx_t> list;
    const row_range window = window_of(p, {0, queries_.length(p)});
    const idx_t end = options_.causal ? first_position(p) + queries_.length(p) : keys_.tokens();
    for (idx_t g : globals_)
      if (queries_.length(p) > 0 && g < end && (g < window.begin || g >= window.end)) list.push_back(g);
    return list;
  }

  template <class Options>
  void set_options(Options& to) const {
    to.scale = options_.scale, to.softcap = options_.softcap;
  }

  /// Some of the own queries, by their windows and the global keys in these: `sums` and lse, or where there is no
  /// `sums`, out and its lse.
  void attend_task(const window_task& one, const tensor_view<const S>& k, const tensor_view<const S>& v,
                    const tensor_view<T>& sums, const tensor_view<T, 3>& lse) const {
    const auto rows = [&](const auto& x) { return x.slice(2, one.queries.begin, one.queries.length()); };
    std::vector<idx_t> inside;
    for (idx_t g : globals_)
      if (g >= one.keys.begin && g < one.keys.end) inside.push_back(g - one.keys.begin);
    partial_window_options<S> options;
    set_options(options);
    options.causal = options_.causal;
    options.first_position = first_position(group_.rank()) + one.queries.begin - one.keys.begin;
    options.left = options_.left, options.right = options_.right, options.dilation = options_.dilation;
    options.alibi_slopes = options_.alibi_slopes, options.global_positions = inside;
    if (sums) options.sums = rows(sums);
    if (!sums) options.sinks = options_.sinks;
    if (lse) options.lse = rows(lse);
    auto function = function_of_part(score_, 0, one.keys.begin);
    execution_ref reference = exec_;
    const tensor_view<S> to = rows(x_.out);
    const auto call =
        checked_call<partial_window_options>(group_.name(), rows(x_.q), k, v, to, options, function, reference);
    run_sliding_window(call, call.options);
  }

  /// The own queries, as if none of them were global, where all the keys they see are in their windows.
  void attend_windows(row_memory<S>& keys, row_memory<S>& values) const {
    const row_ranges gathered = windows_of(group_.rank());
    for (const window_task& one : tasks_of(group_.rank())) {
      if (one.in_place) {
        attend_task(one, x_.k, x_.v, {}, options_.lse);
        continue;
      }
      const idx_t at = rows_before(gathered, one.keys.begin);
      attend_task(one, keys.view(at, one.keys.length()), values.view(at, one.keys.length()), {}, options_.lse);
    }
  }

  /// The same where there are global keys beyond.
  void attend_with_globals(row_memory<S>& keys, row_memory<S>& values, row_memory<S>& global_keys,
                           row_memory<S>& global_values) const {
    const std::array<idx_t, 4>& extents = x_.out.extents();
    tensor<T> sums(extents), others(extents);
    tensor<T, 3> lse({extents[0], extents[1], extents[2]}), other_lse(lse.extents());
    for (const window_task& one : tasks_of(group_.rank()))
      attend_task(one, keys.view(), values.view(), sums.view(), lse.view());
    const std::vector<idx_t> beyond = globals_beyond(group_.rank());
    // Of a causal call they are all before the window.
    attend_some({x_.q, global_keys.view(), global_values.view(), x_.out, others.view(), other_lse.view()}, false,
                {nullptr, first_position(group_.rank())}, {beyond.data(), 0});
    merge_softmax(sums.view(), lse.view(), others.view(), other_lse.view());
    add_sinks(std::span<const T>(options_.sinks), sums.view(), lse.view(), x_.out);
    copy_lse(lse.view(), 0, extents[2]);
  }

  /// All of these queries with all of these keys, but for later ones where `causal`: sums and lse.
  void attend_some(const partial_call<S>& x, bool causal, const row_positions& queries,
                   const row_positions& keys) const {
    partial_softmax_options<S> options;
    set_options(options);
    options.first_position = 0;  // i and j are then numbers of rows
    score_by_position<T, Score> function{score_, options_.alibi_slopes, causal, queries, keys};
    no_score none;
    if (score_terms<T, Score>::scored || causal || !options_.alibi_slopes.empty())
      attend_part(group_.name(), x, options, function, exec_);
    else
      attend_part(group_.name(), x, options, none, exec_);
  }

  /// The global queries with the own keys; the results go to their owners, who merge them.
  void attend_global_queries(row_memory<S>& rows) const {
    if (global_queries_.empty()) return;
    const bool own = bool(options_.q_global);
    const idx_t b = x_.out.extent(0), h = x_.out.extent(1), dim_v = x_.out.extent(3);
    row_memory<T> sums(b, h, rows.rows, dim_v), lse(b, h, rows.rows, 1);
    std::vector<idx_t> positions;
    for (idx_t row : global_queries_) positions.push_back(row + shift_);
    row_memory<S> no_out(b, h, rows.rows, dim_v);
    if (rows.rows > 0)
      attend_some({rows.view(), own ? options_.k_global : x_.k, own ? options_.v_global : x_.v, no_out.view(),
                   sums.view(), lse.list()},
                  options_.causal, {positions.data(), 0}, {nullptr, keys_.of(group_.rank())[0].begin});

    // Those of process p are global queries [before(p), before(p + 1)).
    const auto before = [&](int p) {
      const idx_t row = p < group_.size() ? queries_.of(p)[0].begin : queries_.tokens();
      return std::lower_bound(global_queries_.begin(), global_queries_.end(), row) - global_queries_.begin();
    };
    const int me = group_.rank();
    const idx_t begin = before(me), count = before(me + 1) - begin;
    std::vector<row_memory<T>> all_sums, all_lse;
    message_list messages;
    for (int p = 0; p < group_.size(); ++p) {
      const bool there = keys_.length(p) > 0 && p != me;
      all_sums.emplace_back(b, h, there ? count : 0, dim_v), all_lse.emplace_back(b, h, there ? count : 0, 1);
      if (!there) continue;
      messages.receive(all_sums.back().row(0), all_sums.back().row_bytes(count), p, 1, group_.get());
      messages.receive(all_lse.back().row(0), all_lse.back().row_bytes(count), p, 1, group_.get());
    }
    for (int p = 0; p < group_.size() && rows.rows > 0; ++p) {
      const idx_t first = before(p), some = before(p + 1) - first;
      if (p == me || some == 0) continue;
      messages.send(sums.row(first), sums.row_bytes(some), p, 1, group_.get());
      messages.send(lse.row(first), lse.row_bytes(some), p, 1, group_.get());
    }
    messages.wait();
    if (count == 0) return;
    row_memory<T> total(b, h, count, dim_v), total_lse(b, h, count, 1);
    std::fill(total_lse.memory.begin(), total_lse.memory.end(), -std::numeric_limits<T>::infinity());
    for (int p = 0; p < group_.size(); ++p) {
      if (keys_.length(p) == 0) continue;
      const auto i = static_cast<std::size_t>(p);
      if (p == me)
        merge_softmax(total.view(), total_lse.list(), sums.view(begin, count), lse.list(begin, count));
      else
        merge_softmax(total.view(), total_lse.list(), all_sums[i].view(), all_lse[i].list());
    }
    row_memory<S> result(b, h, count, dim_v);
    add_sinks(std::span<const T>(options_.sinks), total.view(), total_lse.list(), result.view());
    for (idx_t n = 0; n < count; ++n) {
      const idx_t row = global_queries_[static_cast<std::size_t>(begin + n)] - queries_.of(me)[0].begin;
      copy_elements(result.view(n, 1), x_.out.slice(2, row, 1));
      copy_lse(total_lse.list(n, 1), row, 1);
    }
  }

  /// lse of the own rows [row, row + count), if it is wanted.
  void copy_lse(const tensor_view<T, 3>& from, idx_t row, idx_t count) const {
    if (!options_.lse) return;
    for_each_row(x_.out.slice(2, row, count),
                 [&](idx_t b, idx_t h, idx_t i) { options_.lse(b, h, row + i) = from(b, h, i); });
  }

  const process_communicator& group_;
  const softmax_call<S, Score>& x_;
  const sliding_window_options<S>& options_;
  Score* score_;
  execution& exec_;
  sequence_split queries_, keys_;
  idx_t shift_ = 0;
  std::vector<idx_t> globals_, global_queries_;  // positions; rows of the whole of the queries there
};

}}}  // namespace attn::ATTN_ISA::detail
