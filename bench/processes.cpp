#include "processes.hpp"

#if __has_include(<sys/mman.h>) && __has_include(<sys/wait.h>) && __has_include(<unistd.h>)
#define ATTN_BENCH_FORKS 1
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>
#else
#define ATTN_BENCH_FORKS 0
#endif

#include <atomic>
#include <new>
#include <numeric>
#include <span>
#include <thread>
#include <vector>

#include "sweep.hpp"

namespace bench {

#if ATTN_BENCH_FORKS

namespace {

/// In memory that the processes share; the calls per second of each follow it.
struct shared_state {
  std::atomic<int> ready = 0, done = 0;
  std::atomic<bool> failed = false;
};
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);

class shared_memory {
 public:
  explicit shared_memory(std::size_t bytes)
      : bytes_(bytes), at_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {}
  ~shared_memory() {
    if (*this) munmap(at_, bytes_);
  }
  shared_memory(const shared_memory&) = delete;
  shared_memory& operator=(const shared_memory&) = delete;
  explicit operator bool() const { return at_ != MAP_FAILED; }
  void* data() const { return at_; }

 private:
  std::size_t bytes_;
  void* at_;
};

/// One of the processes. None stops working before all have measured.
double measure_beside(shared_state& all, int count, const workload& call, double seconds) {
  attn::execution serial;
  call(serial);  // its memory becomes its own
  ++all.ready;
  while (all.ready < count && !all.failed) std::this_thread::yield();
  const double begin = seconds_now();
  double taken = 0;
  int calls = 0;
  while ((calls == 0 || taken < seconds) && !all.failed) {
    call(serial);
    ++calls;
    taken = seconds_now() - begin;
  }
  ++all.done;
  while (all.done < count && !all.failed) call(serial);
  return calls / taken;
}

}  // namespace

double calls_per_second(int count, const workload& call, double seconds) {
  const shared_memory memory(sizeof(shared_state) + static_cast<std::size_t>(count) * sizeof(double));
  if (!memory) return 0;
  auto& all = *::new (memory.data()) shared_state;
  const std::span<double> each(reinterpret_cast<double*>(&all + 1), static_cast<std::size_t>(count));
  std::vector<pid_t> started;
  for (int n = 0; n < count; ++n) {
    const pid_t child = fork();
    if (child == 0) {
      int status = 1;
      try {
        each[static_cast<std::size_t>(n)] = measure_beside(all, count, call, seconds);
        status = all.failed;
      } catch (...) {
      }
      if (status != 0) all.failed = true;
      _exit(status);
    }
    if (child < 0) {
      all.failed = true;
      break;
    }
    started.push_back(child);
  }
  // In any order: one that is killed must stop the others, which wait for it.
  for (std::size_t left = started.size(); left > 0; --left) {
    int status = 0;
    if (waitpid(-1, &status, 0) < 0 || status != 0) all.failed = true;
  }
  return all.failed ? 0 : std::accumulate(each.begin(), each.end(), 0.0);
}

#else

double calls_per_second(int, const workload&, double) { return 0; }

#endif

}  // namespace bench
