// Random options of full_softmax and sliding_window, at the ends of their ranges and beyond: what no option can be is
// refused in one sentence, all else gives what the naive references give. How to run more calls: fuzz.cpp.
#include "laws/fuzz.hpp"
#include "laws/law.hpp"
#include "reference/full_softmax.hpp"
#include "reference/sliding_window.hpp"

namespace testing::fuzz_options_tests {
namespace {

constexpr double inf = std::numeric_limits<double>::infinity(), none = std::numeric_limits<double>::quiet_NaN();
constexpr idx_t most = std::numeric_limits<idx_t>::max();

// A value of an option, and whether it is one.
template <class T>
struct choice {
  T value;
  bool right = true;
};

template <class T>
struct options_case {
  bool window = false, wrong = false;
  std::string name{};
  law_shape shape{};
  attn::full_softmax_options<T> full{};
  attn::sliding_window_options<T> windowed{};
  reference::sliding_window_options wanted{};
  std::vector<T> slopes{}, sinks{};
  tensor<T> bias{}, decay{};
  std::vector<std::uint8_t> seen{};
};

template <class T>
options_case<T> draw(random_source& random) {
  options_case<T> c;
  c.window = random.below(2) == 0;
  law_shape& s = c.shape;
  s.batch = 1 + random.below(2), s.kv_heads = 1 + random.below(2), s.heads = s.kv_heads * (1 + random.below(2));
  s.queries = random.below(20), s.keys = random.below(40);
  s.dim = 1 + random.below(9), s.value_dim = 1 + random.below(9);
  const auto pick = [&](const auto& list) {
    const auto chosen = one_of(random, list);
    c.wrong |= !chosen.right;
    c.name += " " + std::to_string(chosen.value);
    return chosen.value;
  };
  const auto sometimes = [&](const char* name) {
    if (random.below(4) != 0) return false;
    c.name += std::string(", ") + name;
    return true;
  };
  auto& w = c.wanted;
  const auto both = [&](auto&& set) { set(c.full), set(c.windowed); };
  using real_choices = std::vector<choice<double>>;
  using index_choices = std::vector<choice<idx_t>>;
  if (sometimes("causal")) both([](auto& o) { o.causal = true; }), w.causal = true;
  if (sometimes("scale")) {
    w.scale = static_cast<double>(static_cast<T>(
        pick(real_choices{{0}, {-0.7}, {0.3}, {1}, {1e-30}, {none, false}, {inf, false}, {-inf, false}})));
    both([&](auto& o) { o.scale = static_cast<T>(*w.scale); });
  }
  if (sometimes("softcap")) {
    w.softcap = static_cast<double>(
        static_cast<T>(pick(real_choices{{0.5}, {3}, {50}, {0, false}, {-1, false}, {none, false}, {inf, false}})));
    both([&](auto& o) { o.softcap = static_cast<T>(*w.softcap); });
  }
  if (sometimes("first position")) {
    w.first_position = pick(index_choices{{0}, {-3}, {5}, {100}, {-200}, {most, false}, {-most, false}});
    both([&](auto& o) { o.first_position = w.first_position; });
  }
  // One number more than there are heads, at times.
  const auto list = [&](const real_choices& values, std::vector<T>& into) {
    const idx_t heads = s.heads + (random.below(12) == 0);
    c.wrong |= heads != s.heads;
    for (idx_t h = 0; h < heads; ++h) into.push_back(static_cast<T>(pick(values)));
  };
  if (sometimes("slopes")) {
    // Times distances up to 240 they round scores to a few units of the tolerance.
    list({{0}, {0.25}, {-0.1}, {0.125}, {0.0625}, {0.2}, {none, false}, {0.125}}, c.slopes);
    both([&](auto& o) { o.alibi_slopes = c.slopes; });
  }
  if (sometimes("sinks")) {
    list({{0}, {2}, {-3}, {-inf}, {1}, {inf, false}, {none, false}, {0.5}}, c.sinks);
    both([&](auto& o) { o.sinks = c.sinks; });
  }
  w.alibi_slopes = cast<double>(c.slopes), w.sinks = cast<double>(c.sinks);
  if (sometimes("dropout")) {
    w.dropout_rate = pick(real_choices{{0}, {0.1}, {0.5}, {-0.1, false}, {1, false}, {none, false}});
    w.dropout_seed = 5;
    both([&](auto& o) { o.dropout = {w.dropout_rate, w.dropout_seed}; });
  }
  if (sometimes("skip")) {  // what is left out is less than the tolerance
    const T below = static_cast<T>(pick(real_choices{{50}, {80}, {inf}, {none, false}, {-1, false}}));
    both([&](auto& o) { o.skip_below = below; });
  }
  if (sometimes("mask of keys")) {
    w.key_mask = tensor<double>(random.below(2) ? idx_t(1) : s.batch, 1, 1, s.keys);
    for (double& x : w.key_mask.data) c.seen.push_back(x = random.below(3) != 0);
    both([&](auto& o) {
      o.key_mask = attn::tensor_view<std::uint8_t, 2>(c.seen.data(), {w.key_mask.batch(), s.keys});
    });
  }
  if (sometimes("log decays")) {
    c.wrong |= !w.causal;
    c.decay = tensor<T>(s.batch, s.heads, s.keys, 1);
    for (T& x : c.decay.data) x = random.below(8) == 0 ? T(-inf) : static_cast<T>(-std::abs(random.normal()));
    w.log_decay = cast<double>(c.decay);
    both([&](auto& o) { o.log_decay = row_view(c.decay); });
  }
  if (c.window) {
    w.left = c.windowed.left = pick(index_choices{{0}, {1}, {3}, {17}, {64}, {most}, {most - 1}, {-1, false}});
    w.right = c.windowed.right = pick(index_choices{{0}, {2}, {5}, {31}, {most}, {most - 1}, {-most, false}});
    const idx_t dilations = sometimes("dilation") ? random.below(2) ? s.heads : 1 : 0;
    for (idx_t n = 0; n < dilations; ++n)
      w.dilation.push_back(pick(index_choices{{1}, {2}, {3}, {7}, {1}, {0, false}, {most}}));
    if (sometimes("global"))
      for (idx_t n = random.below(4); n >= 0; --n)
        w.global_positions.push_back(pick(index_choices{{0}, {1}, {9}, {30}, {39}, {5000}, {most}, {-1, false}}));
    c.windowed.dilation = w.dilation, c.windowed.global_positions = w.global_positions;
  } else if (sometimes("bias")) {
    const auto or_one = [&](idx_t extent) { return random.below(2) ? idx_t(1) : extent; };
    const idx_t batch = or_one(s.batch), heads = or_one(s.heads), queries = or_one(s.queries);
    c.bias = tensor<T>(batch, heads, queries, s.keys);
    for (T& x : c.bias.data) x = random.below(6) == 0 ? T(-inf) : static_cast<T>(random.normal());
    c.full.bias = view(c.bias);
  }
  return c;
}

template <class T>
std::string outcome(options_case<T>& c, attn::execution& serial, fuzz_tally& sum) {
  const law_inputs<T> in = random_inputs<T>(c.shape);
  const law_shape& s = c.shape;
  tensor<T> out(s.batch, s.heads, s.queries, s.value_dim, T(7)), lse(s.batch, s.heads, s.queries, 1, T(7));
  const tensor<T> before = out;
  c.full.lse = c.windowed.lse = row_view(lse);
  ++sum.calls;
  const std::string message = refusal([&] {
    if (c.window)
      compiled_sliding_window<T>::call(view(in.q), view(in.k), view(in.v), view(out), c.windowed, {}, serial);
    else
      compiled_full_softmax<T>::call(view(in.q), view(in.k), view(in.v), view(out), c.full, {}, serial);
  });
  if (!message.empty()) {
    ++sum.refused;
    if (!c.wrong) return "refused: " + message;
    if (!well_formed(message, c.window ? "sliding_window" : "full_softmax")) return "not one sentence: " + message;
    return identical(out, before) ? "" : "refused, but written: " + message;
  }
  if (c.wrong) return "not refused";
  reference::full_softmax_options full;
  reference::copy_choices(c.wanted, full);
  full.alibi_slopes = c.wanted.alibi_slopes;
  full.sinks = c.wanted.sinks, full.bias = cast<double>(c.bias);
  full.log_decay = c.wanted.log_decay;
  const auto q = cast<double>(in.q), k = cast<double>(in.k), v = cast<double>(in.v);
  const reference::result wanted =
      c.window ? reference::sliding_window(q, k, v, c.wanted) : reference::full_softmax(q, k, v, full);
  return sum.judge(std::max(deviation(out, wanted.out, largest(in.v), tolerance<T>::out),
                            deviation(lse, wanted.lse, 1, tolerance<T>::lse)),
                   c.name + ", " + text(s));
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("random options are refused in one sentence, or right", "[fuzz]", exact_types) {
  using T = TestType;
  attn::execution serial;
  fuzz(20000, 8.0 / static_cast<double>(std::tuple_size_v<exact_types>), [&](random_source& random, fuzz_tally& sum) {
    options_case<T> c = draw<T>(random);
    std::string what = outcome(c, serial, sum);
    return std::pair{std::move(what), (c.window ? "sliding_window" : "full_softmax") + c.name + ", " + text(c.shape)};
  });
}

}  // namespace testing::fuzz_options_tests
