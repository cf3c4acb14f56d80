// Attention that models put together from parts, token by token and in chunks from caches: what it is at once. NSA
// (examples/20), MiniMax-M3's (MSA), Qwen3.8's (QSA); DeepSeek-V4's are in examples/26.
#include <attn/core/rotary.hpp>
#include <attn/layers/pooled_tokens_step.hpp>
#include <attn/layers/rms_norm.hpp>
#include <attn/softmax/attention_weights.hpp>
#include <attn/softmax/full_softmax_step.hpp>
#include <attn/softmax/lightning_indexer_step.hpp>
#include <attn/softmax/selected_keys.hpp>
#include <attn/softmax/selected_keys_step.hpp>
#include <attn/softmax/sliding_window_step.hpp>

#include <numeric>

#include "support/catch.hpp"
#include "support/measure.hpp"
#include "support/run.hpp"

namespace testing::decoded_compositions_tests {
namespace {

constexpr idx_t batch = 2, heads = 4, kv_heads = 2, dim = 16, index_dim = 8, tokens = 77;
constexpr attn::state_extents extents{.batch = batch, .heads = kv_heads, .dim = dim};
using lists = tensor<std::int32_t>;
using lists_rows = attn::tensor_view<std::int32_t>;

tensor<float> random(std::uint64_t seed, idx_t count, idx_t width = dim) {
  return cast<float>(random_normal(seed, batch, count, tokens, width));
}

// Some tokens of every input, at once or the next ones.
struct part {
  in_view<float> q, k, v, q_idx, k_idx;
  out_view<float> out;
  idx_t count() const { return q.extent(2); }
};

// Rows of out for the parts of `make()` fed with so many tokens at a time.
template <class Make>
tensor<float> fed(idx_t index_heads, idx_t count, Make make) {
  const tensor<float> q = random(1, heads), k = random(2, kv_heads), v = random(3, kv_heads),
                      q_idx = random(4, index_heads, index_dim), k_idx = random(5, 1, index_dim);
  tensor<float> out(batch, heads, tokens, dim, 7);
  auto model = make();
  for (idx_t first = 0; first < tokens; first += count) {
    const auto some = [&](const auto& x) { return x.slice(2, first, std::min(count, tokens - first)); };
    model(part{some(view(q)), some(view(k)), some(view(v)), some(view(q_idx)), some(view(k_idx)), some(view(out))});
  }
  return out;
}

// model: called as whole(part) with all tokens, or made and then called part by part.
void check_decoding(idx_t index_heads, auto whole, auto make) {
  const tensor<float> at_once = fed(index_heads, tokens, [&] { return whole; });
  for (const idx_t count : {1, 5, 77}) {
    CAPTURE(count);
    CHECK(relative_error(fed(index_heads, count, make), at_once) <= 1e-6);
  }
}

// MiniMax-M3: a list of blocks for each key head, by an index head of its own.
struct msa {
  attn::kv_cache<float> cache{extents}, index{{.batch = batch, .dim = index_dim, .value_dim = 0}};

  static lists_rows rows_of(lists& x) { return {x.data.data(), x.extents}; }
  static void whole(const part& t) {
    lists chosen(batch, kv_heads, t.count(), 3);
    attn::lightning_indexer(t.q_idx, t.k_idx, rows_of(chosen),
                            {.scale = 1.0f, .causal = true, .topk = 3, .block = 8, .local_blocks = 1, .per_head = true,
                             .activation = attn::indexer_activation::none});
    attn::selected_keys(t.q, t.k, t.v, t.out, rows_of(chosen), {.causal = true, .block = 8});
  }
  void operator()(const part& t) {
    lists chosen(batch, kv_heads, t.count(), 3);
    attn::lightning_indexer_step(index, t.q_idx, t.k_idx, rows_of(chosen),
                                 {.scale = 1.0f, .topk = 3, .block = 8, .local_blocks = 1, .per_head = true,
                                  .activation = attn::indexer_activation::none});
    attn::selected_keys_step(cache, t.q, t.k, t.v, t.out, rows_of(chosen), {.block = 8});
  }
};

// Means of `window` tokens, of a stream.
class means {
 public:
  means(idx_t head_count, idx_t channels, idx_t window)
      : state_({.batch = batch, .heads = head_count, .channels = channels, .window = window}) {}
  idx_t windows() const { return state_.windows(0); }
  tensor<float> operator()(const in_view<float>& x) {
    tensor<float> made(batch, state_.heads(), state_.rows(x.extent(2)), x.extent(3));
    attn::pooled_tokens_step(state_, x, view(made));
    return made;
  }

 private:
  attn::pooled_tokens_state<float> state_;
};

// Qwen3.8: index keys are means of 4, normed and rotated to their first token; the block of the query is read too.
struct qsa {
  attn::kv_cache<float> cache{extents}, index{{.batch = batch, .dim = index_dim, .value_dim = 0}};
  means pooled{1, index_dim, 4};

  static void finish(tensor<float>& keys, idx_t first) {
    const attn::tensor_view<float, 3> sequence(keys.data.data(), {batch, keys.length(), index_dim});
    attn::rms_norm(sequence, sequence);
    const auto frequencies = attn::rotary_linear(index_dim, {.factor = 0.25});  // every fourth position
    attn::rotary(view(keys), view(keys), {.first_position = first, .frequencies = frequencies});
  }
  static void whole(const part& t) {
    tensor<float> keys(batch, 1, t.count() / 4, index_dim);
    attn::pooled_tokens(t.k_idx, view(keys), {.window = 4});
    finish(keys, 0);
    lists chosen(batch, 1, t.count(), 6);
    attn::lightning_indexer(t.q_idx, view(keys), msa::rows_of(chosen),
                            {.causal = true, .first_position = 0, .span = 4, .topk = 5, .tail = true});
    attn::selected_keys(t.q, t.k, t.v, t.out, msa::rows_of(chosen), {.causal = true, .block = 4});
  }
  void operator()(const part& t) {
    const idx_t position = cache.tokens(0), first = pooled.windows();
    tensor<float> keys = pooled(t.k_idx);
    finish(keys, first);
    index.append(view(keys), view(keys).slice(3, 0, 0));
    lists chosen(batch, 1, t.count(), 6);
    attn::lightning_indexer_cached(index, t.q_idx, msa::rows_of(chosen),
                                   {.first_position = position, .span = 4, .topk = 5, .tail = true});
    attn::selected_keys_step(cache, t.q, t.k, t.v, t.out, msa::rows_of(chosen), {.block = 4});
  }
};

// NSA with gates of 1: the means of blocks of 8; of these the first, the query's own, the one before it and those with
// the largest weights of the heads of a key head; a window.
struct nsa {
  attn::kv_cache<float> cache{extents}, compressed{extents};
  means keys{kv_heads, dim, 8}, values{kv_heads, dim, 8};

  static lists choose(const tensor<float>& weights, idx_t position) {
    lists chosen(batch, kv_heads, weights.length(), 4, -1);
    for (idx_t b = 0; b < batch; ++b)
      for (idx_t h = 0; h < kv_heads; ++h)
        for (idx_t i = 0; i < weights.length(); ++i) {
          const idx_t own = (position + i) / 8;
          const auto rank = [&](idx_t c) {
            const bool always = c == 0 || c == own || c == own - 1;
            return always ? 3.0f : c < weights.dim() ? weights(b, 2 * h, i, c) + weights(b, 2 * h + 1, i, c) : 0.0f;
          };
          std::vector<std::int32_t> order(static_cast<std::size_t>(own + 1));
          std::iota(order.begin(), order.end(), 0);
          std::stable_sort(order.begin(), order.end(), [&](auto x, auto y) { return rank(x) > rank(y); });
          order.resize(std::min<std::size_t>(order.size(), 4));
          std::copy(order.begin(), order.end(), &chosen(b, h, i, 0));
        }
    return chosen;
  }
  static void add(const out_view<float>& out, const tensor<float>& x) {
    for (idx_t b = 0; b < batch; ++b)
      for (idx_t h = 0; h < heads; ++h)
        for (idx_t i = 0; i < x.length(); ++i)
          for (idx_t d = 0; d < dim; ++d) out(b, h, i, d) += x(b, h, i, d);
  }
  static void whole(const part& t) {
    tensor<float> mean_keys(batch, kv_heads, t.count() / 8, dim), mean_values = mean_keys;
    tensor<float> out(batch, heads, t.count(), dim);
    attn::pooled_tokens(t.k, view(mean_keys), {.window = 8});
    attn::pooled_tokens(t.v, view(mean_values), {.window = 8});
    const attn::full_softmax_options<float> of_means{.causal = true, .first_position = 0, .span = 8};
    attn::full_softmax(t.q, view(mean_keys), view(mean_values), t.out, of_means);
    tensor<float> weights(batch, heads, t.count(), mean_keys.length());
    attn::attention_weights(t.q, view(mean_keys), {}, view(weights), of_means);
    lists chosen = choose(weights, 0);
    attn::selected_keys(t.q, t.k, t.v, view(out), msa::rows_of(chosen), {.causal = true, .block = 8});
    add(t.out, out);
    attn::sliding_window(t.q, t.k, t.v, view(out), {.causal = true, .left = 11});
    add(t.out, out);
  }
  void operator()(const part& t) {
    const idx_t position = cache.tokens(0);
    const tensor<float> made_keys = keys(t.k), made_values = values(t.v);
    compressed.append(view(made_keys), view(made_values));
    attn::full_softmax_cached(compressed, t.q, t.out, {.first_position = position, .span = 8});
    tensor<float> weights(batch, heads, t.count(), compressed.tokens()), out(batch, heads, t.count(), dim);
    attn::attention_weights(t.q, compressed.keys(), {}, view(weights),
                            {.causal = true, .first_position = position, .span = 8});
    lists chosen = choose(weights, position);
    attn::selected_keys_step(cache, t.q, t.k, t.v, view(out), msa::rows_of(chosen), {.block = 8});
    add(t.out, out);
    attn::sliding_window_cached(cache, {.left = 11}, t.q, view(out));
    add(t.out, out);
  }
};

}  // namespace

TEST_CASE("MSA, QSA, NSA: token by token from caches what they are at once", "[cached]") {
  check_decoding(kv_heads, msa::whole, [] { return msa(); });
  check_decoding(3, qsa::whole, [] { return qsa(); });
  check_decoding(1, nsa::whole, [] { return nsa(); });
}

}  // namespace testing::decoded_compositions_tests
