// Makers of lists of blocks, alone and with the attention over what they choose.
#include <attn/core/tensor.hpp>
#include <attn/softmax/antidiagonal_blocks.hpp>
#include <attn/softmax/min_max_blocks.hpp>
#include <attn/softmax/selected_keys.hpp>
#include <attn/softmax/vertical_slash_blocks.hpp>

#include <algorithm>
#include <memory>

#include "flops.hpp"
#include "table.hpp"

namespace bench::inline ATTN_BENCH_TYPE {
namespace {

using index_table = attn::tensor<std::int32_t>;

double pairs(const problem& p) {
  const auto n = static_cast<double>(p.length);
  return p.causal ? n * (n + 1) / 2 : n * n;
}
/// Operations of `count` products of queries and keys, or what stands for them.
double products(const problem& p, double count) { return 2 * count * static_cast<double>(p.heads * p.dim); }

struct antidiagonal {
  static constexpr idx_t block = 64, stride = 16;
  static void choose(const problem& p, input q, input k, index_table& lists, attn::execution& exec) {
    attn::antidiagonal_blocks(q, k, lists, {.causal = p.causal, .block = block, .stride = stride}, exec);
  }
  static double flops(const problem& p) { return products(p, pairs(p) / double(stride)); }
};
struct min_max {
  static constexpr idx_t block = 64;
  static void choose(const problem& p, input q, input k, index_table& lists, attn::execution& exec) {
    attn::min_max_blocks(q, k, lists, {.causal = p.causal, .block = block}, exec);
  }
  static double flops(const problem& p) { return products(p, 2 * pairs(p) / double(block)); }
};
struct vertical_slash {
  static constexpr idx_t block = 64, queries = 64;
  static void choose(const problem&, input q, input k, index_table& lists, attn::execution& exec) {
    attn::vertical_slash_blocks(q, k, lists, {.block = block, .queries = queries}, exec);
  }
  static double flops(const problem& p) { return products(p, double(std::min(queries, p.length) * p.length)); }
};

/// Blocks of --selected keys, and the first and the last one at least.
template <class Maker>
std::shared_ptr<index_table> lists_for(const problem& p) {
  const idx_t count = std::max<idx_t>(3, p.set.selected / Maker::block);
  return std::make_shared<index_table>(std::array<idx_t, 4>{1, p.heads, p.length, count});
}
template <class Maker>
runner prepare_maker(const problem& p) {
  return [p, lists = lists_for<Maker>(p)](input q, input k, input, output, attn::execution& exec) {
    Maker::choose(p, q, k, *lists, exec);
  };
}
template <class Maker>
runner prepare_attended(const problem& p) {
  return [p, lists = lists_for<Maker>(p)](input q, input k, input v, output out, attn::execution& exec) {
    Maker::choose(p, q, k, *lists, exec);
    attn::selected_keys(q, k, v, out, *lists, {.causal = p.causal, .block = Maker::block}, exec);
  };
}
template <class Maker>
double attended_flops(const problem& p) {
  const idx_t most = std::max<idx_t>(3, p.set.selected / Maker::block) * Maker::block;
  double scores = 0;
  for (idx_t i = 0; i < p.length; ++i) scores += static_cast<double>(std::min(most, p.causal ? i + 1 : p.length));
  return score_flops(p, scores) + Maker::flops(p);
}

template <class Maker>
void add(std::vector<operator_entry>& all, const char* name, const char* attended, const char* colour,
         const char* colour_of_attended, bool only_causal) {
  all.push_back({.name = name,
                 .colour = colour,
                 .cost = growth::quadratic,
                 .has_causal = true,
                 .exact = false,
                 .uses = {"selected"},
                 .flops = Maker::flops,
                 .prepare = prepare_maker<Maker>,
                 .approximates = false,
                 .only_causal = only_causal});
  all.push_back({.name = attended,
                 .colour = colour_of_attended,
                 .cost = growth::quadratic,
                 .has_causal = true,
                 .exact = false,
                 .uses = {"selected"},
                 .flops = attended_flops<Maker>,
                 .prepare = prepare_attended<Maker>,
                 .settings = settings_of(&flags::selected, {192, 384, 512, 768}),
                 .only_causal = only_causal});
}

}  // namespace

std::vector<operator_entry> block_list_operators() {
  std::vector<operator_entry> all;
  add<antidiagonal>(all, "antidiagonal_blocks", "selected_antidiagonal", "#90a4ae", "#c2187a", false);
  add<min_max>(all, "min_max_blocks", "selected_min_max", "#78909c", "#ee6fb5", false);
  add<vertical_slash>(all, "vertical_slash_blocks", "selected_vertical_slash", "#607d8b", "#7a1059", true);
  return all;
}

}  // namespace bench::inline ATTN_BENCH_TYPE
