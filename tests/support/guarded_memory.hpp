#pragma once
// Memory that faults where an operator must never go: with the very instructions of this machine, where a sanitizer
// does not see all of them.
#include <algorithm>
#include <memory>
#include <new>

#include "support/tensor.hpp"

#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace testing {

// `count` elements; touching one of the first `guarded` (rounded down to whole pages) ends the program.
template <class T>
class guarded_memory {
 public:
#if __has_include(<sys/mman.h>)
  guarded_memory(idx_t count, idx_t guarded) : bytes_(static_cast<std::size_t>(count) * sizeof(T)) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    guarded_ = static_cast<std::size_t>(guarded) * sizeof(T) / page * page;
    memory_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory_ == MAP_FAILED || mprotect(memory_, guarded_, PROT_NONE) != 0) throw std::bad_alloc();
  }
  ~guarded_memory() { munmap(memory_, bytes_); }
#else
  guarded_memory(idx_t count, idx_t) : plain_(new T[static_cast<std::size_t>(count)]()), memory_(plain_.get()) {}
#endif
  guarded_memory(const guarded_memory&) = delete;

  T* data() const { return static_cast<T*>(memory_); }
  // The first row of `dim` elements that may be read.
  idx_t first_readable(idx_t dim) const { return (static_cast<idx_t>(guarded_ / sizeof(T)) + dim - 1) / dim; }

 private:
#if !__has_include(<sys/mman.h>)
  std::unique_ptr<T[]> plain_;
#endif
  void* memory_ = nullptr;
  std::size_t bytes_ = 0, guarded_ = 0;
};

// For containers whose last element lies before a page that faults when it is touched.
template <class T>
struct guarded_allocator {
  using value_type = T;

  guarded_allocator() = default;
  template <class U>
  guarded_allocator(const guarded_allocator<U>&) {}
  bool operator==(const guarded_allocator&) const = default;

#if __has_include(<sys/mman.h>)
  T* allocate(std::size_t count) {
    const extent e = extent_of(count);
    void* const memory = mmap(nullptr, e.readable + e.page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    char* const end = static_cast<char*>(memory) + e.readable;
    if (mprotect(end, e.page, PROT_NONE) != 0) throw std::bad_alloc();
    return reinterpret_cast<T*>(end) - count;
  }
  void deallocate(T* data, std::size_t count) {
    const extent e = extent_of(count);
    munmap(reinterpret_cast<char*>(data + count) - e.readable, e.readable + e.page);
  }

 private:
  struct extent {
    std::size_t page, readable;  // bytes
  };
  static extent extent_of(std::size_t count) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    return {page, (count * sizeof(T) + page - 1) / page * page};
  }
#else
  T* allocate(std::size_t count) { return std::allocator<T>().allocate(count); }
  void deallocate(T* data, std::size_t count) { std::allocator<T>().deallocate(data, count); }
#endif
};

}  // namespace testing
