#pragma once
// Sequences that the processes of MPI_COMM_WORLD share, and what an operator over them must give: on every process the
// rows that a single process computes from the whole.
#include "mpi/processes.hpp"

namespace testing {

// Tokens [begin, begin + length) of this process.
struct own_range {
  idx_t begin = 0, length = 0;
  bool aligned = true;  // do all processes begin at whole segments?
};

// Ways to split `tokens`: in whole segments, evenly or not, with empty processes; and elsewhere.
inline std::vector<own_range> splits(idx_t tokens, idx_t segment) {
  const idx_t size = process_count(), segments = (tokens + segment - 1) / segment;
  const auto range = [&](const auto& begin_of) {
    const idx_t begin = std::min(begin_of(own_rank()), tokens);
    const idx_t end = own_rank() + 1 == size ? tokens : std::min(begin_of(own_rank() + 1), tokens);
    bool aligned = true;
    for (idx_t p = 0; p < size; ++p) aligned = aligned && (begin_of(p) % segment == 0 || begin_of(p) >= tokens);
    return own_range{begin, end - begin, aligned};
  };
  return {range([&](idx_t p) { return segments * p / size * segment; }),
          range([&](idx_t p) { return p * segment; }),  // the last has the rest
          // Those between the first and the last are empty; the first ones are.
          range([&](idx_t p) { return p == 0 ? 0 : tokens / segment / 2 * segment; }),
          range([&](idx_t p) { return p > 0 && p == size - 1 ? tokens / segment * segment : 0; }),
          range([&](idx_t p) { return tokens * p / size; }),
          range([&](idx_t p) { return p == 0 ? 0 : 7 + 130 * p; })};
}

// Rows of padding and of a call that writes nothing keep this.
constexpr double rubbish = 7;

// spread(q, k, v, out, range) for all splits, against alone(q, k, v, out), which sees the whole sequence: bitwise where
// ranges begin at whole segments, else to rounding.
template <class S, class Alone, class Spread>
void check_spread(const tensor<double>& queries, const tensor<double>& keys, const tensor<double>& values,
                  idx_t segment, double bound, const Alone& alone, const Spread& spread) {
  const tensor<S> q = cast<S>(queries), k = cast<S>(keys), v = cast<S>(values);
  tensor<S> wanted(q.batch(), q.heads(), q.length(), v.dim(), S(rubbish));
  alone(view(q), view(k), view(v), view(wanted));
  int number = 0;
  for (const own_range& range : splits(k.length(), segment)) {
    CAPTURE(number++, range.begin, range.length, range.aligned);
    // Queries are the last of the sequence: a process has those of its keys.
    const idx_t shift = k.length() - q.length(), begin = std::max<idx_t>(range.begin - shift, 0),
                end = std::max<idx_t>(range.begin + range.length - shift, 0);
    const tensor<S> own_q = rows(q, begin, end - begin), own_k = rows(k, range.begin, range.length),
                    own_v = rows(v, range.begin, range.length), own = rows(wanted, begin, end - begin);
    tensor<S> out(q.batch(), q.heads(), end - begin, v.dim(), S(rubbish));
    spread(view(own_q), view(own_k), view(own_v), view(out), range);
    if (range.aligned)
      CHECK(out == own);
    else
      CHECK(relative_error(out, own) <= bound);
  }
}

// Gates and decays as a model has them: close to 1.
template <class T>
tensor<T> gates_near_one(idx_t heads, idx_t tokens) {
  random_source random(5);
  tensor<T> gates(2, heads, tokens, 1);
  for (T& g : gates.data) g = static_cast<T>(1 - 0.1 * random.uniform());
  return gates;
}

}  // namespace testing
