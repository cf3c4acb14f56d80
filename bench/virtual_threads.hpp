// attn_bench: what threads would give that this machine does not have.
//
// The tasks of a call run one after another, on one thread, and each of N workers has a clock. The next task belongs to
// the worker whose clock is earliest, as if all worked at the same time, and its time is added to that clock. A call
// takes what its serial parts take and, for what is shared, the time of the latest clock. That is what N cores would
// take that have a memory and caches of their own and the clock of this one; where cores share a memory that is the
// bound, they gain less.
#pragma once

#include <attn/core/threads.hpp>

#include <memory>

namespace bench {

double seconds_now();

class virtual_threads {
 public:
  /// `threads` of them, for one execution at a time.
  attn::execution make_execution(int threads);

  /// The seconds that were spent so far, but would not have been with threads.
  double saved() const { return *saved_; }

 private:
  std::shared_ptr<double> saved_ = std::make_shared<double>(0);
};

}  // namespace bench
