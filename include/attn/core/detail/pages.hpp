// attn: memory that operators and caches allocate. Allocations of 2 MiB and more are aligned to 2 MiB and request pages
// of that size by madvise (Linux): fewer address translations are then needed than with pages of 4 KiB.
#pragma once

#include <attn/core/errors.hpp>

#include <cstddef>
#include <memory>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace attn { inline namespace ATTN_ISA { namespace detail {

inline constexpr std::size_t cache_line = 64, large_page = std::size_t{1} << 21;

constexpr std::align_val_t alignment_of(std::size_t bytes) {
  return std::align_val_t(bytes < large_page ? cache_line : large_page);
}

/// Without large pages what is never written to costs nothing, in pages of 4 KiB.
inline void* allocate_memory(std::size_t bytes, [[maybe_unused]] bool large_pages = true) {
  void* const p = ::operator new(bytes, alignment_of(bytes));
#if defined(MADV_HUGEPAGE)
  if (large_pages && bytes >= large_page) madvise(p, bytes, MADV_HUGEPAGE);  // it may fail: then pages are small
#endif
  return p;
}
inline void free_memory(void* p, std::size_t bytes) { ::operator delete(p, alignment_of(bytes)); }

struct memory_deleter {
  std::size_t bytes = 0;
  void operator()(std::byte* p) const { free_memory(p, bytes); }
};
using memory_block = std::unique_ptr<std::byte, memory_deleter>;
inline memory_block allocate_block(std::size_t bytes, bool large_pages = true) {
  return memory_block(static_cast<std::byte*>(allocate_memory(bytes, large_pages)), {bytes});
}

/// The same as an allocator for containers.
template <class T>
struct memory_allocator {
  using value_type = T;

  memory_allocator() = default;
  template <class U>
  memory_allocator(const memory_allocator<U>&) {}

  T* allocate(std::size_t count) {
    if (count > static_cast<std::size_t>(-1) / sizeof(T)) raise<std::bad_array_new_length>();
    return static_cast<T*>(allocate_memory(count * sizeof(T)));
  }
  void deallocate(T* p, std::size_t count) { free_memory(p, count * sizeof(T)); }
  friend bool operator==(const memory_allocator&, const memory_allocator&) { return true; }
};

template <class T>
using memory_vector = std::vector<T, memory_allocator<T>>;

}}}  // namespace attn::ATTN_ISA::detail
