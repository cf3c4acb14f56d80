// attn_bench: what the sweep runs. Entries of the table of operators, decoders included, become variants of one form.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "accuracy.hpp"
#include "table.hpp"

namespace bench {

/// One operator at one length, ready to be timed.
struct workload {
  std::function<void(attn::execution&)> run;
  const float* out = nullptr;
};

struct variant {
  std::string name;   // sliding_window_causal
  std::string rival;  // the full softmax it has to beat
  std::string label;  // the flags it depends on
  bool exact = false, approximates = true;
  index longest = 0;
  std::function<double(index length)> flops;
  std::function<double(index length)> cache_bytes;  // decoders only
  std::function<double(index length)> memory_bytes;
  std::function<workload(index length)> prepare;
  std::function<double(const dataset&)> error, mean_error;
};

/// `set` must outlive them.
std::vector<variant> make_variants(const flags& set);

}  // namespace bench
