// attn: keys and values of sequences in pages of one pool (Kwon et al. 2023, "Efficient memory management for large
// language model serving with PagedAttention").
//
//   attn::page_pool<float> pool({.pages = 1024, .page_tokens = 64, .heads = 8, .dim = 64});
//   attn::paged_cache<float> cache(pool, 16);                      // 16 sequences, its batch items
//   attn::full_softmax_step(cache, q, k, v, out, {.lengths = n}, threads);
//   cache.copy_item(0, 1);                                         // item 1 continues item 0 and shares its pages
//   cache.reset(0);                                                // frees its pages, except those that are shared
//
// A sequence takes pages as it grows. Sequences with a common beginning share its pages; a shared page that is not full
// is copied before a sequence writes to it.
//
// Speed    As contiguous memory with pages of a multiple of 64 tokens; what smaller ones cost is in page_pool.hpp.
// Throws   std::invalid_argument where an append needs more pages than are free; what an allocator throws is passed on.
//          Either way all sequences are as they were.
#pragma once

#include <attn/core/page_pool.hpp>

#include <algorithm>

namespace attn { inline namespace ATTN_ISA {

/// Sequences in pages of a pool. A copy shares all pages. A moved-from cache may only be assigned to or destroyed.
template <class S>
class paged_cache : public detail::token_state {
  static_assert(detail::check_cache_element<S>());

 public:
  using value_type = S;

  /// `batch` empty sequences. The pool must outlive the cache.
  paged_cache(page_pool<S>& pool, idx_t batch)
      : token_state("paged_cache", {batch, pool.heads(), pool.dim(), pool.value_dim()}), pool_(&pool),
        tables_(static_cast<std::size_t>(batch)) {}
  paged_cache(const paged_cache& other) : token_state(other), pool_(other.pool_), tables_(other.tables_) {
    for (const auto& table : tables_)
      for (idx_t page : table) pool_->retain(page);
  }
  paged_cache(paged_cache&&) noexcept = default;
  paged_cache& operator=(paged_cache other) noexcept {
    static_cast<token_state&>(*this) = static_cast<token_state&&>(other);
    std::swap(pool_, other.pool_);
    tables_.swap(other.tables_);
    return *this;
  }
  ~paged_cache() {
    for (const auto& table : tables_)
      for (idx_t page : table) pool_->release(page);
  }

  page_pool<S>& pool() const { return *pool_; }
  /// The pages of a sequence: token t is token t % page_tokens of page table(item)[t / page_tokens].
  std::span<const idx_t> table(idx_t item) const { return table_of(check_item(item)); }

  /// Forgets all but the first `tokens` tokens of every item, or of one; pages that no other sequence uses become free.
  void truncate(idx_t tokens) {
    check_kept(tokens, this->tokens());
    for (idx_t b = 0; b < batch(); ++b) cut(b, std::min(length(b), tokens));
  }
  void truncate(idx_t item, idx_t tokens) {
    check_kept(tokens, this->tokens(item));
    cut(item, tokens);
  }
  /// Forgets all tokens, or those of one item.
  void reset() { truncate(0); }
  void reset(idx_t item) { truncate(item, 0); }

  /// Item `to` becomes what item `from` is, sharing its pages; or it gets the first `tokens` tokens of `from`.
  void copy_item(idx_t from, idx_t to) { copy_item(from, to, tokens(from)); }
  void copy_item(idx_t from, idx_t to, idx_t tokens) {
    check_kept(tokens, this->tokens(from));
    if (from == check_item(to)) return truncate(to, tokens);
    std::vector<idx_t> shared(table_of(from).begin(), table_of(from).begin() + pages_for(tokens));
    adopt(to, std::move(shared), tokens);
  }
  /// Item n becomes what item order[n] was, for all n. Throws std::invalid_argument for a list of another size, or for
  /// items that do not exist.
  void reorder(list_view<idx_t> order) {
    const auto exchange = [&](idx_t a, idx_t b) {
      table_of(a).swap(table_of(b));
      std::swap(length(a), length(b));
    };
    detail::reorder_items(
        detail::validator(name_), order, batch(), [&](idx_t from, idx_t to) { copy_item(from, to); }, exchange);
  }
  /// An item becomes the `tokens` tokens that lie in the given pages of the pool. The pages must have users already,
  /// such as code that keeps common beginnings for later. Throws std::invalid_argument for pages that do not exist, are
  /// not in use or are listed twice, and for a number of pages that does not fit the number of tokens.
  void assign(idx_t item, list_view<idx_t> pages, idx_t tokens) {
    const detail::validator check(name_);
    check_item(item);
    check.at_least("tokens", 0, tokens);
    check.equal("pages for the tokens", pages_for(tokens), std::ssize(pages));
    for (auto page = pages.begin(); page != pages.end(); ++page) {
      if (*page < 0 || *page >= pool_->pages()) check.fail({"pages from 0 to ", pool_->pages() - 1}, *page);
      if (pool_->users(*page) == 0) check.fail("pages in use", *page);
      if (std::find(pages.begin(), page, *page) != page) check.fail("every page once", *page);
    }
    adopt(item, {pages.begin(), pages.end()}, tokens);
  }

  /// Adds the tokens of k [B, Hkv, n, D] and v [B, Hkv, n, Dv], of which item b takes the first lengths[b]. Throws
  /// std::invalid_argument for shapes that do not fit, views of the pool, or more pages than are free, before anything
  /// changes.
  template <viewable K, viewable V>
  void append(const K& k, const V& v, const append_options& options = {}) {
    using E = element_of<const K&>;
    detail::check_stores<S, E>();
    const tensor_view<const E> keys = as_view(k), values = as_view(v);
    detail::check_append(*this, name_, keys, values, options.lengths);
    append_checked(keys, values, options.lengths);
  }

  // For the step ------------------------------------------------------------------------------------------------------

  /// append() of tokens that were already checked.
  template <class E>
  void append_checked(const tensor_view<const E>& k, const tensor_view<const E>& v, std::span<const idx_t> lengths) {
    try {
      for (idx_t b = 0; b < batch(); ++b) grow(b, taken_of(b, k.extent(2), lengths));
    } catch (...) {  // out of memory, or an exception of the caller's allocator
      for (idx_t b = 0; b < batch(); ++b) cut(b, length(b));
      throw;
    }
    for (idx_t b = 0; b < batch(); ++b) {
      const idx_t taken = taken_of(b, k.extent(2), lengths);
      for (idx_t h = 0; h < heads(); ++h)
        for (idx_t i = 0; i < taken; ++i) {
          const idx_t t = length(b) + i;
          pool_->memory().put(k, v, b, h, i, page_of(b, t), t % pool_->page_tokens());
        }
      length(b) += taken;
    }
  }

  /// Checks the tokens of a step.
  template <class E>
  void check_tokens(const detail::validator& check, const tensor_view<const E>& k, const tensor_view<const E>& v,
                    std::span<const idx_t> lengths) const {
    token_state::check_tokens(check, k, v, lengths);
    pool_->memory().check_tokens(check, k, v, lengths);
    idx_t needed = 0;
    for (idx_t b = 0; b < batch(); ++b) {
      const idx_t taken = taken_of(b, k.extent(2), lengths);
      if (taken == 0) continue;
      needed += pages_for(length(b) + taken) - std::ssize(table_of(b));
      if (!writes_shared(b)) continue;
      idx_t users = pool_->users(table_of(b).back());  // of sequences that write to it the last need not copy it
      for (idx_t other = 0; other < b; ++other)
        users -= taken_of(other, k.extent(2), lengths) > 0 && writes_shared(other) &&
                 table_of(other).back() == table_of(b).back();
      needed += users > 1;
    }
    if (needed > pool_->free_pages())
      check.fail({"at most as many new pages as the ", pool_->free_pages(), " that are free"}, needed);
  }
  void list_memory(detail::call_views& views) const { pool_->memory().list_memory(views); }
  void forget(idx_t count, std::span<const idx_t> lengths) {
    for (idx_t b = 0; b < batch(); ++b) cut(b, length(b) - taken_of(b, count, lengths));
  }
  tensor_view<const S> keys() const { return pool_->keys(); }
  tensor_view<const S> values() const { return pool_->values(); }
  detail::page_tables pages() const { return {tables_.data(), pool_->page_tokens()}; }
  bool values_in_keys() const { return pool_->memory().values_in_keys(); }

 private:
  std::vector<idx_t>& table_of(idx_t b) { return tables_[static_cast<std::size_t>(b)]; }
  const std::vector<idx_t>& table_of(idx_t b) const { return tables_[static_cast<std::size_t>(b)]; }
  idx_t page_of(idx_t b, idx_t t) const {
    return table_of(b)[static_cast<std::size_t>(t / pool_->page_tokens())];
  }
  idx_t pages_for(idx_t tokens) const {
    return tokens / pool_->page_tokens() + (tokens % pool_->page_tokens() != 0);
  }

  /// Whether the next token of an item goes to a page that other sequences use.
  bool writes_shared(idx_t b) const {
    return length(b) % pool_->page_tokens() != 0 && pool_->users(table_of(b).back()) > 1;
  }
  void own_last_page(idx_t b) {
    const idx_t page = pool_->allocate();
    pool_->memory().copy(table_of(b).back(), page, length(b) % pool_->page_tokens());
    pool_->release(std::exchange(table_of(b).back(), page));
  }
  /// Allocates pages for so many more tokens; the page where they begin becomes the item's own.
  void grow(idx_t b, idx_t taken) {
    if (taken == 0) return;
    if (writes_shared(b)) own_last_page(b);
    std::vector<idx_t>& table = table_of(b);
    const std::size_t pages = static_cast<std::size_t>(pages_for(length(b) + taken));
    if (pages > table.capacity()) table.reserve(std::max(pages, 2 * table.size()));  // a page is not lost to push_back
    while (table.size() < pages) table.push_back(pool_->allocate());
  }
  void cut(idx_t b, idx_t tokens) {
    std::vector<idx_t>& table = table_of(b);
    for (; std::ssize(table) > pages_for(tokens); table.pop_back()) pool_->release(table.back());
    length(b) = tokens;
  }
  void adopt(idx_t b, std::vector<idx_t>&& pages, idx_t tokens) {
    for (idx_t page : pages) pool_->retain(page);
    for (idx_t page : table_of(b)) pool_->release(page);
    table_of(b) = std::move(pages);
    length(b) = tokens;
  }

  page_pool<S>* pool_;
  std::vector<std::vector<idx_t>> tables_;
};

}}  // namespace attn::ATTN_ISA
