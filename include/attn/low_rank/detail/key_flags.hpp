// attn: which keys a key_mask leaves visible, for operators that sum keys and values up along the sequence: the rows of
// hidden ones are 0 in what is multiplied, whatever lies there, and so are their gradients.
#pragma once

#include <attn/core/detail/attention_call.hpp>
#include <attn/softmax/detail/score_terms.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Some adjacent keys: all of them are seen, unless it has flags.
struct seen_range {
  const unsigned char* flags = nullptr;
  idx_t stride = 1;

  explicit operator bool() const { return flags != nullptr; }
  bool hides(idx_t n) const { return flags && !flags[n * stride]; }
  /// The first hidden key among [n, end), or end.
  idx_t next_hidden(idx_t n, idx_t end) const {
    while (flags && n < end && !hides(n)) ++n;
    return flags ? n : end;
  }

  /// Sets the rows of hidden keys among `count` to 0.
  template <class T>
  void clear_rows(T* rows, idx_t count, idx_t row_stride) const {
    for (idx_t n = 0; flags && n < count; ++n)
      if (hides(n)) std::fill_n(rows + n * row_stride, row_stride, T(0));
  }
  /// Likewise in panels of `capacity` rows as pack_panels writes them.
  template <class P>
  void clear_panels(P* panels, idx_t capacity, idx_t count, idx_t cols) const {
    for (idx_t n = 0; flags && n < count; ++n)
      for (idx_t col = 0; hides(n) && col < cols; col += panel_width<P>)
        for (idx_t lane = 0; lane < panel_width<P>; ++lane) {
          P& x = panels[col * operands<P>(capacity) + n / numbers_of<P> * panel_width<P> + lane];
          if constexpr (numbers_of<P> > 1)
            x.bits &= n % 2 ? 0xffffu : 0xffff0000u;
          else
            x = P(0);
        }
  }
};

/// The keys of a call.
struct key_flags {
  tensor_view<const unsigned char> mask{};  // [B or 1, 1, 1, Lk], or none

  explicit operator bool() const { return static_cast<bool>(mask); }
  /// Keys [begin, end) of one batch item.
  seen_range range(idx_t b, idx_t begin, idx_t end) const {
    if (!mask || begin >= end) return {};
    const seen_range keys{&mask(mask.extent(0) == 1 ? 0 : b, 0, 0, begin), mask.stride(3)};
    return seen_of(keys.flags, end - begin, keys.stride) == mask_coverage::all ? seen_range{} : keys;
  }
  /// How many of them are seen, counted up to `most`.
  idx_t count(idx_t b, idx_t begin, idx_t end, idx_t most = std::numeric_limits<idx_t>::max()) const {
    if (!mask) return std::min(end - begin, most);
    idx_t seen = 0;
    for (idx_t j = begin; j < end && seen < most; ++j) seen += mask(mask.extent(0) == 1 ? 0 : b, 0, 0, j) != 0;
    return seen;
  }
  bool any(idx_t b, idx_t begin, idx_t end) const { return count(b, begin, end, 1) > 0; }
};

/// While it lives, sequences of a call in which every key is hidden have no keys.
class seen_lengths {
 public:
  seen_lengths(const key_mask_view& mask, idx_t batch, sequence_lengths& lengths, execution& exec)
      : list_(exec.workspace([&](arena& memory) { return memory.allocate<idx_t>(mask ? batch : 0); })) {
    const key_flags keys{mask.bytes()};
    if (!keys || batch == 0) return;
    for (idx_t b = 0; b < batch; ++b) (*list_)[b] = keys.any(b, 0, lengths.keys(b)) ? lengths.keys(b) : 0;
    lengths.given_keys = {*list_, static_cast<std::size_t>(batch)};
  }

 private:
  execution::persistent_workspace<idx_t*> list_;
};

/// The terms of scores of rows that are sums of keys, none of which is hidden.
template <class T, class Options>
score_terms<T, no_score> terms_of_sums(const Options& options, idx_t dim) {
  score_terms<T, no_score> terms = terms_of<T>(options, dim);
  terms.mask = {};
  return terms;
}

}}}  // namespace attn::ATTN_ISA::detail
