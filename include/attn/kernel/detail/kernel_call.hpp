// attn: a call of kernel attention, after its checks, and the segments of its tokens.
#pragma once

#include <attn/core/detail/attention_shape.hpp>
#include <attn/core/detail/item_state.hpp>
#include <attn/core/detail/key_flags.hpp>
#include <attn/kernel/detail/features.hpp>
#include <attn/kernel/performer_kernel.hpp>

#include <optional>

namespace attn { inline namespace ATTN_ISA { namespace detail {

enum class decay_kind { none, token, channel };

/// How a token changes the state S: phi(k) v^T is added; or k times what v differs by from the value stored for k; or
/// k v^T and b (a^T S), so that a decay and a matrix of rank 1 act on it.
enum class rule { add, correct, low_rank };
/// Whether what a token writes depends on the state.
template <rule R>
inline constexpr bool reads_state = R != rule::add;

template <rule R, class T>
struct recurrence_driver;
template <rule R, class T>
struct recurrence_backward_driver;

/// The parameters of a recurrence (recurrence.hpp), beside decays.
template <class T>
struct recurrence_parameters {
  T scale = T(1);
  tensor_view<const T> log_decay{};
  stored_tensor<T> a{}, b{};  // of rule::low_rank
  tensor_view<const T, 2> bonus{};
  tensor_view<const T, 3> beta{};
  T unit_norm_eps = T(-1);  // below 0: q and k are not normalised
  tensor_view<const T> initial_state{};
  tensor_view<const T, 3> initial_weights{};
  tensor_view<T> final_state{};
  tensor_view<T, 3> final_weights{};

  bool per_token() const { return log_decay.data() != nullptr && log_decay.extent(3) == 1; }
  bool per_channel() const { return log_decay && log_decay.extent(3) != 1; }
};

/// Tokens of a segment, at least. Shorter ones let more threads share heads, but summing up 512 at a time takes 7 % of
/// the time of the causal backward pass of one thread over 1024.
inline constexpr idx_t kernel_segment = 16 * kernel_chunk;

/// Tokens of a segment of so many: about as many chunks as there are segments, so that no sum has many terms.
[[gnu::noinline]] inline idx_t segment_tokens(idx_t tokens) {
  if (tokens <= kernel_segment * kernel_segment / kernel_chunk) return kernel_segment;
  const double chunks = std::sqrt(static_cast<double>(tokens) / kernel_chunk);
  return (std::max)(kernel_segment, static_cast<idx_t>(std::ceil(chunks)) * kernel_chunk);
}
/// Segments of at most so many tokens.
[[gnu::noinline]] inline idx_t most_segments(idx_t tokens) {
  if (tokens <= 16 * kernel_segment) return ceil_div(tokens, kernel_segment);
  const double of_many = std::ceil(std::sqrt(static_cast<double>(tokens) / kernel_chunk));
  return (std::min)(ceil_div(tokens, kernel_segment), std::max<idx_t>(16, static_cast<idx_t>(of_many)));
}

/// Prefetches a few rows; not inlined, since products are compiled many times.
[[gnu::noinline]] inline void fetch_some(row_prefetcher<>& prefetch) { prefetch.next(4); }
[[gnu::noinline]] inline void fetch_all(row_prefetcher<>& prefetch) { prefetch.next(kernel_chunk); }

/// What computes a call: sums of features, decays per token included, or a recurrence.
enum class kernel_driver { sums, recurrence };

/// What the options of an operator say, which convert to it. What an operator does not have keeps its default.
template <class T>
struct kernel_parameters {
  std::span<const idx_t> both_lengths{}, query_lengths{}, key_lengths{};
  bool causal = true, normalise = true;
  T eps = T(0), norm_eps = T(0);
  tensor_view<const T, 3> gate{};
  bool complement = false;  // keys enter with 1 - gate
  key_flags key_mask{};     // a hidden key adds nothing to the state; its decay applies
  std::optional<T> given_scale{}, feature_eps{}, given_unit_norm_eps{};
  performer_kernel kernel = performer_kernel::positive;
  bool center_keys = false;
  recurrence_parameters<T> recurrence{};

  const char* gate_name() const { return complement ? "gate" : "decay"; }
};

/// One call, after its checks.
template <class T>
struct kernel_call : kernel_parameters<T> {
  using kernel_parameters<T>::causal, kernel_parameters<T>::gate, kernel_parameters<T>::key_mask,
      kernel_parameters<T>::recurrence;

  stored_tensor<T> q, k, v, out;
  stored_tensor<T> projection{};  // of performer and rfa: [1, heads, features, dim]
  attention_shape shape{};
  sequence_lengths lengths{};
  feature_map<T>* map = nullptr;
  idx_t heads = 0;        // of sums: as key heads or, where features or gates are per query head, as query heads
  idx_t query_heads = 0;  // of parameters: shape.heads, or those of the state for tokens without queries
  item_memory<T> state{};  // where given, the sums before the call, which become those after it
  kernel_driver driver = kernel_driver::sums;

  /// Whether there is a decay or gate per token, or its logarithm.
  bool gated() const { return gate.data() != nullptr || recurrence.per_token(); }
  decay_kind decays() const {
    return recurrence.per_channel() ? decay_kind::channel : gated() ? decay_kind::token : decay_kind::none;
  }
  bool log_scaled() const { return map->scaling != nullptr; }
  sum_parts parts() const {
    return !map ? sum_parts::values : log_scaled() ? sum_parts::log_scales : sum_parts::weights;
  }
  idx_t group() const { return heads > 0 ? shape.heads / heads : 0; }
  idx_t kv_head(idx_t h) const { return h / (heads / shape.kv_heads); }
  /// Heads of q and v: as many as those of out and as key heads or, of the delta rule, the other way round.
  idx_t query_head(idx_t head) const { return head / (shape.heads / q.extents[1]); }
  idx_t value_head(idx_t h) const { return parameter_head(v.extents[1], h); }
  idx_t features() const { return map ? map->features : shape.dim; }
  /// Sums are of query heads where a parameter has `given` heads, those of the queries.
  void take_heads_of(idx_t given) {
    if (given == query_heads && given > shape.kv_heads) heads = given;
  }
  /// Which of the `given` heads of a parameter belongs to head h of the sums.
  idx_t parameter_head(idx_t given, idx_t h) const { return given == heads ? h : h / (heads / given); }
  bool hides(idx_t b, idx_t t) const { return key_mask.hides(b, t); }
  idx_t seen_keys(idx_t b) const { return key_mask.count(b, 0, lengths.keys(b)); }
  /// With a mask: f(t) for the lanes of hidden keys among `count` from `begin` on, and for those beyond the last.
  template <class F>
  void each_hidden(idx_t b, idx_t begin, idx_t count, F&& f) const {
    for (idx_t t = 0; key_mask && t < kernel_chunk; ++t)
      if (t >= count || hides(b, begin + t)) f(t);
  }
  /// Sets those lanes of columns [rows][kernel_chunk].
  [[gnu::noinline]] void fill_hidden(idx_t b, idx_t begin, idx_t count, T* columns, idx_t rows, T value) const {
    each_hidden(b, begin, count, [&](idx_t t) {
      for (idx_t r = 0; r < rows; ++r) columns[r * kernel_chunk + t] = value;
    });
  }
  /// Rows of keys from `begin` on, hidden ones replaced by one that is seen; false if there is none.
  bool replace_hidden(idx_t b, idx_t begin, token_rows<T>& rows) const {
    idx_t seen = 0;
    while (seen < rows.count && hides(b, begin + seen)) ++seen;
    for (idx_t t = 0; t < rows.count && seen < rows.count; ++t)
      if (hides(b, begin + t)) rows.at[t] = rows.at[seen];
    return seen < rows.count;
  }
  T gate_at(idx_t b, idx_t h, idx_t t) const {
    if (const auto& g = recurrence.log_decay; recurrence.per_token())
      return std::exp(g(b, parameter_head(g.extent(1), h), t, 0));
    return gate(b, parameter_head(gate.extent(1), h), t);
  }
  /// The number of lanes of a block that must be filled: features with log scales are compared across all of them.
  idx_t filled_lanes() const { return log_scaled() ? kernel_chunk : 1; }

  /// A state at a place of its item: the sums of all heads, then, but for the rules that read the state, the product of
  /// the decays of each.
  kernel_sums<T> sums_at(T* place, idx_t h) const {
    return kernel_sums<T>::over(place + h * sums_size(), features(), shape.dim_v, parts());
  }
  T& decay_at(T* place, idx_t h) const { return place[heads * sums_size() + h]; }
  idx_t sums_size() const { return kernel_sums<T>::count(features(), shape.dim_v, parts()); }
  kernel_sums<T> allocate_sums(arena& memory) const {
    return kernel_sums<T>::layout(memory, features(), shape.dim_v, parts());
  }
  kernel_sums<T> state_sums(idx_t b, idx_t h) const {
    auto sums = sums_at(state.at(b), h);
    sums.empty = state.empty(b);
    return sums;
  }

  [[gnu::noinline]] static void fetch(row_prefetcher<>& prefetch, const stored_matrix<T>& x, idx_t begin, idx_t end) {
    prefetch.add(matrix_view<const std::byte>{x.data, x.rows, x.cols * x.access->size, x.row_stride, x.col_stride},
                 begin, end);
  }
  /// Of a chunk; there may be none at `begin`.
  row_prefetcher<> prefetch_keys(idx_t b, idx_t h, idx_t begin) const {
    row_prefetcher<> prefetch;
    const idx_t end = begin < 0 ? begin : std::min<idx_t>(begin + kernel_chunk, lengths.keys(b));
    fetch(prefetch, k.head(b, kv_head(h)), begin, end);
    fetch(prefetch, v.head(b, value_head(h)), begin, end);
    if (const auto& g = recurrence.log_decay; recurrence.per_channel())
      prefetch.add(head_of(g, b, parameter_head(g.extent(1), h)), begin, end);
    for (const stored_tensor<T>* x : {&recurrence.a, &recurrence.b})
      if (x->data) fetch(prefetch, x->head(b, h), begin, end);
    return prefetch;
  }

  /// Tokens of a segment of keys, and the number of segments.
  idx_t segment(idx_t b) const { return segment_tokens(lengths.keys(b)); }
  idx_t segments(idx_t b) const { return ceil_div(lengths.keys(b), segment(b)); }
  idx_t end_of_segment(idx_t b, idx_t n) const { return (std::min)((n + 1) * segment(b), lengths.keys(b)); }
  idx_t blocks(idx_t b) const { return ceil_div(lengths.queries(b), kernel_chunk); }
  /// The first queries of item b, which see no key.
  idx_t queries_without_keys(idx_t b) const {
    const idx_t keys = lengths.keys(b), queries = lengths.queries(b);
    return keys == 0 ? queries : causal ? std::max<idx_t>(queries - keys, 0) : 0;
  }
  /// Sets the rows of padding and those that see no key to zero.
  void pad(idx_t b, idx_t h) const {
    for (idx_t g = h * group(); g < (h + 1) * group(); ++g) {
      out.head(b, g).clear_rows(0, queries_without_keys(b));
      out.head(b, g).clear_rows(lengths.queries(b), shape.queries);
    }
  }

  /// Whether a whole call is computed token by token: one whose queries see the keys up to their own.
  bool by_tokens(const execution& exec) const { return exec.invariant() && causal && !state; }

  work_estimate work() const {
    const auto tokens = static_cast<double>(shape.batch * (shape.heads * shape.queries + heads * shape.keys));
    const auto features = static_cast<double>(map->features), dim_v = static_cast<double>(shape.dim_v);
    const double triangle = causal ? kernel_chunk * (features + dim_v) : 0;
    const double sums = state ? static_cast<double>(shape.batch * heads) * features * dim_v : 0;
    return {.operations = tokens * (2 * features * dim_v + triangle + static_cast<double>(map->operations)),
            .bytes = tokens * (static_cast<double>(shape.dim) + dim_v) * static_cast<double>(q.access->size) +
                     2 * sums * sizeof(T)};
  }
};

}}}  // namespace attn::ATTN_ISA::detail
