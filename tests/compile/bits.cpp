// Prints the bits of a few results. The lines "stream" and "random" are the same with every compiler and processor; the
// others are the same for the headers of the tree and the headers in one file, which -include then names.
#if !defined(ATTN_VERSION)
#include <attn/attn.hpp>
#endif

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr attn::idx_t heads = 2, length = 150, dim = 24;

std::uint64_t hash(const std::string& bytes) {
  std::uint64_t h = 0xcbf29ce484222325;
  for (const char c : bytes) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return h;
}

// The lowest byte first, whatever the machine's order.
std::string bytes_of(const float* numbers, attn::idx_t count) {
  std::string bytes;
  for (attn::idx_t n = 0; n < count; ++n)
    for (int shift = 0; shift < 32; shift += 8)
      bytes.push_back(static_cast<char>(std::bit_cast<std::uint32_t>(numbers[n]) >> shift & 255));
  return bytes;
}

void say(const char* name, const std::string& bytes) {
  std::printf("%-16s %016llx\n", name, static_cast<unsigned long long>(hash(bytes)));
}
void say(const char* name, const attn::tensor<float>& x) { say(name, bytes_of(x.data(), x.size())); }

attn::tensor<float> waves(float step) {
  attn::tensor<float> x({1, heads, length, dim});
  for (attn::idx_t n = 0; n < x.size(); ++n) x.data()[n] = std::sin(step * static_cast<float>(n));
  return x;
}

// Numbers that float holds exactly, so that no rounding differs.
std::string exact_state() {
  attn::linear_state<float> state({.heads = 2, .features = 3, .value_dim = 2});
  attn::tensor<float> k({1, 2, 5, 3}), v({1, 2, 5, 2}), out({1, 2, 5, 2});
  for (attn::idx_t n = 0; n < k.size(); ++n) k.data()[n] = static_cast<float>(n % 7) / 4;
  for (attn::idx_t n = 0; n < v.size(); ++n) v.data()[n] = static_cast<float>(n % 5) - 2;
  attn::linear_step(state, k, k, v, out);
  std::ostringstream stream;
  state.write(stream);
  const std::string bytes = stream.str();
  std::istringstream again(bytes);
  attn::linear_state<float> reader({.heads = 2, .features = 3, .value_dim = 2});
  reader.read(again);
  std::ostringstream copy;
  reader.write(copy);
  if (copy.str() != bytes) std::puts("what was read is not what was written");
  return bytes;
}

}  // namespace

int main() {
  const auto q = waves(0.37f), k = waves(0.11f), v = waves(0.05f), d_out = waves(0.7f);
  attn::tensor<float> out({1, heads, length, dim}), dq = out, dk = out, dv = out;

  say("stream", exact_state());
  const auto features = attn::draw_features<float>(32, dim, {.seed = 7});
  const auto projection = attn::draw_projection<float>(16, length, {.seed = 7});
  say("random", bytes_of(projection.data(), projection.size()));

  attn::full_softmax(q, k, v, out, {.causal = true});
  say("full_softmax", out);
  attn::full_softmax_backward(q, k, v, out, d_out, {.q = dq, .k = dk, .v = dv}, {.causal = true});
  say("backward", dk);
  attn::sliding_window(q, k, v, out, {.left = 20, .right = 3});
  say("sliding_window", out);
  attn::linformer(q, k, v, out, projection, projection);
  say("linformer", out);
  attn::linear(q, k, v, out, {.causal = true});
  say("linear", out);
  attn::performer(q, k, v, out, features);
  say("performer", out);
  attn::aft_simple(q, k, v, out);
  say("aft_simple", out);
  attn::fnet(q, out);
  say("fnet", out);
}
