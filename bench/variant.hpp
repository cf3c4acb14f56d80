// attn_bench: what the sweep runs. Entries of the table of operators, decoders included, become variants of one form.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accuracy.hpp"
#include "machine.hpp"
#include "problem.hpp"

namespace bench {

/// The length at which operators are compared.
inline constexpr idx_t usual_length = 4096;

/// One operator at one length, ready to be timed.
using workload = std::function<void(attn::execution&)>;

struct variant {
  std::string form;   // sliding_window_causal
  std::string name;   // the form, and its setting if it is not the flags': sliding_window_causal/window:32
  std::string rival;  // what it is compared with: the form of full softmax, of a backward pass the forward one
  std::string operator_name, family, colour;  // of forward operators: how pictures show them
  std::vector<std::string> uses;  // the flags it depends on, besides heads, dim and threads
  std::string label;              // their values
  std::string type;   // of its elements
  arithmetic products = arithmetic::of_float;  // the peak it is compared with
  double rounding = 0;                         // the most an exact operator may err
  bool exact = false, approximates = true;
  bool main = false;      // on the main curve: the operator itself, or what one is compared with
  bool backward = false;  // the gradients of the rival's results
  idx_t longest = 0;
  idx_t sequences = 1;  // of a decoder: that a step feeds at once
  std::function<double(idx_t length)> flops;
  std::function<double(idx_t length)> moved_bytes;  // where memory is the bound: of decoders, that of the state
  bool rewrites = false;                            // what it moves is written as well as read
  std::function<double(idx_t length)> memory_bytes;
  std::function<workload(idx_t length)> prepare;
  std::function<std::vector<std::pair<std::string, std::vector<float>>>(idx_t length)> results;  // of the last run
  std::function<double(const dataset&)> error, mean_error;
  /// Of an approximation: is it no further from full softmax than rounding, as where its setting sees every token?
  bool sees_every_token(const std::vector<double>& errors) const;

  bool has_setting() const { return name != form; }
};

/// Bytes a run of `seconds` moves, and their share of the memory's bandwidth; none where memory is not the bound or the
/// caches hold it all.
struct traffic {
  double bytes_per_second, share;
  const char* of;  // the bandwidth compared with
};
std::optional<traffic> traffic_of(const variant&, idx_t length, double seconds, const machine&);

/// Of the types that are asked for. Those of one form follow one another, the one with the flags' own setting first.
/// Throws std::invalid_argument for a type that this attn_bench was not built for.
std::vector<variant> make_variants(const flags& set);

/// The operators that use a flag: "block" -> "block, topk_blocks".
std::map<std::string, std::string> users_of_flags();

/// Is `name` one of those between commas?
bool lists(const std::string& names, const std::string& name);

/// The types it was built for: variant.cpp, compiled for each, joins the list.
struct element_type {
  std::string name;
  std::vector<variant> (*make)(const flags&);
};
std::vector<element_type>& element_types();
struct type_registration {
  explicit type_registration(element_type type) { element_types().push_back(std::move(type)); }
};

}  // namespace bench
