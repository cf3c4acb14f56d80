// attn_bench: the table of operators.
//
// An operator joins by one entry in the file of its family (softmax.cpp); a new family is one more file, named in
// families() and CMakeLists.txt. Everything else, the lengths, the names, the counters, the error on real data, the
// final table and the pictures with their colours, follows from the entry.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "problem.hpp"

namespace bench::inline ATTN_BENCH_TYPE {

using element = ATTN_BENCH_ELEMENT;
using real = attn::compute_type<element>;
using input = attn::tensor_view<const element>;
using output = attn::tensor_view<element>;

using runner = std::function<void(input q, input k, input v, output out, attn::execution&)>;

/// The backward pass of an operator: what it reads, what the forward call wrote, and the gradients.
struct training_views {
  input q, k, v;
  output out;
  attn::tensor_view<real, 3> lse;  // [1, heads, length], for operators that have one
  input d_out;
  output dq, dk, dv;
};

struct training_runner {
  std::function<void(const training_views&, attn::execution&)> forward;  // run once, writes out and lse
  std::function<void(const training_views&, attn::execution&)> backward;
};

struct backward_entry {
  double (*flops)(const problem&) = nullptr;  // what the formulas need, from what the forward call has saved
  training_runner (*prepare)(const problem&) = nullptr;

  explicit operator bool() const { return prepare != nullptr; }
};

struct operator_entry {
  std::string name;
  const char* colour;  // in the pictures: a hue of its family, a shade of its own
  growth cost;
  bool has_causal;                    // also benchmarked as <name>_causal
  bool exact;                         // computes full softmax: its error must be rounding alone
  std::vector<std::string> uses;      // the flags it depends on, besides heads, dim and threads
  double (*flops)(const problem&);    // what the formula needs: two for a multiply-add, none for exponentials
  runner (*prepare)(const problem&);  // makes parameters (projections, features), outside the timing
  double (*parameter_bytes)(const problem&) = nullptr;
  bool approximates = true;  // takes the place of full softmax on the same q, k, v: its error has a meaning
  bool shared_keys = false;  // the keys are the queries, normalised: its error is relative to full softmax over those
  double (*moved_bytes)(const problem&) = nullptr;  // read and written at least, where memory is the bound
  backward_entry backward{};
  // Measured at one length, besides the flags' own: together its curve of error against time.
  std::vector<setting> settings{};
  std::vector<setting> causal_settings{};  // of the causal form, where they differ
  bool only_causal = false;                // has no other form
  bool has_fast = false;                   // precision::fast changes it
};

/// Decoding: a state that has seen some tokens and is fed one more at a time.
struct stream {
  virtual ~stream() = default;
  virtual std::unique_ptr<stream> copy() const = 0;
  /// Appends tokens without attending.
  virtual void feed(input k, input v) = 0;
  virtual void step(input q, input k, input v, output out, attn::execution&) = 0;
  /// Goes back to `tokens` tokens, where more of them would make the next step slower.
  virtual void rewind(idx_t tokens) = 0;
};

struct decode_entry {
  std::string name;
  bool exact;
  std::vector<std::string> uses;
  idx_t sequences = 1;  // that a step feeds at once
  double (*flops)(const problem&);        // of one step that ends with problem.length tokens seen
  double (*cache_bytes)(const problem&);  // of the state that one step has to read, or to read and write
  std::unique_ptr<stream> (*prepare)(const problem&);
  bool approximates = true;
  bool rewritten = false;                           // the state is written as well as read
  double (*state_bytes)(const problem&) = nullptr;  // of the whole state, where a step reads only a part of it
  bool reads_anew = false;                          // each step reads another part of it
  std::string cache_type{};                         // of the elements of its cache, if it is asked for by --cache-type
  double rounding = 0;                              // the most it may err with them
};

struct family {
  const char* title;  // of its panel in the pictures, shared by families of one title
  std::vector<operator_entry> operators;
  std::vector<decode_entry> decoders;
};

family softmax_family();
family low_rank_family();
family multipole_family();
family fourier_family();
family kernel_family();
family aft_family();
family rotary_family();
family layers_family();
family cache_family();

inline std::vector<family> families() {
  return {softmax_family(), low_rank_family(), multipole_family(), kernel_family(), fourier_family(),
          aft_family(),     rotary_family(),   layers_family(),    cache_family()};
}

}  // namespace bench::inline ATTN_BENCH_TYPE
