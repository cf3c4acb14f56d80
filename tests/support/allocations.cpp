// Replaces operator new, and with the linker's --wrap the C functions too (Eigen calls them), to count the calls.
#include "support/allocations.hpp"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<std::size_t> count{0};

void* counted(std::size_t bytes, std::size_t alignment) {
  ++count;
  const std::size_t whole = (bytes + alignment - 1) / alignment * alignment;
  if (void* memory = std::aligned_alloc(alignment, whole ? whole : alignment)) return memory;
  throw std::bad_alloc();
}

}  // namespace

std::size_t testing::allocations() { return count; }

void* operator new(std::size_t bytes) { return counted(bytes, alignof(std::max_align_t)); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return counted(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

#if defined(ATTN_TEST_WRAP_MALLOC)
extern "C" {
void* __real_malloc(std::size_t);
void* __real_calloc(std::size_t, std::size_t);
void* __real_realloc(void*, std::size_t);
void* __real_aligned_alloc(std::size_t, std::size_t);
int __real_posix_memalign(void**, std::size_t, std::size_t);

void* __wrap_malloc(std::size_t bytes) { return ++count, __real_malloc(bytes); }
void* __wrap_calloc(std::size_t n, std::size_t bytes) { return ++count, __real_calloc(n, bytes); }
void* __wrap_realloc(void* memory, std::size_t bytes) { return ++count, __real_realloc(memory, bytes); }
void* __wrap_aligned_alloc(std::size_t alignment, std::size_t bytes) {
  return ++count, __real_aligned_alloc(alignment, bytes);
}
int __wrap_posix_memalign(void** memory, std::size_t alignment, std::size_t bytes) {
  return ++count, __real_posix_memalign(memory, alignment, bytes);
}
}
#endif
