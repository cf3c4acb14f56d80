// A document that no process holds whole: exact and linear attention by several processes.
//
//   mpiexec -n 4 18_mpi_long_document 65536       # tokens; without mpiexec it is one process
//
// The last token asks for something that was said after a third of the document. Exact attention finds it, wherever it
// lies; linear attention, which sends only sums, has it averaged with all other tokens.
#include <attn/core/tensor.hpp>
#include <attn/mpi/full_softmax.hpp>
#include <attn/mpi/linear.hpp>
#include <attn/mpi/zigzag.hpp>

#if __has_include(<sys/resource.h>)
#include <sys/resource.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

using tensor = attn::tensor<float>;
constexpr attn::idx_t head_count = 4, head_dim = 64;
constexpr float said = 3;  // the value, in every channel, of the token to be found

/// The document: numbers of any token, from its position alone. Reading a file would do as well.
struct document {
  attn::idx_t tokens;

  attn::idx_t place() const { return tokens / 3; }
  static float number(attn::idx_t which, attn::idx_t h, attn::idx_t i, attn::idx_t d) {  // roughly normal
    std::uint64_t x =
        static_cast<std::uint64_t>(((i * head_count + h) * head_dim + d) * 3 + which) * 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    x ^= x >> 31;
    const auto sixteenth = [&](int n) { return static_cast<float>((x >> (16 * n)) & 0xffff) / 65536 - 0.5F; };
    return 1.7F * (sixteenth(0) + sixteenth(1) + sixteenth(2) + sixteenth(3));
  }
  float q(attn::idx_t h, attn::idx_t i, attn::idx_t d) const { return number(0, h, i, d); }
  float k(attn::idx_t h, attn::idx_t i, attn::idx_t d) const {
    return i == place() ? 3 * q(h, tokens - 1, d) : number(1, h, i, d);  // what the last query looks for
  }
  float v(attn::idx_t h, attn::idx_t i, attn::idx_t d) const { return i == place() ? said : number(2, h, i, d); }
};

/// What a process holds: the tokens at these positions, and no others.
struct part {
  std::vector<attn::idx_t> positions;
  tensor q, k, v, out;

  part(const document& text, std::vector<attn::idx_t> at) : positions(std::move(at)) {
    const attn::idx_t n = std::ssize(positions);
    for (tensor* x : {&q, &k, &v, &out}) *x = tensor({1, head_count, n, head_dim});
    for (attn::idx_t h = 0; h < head_count; ++h)
      for (attn::idx_t i = 0; i < n; ++i)
        for (attn::idx_t d = 0; d < head_dim; ++d) {
          const attn::idx_t position = positions[static_cast<std::size_t>(i)];
          q(0, h, i, d) = text.q(h, position, d);
          k(0, h, i, d) = text.k(h, position, d);
          v(0, h, i, d) = text.v(h, position, d);
        }
  }
};

/// The answer to the last query by the formula, in double precision, from one token after another.
std::vector<double> answer(const document& text, bool exact) {
  const auto feature = [](double x) { return x > 0 ? x + 1 : std::exp(x); };  // of linear attention: elu + 1
  std::vector<double> result;
  for (attn::idx_t h = 0; h < head_count; ++h) {
    std::vector<double> sum(head_dim);
    double total = 0;
    for (attn::idx_t i = 0; i < text.tokens; ++i) {
      double score = 0;
      for (attn::idx_t d = 0; d < head_dim; ++d) {
        const double q = text.q(h, text.tokens - 1, d), k = text.k(h, i, d);
        score += exact ? q * k : feature(q) * feature(k);
      }
      const double weight = exact ? std::exp(score / std::sqrt(double(head_dim))) : score;
      total += weight;
      for (attn::idx_t d = 0; d < head_dim; ++d) sum[static_cast<std::size_t>(d)] += weight * text.v(h, i, d);
    }
    for (double x : sum) result.push_back(x / total);
  }
  return result;
}

/// Process 0 gets the row of the last token from the process that has it, and compares. False if it differs.
bool check(const char* name, const document& text, const part& own, bool exact) {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  std::vector<float> row(head_count * head_dim), found(head_count * head_dim);
  const auto at = std::ranges::find(own.positions, text.tokens - 1);
  if (at != own.positions.end())
    for (attn::idx_t h = 0; h < head_count; ++h)
      for (attn::idx_t d = 0; d < head_dim; ++d)
        row[static_cast<std::size_t>(h * head_dim + d)] = own.out(0, h, at - own.positions.begin(), d);
  MPI_Reduce(row.data(), found.data(), int(row.size()), MPI_FLOAT, MPI_SUM, 0, MPI_COMM_WORLD);  // zeros elsewhere
  if (rank != 0) return true;
  const std::vector<double> wanted = answer(text, exact);
  double difference = 0, size = 0, mean = 0;
  for (std::size_t n = 0; n < found.size(); ++n) {
    difference += std::pow(found[n] - wanted[n], 2);
    size += std::pow(wanted[n], 2);
    mean += found[n] / double(found.size());
  }
  const double relative = std::sqrt(difference / size);
  std::printf("%-6s  the last token hears %5.2f of the %.2f that was said; off the formula by %.0e\n", name, mean,
              double(said), relative);
  return relative < 1e-4;
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const document text{std::max<attn::idx_t>(argc > 1 ? std::atol(argv[1]) : 16384, 4)};
  const auto memory = [] {
#if __has_include(<sys/resource.h>)
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return double(usage.ru_maxrss) / 1024;  // MiB on Linux
#else
    return 0.0;  // not known
#endif
  };
  struct figures {
    double tokens, first, last, memory, exact_seconds, linear_seconds;
  } own{};
  const double memory_before = memory();

  // Exact and causal: in zigzag order every process has the same work. Keys and values are sent around the ring.
  bool right = true;
  {
    part mine(text, attn::mpi::zigzag_positions(text.tokens, rank, size));
    const double begin = MPI_Wtime();
    attn::mpi::full_softmax(mine.q, mine.k, mine.v, mine.out, MPI_COMM_WORLD, {.causal = true, .zigzag = true});
    own.exact_seconds = MPI_Wtime() - begin;
    right = check("exact", text, mine, true) && right;
  }
  // Linear and causal: tokens in their order, here in ranges of the same length. Only states are sent.
  {
    std::vector<attn::idx_t> positions;
    for (attn::idx_t i = text.tokens * rank / size; i < text.tokens * (rank + 1) / size; ++i) positions.push_back(i);
    part mine(text, positions);
    const double begin = MPI_Wtime();
    attn::mpi::linear(mine.q, mine.k, mine.v, mine.out, MPI_COMM_WORLD, {.causal = true});
    own.linear_seconds = MPI_Wtime() - begin;
    right = check("linear", text, mine, false) && right;
    own.tokens = double(positions.size());
    if (!positions.empty()) own.first = double(positions.front()), own.last = double(positions.back());
  }
  own.memory = memory() - memory_before;

  std::vector<figures> all(static_cast<std::size_t>(size));
  MPI_Gather(&own, sizeof(own), MPI_BYTE, all.data(), sizeof(own), MPI_BYTE, 0, MPI_COMM_WORLD);
  if (rank == 0) {
    const double mib = 1 << 20, token = head_count * head_dim * sizeof(float);
    std::printf("\n%td tokens; q, k, v and out of all of them: %.1f MiB\n", text.tokens,
                4 * token * double(text.tokens) / mib);
    std::printf("process  holds (linear)        MiB  most memory used, MiB  exact, s  linear, s\n");
    for (std::size_t p = 0; p < all.size(); ++p)
      std::printf("%7zu  %8.0f to %8.0f  %6.1f  %21.1f  %8.2f  %9.3f\n", p, all[p].first, all[p].last,
                  4 * token * all[p].tokens / mib, all[p].memory, all[p].exact_seconds, all[p].linear_seconds);
    std::printf("sent by a process: exact %.2f MiB; linear up to %.2f MiB\n",
                2 * token * double(text.tokens) / size * (size - 1) / mib,
                size > 1 ? head_count * head_dim * (head_dim + 1) * sizeof(float) / mib : 0.0);
  }
  MPI_Finalize();
  return right ? 0 : 1;
}
