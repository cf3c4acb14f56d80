// attn: sequences packed one after another in one buffer, for every operator.
//
//   // offsets: where each sequence begins, and where the last one ends ("cu_seqlens")
//   attn::for_each_sequence({.offsets = offsets}, threads, [&](const auto& s, attn::execution& exec) {
//     attn::full_softmax(s.queries(q), s.queries(k), s.queries(v), s.queries(out), {.causal = true}, exec);
//   });
//   // queries and keys of different lengths:
//   attn::for_each_sequence({.query_offsets = of_q, .key_offsets = of_k}, threads, [&](const auto& s, auto& exec) {
//     attn::full_softmax(s.queries(q), s.keys(k), s.keys(v), s.queries(out), {}, exec);
//   });
//
// The body is called once for every sequence and may call anything (an operator, its backward pass, a layer) with
// slices of the views: each sequence gives what it gives alone, to the last bit. Views of [total, heads, dim] memory
// are blhd_view(data, 1, total, heads, dim).
//
// Threads  Long sequences are computed by all threads, one after another; the others by one thread each, the longest
//          first. Then the body must write to different memory for each sequence. Gradients of shared parameters need
//          in_order: sequences are computed in order, each by all threads, and `.accumulate` adds their gradients up.
// Cost     that of the calls; scratch memory of the calls for every thread, and 8 bytes per sequence.
// Throws   std::invalid_argument for offsets that decrease, before the first call; for offsets beyond the end of a view
//          where it is first sliced, before its operator is called. What the body throws passes through, and no further
//          sequence begins.
#pragma once

#include <attn/core/detail/check.hpp>
#include <attn/core/execution.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Where packed sequences lie: sequence n has the tokens from offsets[n] to offsets[n + 1].
struct packed_offsets {
  /// For queries and keys alike, or separately: one more entry than there are sequences, beginning with 0, never
  /// decreasing.
  list_view<idx_t> offsets{}, query_offsets{}, key_offsets{};
  /// One sequence after another, each by all threads.
  bool in_order = false;
};

/// One of the packed sequences.
class packed_sequence {
 public:
  packed_sequence(idx_t number, std::span<const idx_t> queries, std::span<const idx_t> keys)
      : number_(number), queries_(queries), keys_(keys) {}

  idx_t number() const { return number_; }
  idx_t query_length() const { return length(queries_); }
  idx_t key_length() const { return length(keys_); }

  /// The sequence's part of a view of all: along the length, which is the third axis; of Eigen matrices the rows, of
  /// views of rank 2 or 1 the last axis. Other axes, such as that of the layers' [batch, length, dim], have to be
  /// named.
  template <viewable X>
  auto queries(const X& x, int axis = length_axis<X>()) const {
    return part(as_view(x), axis, queries_);
  }
  template <viewable X>
  auto keys(const X& x, int axis = length_axis<X>()) const {
    return part(as_view(x), axis, keys_);
  }

 private:
  template <class X>
  static constexpr int length_axis() {
    constexpr int rank = decltype(as_view(std::declval<const X&>()))::rank;
    return rank > 2 ? 2 : rank - 1;
  }

  idx_t length(std::span<const idx_t> offsets) const { return at(offsets, number_ + 1) - at(offsets, number_); }
  static idx_t at(std::span<const idx_t> offsets, idx_t n) { return offsets[static_cast<std::size_t>(n)]; }

  template <class T, int Rank>
  auto part(const tensor_view<T, Rank>& x, int axis, std::span<const idx_t> offsets) const {
    const detail::validator check{"for_each_sequence"};
    if (axis < 0 || axis >= Rank) check.fail({"an axis of the view, from 0 to ", Rank - 1}, axis);
    if (offsets.back() > x.extent(axis))
      check.fail({"offsets up to the ", x.extent(axis), " tokens of the view"}, offsets.back());
    return x.slice(axis, at(offsets, number_), length(offsets));
  }

  idx_t number_;
  std::span<const idx_t> queries_, keys_;
};

namespace detail {

inline std::span<const idx_t> check_offsets(const validator& check, const char* what, std::span<const idx_t> list) {
  if (list.empty()) check.fail({what, ", one more than there are sequences"}, "none");
  if (list[0] < 0) check.fail({what, " from 0 on"}, list[0]);
  for (std::size_t n = 1; n < list.size(); ++n)
    if (list[n] < list[n - 1]) check.fail({what, " that do not fall, after ", list[n - 1]}, list[n]);
  if (list.back() >= beyond_memory) check.fail({what, " below ", beyond_memory}, list.back());
  return list;
}

}  // namespace detail

/// body(packed_sequence, execution) for every sequence that is not empty. See the top of the file.
template <class Body>
void for_each_sequence(const packed_offsets& options, execution_ref threads, Body&& body) {
  const detail::validator check{"for_each_sequence"};
  const bool both = options.query_offsets.empty() && options.key_offsets.empty();
  if (!both && !options.offsets.empty())
    check.fail("either offsets, or query_offsets and key_offsets", "both");
  const auto queries = detail::check_offsets(check, both ? "offsets" : "query_offsets",
                                                     both ? options.offsets : options.query_offsets);
  const auto keys = detail::check_offsets(check, both ? "offsets" : "key_offsets",
                                                  both ? options.offsets : options.key_offsets);
  check.equal("entries of key_offsets = those of query_offsets", std::ssize(queries), std::ssize(keys));
  const idx_t count = std::ssize(queries) - 1;
  const auto sequence = [&](idx_t n) { return packed_sequence(n, queries, keys); };
  const auto tokens = [&](idx_t n) { return sequence(n).query_length() + sequence(n).key_length(); };

  execution& exec = threads.get();
  if (options.in_order || exec.threads() == 1) {
    for (idx_t n = 0; n < count; ++n)
      if (tokens(n) > 0) body(sequence(n), exec);
    return;
  }
  // The longest first. A sequence that is more than one thread's share of the remaining work, assuming that work grows
  // with the square of the length, is computed by all threads.
  const auto order = exec.workspace([&](detail::arena& memory) { return memory.allocate<idx_t>(count); });
  std::iota(*order, *order + count, idx_t(0));
  std::sort(*order, *order + count,
            [&](idx_t a, idx_t b) { return tokens(a) != tokens(b) ? tokens(a) > tokens(b) : a < b; });
  const auto work = [&](idx_t n) { return static_cast<double>(tokens(n)) * static_cast<double>(tokens(n)); };
  double left = 0;
  for (idx_t n = 0; n < count; ++n) left += work(n);
  idx_t first = 0;
  for (; first < count && work((*order)[first]) > left / (2 * exec.threads()); ++first) {
    const idx_t n = (*order)[first];
    left -= work(n);
    if (tokens(n) > 0) body(sequence(n), exec);
  }
  const auto serial = exec.serial_executions();
  exec.for_each(count - first, [&](idx_t task, int worker) {
    const idx_t n = (*order)[first + task];
    if (tokens(n) > 0) body(sequence(n), serial[static_cast<std::size_t>(worker)]);
  });
}

/// The same on the caller's thread.
template <class Body>
  requires std::invocable<Body&, const packed_sequence&, execution&>
void for_each_sequence(const packed_offsets& options, Body&& body) {
  for_each_sequence(options, execution_ref(), body);
}

}}  // namespace attn::ATTN_ISA
