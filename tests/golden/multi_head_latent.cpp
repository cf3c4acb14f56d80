#include "golden/gradients.hpp"
#include "layers/multi_head_latent.hpp"

namespace testing::multi_head_latent_golden {
namespace {

latent_layer_problem read(const golden_case& golden) {
  latent_layer_problem p;
  for (const char* name : latent_layer_names)
    if (golden.has_array(name))
      p.add(name, p.given.empty() ? by_item(golden.array(name)) : golden.array(name));
  p.heads = golden.integer("heads"), p.causal = golden.flag("causal", false), p.norm_eps = golden.number("norm_eps");
  if (golden.has("scale")) p.scale = golden.number("scale");
  if (golden.has("rotary_base"))
    p.rotation = {.dims = golden.integer("rotary_dims"), .base = golden.number("rotary_base"), .interleaved = true};
  if (golden.has("first_position")) p.rotation.first_position = golden.integer("first_position");
  return p;
}

template <class S>
reference::result by_library(const golden_case& golden) {
  attn::execution serial;
  return {as_read(cast<double>(run_latent_layer<S>(read(golden), serial))), {}};
}
template <class S>
named_tensors gradients_by_library(const golden_case& golden) {
  const auto c = case_of<S>(read(golden));
  return named_gradients<S>(c.reference, [&](const auto& in) {
    attn::execution serial;
    return all_gradients(c, in, cast<S>(by_item(golden.array("d_out"))), serial);
  });
}

const golden_entry entry({"multi_head_latent",
                          {"operator", "source", "tolerance", "heads", "causal", "scale", "norm_eps", "rotary_dims",
                           "rotary_base", "first_position"},
                          {"x", "w_query", "w_query_down", "q_norm", "w_query_up", "w_latent", "latent_norm",
                           "w_latent_up", "w_output", "out"},
                          [](const golden_case& golden) -> reference::result {
                            const auto p = read(golden);
                            return {as_read(p.by_reference(p.inputs)), {}};
                          },
                          by_library<widest_type>,
                          by_library<float>,
                          [](const golden_case& golden) {
                            return reverse_gradients(case_of<widest_type>(read(golden)).reference,
                                                     by_item(golden.array("d_out")));
                          },
                          gradients_by_library<widest_type>,
                          gradients_by_library<float>});

}  // namespace
}  // namespace testing::multi_head_latent_golden
