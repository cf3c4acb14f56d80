// attn: pages of keys and values, for sequences that come and go: paged_cache.hpp.
//
//   attn::page_pool<float> pool({.pages = 1024, .page_tokens = 64, .heads = 8, .dim = 64});
//   attn::page_pool<float> pool(keys, values);               // the caller's [pages, Hkv, page tokens, D]
//
// A page has the keys and values of page_tokens tokens in all heads, and is used by any number of sequences; when the
// last of them releases it, it is free. Caches point to their pool, which must outlive them. A pool and its caches may
// be used by one thread at a time.
//
// Memory   pages * heads * page_tokens * (dim + value_dim) elements, as of a kv_cache, or the caller's, and a few bytes
//          per page. With attn::int4 a page has room for 128 tokens more, with attn::int8_channels for 64, as an item
//          of a kv_cache has: pages of 64 tokens take 3 or 2 times the memory, of 256 1.5 or 1.25, of 1024 1.12 or
//          1.06.
// Speed    Pages of a multiple of 64 tokens are as fast as contiguous memory. A step over smaller ones reads keys
//          page by page: with pages of 1, 2, 4 and 16 tokens it takes 11, 5.5, 3.4 and 1.2 times as long. Pages of a
//          multiple of 64 tokens in float or double, 128 in 16 bits, 256 in eight-bit floats, or of any size in codes
//          also give the same results to the last bit.
#pragma once

#include <attn/core/kv_cache.hpp>

namespace attn { inline namespace ATTN_ISA {

struct page_pool_extents {
  idx_t pages = 0;
  /// With std::int8_t rounded up to a multiple of 16, with attn::int4 and attn::int8_channels of 32.
  idx_t page_tokens = 64;
  /// Key heads.
  idx_t heads = 1;
  /// Of keys.
  idx_t dim = 0;
  /// Of values; that of keys unless given.
  idx_t value_dim = -1;
};

/// Chooses pages. One of your own may take the place of the free list that every pool has.
class page_allocator {
 public:
  virtual ~page_allocator() = default;
  /// Number of pages that allocate() can still return.
  virtual idx_t available() const = 0;
  /// Returns a page that is not in use; called only while there is one.
  virtual idx_t allocate() = 0;
  /// Marks a page as free.
  virtual void free(idx_t page) = 0;
};

/// The page that was freed last is used first.
class page_free_list : public page_allocator {
 public:
  explicit page_free_list(idx_t pages) : free_(static_cast<std::size_t>(pages)) {
    for (idx_t& page : free_) page = --pages;
  }
  idx_t available() const override { return std::ssize(free_); }
  idx_t allocate() override {
    const idx_t page = free_.back();
    free_.pop_back();
    return page;
  }
  void free(idx_t page) override { free_.push_back(page); }

 private:
  std::vector<idx_t> free_;
};

template <class S>
class page_pool {
  friend struct detail::step_access;

 public:
  /// A pool with its own memory. The allocator, if given, must outlive the pool. Throws std::invalid_argument for
  /// extents that do not fit or that no memory can hold.
  explicit page_pool(const page_pool_extents& e, const kv_cache_options& options = {},
                     page_allocator* allocator = nullptr)
      : page_pool(own(e, options), allocator) {}
  /// The caller's: keys [pages, Hkv, page tokens, D], values [pages, Hkv, page tokens, Dv], with any strides; the
  /// values may be the first dims of the keys. Of fewer than 16 bits blocks, as in a kv_cache.
  page_pool(const tensor_view<S>& keys, const tensor_view<S>& values, page_allocator* allocator = nullptr)
      : page_pool(keys, values, {}, allocator) {}
  page_pool(const tensor_view<S>& keys, const tensor_view<S>& values, const kv_cache_options& options,
            page_allocator* allocator = nullptr)
      : page_pool(detail::kv_memory<S>(detail::validator("page_pool"), keys, values, detail::storage_of(options)),
                  allocator) {}

  page_pool(const page_pool&) = delete;
  page_pool& operator=(const page_pool&) = delete;

  idx_t pages() const { return memory_.extents().batch; }
  idx_t page_tokens() const { return memory_.rows(); }
  idx_t heads() const { return memory_.extents().heads; }
  idx_t dim() const { return memory_.extents().dim; }
  idx_t value_dim() const { return memory_.extents().value_dim; }
  idx_t free_pages() const { return allocator_->available(); }
  std::size_t bytes() const { return memory_.bytes() + users_.capacity() * sizeof(int); }

  /// All pages, [pages, Hkv, page tokens, D] and [.., Dv].
  tensor_view<S> keys() const { return memory_.keys(); }
  tensor_view<S> values() const { return memory_.values(); }

  /// How many sequences use a page.
  idx_t users(idx_t page) const { return users_[check_page(page)]; }
  /// Allocates a free page, which then has one user. Throws std::invalid_argument if there is none.
  idx_t allocate() {
    const detail::validator check{"page_pool"};
    check.at_least("free pages", 1, free_pages());
    const idx_t page = allocator_->allocate();
    if (users_[check_page(page)] != 0) check.fail("the allocator to give a free page", page);
    users_[static_cast<std::size_t>(page)] = 1;
    return page;
  }
  /// Adds or removes one user of a page that has users. Throws std::invalid_argument for a page without users.
  void retain(idx_t page) { ++users_[check_used(page)]; }
  void release(idx_t page) {
    if (--users_[check_used(page)] == 0) allocator_->free(page);
  }

 private:
  page_pool(detail::kv_memory<S> memory, page_allocator* allocator)
      : memory_(std::move(memory)), free_list_(pages()), allocator_(allocator ? allocator : &free_list_),
        users_(static_cast<std::size_t>(pages()), 0) {
    detail::validator("page_pool").at_least("tokens of a page", 1, page_tokens());
  }
  static detail::kv_memory<S> own(const page_pool_extents& e, const kv_cache_options& options) {
    const detail::validator check{"page_pool"};
    check.at_least("pages", 0, e.pages);
    check.fits("pages", {e.pages, static_cast<idx_t>(sizeof(idx_t))});
    detail::kv_memory<S> memory(check, {e.pages, e.heads, e.dim, e.value_dim}, detail::storage_of(options));
    check.at_least("tokens of a page", 1, e.page_tokens);
    memory.make_pages(check, e.page_tokens);
    return memory;
  }
  std::size_t check_page(idx_t page) const {
    if (page < 0 || page >= pages()) detail::validator("page_pool").fail({"a page from 0 to ", pages() - 1}, page);
    return static_cast<std::size_t>(page);
  }
  std::size_t check_used(idx_t page) const {
    if (users(page) == 0) detail::validator("page_pool").fail("a page in use", page);
    return static_cast<std::size_t>(page);
  }

  detail::kv_memory<S> memory_;
  page_free_list free_list_;
  page_allocator* allocator_;
  std::vector<int> users_;
};

}}  // namespace attn::ATTN_ISA
