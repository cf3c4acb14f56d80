// Bad input is refused on entry: std::invalid_argument in one sentence, out and lse untouched.
#include <attn/softmax/merge_softmax.hpp>

#include "support/refusals.hpp"

namespace testing::refusals_tests {

namespace {

// Of decays, masks of keys and dropout.
template <class Call>
std::vector<refused<Call>> decay_refusals() {
  const auto decays = [](idx_t b, idx_t h, idx_t j) {
    return [=](Call& d) { d.options.causal = true, d.options.log_decay = {d.other.data.data(), {b, h, j}}; };
  };
  const auto rate = [](double x) { return [=](Call& d) { d.options.dropout.rate = x; }; };
  const auto mask = [](idx_t b, idx_t j) {
    return [=](Call& d) {
      d.options.key_mask = attn::tensor_view<std::uint8_t, 2>(reinterpret_cast<std::uint8_t*>(d.other.data.data()), {b, j});
    };
  };
  return {{"log decays of one batch item", "log_decay batch", decays(1, 4, 9)},
          {"log decays of the key heads", "log_decay heads", decays(2, 2, 9)},
          {"log decays of the queries", "log_decay length = key length 9; found 6", decays(2, 4, 6)},
          {"log decays without causal", "causal attention, since log_decay is given; found causal = false",
           [](Call& d) { d.options.log_decay = {d.other.data.data(), {2, 4, 9}}; }},
          {"null log decays", "null",
           [](Call& d) { d.options.causal = true, d.options.log_decay = {nullptr, {2, 4, 9}}; }},
          {"a mask of keys of another batch", "key_mask batch", mask(3, 9)},
          {"a mask of the queries as keys", "key_mask length = key length 9; found 6", mask(1, 6)},
          {"out in the mask of keys", "overlap",
           [](Call& d) {
             d.options.key_mask =
                 attn::tensor_view<std::uint8_t, 2>(reinterpret_cast<std::uint8_t*>(d.out.data.data()), {1, 9});
           }},
          {"dropout of everything", "a dropout rate from 0 to less than 1; found 1", rate(1)},
          {"a negative rate", "a dropout rate", rate(-0.1)},
          {"a rate of NaN", "a dropout rate", rate(std::numeric_limits<double>::quiet_NaN())}};
}

// A window is of tokens, and a step appends tokens: for keys that stand for several, neither can be asked.
template <class Options>
concept has_span = requires(Options o) { o.span; };
static_assert(!has_span<attn::sliding_window_options<float>> && !has_span<attn::sliding_window_step_options<float>> &&
              !has_span<attn::full_softmax_step_options<float>>);

}  // namespace

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
  using rows = attn::tensor_view<const float, 3>;
  const auto keys = [](idx_t h, idx_t entries, idx_t dim) {
    return [=](here& d) { d.options.relative_keys = rows(d.other.data.data(), {h, entries, dim}); };
  };
  const auto queries = [](idx_t h, idx_t entries, idx_t dim) {
    return [=](here& d) { d.options.position_queries = rows(d.other.data.data(), {h, entries, dim}); };
  };
  list.push_back({"relative keys of the key heads", "relative_keys heads", keys(2, 3, 8)});
  list.push_back({"relative keys without a middle", "2 R + 1 rows of relative_keys; found 4", keys(4, 4, 8)});
  list.push_back({"relative keys of another dim", "relative_keys dim = query dim 8; found 5", keys(1, 3, 5)});
  list.push_back({"position queries of the key heads", "position_queries heads", queries(2, 3, 8)});
  list.push_back({"position queries without a middle", "2 R + 1 rows of position_queries; found 4", queries(4, 4, 8)});
  list.push_back({"position queries of another dim", "position_queries dim = key dim 8; found 5", queries(1, 3, 5)});
  list.push_back({"null position queries", "null", [](here& d) { d.options.position_queries = {nullptr, {1, 3, 8}}; }});
  list.push_back({"out in the position queries", "overlap",
                  [](here& d) { d.options.position_queries = {d.out.data.data(), {1, 3, 8}}; }});
  for (auto& one : decay_refusals<here>()) list.push_back(one);
  list.push_back({"out in bias", "overlap", [](here& d) { d.options.bias = {d.out.data.data(), {1, 1, 6, 9}}; }});
  list.push_back({"lse in bias", "overlap", [](here& d) { d.options.bias = {d.lse.data.data(), {1, 1, 1, 9}}; }});
  check_refused<compiled_full_softmax<float>>("full_softmax", list);
}

TEST_CASE("sliding_window refuses what does not fit", "[refusals]") {
  using options = attn::sliding_window_options<float>;
  using here = call_inputs<options>;
  auto list = common_refusals<here>();
  static const std::vector<idx_t> two_positions = {0, 1};
  const auto own = [](here& d) {
    d.options.q_global = d.shaped(2, 4, 6, 8), d.options.k_global = d.shaped(2, 2, 9, 8);
    d.options.v_global = d.shaped(2, 2, 9, 5);
  };
  const auto with_own = [own](std::function<void(here&)> then) { return [=](here& d) { own(d), then(d); }; };
  list.push_back({"a negative left", "left", [](here& d) { d.options.left = -1; }});
  list.push_back({"a negative right", "right", [](here& d) { d.options.right = -5; }});
  list.push_back({"a dilation of 0", "dilation", [](here& d) { d.options.dilation = d.list(0); }});
  list.push_back({"a negative dilation", "dilation", [](here& d) { d.options.dilation = d.list(1, 2, -1, 1); }});
  list.push_back({"a dilation for some heads", "dilation", [](here& d) { d.options.dilation = d.list(1, 2); }});
  list.push_back({"a dilation for too many heads", "dilation", [](here& d) {
                    d.options.dilation = d.list(1, 2, 1, 1, 1);
                  }});
  list.push_back({"a negative global position", "global", [](here& d) { d.options.global_positions = d.list(0, -1); }});
  list.push_back({"global counts of other items", "global_counts", [](here& d) {
                    d.options.global_positions = two_positions, d.options.global_counts = d.list(1, 1, 0);
                  }});
  list.push_back({"global counts of other positions", "sum of global_counts", [](here& d) {
                    d.options.global_positions = two_positions, d.options.global_counts = d.list(1, 2);
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
  for (auto& one : decay_refusals<here>()) list.push_back(one);
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
