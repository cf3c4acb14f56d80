#include "golden/gradients.hpp"
#include "support/call_low_rank.hpp"

namespace testing::linformer_golden {
namespace {

linformer_problem read(const golden_case& golden) {
  linformer_problem p{golden.array("q"), golden.array("k"), golden.array("v"), {}};
  read_softmax_options(golden, p.options);
  require_not_causal(golden);
  p.options.e = golden.array("e");
  p.options.f = golden.has_array("f") ? golden.array("f") : p.options.e;
  return p;
}

// Where a case has one projection for keys and values, its gradient is the sum of both parts.
named_tensors with_one(named_tensors all, bool one) {
  for (std::size_t n = 0; one && n < all["e"].data.size(); ++n) all["e"].data[n] += all["f"].data[n];
  return all;
}

named_tensors case_by_reference(const golden_case& golden) {
  const linformer_problem p = read(golden);
  gradient_case c{"", {"q", "k", "v", "e", "f"}, {p.q, p.k, p.v, p.options.e, p.options.f}, {}};
  c.forward = [&p](const std::vector<tensor<variable>>& x) {
    reference::basic_linformer_options<variable> options;
    reference::copy_choices(p.options, options);
    options.e = x[3], options.f = x[4];
    return std::vector{reference::linformer(x[0], x[1], x[2], options).out};
  };
  return with_one(reverse_gradients(c, golden.array("d_out")), !golden.has_array("f"));
}

template <class T>
named_tensors case_by_library(const golden_case& golden) {
  const linformer_problem p = read(golden);
  const tensor<T> q = cast<T>(p.q), k = cast<T>(p.k), v = cast<T>(p.v), e = cast<T>(p.options.e),
                  f = cast<T>(p.options.f), out = cast<T>(golden.array("out")), d_out = cast<T>(golden.array("d_out"));
  tensor<T> dq = q, dk = k, dv = v, de = e, df = f;
  const auto per_head = [](tensor<T>& x) {
    return attn::tensor_view<T, 3>(x.data.data(), {x.heads(), x.length(), x.dim()});
  };
  attn::linformer_options<T> options;
  copy_common(p.options, options);
  attn::execution serial;
  compiled_linformer<T>::backward(view(q), view(k), view(v), view(out), heads_view(e), heads_view(f), view(d_out),
                                  {.q = view(dq), .k = view(dk), .v = view(dv), .e = per_head(de), .f = per_head(df)},
                                  options, serial);
  return with_one({{"q", cast<double>(dq)},
                   {"k", cast<double>(dk)},
                   {"v", cast<double>(dv)},
                   {"e", cast<double>(de)},
                   {"f", cast<double>(df)}},
                  !golden.has_array("f"));
}

golden_operator golden_linformer() {
  return {"linformer",
          {"operator", "source", "tolerance", "causal", "scale", "lengths", "query_lengths", "key_lengths"},
          {"q", "k", "v", "e", "f", "out", "lse"},
          [](const golden_case& golden) { return expected(read(golden)); },
          [](const golden_case& golden) { return run<widest_type>(read(golden)); },
          [](const golden_case& golden) { return run<float>(read(golden)); },
          case_by_reference,
          case_by_library<widest_type>,
          case_by_library<float>};
}

const golden_entry entry(golden_linformer());

}  // namespace
}  // namespace testing::linformer_golden
