#pragma once
// Memory whose first part faults when it is touched: shows that an operator never goes there.
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
  guarded_memory(index count, index guarded) : bytes_(static_cast<std::size_t>(count) * sizeof(T)) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    guarded_ = static_cast<std::size_t>(guarded) * sizeof(T) / page * page;
    memory_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory_ == MAP_FAILED || mprotect(memory_, guarded_, PROT_NONE) != 0) throw std::bad_alloc();
  }
  ~guarded_memory() { munmap(memory_, bytes_); }
#else
  guarded_memory(index count, index) : plain_(new T[static_cast<std::size_t>(count)]()), memory_(plain_.get()) {}
#endif
  guarded_memory(const guarded_memory&) = delete;

  T* data() const { return static_cast<T*>(memory_); }
  // The first row of `dim` elements that may be read.
  index first_readable(index dim) const { return (static_cast<index>(guarded_ / sizeof(T)) + dim - 1) / dim; }

 private:
#if !__has_include(<sys/mman.h>)
  std::unique_ptr<T[]> plain_;
#endif
  void* memory_ = nullptr;
  std::size_t bytes_ = 0, guarded_ = 0;
};

}  // namespace testing
