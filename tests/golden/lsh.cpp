#include "reference/lsh.hpp"

#include "golden/gradients.hpp"
#include "support/run_pattern_backward.hpp"

namespace testing::lsh_golden {
namespace {

reference::lsh_options read(const golden_case& golden) {
  reference::lsh_options o;
  read_softmax_options(golden, o);
  o.rounds = golden.integer("rounds"), o.buckets = golden.integer("buckets"), o.chunk = golden.integer("chunk");
  if (golden.has("lookback")) o.lookback = golden.integer("lookback");
  if (golden.has("lookahead")) o.lookahead = golden.integer("lookahead");
  if (golden.has("norm_eps")) o.norm_eps = golden.number("norm_eps");
  o.wrap = golden.flag("wrap", false);
  o.scaled = golden.flag("scaled", true);
  o.rotations = golden.array("rotations");
  return o;
}

template <class T>
reference::result run(const golden_case& golden) {
  const reference::lsh_options from = read(golden);
  common_softmax_options<T, attn::lsh_options<T>> stored(from);
  auto& o = stored.options;
  o.rounds = from.rounds, o.buckets = from.buckets, o.chunk = from.chunk;
  o.lookback = from.lookback, o.lookahead = from.lookahead, o.wrap = from.wrap, o.scaled = from.scaled;
  o.norm_eps = static_cast<T>(from.norm_eps);
  const tensor<T> rotations = cast<T>(from.rotations), q = cast<T>(golden.array("q")), v = cast<T>(golden.array("v"));
  tensor<T> out(q.batch(), q.heads(), q.length(), v.dim(), T(7)), lse(q.batch(), q.heads(), q.length(), 1, T(7));
  o.rotations = view(rotations), o.lse = row_view(lse);
  attn::execution serial;
  compiled_lsh<T>::call(view(q), view(v), view(out), o, {}, serial);
  return {cast<double>(out), cast<double>(lse)};
}

problem<reference::lsh_options> read_problem(const golden_case& golden) {
  return {golden.array("q"), {}, golden.array("v"), read(golden)};
}

golden_operator golden_lsh() {
  return with_gradients(
      {"lsh", with(softmax_keys, {"rounds", "buckets", "chunk", "scaled", "lookback", "lookahead", "wrap", "norm_eps"}),
       with(softmax_arrays, {"rotations"}),
       [](const golden_case& golden) { return reference::lsh(golden.array("q"), golden.array("v"), read(golden)); },
       run<widest_type>, run<float>},
      read_problem);
}

const golden_entry entry(golden_lsh());

}  // namespace
}  // namespace testing::lsh_golden
