// attn: keys and values of sequences in pages of one pool (Kwon et al. 2023, "Efficient memory management for large
// language model serving with PagedAttention").
//
//   attn::page_pool<float> pool({.pages = 1024, .page_tokens = 64, .heads = 8, .dim = 64});
//   attn::paged_cache<float> cache(pool, 16);                      // 16 sequences, its batch items
//   attn::full_softmax_step(cache, q, k, v, out, {.lengths = n}, threads);
//   cache.copy_item(0, 1);                                         // item 1 continues item 0 and shares its pages
//   cache.reset(0);                                                // frees its pages, except those that are shared
//   cache.keep(1, positions);                                      // leaves the tokens at these positions
//
// A sequence takes pages as it grows. Sequences with a common beginning share its pages; a shared page that is not full
// is copied before a sequence writes to it.
//
// Speed    As contiguous memory with pages of a multiple of 64 tokens; what smaller ones cost is in page_pool.hpp.
//          full_softmax_step reads the pages that several sequences begin with once for all of them.
// Throws   std::invalid_argument where append or keep needs more pages than are free; what an allocator throws is
//          passed on. Either way all sequences are as they were.
#pragma once

#include <attn/core/page_pool.hpp>

#include <algorithm>

namespace attn { inline namespace ATTN_ISA {

namespace detail {

/// The inside of paged_cache. A copy shares all pages.
template <class S>
class paged_tokens : public cached_tokens {
 public:
  using value_type = S;

  paged_tokens(page_pool<S>& pool, idx_t batch)
      : cached_tokens("paged_cache", {batch, pool.heads(), pool.dim(), pool.value_dim()}), pool_(&pool),
        tables_(static_cast<std::size_t>(batch)) {}
  paged_tokens(const paged_tokens& other) : cached_tokens(other), pool_(other.pool_), tables_(other.tables_) {
    for (const auto& table : tables_)
      for (idx_t page : table) pool_->retain(page);
  }
  paged_tokens(paged_tokens&&) noexcept = default;
  paged_tokens& operator=(paged_tokens other) noexcept {
    static_cast<cached_tokens&>(*this) = static_cast<cached_tokens&&>(other);
    std::swap(pool_, other.pool_);
    tables_.swap(other.tables_);
    return *this;
  }
  ~paged_tokens() {
    for (const auto& table : tables_)
      for (idx_t page : table) pool_->release(page);
  }

  page_pool<S>& pool() const { return *pool_; }
  std::span<const idx_t> table(idx_t item) const { return tables_[static_cast<std::size_t>(check_item(item))]; }
  tensor_view<const S> keys() const { return pool_->keys(); }
  tensor_view<const S> values() const { return pool_->values(); }
  bool values_in_keys() const { return memory().values_in_keys(); }
  bool rotated() const { return memory().rotated(); }
  page_tables pages() const { return {tables_.data(), pool_->page_tokens()}; }

  template <class E>
  void check_tokens(const validator& check, const tensor_view<const E>& k, const tensor_view<const E>& v,
                    std::span<const idx_t> given) const {
    check_shapes(check, k, v, given);
    memory().check_tokens(check, k, v, given);
    idx_t needed = 0;
    for (idx_t b = 0; b < batch(); ++b) {
      const idx_t taken = taken_of(b, k.extent(2), given);
      if (taken == 0) continue;
      needed += pages_for(length(b) + taken) - std::ssize(table_of(b));
      if (!writes_shared(b)) continue;
      idx_t users = pool_->users(table_of(b).back());  // of sequences that write to it the last need not copy it
      for (idx_t other = 0; other < b; ++other)
        users -= taken_of(other, k.extent(2), given) > 0 && writes_shared(other) &&
                 table_of(other).back() == table_of(b).back();
      needed += users > 1;
    }
    if (needed > pool_->free_pages())
      check.fail({"at most as many new pages as the ", pool_->free_pages(), " that are free"}, needed);
  }
  void list_memory(call_views& views) const { memory().list_memory(views); }
  template <class E>
  void append(const tensor_view<const E>& k, const tensor_view<const E>& v, std::span<const idx_t> given) {
    do_or_undo(  // out of memory, or an exception of the caller's allocator
        [&] {
          for (idx_t b = 0; b < batch(); ++b) grow(b, taken_of(b, k.extent(2), given));
        },
        [&] {
          for (idx_t b = 0; b < batch(); ++b) cut(b, length(b));
        });
    put_all(k.extent(2), given, [&](idx_t b, idx_t h, idx_t i) {
      const idx_t t = length(b) + i, rows = pool_->page_tokens();
      memory().put(k, v, b, h, i, table_of(b)[static_cast<std::size_t>(t / rows)], t % rows);
    });
  }
  void cut(idx_t b, idx_t tokens) {
    std::vector<idx_t>& table = table_of(b);
    for (; std::ssize(table) > pages_for(tokens); table.pop_back()) pool_->release(table.back());
    length(b) = tokens;
  }
  /// A page whose tokens stay together remains as it is. The others are written: pages that only this item uses, whose
  /// own tokens have been moved by then, or new ones.
  void keep(idx_t b, std::span<const idx_t> positions, idx_t first) {
    const idx_t rows = pool_->page_tokens(), kept = std::ssize(positions), count = pages_for(kept);
    const std::vector<idx_t>& old = table_of(b);
    const auto position = [&](idx_t n) { return positions[static_cast<std::size_t>(n)]; };
    const auto old_page = [&](idx_t n) { return old[static_cast<std::size_t>(n)]; };
    constexpr idx_t none = -1;
    std::vector<idx_t> pages(old.begin(), old.begin() + first / rows), own, taken;
    std::vector<bool> remains(old.size(), false), written(old.size(), false);
    pages.reserve(old.size()), own.reserve(old.size()), taken.reserve(old.size());
    for (idx_t m = first / rows; m < count; ++m) {
      const idx_t begin = position(m * rows), last = (std::min)((m + 1) * rows, kept) - 1;
      const bool together = begin % rows == 0 && position(last) - begin == last - m * rows;
      if (together) remains[static_cast<std::size_t>(begin / rows)] = true;
      if (!remains[static_cast<std::size_t>(m)] && pool_->users(old_page(m)) == 1) own.push_back(old_page(m));
      written[static_cast<std::size_t>(m)] = !together;
      pages.push_back(together ? old_page(begin / rows) : none);
      if (together || own.empty()) continue;
      pages.back() = own.back();
      own.pop_back();
    }
    const idx_t needed = std::count(pages.begin(), pages.end(), none);
    if (needed > pool_->free_pages())
      validator(name_).fail({"at most as many new pages as the ", pool_->free_pages(), " that are free"}, needed);
    memory().begin_moves(old.back(), length(b) - (std::ssize(old) - 1) * rows);
    const auto release_taken = [&] {
      for (idx_t page : taken) pool_->release(page);
    };
    do_or_undo(  // an exception of the caller's allocator
        [&] {
          for (idx_t& page : pages)
            if (page == none) taken.push_back(page = pool_->allocate());
        },
        release_taken);
    for (idx_t m = first / rows; m < count; ++m)
      for (idx_t n = m * rows; n < (std::min)((m + 1) * rows, kept) && written[static_cast<std::size_t>(m)]; ++n)
        memory().move(old_page(position(n) / rows), position(n) % rows, pages[static_cast<std::size_t>(m)], n % rows);
    adopt(b, std::move(pages), kept);
    release_taken();  // which adopt() has retained
  }
  void reset(idx_t b) { cut(b, 0); }
  void copy(idx_t from, idx_t to) { adopt(to, std::vector<idx_t>(table_of(from)), length(from)); }
  void exchange(idx_t a, idx_t b) { table_of(a).swap(table_of(b)); }

  /// Item b becomes the tokens in the given pages.
  void adopt(idx_t b, std::vector<idx_t>&& pages, idx_t tokens) {
    for (idx_t page : pages) pool_->retain(page);
    for (idx_t page : table_of(b)) pool_->release(page);
    table_of(b) = std::move(pages);
    length(b) = tokens;
  }
  idx_t pages_for(idx_t tokens) const {
    return tokens / pool_->page_tokens() + (tokens % pool_->page_tokens() != 0);
  }

 private:
  kv_memory<S>& memory() const { return step_access::memory_of(*pool_); }
  std::vector<idx_t>& table_of(idx_t b) { return tables_[static_cast<std::size_t>(b)]; }
  const std::vector<idx_t>& table_of(idx_t b) const { return tables_[static_cast<std::size_t>(b)]; }

  /// Whether the next token of an item goes to a page that other sequences use.
  bool writes_shared(idx_t b) const {
    return length(b) % pool_->page_tokens() != 0 && pool_->users(table_of(b).back()) > 1;
  }
  /// Allocates pages for so many more tokens; the page where they begin becomes the item's own.
  void grow(idx_t b, idx_t taken) {
    if (taken == 0) return;
    std::vector<idx_t>& table = table_of(b);
    if (writes_shared(b)) {
      const idx_t page = pool_->allocate();
      memory().copy(table.back(), page, length(b) % pool_->page_tokens());
      pool_->release(std::exchange(table.back(), page));
    }
    const std::size_t pages = static_cast<std::size_t>(pages_for(length(b) + taken));
    // a page is not lost to push_back
    if (pages > table.capacity()) table.reserve((std::max)(pages, 2 * table.size()));
    while (table.size() < pages) table.push_back(pool_->allocate());
  }

  page_pool<S>* pool_;
  std::vector<std::vector<idx_t>> tables_;
};

}  // namespace detail

/// Sequences in pages of a pool. A copy shares all pages, of the cache or of an item; pages that no sequence uses
/// become free. A moved-from cache may only be assigned to or destroyed.
template <class S>
class paged_cache : public detail::cached_sequences<detail::paged_tokens<S>> {
  using base = detail::cached_sequences<detail::paged_tokens<S>>;

 public:
  using value_type = S;

  /// `batch` empty sequences. The pool must outlive the cache.
  paged_cache(page_pool<S>& pages, idx_t batch) : base(pages, batch) {}

  /// table(item) has the pages of a sequence: token t is token t % page_tokens of page table(item)[t / page_tokens].
  using base::pool, base::table;

  /// Item `to` becomes what item `from` is, sharing its pages; or it gets the first `tokens` tokens of `from`.
  using base::copy_item;
  void copy_item(idx_t from, idx_t to, idx_t tokens) {
    this->check_kept(tokens, this->tokens(from));
    if (from == this->check_item(to)) return this->truncate(to, tokens);
    const auto pages = table(from).first(static_cast<std::size_t>(this->pages_for(tokens)));
    this->adopt(to, {pages.begin(), pages.end()}, tokens);
  }
  /// An item becomes the `tokens` tokens that lie in the given pages of the pool. The pages must have users already,
  /// such as code that keeps common beginnings for later. Throws std::invalid_argument for pages that do not exist, are
  /// not in use or are listed twice, and for a number of pages that does not fit the number of tokens.
  void assign(idx_t item, list_view<idx_t> pages, idx_t tokens) {
    const detail::validator check{this->name_};
    this->check_item(item);
    check.at_least("tokens", 0, tokens);
    check.equal("pages for the tokens", this->pages_for(tokens), std::ssize(pages));
    for (auto page = pages.begin(); page != pages.end(); ++page) {
      if (*page < 0 || *page >= pool().pages()) check.fail({"pages from 0 to ", pool().pages() - 1}, *page);
      if (pool().users(*page) == 0) check.fail("pages in use", *page);
      if (std::find(pages.begin(), page, *page) != page) check.fail("every page once", *page);
    }
    this->adopt(item, {pages.begin(), pages.end()}, tokens);
  }
};

}}  // namespace attn::ATTN_ISA
