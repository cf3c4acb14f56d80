#pragma once
// Sequences that the processes of MPI_COMM_WORLD share, and what an operator over them must give: on every process the
// rows that a single process computes from the whole.
#include <attn/core/tensor_view.hpp>

#include <mpi.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "support/catch.hpp"
#include "support/measure.hpp"
#include "support/random.hpp"
#include "support/refusal.hpp"

namespace testing {

inline index process() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}
inline index processes() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

template <class T>
attn::tensor_view<const T> view_of(const tensor<T>& x) {
  return {x.data.data(), x.extents};
}
template <class T>
attn::tensor_view<T> view_of(tensor<T>& x) {
  return {x.data.data(), x.extents};
}

// Tokens [begin, begin + length) of this process.
struct own_range {
  index begin = 0, length = 0;
  bool aligned = true;  // do all processes begin at whole segments?
};

// Ways to split `tokens`: in whole segments, evenly or not, with empty processes; and elsewhere.
inline std::vector<own_range> splits(index tokens, index segment) {
  const index size = processes(), segments = (tokens + segment - 1) / segment;
  const auto range = [&](const auto& begin_of) {
    const index begin = std::min(begin_of(process()), tokens);
    const index end = process() + 1 == size ? tokens : std::min(begin_of(process() + 1), tokens);
    bool aligned = true;
    for (index p = 0; p < size; ++p) aligned = aligned && (begin_of(p) % segment == 0 || begin_of(p) >= tokens);
    return own_range{begin, end - begin, aligned};
  };
  return {range([&](index p) { return segments * p / size * segment; }),
          range([&](index p) { return p * segment; }),  // the last has the rest
          // Those between the first and the last are empty; the first ones are.
          range([&](index p) { return p == 0 ? 0 : tokens / segment / 2 * segment; }),
          range([&](index p) { return p > 0 && p == size - 1 ? tokens / segment * segment : 0; }),
          range([&](index p) { return tokens * p / size; }),
          range([&](index p) { return p == 0 ? 0 : 7 + 130 * p; })};
}

// Rows of padding and of a call that writes nothing keep this.
constexpr double rubbish = 7;

// spread(q, k, v, out, range) for all splits, against alone(q, k, v, out), which sees the whole sequence: bitwise where
// ranges begin at whole segments, else to rounding.
template <class S, class Alone, class Spread>
void check_spread(const tensor<double>& queries, const tensor<double>& keys, const tensor<double>& values,
                  index segment, double bound, const Alone& alone, const Spread& spread) {
  const tensor<S> q = cast<S>(queries), k = cast<S>(keys), v = cast<S>(values);
  tensor<S> wanted(q.batch(), q.heads(), q.length(), v.dim(), S(rubbish));
  alone(view_of(q), view_of(k), view_of(v), view_of(wanted));
  int number = 0;
  for (const own_range& range : splits(k.length(), segment)) {
    CAPTURE(number++, range.begin, range.length, range.aligned);
    // Queries are the last of the sequence: a process has those of its keys.
    const index shift = k.length() - q.length(), begin = std::max<index>(range.begin - shift, 0),
                end = std::max<index>(range.begin + range.length - shift, 0);
    const tensor<S> own_q = rows(q, begin, end - begin), own_k = rows(k, range.begin, range.length),
                    own_v = rows(v, range.begin, range.length), own = rows(wanted, begin, end - begin);
    tensor<S> out(q.batch(), q.heads(), end - begin, v.dim(), S(rubbish));
    spread(view_of(own_q), view_of(own_k), view_of(own_v), view_of(out), range);
    if (range.aligned)
      CHECK(out == own);
    else
      CHECK(relative_error(out, own) <= bound);
  }
}

// The message with which `call` was refused, which must be the same on all processes and of the usual form.
inline std::string refusal_of_all(const std::string& name, const std::function<void()>& call) {
  const std::string message = refusal(call);
  std::vector<char> text(512), first(512);
  std::copy_n(message.c_str(), std::min<std::size_t>(message.size() + 1, 511), text.begin());
  first = text;
  MPI_Bcast(first.data(), 512, MPI_CHAR, 0, MPI_COMM_WORLD);
  CAPTURE(message);
  CHECK(text == first);
  CHECK(well_formed(message, name));
  return message;
}

}  // namespace testing
