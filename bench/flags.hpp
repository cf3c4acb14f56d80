// attn_bench: its own flags, beside Google Benchmark's.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <map>
#include <string>
#include <vector>

namespace bench {

struct flags {
  using idx_t = std::ptrdiff_t;
  idx_t heads = 8, dim = 64, threads = 1, step_tokens = 1;
  idx_t virtual_threads = 0;  // 0: real ones; otherwise `threads`, too
  idx_t window = 128, block = 128, stride = 64, rounds = 4, rank = 256, landmarks = 64, features = 256;
  idx_t random = 3, topk = 3, relative_bias = 0, relative_keys = 0, position_queries = 0;
  idx_t log_decay = 0, dropout = 0, key_mask = 0, skip = 7;
  idx_t selected = 256, list_block = 1, axes = 2, kernel = 13;
  idx_t exact = 0, clusters = 0, probe = 0, query_block = 0;  // 0: the operator's own
  bool exact_inverse = false, shared_lists = false;
  double far = 0;
  std::string type = "float";  // of elements; several with commas between them
  std::string cache_type;      // of the elements of caches, beside those of the tokens; several with commas
  std::string weights = "rows";  // how layers are given theirs
  std::string precision = "standard";  // or fast: lines of it beside the others
  std::string save;            // folder to write numbers and results to; none unless given
  std::string input;           // folder with q.npy, k.npy, v.npy instead of the shipped data
  // Of that data, besides heads and dim. 0: as heads and dim; no length of it among those measured
  idx_t kv_heads = 0, dim_v = 0, own_length = 0;
  idx_t min_length = 256;
  idx_t max_length = 0;    // 0: by the operator's growth
  double max_seconds = 0;  // a run that takes longer is left out; 0: none for that reason
  double budget = 150;     // seconds the sweep may take; the main curve is run whatever it takes
  bool efficiency = true;  // of several threads, beside processes
  bool smoke = false;
  bool help = false;
};

/// Takes the flags it knows out of `arguments` and leaves the rest to Google Benchmark.
/// Throws std::invalid_argument for a value that is not one.
flags take_flags(std::vector<std::string>& arguments);

/// Whether Google Benchmark's flag `name` was given, as an argument or in the environment.
bool is_given(const std::vector<std::string>& arguments, const std::string& name);

/// The value given to it as an argument, or `otherwise`.
std::string value_of(const std::vector<std::string>& arguments, const std::string& name, const std::string& otherwise);

/// `users` names the operators that depend on a flag.
std::string flags_help(const std::map<std::string, std::string>& users);

/// "window=128, rank=256": the values of the named flags.
std::string describe(const flags& set, const std::vector<std::string>& names);

/// Values of some flags that take the place of those given: a point of a curve of error against time.
struct flag_value {
  flags::idx_t flags::*flag;
  flags::idx_t value;
};
using setting = std::vector<flag_value>;

/// One setting for each value of one flag.
std::vector<setting> settings_of(flags::idx_t flags::*flag, std::initializer_list<flags::idx_t> values);

/// `set` with the values of the setting.
flags with(flags set, const setting&);

/// "exact:64,probe:16", as part of a benchmark's name.
std::string name_of(const setting&);

}  // namespace bench
