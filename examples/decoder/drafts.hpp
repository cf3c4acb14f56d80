// What a decoder is fed with: chunks of texts, or trees of drafts.
#pragma once

#include <attn/core/mask_view.hpp>
#include <attn/core/rotary.hpp>

#include <array>

#include "weights.hpp"

namespace decoder {

// Tokens for an item: a chunk of its text, or the last token of it and a tree of drafts that may follow.
struct fed_tokens {
  std::vector<int> tokens;
  std::vector<idx_t> parents;  // of a tree: the token before each one, -1 for the first; of a chunk: empty

  idx_t size() const { return std::ssize(tokens); }
  bool is_tree() const { return !parents.empty(); }
};

constexpr idx_t most_drafts = 12;  // of a tree

inline idx_t child_of(const fed_tokens& tree, idx_t parent, int token) {
  for (idx_t n = parent + 1; n < tree.size(); ++n)
    if (tree.parents[n] == parent && tree.tokens[n] == token) return n;
  return -1;
}

// The last token of a text and a tree of drafts: up to four tokens that followed the last two where those occurred
// before, the latest places first. (A small model would guess better.)
inline fed_tokens with_drafts(const std::vector<int>& text) {
  constexpr idx_t depth = 4;
  fed_tokens tree{{text.back()}, {-1}};
  const idx_t last = std::ssize(text) - 1;
  for (idx_t at = last - 1; at > 0 && tree.size() <= most_drafts; --at) {
    if (text[at] != text[last] || text[at - 1] != text[last - 1]) continue;
    idx_t node = 0;
    for (idx_t n = at + 1; n <= std::min(at + depth, last) && tree.size() <= most_drafts; ++n) {
      idx_t child = child_of(tree, node, text[n]);
      if (child < 0) {
        child = tree.size();
        tree.tokens.push_back(text[n]), tree.parents.push_back(node);
      }
      node = child;
    }
  }
  return tree;
}

// Where the tokens of a step are and what they see, if some of them are trees: a draft is at the place that it has in
// its branch, and sees what was fed before and its branch.
class tree_options {
 public:
  tree_options(const std::vector<fed_tokens>& fed, const std::vector<idx_t>& before, idx_t length) {
    if (std::none_of(fed.begin(), fed.end(), [](const fed_tokens& x) { return x.is_tree(); })) return;
    const idx_t items = std::ssize(fed);
    idx_t keys = 0;
    for (idx_t b = 0; b < items; ++b) keys = std::max(keys, before[b] + fed[b].size());
    extents_ = {items, 1, length, keys};
    places_.assign(items * length, 0);
    seen_.assign(items * length * keys, 0);
    for (idx_t b = 0; b < items; ++b)
      for (idx_t t = 0; t < fed[b].size(); ++t) {
        const idx_t row = b * length + t, parent = fed[b].is_tree() ? fed[b].parents[t] : t - 1;
        places_[row] = parent < 0 ? before[b] : places_[b * length + parent] + 1;
        std::uint8_t* const seen = &seen_[row * keys];
        if (parent < 0) std::fill_n(seen, before[b], 1);
        else std::copy_n(&seen_[(b * length + parent) * keys], keys, seen);
        seen[before[b] + t] = 1;
      }
  }

  attn::rotary_options<float> rotary() const {
    attn::rotary_options<float> options{.interleaved = true, .base = 10000};
    if (!places_.empty()) options.positions = {places_.data(), {extents_[0], extents_[2]}};
    return options;
  }
  attn::mask_view mask() const {
    if (seen_.empty()) return {};
    return attn::tensor_view<const std::uint8_t>(seen_.data(), extents_);
  }

 private:
  std::array<idx_t, 4> extents_{};
  std::vector<idx_t> places_;
  std::vector<std::uint8_t> seen_;
};

}  // namespace decoder
