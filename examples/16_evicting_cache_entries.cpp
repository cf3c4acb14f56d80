// Which entries of a cache may go? After a prompt, a head keeps the entries to which the last queries of the prompt
// attend most (after SnapKV, Li et al. 2024) and those last tokens themselves. What that costs is measured on the
// queries that follow, beside keeping the latest entries only.
// Usage: 16_evicting_cache_entries [q.npy k.npy v.npy]
// The files hold [1, heads, length, dim] as float16; without them, it makes data in which neighbouring tokens are
// similar; the repository's bench/data has data of a trained model.
#include <attn/core/tensor.hpp>
#include <attn/softmax/attention_weights.hpp>
#include <attn/softmax/merge_softmax.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

using attn::idx_t;
using tensor = attn::tensor<float, 4>;
using view = attn::tensor_view<const float>;

tensor read_npy(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("file not found: " + path);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  const std::size_t at = bytes.find("'shape': ("), end = bytes.find('\n', at);  // of the header
  const char* const type = std::endian::native == std::endian::little ? "'<f2'" : "'>f2'";
  idx_t b = 0, h = 0, l = 0, d = 0;
  if (end == std::string::npos || bytes.find(type) > end ||
      std::sscanf(bytes.c_str() + at, "'shape': (%td, %td, %td, %td)", &b, &h, &l, &d) != 4 || b != 1)
    throw std::runtime_error(path + ": expected a .npy file of [1, heads, length, dim] in float16, in this machine's byte order");
  tensor x({b, h, l, d});
  if (bytes.size() - end - 1 != 2 * static_cast<std::size_t>(x.size()))
    throw std::runtime_error(path + ": expected as many numbers as its shape says");
  for (idx_t n = 0; n < x.size(); ++n) {
    Eigen::half number;
    std::memcpy(&number, bytes.data() + end + 1 + 2 * n, 2);
    x.data()[n] = static_cast<float>(number);
  }
  return x;
}

// Every channel changes slowly from token to token.
tensor make(idx_t heads, idx_t length, idx_t dim, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  tensor x({1, heads, length, dim});
  for (idx_t h = 0; h < heads; ++h)
    for (idx_t i = 0; i < length; ++i)
      for (idx_t d = 0; d < dim; ++d)
        x.view()(0, h, i, d) = (i > 0 ? 0.95f * x.view()(0, h, i - 1, d) : 0) + 0.5f * normal(random);
  return x;
}

// The rows of each head, in the order of its list.
tensor gather(const view& x, const std::vector<std::vector<idx_t>>& rows) {
  tensor some({1, x.extent(1), std::ssize(rows[0]), x.extent(3)});
  for (idx_t h = 0; h < x.extent(1); ++h)
    for (idx_t n = 0; n < some.extent(2); ++n)
      for (idx_t d = 0; d < x.extent(3); ++d)
        some.view()(0, h, n, d) = x(0, h, rows[static_cast<std::size_t>(h)][static_cast<std::size_t>(n)], d);
  return some;
}

int main(int argc, char** argv) try {
  const bool given = argc > 3;
  const tensor queries = given ? read_npy(argv[1]) : make(4, 1024, 64, 1),
               keys = given ? read_npy(argv[2]) : make(4, 1024, 64, 2),
               values = given ? read_npy(argv[3]) : make(4, 1024, 64, 3);
  const view q = queries, k = keys, v = values;
  const idx_t heads = k.extent(1), length = k.extent(2), prompt = length * 7 / 8, later = length - prompt, last = 32;
  if (q.extent(1) != heads || q.extent(2) != length || prompt < 4 * last)
    throw std::runtime_error("expected as many queries as keys, of as many heads, and at least 147");

  // What the last queries of the prompt attend to.
  attn::tensor<float, 3> weights({1, heads, prompt});
  attn::key_weights(q.slice(2, prompt - last, last), k.slice(2, 0, prompt), weights, {.causal = true});

  // The queries after the prompt, over all entries.
  const view new_q = q.slice(2, prompt, later), new_k = k.slice(2, prompt, later), new_v = v.slice(2, prompt, later);
  tensor exact({1, heads, later, v.extent(3)});
  attn::full_softmax(new_q, k, v, exact, {.causal = true});

  std::printf("%td heads, %td tokens of a prompt; error of the %td queries that follow\n", heads, prompt, later);
  std::printf("%8s %14s %14s\n", "kept", "key_weights", "the latest");
  double error[2] = {};
  for (const idx_t share : {2, 4, 8, 16}) {
    const idx_t kept = prompt / share;
    for (const bool latest : {false, true}) {
      std::vector<std::vector<idx_t>> rows(static_cast<std::size_t>(heads));
      for (idx_t h = 0; h < heads; ++h) {
        std::vector<idx_t>& list = rows[static_cast<std::size_t>(h)];
        list.resize(static_cast<std::size_t>(prompt));
        std::iota(list.begin(), list.end(), idx_t(0));
        const auto worth = [&](idx_t j) {
          return latest || j >= prompt - last ? static_cast<float>(last + j) : weights.view()(0, h, j);
        };
        std::nth_element(list.begin(), list.begin() + kept, list.end(),
                         [&](idx_t a, idx_t b) { return worth(a) > worth(b); });
        list.resize(static_cast<std::size_t>(kept));
      }
      // The entries kept and the new tokens are two sets of keys, whose results are merged.
      const tensor kept_k = gather(k, rows), kept_v = gather(v, rows);
      tensor out(exact.extents()), of_new = out;
      attn::tensor<float, 3> lse({1, heads, later}), lse_of_new = lse;
      attn::full_softmax(new_q, kept_k, kept_v, out, {.lse = lse});
      attn::full_softmax(new_q, new_k, new_v, of_new, {.causal = true, .lse = lse_of_new});
      attn::merge_softmax(out, lse, of_new, lse_of_new);

      double difference = 0, size = 0;
      for (idx_t n = 0; n < out.size(); ++n) {
        const double wanted = exact.data()[n], one = out.data()[n] - wanted;
        difference += one * one, size += wanted * wanted;
      }
      error[latest] = std::sqrt(difference / size);
    }
    std::printf("%7.1f%% %14.4f %14.4f\n", 100.0 / static_cast<double>(share), error[0], error[1]);
  }
  return error[0] < error[1] ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
