#include "reference/fnet.hpp"
#include "golden/gradients.hpp"
#include "support/call_fourier.hpp"
#include "support/run.hpp"

namespace testing::fnet_golden {
namespace {

// [1, B, L, D] as [B, 1, L, D]: lengths are given per batch item.
template <class T>
attn::tensor_view<T> by_item(const attn::tensor_view<T>& x) {
  return {x.data(), {x.extent(1), 1, x.extent(2), x.extent(3)}};
}

template <class T>
reference::result run_fnet(const golden_case& golden) {
  const tensor<T> x = cast<T>(golden.array("x"));
  tensor<T> out(x.batch(), x.heads(), x.length(), x.dim(), T(7));
  attn::execution serial;
  const std::vector<idx_t> lengths = golden.integers("lengths");
  compiled_fnet<T>::call(by_item(view(x)), by_item(view(out)), {.lengths = lengths}, serial);
  return {cast<double>(out), {}};
}

named_tensors case_by_reference(const golden_case& golden) {
  tensor<double> x = golden.array("x"), d_out = golden.array("d_out");
  std::swap(x.extents[0], x.extents[1]), std::swap(d_out.extents[0], d_out.extents[1]);
  gradient_case c{"", {"x"}, {x}, {}};
  c.forward = [&golden](const std::vector<tensor<variable>>& in) {
    return std::vector{reference::fnet(in[0], {golden.integers("lengths")})};
  };
  named_tensors all = reverse_gradients(c, d_out);
  std::swap(all["x"].extents[0], all["x"].extents[1]);
  return all;
}

template <class T>
named_tensors case_by_library(const golden_case& golden) {
  const tensor<T> d_out = cast<T>(golden.array("d_out"));
  tensor<T> dx = d_out;
  const std::vector<idx_t> lengths = golden.integers("lengths");
  attn::execution serial;
  compiled_fnet<T>::backward(by_item(view(d_out)), {.x = by_item(view(dx))}, {.lengths = lengths}, serial);
  return {{"x", cast<double>(dx)}};
}

// Cases hold x as [B, L, D], which is read as [1, B, L, D].
golden_operator golden_fnet() {
  return {"fnet",
          {"operator", "source", "tolerance", "causal", "lengths"},
          {"x", "out"},
          [](const golden_case& golden) -> reference::result {
            require_not_causal(golden);
            tensor<double> x = golden.array("x");
            std::swap(x.extents[0], x.extents[1]);
            tensor<double> out = reference::fnet(x, {golden.integers("lengths")});
            std::swap(out.extents[0], out.extents[1]);
            return {out, {}};
          },
          run_fnet<widest_type>,
          run_fnet<float>,
          case_by_reference,
          case_by_library<widest_type>,
          case_by_library<float>};
}

const golden_entry entry(golden_fnet());

}  // namespace
}  // namespace testing::fnet_golden
