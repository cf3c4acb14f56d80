// Sizes that no memory can hold, or that cannot be counted, are refused in one sentence, whatever the other extents
// are.
#include <attn/attn.hpp>

#include "support/catch.hpp"
#include "support/refusal.hpp"

namespace testing::sizes_tests {
namespace {

using attn::idx_t;

// Whose products with anything overflow; which no list of anything has; whose lists of tokens no process can address.
constexpr idx_t most = std::numeric_limits<idx_t>::max(), huge = idx_t(1) << 60, large = idx_t(1) << 45;

struct wrong_size {
  const char *name, *says;
  void (*make)();
};

template <class State, idx_t batch, idx_t heads, idx_t features, idx_t value_dim, idx_t keep>
void kernel_state() {
  State({.batch = batch, .heads = heads, .features = features, .value_dim = value_dim, .keep = keep});
}
template <class State, idx_t batch, idx_t heads, idx_t dim>
void state_of() {
  State({.batch = batch, .heads = heads, .dim = dim});
}

template <class State>
void add_states(std::vector<wrong_size>& all, const char* name) {
  all.insert(all.end(), {{name, "memory can hold", &kernel_state<State, huge, 0, 0, 0, 0>},
                         {name, "memory can hold", &kernel_state<State, huge, 0, 4, 4, 0>},
                         {name, "memory can hold", &kernel_state<State, 0, huge, 4, 4, 0>},
                         {name, "memory can hold", &kernel_state<State, 0, most, most, most, 0>},
                         {name, "memory can hold", &kernel_state<State, 0, 0, 4, huge, 0>},
                         {name, "memory can hold", &kernel_state<State, 0, 0, 4, 4, most>},
                         {name, "memory can hold", &kernel_state<State, large, 0, 0, 4, 4>}});
}
template <class State>
void add_caches(std::vector<wrong_size>& all, const char* name) {
  all.insert(all.end(), {{name, "memory can hold", &state_of<State, huge, 0, 0>},
                         {name, "memory can hold", &state_of<State, huge, 0, 4>},
                         {name, "memory can hold", &state_of<State, 0, huge, 64>},
                         {name, "memory can hold", &state_of<State, 0, most, most>},
                         {name, "memory can hold", &state_of<State, most, 0, 4>},
                         {name, "memory can hold", &state_of<State, 0, 1, most - 5>}});
}

template <class Cache>
void reserve(idx_t heads, idx_t tokens) {
  Cache({.batch = 1, .heads = heads, .dim = 8}).reserve(tokens);
}

std::vector<wrong_size> wrong_sizes() {
  std::vector<wrong_size> all = {
      {"delta_rule_state", "memory can hold", [] { attn::delta_rule_state<float>({.batch = huge, .heads = 0}); }},
      {"delta_rule_state", "memory can hold", [] { attn::delta_rule_state<float>({.batch = 0, .heads = huge}); }},
      {"delta_rule_state", "memory can hold", [] { attn::delta_rule_state<float>({.batch = 0, .keep = huge}); }},
      {"delta_rule_state", "memory can hold", [] { attn::delta_rule_state<float>({.batch = 0, .dim = most}); }},
      {"dplr_state", "memory can hold", [] { attn::dplr_state<float>({.batch = 0, .dim = most}); }},
      {"aft_local_state", "memory can hold",
       [] { attn::aft_local_state<float>({.batch = 0, .dim = 4}, {.window = large}); }},
      {"aft_conv_state", "memory can hold",
       [] { attn::aft_conv_state<float>({.heads = 0, .dim = 4}, {.width = huge + 1}); }},
      {"kv_cache", "memory can hold", [] { reserve<attn::kv_cache<float>>(1, large); }},
      {"kv_cache", "memory can hold", [] { reserve<attn::kv_cache<float>>(0, most); }},
      {"kv_cache", "memory can hold", [] { reserve<attn::kv_cache<std::int8_t>>(1, large); }},
      {"topk_blocks_cache", "memory can hold", [] { reserve<attn::topk_blocks_cache<float>>(1, large); }},
      {"topk_blocks_cache", "memory can hold", [] { reserve<attn::topk_blocks_cache<float>>(0, huge); }},
      {"multipole_cache", "memory can hold", [] { reserve<attn::multipole_cache<float>>(1, large); }},
      {"multipole_cache", "memory can hold", [] { reserve<attn::multipole_cache<float>>(0, most); }},
      {"page_pool", "memory can hold", [] { attn::page_pool<float>({.pages = 1, .page_tokens = large, .dim = 8}); }},
      {"page_pool", "memory can hold", [] { attn::page_pool<float>({.pages = 0, .page_tokens = most, .dim = 8}); }},
      {"page_pool", "memory can hold", [] { attn::page_pool<float>({.pages = large, .dim = 0}); }},
      {"sliding_window_cache", "memory can hold",
       [] { attn::sliding_window_cache<float>({.dim = 8}, {.left = large}); }},
      {"sliding_window_cache", "memory can hold",
       [] { attn::sliding_window_cache<float>({.heads = 0, .dim = 8}, {.left = huge}); }},
      {"lsh", "rounds <= 65536; found 2147483648",
       [] {
         Eigen::MatrixXf x = Eigen::MatrixXf::Ones(3, 2), out(3, 2);
         attn::lsh(x, x, out, {.rounds = idx_t(1) << 31});
       }},
      {"draw_rotations", "rounds <= 65536; found 2147483648",
       [] { attn::draw_rotations<float>(idx_t(1) << 31, 0, 2); }},
      {"tensor", "memory can hold", [] { attn::tensor<float, 2>({0, most}); }},
      {"for_each_sequence", "offsets below",
       [] { attn::for_each_sequence({.offsets = std::array<idx_t, 2>{0, most}}, [](auto&&...) {}); }},
      {"for_each_sequence", "key_offsets below",
       [] {
         attn::for_each_sequence(
             {.query_offsets = std::array<idx_t, 2>{0, 1}, .key_offsets = std::array<idx_t, 2>{0, huge}},
             [](auto&&...) {});
       }},
  };
  add_states<attn::linear_state<float>>(all, "linear_state");
  add_states<attn::performer_state<float>>(all, "performer_state");
  add_states<attn::rfa_state<float>>(all, "rfa_state");
  add_caches<attn::aft_simple_state<float>>(all, "aft_simple_state");
  add_caches<attn::aft_local_state<float>>(all, "aft_local_state");
  add_caches<attn::kv_cache<float>>(all, "kv_cache");
  add_caches<attn::sliding_window_cache<double>>(all, "sliding_window_cache");
  add_caches<attn::multipole_cache<float>>(all, "multipole_cache");
  return all;
}

}  // namespace

TEST_CASE("sizes that no memory can hold are refused, whatever the other extents are", "[sizes]") {
  int number = 0;
  for (const wrong_size& wrong : wrong_sizes()) {
    const std::string message = refusal(wrong.make);
    CAPTURE(number++, message);
    CHECK(well_formed(message, wrong.name));
    CHECK(message.find(wrong.says) != std::string::npos);
  }
}

// Views are refused before anything is computed from their extents and strides that no number can hold.
TEST_CASE("views that no memory can hold are refused", "[sizes]") {
  std::vector<float> memory(64);
  const auto call = [&](const attn::tensor_view<float>& q, const attn::tensor_view<float>& k) {
    return refusal([&] {
      Eigen::MatrixXf out(2, 3);
      attn::full_softmax(q, k, k, out);
    });
  };
  const attn::tensor_view<float> good(memory.data(), {1, 1, 2, 3});
  for (const auto& [extents, strides] : std::vector<std::array<std::array<idx_t, 4>, 2>>{
           {{{1, 1, 2, 3}, {0, 0, most, 1}}},
           {{{1, 1, 2, 3}, {0, 0, -most - 1, 1}}},
           {{{1, 1, most, 3}, {0, 0, 3, 1}}},
           {{{1, 1, huge, huge}, {0, 0, 1, huge}}},
           {{{most, most, 0, 3}, {1, 1, 1, 1}}},
           {{{1, most, most, 0}, {0, 0, 0, 1}}}}) {
    const attn::tensor_view<float> wrong(memory.data(), extents, strides);
    CAPTURE(extents, strides);
    CHECK(well_formed(call(wrong, good), "full_softmax"));
    CHECK(well_formed(call(good, wrong), "full_softmax"));
    CHECK(well_formed(call(wrong, wrong), "full_softmax"));
  }
}

// A process addresses less than 2^47 bytes: from there on a view is refused, whichever it is, before it is read.
TEST_CASE("strides that lead out of a process's memory are refused", "[sizes]") {
  std::vector<float> memory(64, 1);
  std::vector<std::uint8_t> flags(64, 1);
  const attn::tensor_view<float> x(memory.data(), {1, 1, 2, 2});
  std::vector<float> result(8);
  const attn::tensor_view<float> out(result.data(), {1, 1, 2, 2});
  const auto says = [](auto&& call) { return refusal(call).find("with strides * extents that memory can hold") < 99; };
  for (idx_t bytes : {idx_t(1) << 47, idx_t(3) << 46, idx_t(1) << 48, idx_t(1) << 53, idx_t(1) << 59, idx_t(1) << 60,
                      -(idx_t(1) << 47), -(idx_t(1) << 55)}) {
    CAPTURE(bytes);
    const idx_t away = bytes / 4;
    const attn::tensor_view<float> wrong(memory.data(), {1, 1, 2, 2}, {4, 4, away, 1});
    CHECK(says([&] { attn::full_softmax(wrong, x, x, out); }));
    CHECK(says([&] { attn::full_softmax(x, wrong, x, out); }));
    CHECK(says([&] { attn::full_softmax(x, x, wrong, out); }));
    CHECK(says([&] { attn::full_softmax(x, x, x, wrong); }));
    CHECK(says([&] { attn::full_softmax(x, x, x, out, {.bias = wrong}); }));
    CHECK(says([&] { attn::full_softmax(x, x, x, out, {.lse = {memory.data(), {1, 1, 2}, {2, 2, away}}}); }));
    CHECK(says([&] { attn::full_softmax(x, x, x, out, {.relative_bias = {memory.data(), {1, 3}, {3, away / 2}}}); }));
    const attn::tensor_view<std::uint8_t> mask(flags.data(), {1, 1, 2, 2}, {4, 4, bytes, 1});
    CHECK(says([&] { attn::full_softmax(x, x, x, out, {.mask = mask}); }));
    const attn::tensor_view<std::uint8_t, 2> key_mask(flags.data(), {1, 2}, {2, bytes});
    CHECK(says([&] { attn::full_softmax(x, x, x, out, {.key_mask = key_mask}); }));
    std::vector<std::int32_t> lists(8);
    const attn::tensor_view<std::int32_t> indices(lists.data(), {1, 1, 2, 2}, {4, 4, away, 1});
    CHECK(says([&] { attn::detail::call_views("sizes").read("indices", indices); }));
  }
  CHECK(result == std::vector<float>(8));
}

}  // namespace testing::sizes_tests
