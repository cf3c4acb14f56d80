// attn: rows that some processes have and others need: only these are sent, directly from process to process.
#pragma once

#include <attn/mpi/detail/ring.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Rows [begin, end) of the whole sequence.
struct row_range {
  idx_t begin = 0, end = 0;
  idx_t length() const { return std::max<idx_t>(0, end - begin); }
};
inline row_range common_rows(const row_range& x, const row_range& y) {
  return {(std::max)(x.begin, y.begin), (std::max)((std::max)(x.begin, y.begin), (std::min)(x.end, y.end))};
}
/// What a process wants: ranges that ascend and do not overlap.
using row_ranges = std::vector<row_range>;

inline idx_t total_length(const row_ranges& ranges) {
  idx_t rows = 0;
  for (const row_range& range : ranges) rows += range.length();
  return rows;
}
/// How many rows of them are before `row`.
inline idx_t rows_before(const row_ranges& ranges, idx_t row) {
  idx_t rows = 0;
  for (const row_range& range : ranges) rows += std::clamp(row - range.begin, idx_t(0), range.length());
  return rows;
}
/// Ranges in any order become such that ascend and do not touch.
inline void join(row_ranges& ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const row_range& x, const row_range& y) { return x.begin < y.begin; });
  std::size_t count = 0;
  for (const row_range& range : ranges)
    if (count > 0 && range.begin <= ranges[count - 1].end)
      ranges[count - 1].end = (std::max)(ranges[count - 1].end, range.end);
    else
      ranges[count++] = range;
  ranges.resize(count);
}
/// Positions that ascend, each once, as ranges.
inline row_ranges ranges_of(std::span<const idx_t> positions) {
  row_ranges ranges;
  for (idx_t p : positions) {
    if (ranges.empty() || ranges.back().end != p) ranges.push_back({p, p});
    ++ranges.back().end;
  }
  return ranges;
}

/// Memory for rows of [B, H] vectors, row after row, so that any range of rows is one message.
template <class E>
struct row_memory {
  idx_t batch = 0, heads = 0, rows = 0, dim = 0;
  std::vector<E> memory{};

  row_memory() = default;
  row_memory(idx_t b, idx_t h, idx_t n, idx_t d)
      : batch(b), heads(h), rows(n), dim(d), memory(static_cast<std::size_t>(b * h * n * d)) {}

  idx_t row_size() const { return batch * heads * dim; }
  std::size_t row_bytes(idx_t count) const { return static_cast<std::size_t>(count * row_size()) * sizeof(E); }
  E* row(idx_t n) { return memory.data() + n * row_size(); }
  const E* row(idx_t n) const { return memory.data() + n * row_size(); }
  /// Rows [first, first + count) as [B, H, count, D].
  tensor_view<E> view(idx_t first, idx_t count) {
    return {row(first), {batch, heads, count, dim}, {heads * dim, dim, row_size(), 1}};
  }
  tensor_view<E> view() { return view(0, rows); }
  /// Of rows of one number, as [B, H, count].
  tensor_view<E, 3> list(idx_t first, idx_t count) {
    return {row(first), {batch, heads, count}, {heads, 1, row_size()}};
  }
  tensor_view<E, 3> list() { return list(0, rows); }
};

/// The rows that a process wants of what all processes have.
template <class E>
class row_exchange {
 public:
  /// Begins to send the rows of `own`, this process's part of a sequence, and to receive what it wants: wanted(p) are
  /// the ranges that process p wants.
  template <class Wanted>
  row_exchange(const process_communicator& group, const sequence_split& split, const tensor_view<const E>& own,
               const Wanted& wanted) {
    const auto rows_of = [&](int p) {
      const sequence_range range = split.of(p)[0];
      return row_range{range.begin, range.begin + range.length};
    };
    const int me = group.rank();
    const row_range mine = rows_of(me);
    const row_ranges wanted_here = wanted(me);
    struct message {
      row_range rows;
      int to = 0;
    };
    std::vector<message> messages;
    row_ranges wanted_of_own;  // of others, among the own rows
    for (int p = 0; p < group.size(); ++p) {
      if (p == me) continue;
      for (const row_range& range : wanted(p))
        if (const row_range part = common_rows(range, mine); part.length() > 0)
          messages.push_back({part, p}), wanted_of_own.push_back(part);
    }
    join(wanted_of_own);
    const idx_t b = own.extent(0), h = own.extent(1), d = own.extent(3);
    leaving = row_memory<E>(b, h, total_length(wanted_of_own), d);
    idx_t at = 0;
    for (const row_range& range : wanted_of_own) {
      copy_elements(own.slice(2, range.begin - mine.begin, range.length()), leaving.view(at, range.length()));
      at += range.length();
    }
    rows = row_memory<E>(b, h, total_length(wanted_here), d);
    at = 0;
    for (const row_range& range : wanted_here)
      for (int p = 0; p < group.size(); ++p) {
        const row_range part = common_rows(range, rows_of(p));
        if (part.length() == 0) continue;
        if (p == me)
          copy_elements(own.slice(2, part.begin - mine.begin, part.length()), rows.view(at, part.length()));
        else
          messages_.receive(rows.row(at), rows.row_bytes(part.length()), p, 0, group.get());
        at += part.length();
      }
    for (const message& one : messages)
      messages_.send(leaving.row(rows_before(wanted_of_own, one.rows.begin)), leaving.row_bytes(one.rows.length()),
                     one.to, 0, group.get());
  }

  void wait() { messages_.wait(); }

  row_memory<E> rows;  // what this process wants, in order; there after wait()
  row_memory<E> leaving;  // those of its own that others want, each once

 private:
  message_list messages_;
};

}}}  // namespace attn::ATTN_ISA::detail
