// Bad input is refused on entry: std::invalid_argument in one sentence, out and lse untouched.
#include <attn/softmax/merge_softmax.hpp>

#include "support/refusals.hpp"

namespace testing::refusals_tests {

TEST_CASE("full_softmax refuses what does not fit", "[refusals]") {
  using options = attn::full_softmax_options<float>;
  using here = call_inputs<options>;
  auto list = common_refusals<here>();
  const auto bias = [](idx_t b, idx_t h, idx_t i, idx_t j) {
    return [=](here& d) { d.options.bias = d.shaped(b, h, i, j); };
  };
  list.push_back({"bias of another batch", "bias", bias(3, 1, 1, 9)});
  list.push_back({"bias of the key heads", "bias", bias(1, 2, 1, 9)});
  list.push_back({"bias of another query length", "bias", bias(1, 1, 5, 9)});
  list.push_back({"bias of another key length", "bias", bias(1, 1, 6, 8)});
  list.push_back({"a null bias", "null", [](here& d) { d.options.bias = {nullptr, {1, 1, 6, 9}}; }});
  const auto table = [](idx_t h, idx_t entries) {
    return [=](here& d) { d.options.relative_bias = {d.other.data.data(), {h, entries}}; };
  };
  list.push_back({"a relative bias of the key heads", "relative_bias heads", table(2, 9)});
  list.push_back({"a relative bias without a middle", "2 R + 1 entries of relative_bias", table(4, 8)});
  list.push_back({"a null relative bias", "null", [](here& d) { d.options.relative_bias = {nullptr, {4, 9}}; }});
  list.push_back({"lse in the relative bias", "overlap",
                  [](here& d) { d.options.relative_bias = {d.lse.data.data(), {1, 9}}; }});
  list.push_back({"out in bias", "overlap", [](here& d) { d.options.bias = {d.out.data.data(), {1, 1, 6, 9}}; }});
  list.push_back({"lse in bias", "overlap", [](here& d) { d.options.bias = {d.lse.data.data(), {1, 1, 1, 9}}; }});
  check_refused<compiled_full_softmax<float>>("full_softmax", list);
}

TEST_CASE("sliding_window refuses what does not fit", "[refusals]") {
  using options = attn::sliding_window_options<float>;
  using here = call_inputs<options>;
  auto list = common_refusals<here>();
  const auto own = [](here& d) {
    d.options.q_global = d.shaped(2, 4, 6, 8), d.options.k_global = d.shaped(2, 2, 9, 8);
    d.options.v_global = d.shaped(2, 2, 9, 5);
  };
  const auto with_own = [own](std::function<void(here&)> then) { return [=](here& d) { own(d), then(d); }; };
  list.push_back({"a negative left", "left", [](here& d) { d.options.left = -1; }});
  list.push_back({"a negative right", "right", [](here& d) { d.options.right = -5; }});
  list.push_back({"a dilation of 0", "dilation", [](here& d) { d.options.dilation = d.list({0}); }});
  list.push_back({"a negative dilation", "dilation", [](here& d) { d.options.dilation = d.list({1, 2, -1, 1}); }});
  list.push_back({"a dilation for some heads", "dilation", [](here& d) { d.options.dilation = d.list({1, 2}); }});
  list.push_back({"a dilation for too many heads", "dilation", [](here& d) {
                    d.options.dilation = d.list({1, 2, 1, 1, 1});
                  }});
  list.push_back({"a negative global position", "global", [](here& d) {
                    d.options.global_positions = d.list({0, -1});
                  }});
  list.push_back({"q_global alone", "k_global", [](here& d) { d.options.q_global = d.shaped(2, 4, 6, 8); }});
  list.push_back({"no v_global", "v_global", with_own([](here& d) { d.options.v_global = {}; })});
  list.push_back({"no q_global", "q_global", with_own([](here& d) { d.options.q_global = {}; })});
  list.push_back(
      {"q_global of another length", "", with_own([](here& d) { d.options.q_global = d.shaped(2, 4, 5, 8); })});
  list.push_back({"q_global of another dim", "", with_own([](here& d) { d.options.q_global = d.shaped(2, 4, 6, 9); })});
  list.push_back({"q_global of other heads", "", with_own([](here& d) { d.options.q_global = d.shaped(2, 2, 6, 8); })});
  list.push_back(
      {"k_global of another length", "", with_own([](here& d) { d.options.k_global = d.shaped(2, 2, 8, 8); })});
  list.push_back({"k_global of another dim", "", with_own([](here& d) { d.options.k_global = d.shaped(2, 2, 9, 7); })});
  list.push_back(
      {"k_global of the query heads", "", with_own([](here& d) { d.options.k_global = d.shaped(2, 4, 9, 8); })});
  list.push_back(
      {"k_global of another batch", "", with_own([](here& d) { d.options.k_global = d.shaped(1, 2, 9, 8); })});
  list.push_back(
      {"v_global of another length", "", with_own([](here& d) { d.options.v_global = d.shaped(2, 2, 8, 5); })});
  list.push_back({"v_global of another dim", "", with_own([](here& d) { d.options.v_global = d.shaped(2, 2, 9, 8); })});
  list.push_back({"a null k_global", "null", with_own([](here& d) { d.options.k_global = {nullptr, {2, 2, 9, 8}}; })});
  list.push_back({"out in v_global", "overlap", with_own([](here& d) {
                    d.options.v_global = {d.out.data.data(), {2, 2, 9, 5}, {90, 45, 5, 1}};
                  })});
  list.push_back({"lse in q_global", "overlap", with_own([](here& d) {
                    d.options.q_global = {d.lse.data.data(), {2, 4, 6, 8}, {0, 0, 0, 1}};
                  })});
  check_refused<compiled_sliding_window<float>>("sliding_window", list);
}

TEST_CASE("merge_softmax refuses what does not fit", "[refusals]") {
  tensor<float> out(2, 3, 4, 5, 7), lse(2, 3, 4, 1, 7), other(2, 3, 4, 5, 1), other_lse(2, 3, 4, 1, 1);
  const auto rows = row_view(lse), other_rows = row_view(other_lse);
  const auto check = [&](auto&& call) {
    const std::string message = refusal(call);
    INFO(message);
    CHECK(well_formed(message, "merge_softmax"));
    CHECK(std::all_of(out.data.begin(), out.data.end(), [](float x) { return x == 7; }));
    CHECK(std::all_of(lse.data.begin(), lse.data.end(), [](float x) { return x == 7; }));
  };
  check([&] { attn::merge_softmax(view(out), rows.slice(2, 0, 3), view(other), other_rows); });
  check([&] { attn::merge_softmax(view(out), rows.slice(0, 0, 1), view(other), other_rows); });
  check([&] { attn::merge_softmax(view(out), rows, view(other).slice(3, 0, 4), other_rows); });
  check([&] { attn::merge_softmax(view(out), rows, view(other).slice(2, 0, 3), other_rows); });
  check([&] { attn::merge_softmax(view(out), rows, view(other).slice(1, 0, 2), other_rows); });
  check([&] { attn::merge_softmax(view(out), rows, view(other), other_rows.slice(1, 0, 2)); });
  check([&] { attn::merge_softmax(view(out), rows, out_view<float>(nullptr, other.extents), other_rows); });
  check([&] { attn::merge_softmax(view(out), rows, view(out), other_rows); });
  check([&] { attn::merge_softmax(view(out), rows, view(other), rows); });
}

}  // namespace testing::refusals_tests
