#include <attn/softmax/deberta_relative.hpp>

#include "golden/gradients.hpp"

namespace testing::full_softmax_golden {
namespace {

attn::deberta_relative_options bucket_options(const golden_case& golden) {
  attn::deberta_relative_options options;
  if (golden.integer("buckets") > 0) options.max_position = golden.integer("max_position");
  return options;
}
template <class N>
attn::tensor_view<N, 3> table_of(std::conditional_t<std::is_const_v<N>, const tensor<double>, tensor<double>>& x) {
  return {x.data.data(), {x.heads(), x.length(), x.dim()}};
}
// Buckets by distance, for every pair of the case.
tensor<double> spread(const golden_case& golden, const std::string& name) {
  const tensor<double> buckets = golden.optional_array(name);
  if (buckets.empty()) return buckets;
  tensor<double> table(1, buckets.heads(), 2 * (golden.array("q").length() + golden.array("k").length()) + 1,
                       buckets.dim());
  attn::deberta_relative<double>(table_of<const double>(buckets), table_of<double>(table), bucket_options(golden));
  return table;
}

full_softmax_problem read(const golden_case& golden) {
  full_softmax_problem p{golden.array("q"), golden.array("k"), golden.array("v"), {}};
  read_softmax_options(golden, p.options);
  p.options.bias = golden.optional_array("bias");
  p.options.position_queries = golden.optional_array("position_queries");
  if (golden.has_array("key_buckets")) p.options.relative_keys = spread(golden, "key_buckets");
  if (golden.has_array("query_buckets")) p.options.position_queries = spread(golden, "query_buckets");
  return p;
}

// The gradients of tables, as those of the buckets that they were made of.
golden_gradients of_buckets(golden_gradients by_table) {
  return [=](const golden_case& golden) {
    auto all = by_table(golden);
    for (const auto& [table, name] :
         {std::pair("relative_keys", "key_buckets"), std::pair("position_queries", "query_buckets")}) {
      if (!golden.has_array(name)) continue;
      tensor<double>& sums = all[name] = golden.array(name);
      attn::deberta_relative_backward<double>(table_of<const double>(all.at(table)), table_of<double>(sums),
                                              bucket_options(golden));
    }
    return all;
  };
}

golden_operator golden_full_softmax() {
  golden_operator one = with_gradients(
      {"full_softmax", with(softmax_keys, {"buckets", "max_position", "span", "first_position"}),
       with(softmax_arrays, {"relative_bias", "relative_keys", "relative_queries", "position_queries", "key_buckets",
                             "query_buckets", "log_decay", "bias"}),
       [](const golden_case& golden) { return expected(read(golden)); },
       [](const golden_case& golden) { return run<widest_type>(read(golden)); },
       [](const golden_case& golden) { return run<float>(read(golden)); }},
      read);
  for (golden_gradients* by : {&one.gradients_by_reference, &one.gradients_in_double, &one.gradients_in_float})
    *by = of_buckets(*by);
  return one;
}

const golden_entry entry(golden_full_softmax());

}  // namespace
}  // namespace testing::full_softmax_golden
