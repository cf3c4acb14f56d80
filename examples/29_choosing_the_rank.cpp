// Which rank does low-rank attention need on your data? The singular values of the weights say what is possible: of all
// matrices of rank r, the one that keeps the r largest of them is nearest (Eckart and Young 1936). Beside it is what
// nystrom makes of r landmarks, and linformer of r projected keys: means of r segments, or projections drawn at random,
// with which training starts. Both choose before they know the weights, and come less near.
// Usage: 29_choosing_the_rank [FOLDER...]
// A folder has q.npy, k.npy, v.npy [1, heads, length, dim] as float16, float32 or float64; the repository's bench/data
// has those of two layers of a trained model. Without one, it makes data in which neighbouring tokens are similar.
#include <attn/low_rank/linformer.hpp>
#include <attn/low_rank/nystrom.hpp>
#include <attn/softmax/attention_weights.hpp>

#include <Eigen/Eigenvalues>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/npy.hpp"

using attn::idx_t;
using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using view = attn::tensor_view<const float>;

view view_of(const support::array& x, const std::string& name) {
  if (x.shape.size() != 4 || x.shape[0] != 1 || x.numbers.empty())
    support::fail(name, "expected an array [1, heads, length, dim]; found " + support::text_of(x.shape));
  for (const float number : x.numbers)
    if (!std::isfinite(number)) support::fail(name, "expected finite numbers; found " + std::to_string(number));
  return {x.numbers.data(), {1, x.shape[1], x.shape[2], x.shape[3]}};
}

// Every channel of two heads changes slowly from token to token.
support::array make(float size, std::uint64_t seed) {
  support::array x{{1, 2, 256, 32}, {}};
  attn::random_numbers numbers(seed);
  std::array<float, 32> state{};
  for (std::size_t n = 0; n < 2 * 256 * 32; ++n) {
    state[n % 32] = 0.95f * state[n % 32] + 0.3f * float(numbers.normal());
    x.numbers.push_back(size * state[n % 32]);
  }
  return x;
}

// Projects tokens to the means of segments.
matrix means_of_segments(idx_t rank, idx_t length) {
  matrix e = matrix::Zero(rank, length);
  for (idx_t r = 0; r < rank; ++r) {
    const idx_t begin = r * length / rank, count = (r + 1) * length / rank - begin;
    e.row(r).segment(begin, count).setConstant(1 / float(count));
  }
  return e;
}

// Squares of distances, summed over heads.
struct distance {
  double weights = 0, results = 0;
};
enum method { truncated, nystrom, means, drawn, methods };
const char* const names[] = {"singular values", "nystrom", "linformer, means", "linformer, drawn"};

// Prints what each rank gives. False if what the first lines of this file say is wrong.
bool study(const std::string& name, const view& q, const view& k, const view& v) {
  const idx_t heads = q.extent(1), length = q.extent(2);
  const auto differs = [&](const view& x) { return x.extent(1) != heads || x.extent(2) != length; };
  if (length <= 8 || differs(k) || differs(v))
    support::fail(name, "expected more than 8 queries, as many keys and values, of as many heads; found " +
                            std::to_string(length) + ", " + std::to_string(k.extent(2)) + " and " +
                            std::to_string(v.extent(2)) + " of " + std::to_string(heads) + ", " +
                            std::to_string(k.extent(1)) + " and " + std::to_string(v.extent(1)));
  if (k.extent(3) != q.extent(3))
    support::fail(name, "expected keys of dim " + std::to_string(q.extent(3)) + "; found " +
                            std::to_string(k.extent(3)));
  std::vector<idx_t> ranks;
  for (const idx_t rank : {8, 16, 32, 64, 128, 256})
    if (rank < length) ranks.push_back(rank);

  const matrix identity = matrix::Identity(length, length);
  std::vector<distance> rest(std::size_t(length) + 1);  // by rank, without the singular values beyond it
  std::vector<std::array<distance, methods>> all(ranks.size());
  bool right = true;
  for (idx_t h = 0; h < heads; ++h) {
    const view one_q = q.slice(1, h, 1), one_k = k.slice(1, h, 1);
    const matrix values = Eigen::Map<const matrix>(&v(0, h, 0, 0), length, v.extent(3));
    matrix weights(length, length), found(length, length);
    attn::attention_weights(one_q, one_k, {}, weights);

    // Squares of singular values, ascending, and the vectors on the left. Eigen::BDCSVD finds those below 1e-8 of the
    // largest as well, but takes four times as long to compile.
    const Eigen::MatrixXd w = weights.cast<double>(), result = w * values.cast<double>();
    const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> decomposed(w * w.transpose());
    const Eigen::MatrixXd& u = decomposed.eigenvectors();
    const Eigen::VectorXd parts = (u.transpose() * result).rowwise().squaredNorm();
    distance sum;
    for (idx_t n = 0; n < length; ++n) {
      sum.weights += std::max(0.0, decomposed.eigenvalues()[n]), sum.results += parts[n];
      distance& all_heads = rest[std::size_t(length - 1 - n)];
      all_heads.weights += sum.weights, all_heads.results += sum.results;
    }

    // With a channel of the values for every token, results are weights.
    const auto measure = [&](distance& to) {
      const Eigen::MatrixXd difference = found.cast<double>() - w;
      to.weights += difference.squaredNorm(), to.results += (difference * values.cast<double>()).squaredNorm();
    };
    for (std::size_t n = 0; n < ranks.size(); ++n) {
      const matrix e = means_of_segments(ranks[n], length);
      const auto random = attn::draw_projection<float>(ranks[n], length, {.seed = 1});
      const auto largest = u.rightCols(ranks[n]);
      found = (largest * (largest.transpose() * w)).cast<float>();
      measure(all[n][truncated]);
      attn::nystrom(one_q, one_k, identity, found, {.landmarks = ranks[n]});
      measure(all[n][nystrom]);
      attn::linformer(one_q, one_k, identity, found, e, e);
      measure(all[n][means]);
      attn::linformer(one_q, one_k, identity, found, random, random);
      measure(all[n][drawn]);
    }
    attn::linformer(one_q, one_k, identity, found, identity, identity);
    right &= (found - weights).norm() < 1e-5f * weights.norm();
  }

  if (!(rest[0].results > 0)) support::fail(name, "expected values whose attention is not 0 everywhere");
  const auto error = [&](const distance& d) {
    return std::array{std::sqrt(d.weights / rest[0].weights), std::sqrt(d.results / rest[0].results)};
  };
  std::printf("%s: %td heads, %td tokens\n%6s", name.c_str(), heads, length, "");
  for (const char* const each : names) std::printf(" %19s", each);
  std::printf("\n%6s", "rank");
  for (int m = 0; m < methods; ++m) std::printf(" %9s %9s", "weights", "results");
  std::puts("");
  double before = 1;
  for (std::size_t n = 0; n < ranks.size(); ++n) {
    std::printf("%6td", ranks[n]);
    const double best = error(rest[std::size_t(ranks[n])])[0];
    right &= best <= before && std::abs(best - error(all[n][truncated])[0]) < 1e-5;
    before = best;
    for (const distance& each : all[n]) {
      std::printf(" %9.3f %9.3f", error(each)[0], error(each)[1]);
      right &= error(each)[0] > best - 1e-5;
    }
    std::puts("");
  }

  const auto first = [&](double wanted, int of) {
    const auto within = [&](const distance& d) { return error(d)[std::size_t(of)] <= wanted; };
    return std::find_if(rest.begin(), rest.end(), within) - rest.begin();
  };
  const auto first_tried = [&](double wanted, method m) {
    for (std::size_t n = 0; n < ranks.size(); ++n)
      if (error(all[n][m])[1] <= wanted) return std::to_string(ranks[n]);
    return "> " + std::to_string(ranks.back());
  };
  const auto sentence = [&](const char* what, double wanted, const char* end) {
    std::printf("%s within %g %% take rank %td by singular values (weights %td), ", what, 100 * wanted,
                first(wanted, 1), first(wanted, 0));
    std::printf("%s by nystrom, %s by means, %s drawn%s", first_tried(wanted, nystrom).c_str(),
                first_tried(wanted, means).c_str(), first_tried(wanted, drawn).c_str(), end);
  };
  sentence("Results", 0.1, ";\n");
  sentence("those", 0.01, ".\n\n");
  return right;
}

int main(int argc, char** argv) try {
  bool right = true;
  for (int n = 1; n < argc; ++n) {
    const std::string folder = argv[n];
    const auto read = [&](const char* file) { return support::read_npy(folder + file); };
    const support::array q = read("/q.npy"), k = read("/k.npy"), v = read("/v.npy");
    right &= study(folder, view_of(q, folder + "/q.npy"), view_of(k, folder + "/k.npy"), view_of(v, folder + "/v.npy"));
  }
  if (argc > 1) return right ? 0 : 1;
  const support::array v = make(1, 3);
  for (const float size : {2.0f, 0.7f}) {
    const support::array q = make(size, 1), k = make(size, 2);
    right &= study(size > 1 ? "Attention to a few keys" : "Attention to most keys", view_of(q, "q"), view_of(k, "k"),
                   view_of(v, "v"));
  }
  return right ? 0 : 1;
} catch (const std::exception& error) {
  return std::fprintf(stderr, "%s\n", error.what()), 1;
}
