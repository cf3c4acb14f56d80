// attn: scratch memory: a buffer that grows, and what lays it out.
#pragma once

#include <attn/core/detail/pages.hpp>
#include <attn/core/tensor_view.hpp>

#include <cstddef>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Aligned memory that only grows; growing loses its content.
class scratch_buffer {
 public:
  std::byte* grow(std::size_t bytes) {
    if (bytes > size()) {
      memory_.reset();  // so that old and new never exist together
      memory_ = allocate_block(bytes);
    }
    return memory_.get();
  }
  std::size_t size() const { return memory_ ? memory_.get_deleter().bytes : 0; }

 private:
  memory_block memory_;
};

/// Allocates aligned parts of a scratch buffer one after the other. With a null base it only counts bytes.
class arena {
 public:
  explicit arena(std::byte* base = nullptr) : base_(base) {}

  template <class T>
  T* allocate(idx_t count) {
    const std::size_t begin = used_;
    used_ += (static_cast<std::size_t>(count) * sizeof(T) + cache_line - 1) / cache_line * cache_line;
    return base_ ? static_cast<T*>(static_cast<void*>(base_ + begin)) : nullptr;  // aligned: no -Wcast-align
  }
  /// `count` objects made by layout(*this), which allocates what they point to.
  template <class Layout>
  auto* allocate_list(idx_t count, Layout&& layout) {
    using item = decltype(layout(*this));
    item* const list = allocate<item>(count);
    for (idx_t n = 0; n < count; ++n) {
      const item one = layout(*this);
      if (list) list[n] = one;
    }
    return list;
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

}}}  // namespace attn::ATTN_ISA::detail
