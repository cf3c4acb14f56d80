#include "save.hpp"

#include <attn/kernel/draw_features.hpp>
#include <attn/low_rank/draw_projection.hpp>

#include <filesystem>

#include "inputs.hpp"
#include "npy.hpp"

namespace bench {
namespace {

/// The first `count` of the numbers that all operators view.
std::vector<float> drawn(role r, idx_t count) {
  const auto size = static_cast<std::size_t>(count);
  const float* const numbers = drawn_numbers<float>(r, size);
  return {numbers, numbers + size};
}

template <int N>
std::vector<float> numbers_in(const attn::tensor<float, N>& x) {
  return {x.data(), x.data() + x.size()};
}

}  // namespace

void save(const std::string& folder, const flags& set, const variant& x, idx_t length) {
  std::filesystem::create_directories(folder);
  const auto write = [&](const std::string& name, const std::vector<float>& values) {
    write_npy(folder + "/" + name + ".npy", values);
  };
  const idx_t size = set.heads * length * set.dim;
  write("query", drawn(role::query, size));
  write("key", drawn(role::key, size));
  write("value", drawn(role::value, size));
  write("gradient", drawn(role::gradient, size));
  write("parameter", drawn(role::parameter, 2 * set.rank * length));
  write("rate", drawn(role::rate, set.heads * length));
  write("log_decay", drawn(role::log_decay, set.heads * length));
  if (x.name.starts_with("aft_full")) write("bias", drawn(role::bias, length * length));  // no other has so many
  // As kernel.cpp and low_rank.cpp draw them.
  write("features", numbers_in(attn::draw_features<float>(set.features, set.dim, {.seed = 7})));
  write("projection_e", numbers_in(attn::draw_projection<float>(set.rank, length, {.seed = 1})));
  write("projection_f", numbers_in(attn::draw_projection<float>(set.rank, length, {.seed = 2})));
  for (const auto& [part, values] : x.results(length))
    write(x.name + "_" + std::to_string(length) + (part.empty() ? "" : "_" + part), values);
}

}  // namespace bench
