// Bad input of the operators that attend by a pattern: refused in one sentence, out and lse untouched.
#include "support/call_patterns.hpp"
#include "support/refusals.hpp"

namespace testing::pattern_refusals_tests {

TEST_CASE("block refuses what does not fit", "[refusals]") {
  using here = call_inputs<attn::block_options<float>>;
  auto list = common_refusals<here>();
  const auto table = [](std::vector<idx_t> entries, idx_t heads, idx_t blocks) {
    return [=](here& d) {
      d.options.size = 4;
      d.options.permutation = {d.list(entries).data(), {heads, blocks}};
    };
  };
  list.push_back({"blocks of 0", "block size >= 1; found 0", [](here& d) { d.options.size = 0; }});
  list.push_back({"negative blocks", "block size", [](here& d) { d.options.size = -3; }});
  list.push_back({"negative neighbours", "neighbours", [](here& d) { d.options.neighbours = -1; }});
  list.push_back({"an index below -1", "from -1 to 2; found -2", table({0, -2, 1}, 1, 3)});
  list.push_back({"an index beyond the blocks", "from -1 to 2; found 3", table({0, 1, 3}, 1, 3)});
  list.push_back({"a table of too few blocks", "blocks 3; found 2", table({0, 1}, 1, 2)});
  list.push_back({"a table of some heads", "heads", table({0, 1, 2, 2, 1, 0}, 2, 3)});
  list.push_back({"a null table", "null", [](here& d) {
                    d.options.size = 4, d.options.permutation = {nullptr, {1, 3}};
                  }});
  check_refused<compiled_block<float>>("block", list);
}

TEST_CASE("strided refuses what does not fit", "[refusals]") {
  using here = call_inputs<attn::strided_options<float>>;
  auto list = common_refusals<here>();
  const auto fixed = [](idx_t summary) {
    return [=](here& d) {
      d.options.kind = attn::strided_kind::fixed;
      d.options.stride = 5, d.options.summary = summary;
    };
  };
  list.push_back({"a stride of 0", "stride >= 1; found 0", [](here& d) { d.options.stride = 0; }});
  list.push_back({"a negative stride", "stride", [](here& d) { d.options.stride = -4; }});
  list.push_back({"a negative summary", "summary", fixed(-1)});
  list.push_back({"a summary longer than the stride", "summary <= stride 5; found 6", fixed(6)});
  check_refused<compiled_strided<float>>("strided", list);
}

TEST_CASE("bigbird refuses what does not fit", "[refusals]") {
  using here = call_inputs<attn::bigbird_options<float>>;
  auto list = common_refusals<here>();
  const auto table = [](std::vector<idx_t> entries, idx_t heads, idx_t blocks, idx_t count) {
    return [=](here& d) {
      d.options.size = 4;
      d.options.random = {d.list(entries).data(), {heads, blocks, count}};
    };
  };
  list.push_back({"blocks of 0", "block size >= 1; found 0", [](here& d) { d.options.size = 0; }});
  list.push_back(
      {"an even window", "odd number of window blocks; found 2", [](here& d) { d.options.window_blocks = 2; }});
  list.push_back({"no window", "window blocks", [](here& d) { d.options.window_blocks = 0; }});
  list.push_back({"a negative window", "window blocks", [](here& d) { d.options.window_blocks = -3; }});
  list.push_back({"negative global blocks", "global blocks", [](here& d) { d.options.global_blocks = -1; }});
  list.push_back({"a random block below -1", "from -1 to 2; found -2", table({0, 1, 2, 0, -2, 1}, 1, 3, 2)});
  list.push_back({"a random block beyond the last", "from -1 to 2; found 3", table({0, 1, 2, 0, -1, 3}, 1, 3, 2)});
  list.push_back({"a table of too few rows", "rows = key blocks 3; found 2", table({0, 1, 2, 0}, 1, 2, 2)});
  list.push_back({"a table of some heads", "heads", table({0, 1, 2, 2, 1, 0}, 2, 3, 1)});
  list.push_back({"a null table", "null", [](here& d) { d.options.size = 4, d.options.random = null_view(1, 3, 2); }});
  check_refused<compiled_bigbird<float>>("bigbird", list);
}

namespace {

struct everything {
  using options = attn::pattern_softmax_options<float>;
  static void call(in_view<float> q, in_view<float> k, in_view<float> v, out_view<float> out, const options& chosen,
                   const score_of<float>& score, attn::execution& execution) {
    const listed_pattern all{{{{-100, 100}, {{.range = {0, 100}}}}}};
    compiled_pattern_softmax<float>::call(q, k, v, out, all, chosen, score, execution);
  }
};

}  // namespace

TEST_CASE("pattern_softmax refuses what does not fit", "[refusals]") {
  check_refused<everything>("pattern_softmax", common_refusals<call_inputs<everything::options>>());
}

}  // namespace testing::pattern_refusals_tests
