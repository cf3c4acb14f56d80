#include "reference/full_softmax.hpp"

#include "laws/law.hpp"

namespace testing::full_softmax_law {
namespace {

struct full_softmax_entry {
  std::string name;
  bool causal = false, bias = false, softcap = false, alibi = false, sinks = false, score = false;
};

// Deterministic in the absolute batch item and head, so that an item alone gets the parameters it has in a batch.
template <class T>
T bias_value(index b, index h, index i, index j) {
  const index mixed = 5 * b + 3 * h + 7 * i + 11 * j;
  if (mixed % 13 == 0 && i != j) return -std::numeric_limits<T>::infinity();
  return static_cast<T>(mixed % 17) / 8;
}

template <class N>
N own_score(N x, index h, index i, index j) {
  return x / 2 + static_cast<N>((h + i + 3 * j) % 5) / 4;
}

// call: of a forward or a backward pass.
template <class T>
attn::full_softmax_options<T> options_of(const full_softmax_entry& entry, const auto& call,
                                         const std::vector<T>& slopes, const std::vector<T>& sinks,
                                         const tensor<T>& bias) {
  attn::full_softmax_options<T> options;
  options.causal = entry.causal;
  call.set_lengths(options);
  options.lse = call.lse;
  if (entry.softcap) options.softcap = T(2);
  if (entry.alibi) options.alibi_slopes = slopes;
  if (entry.sinks) options.sinks = sinks;
  if (entry.bias) options.bias = view(bias);
  return options;
}

template <class T>
struct parameters {
  full_softmax_entry entry;
  std::vector<T> slopes, sinks;
  tensor<T> bias;
  score_of<T> score;
  index first_head;

  parameters(const full_softmax_entry& e, const law_shape& s) : entry(e), first_head(s.first_head) {
    for (index h = 0; h < s.heads; ++h) {
      slopes.push_back(static_cast<T>(std::exp2(-(s.first_head + h + 1))));
      sinks.push_back(static_cast<T>(s.first_head + h) - 1);
    }
    if (e.bias) {
      bias = tensor<T>(s.batch, s.heads, s.queries, s.keys);
      for (index b = 0; b < s.batch; ++b)
        for (index h = 0; h < s.heads; ++h)
          for (index i = 0; i < s.queries; ++i)
            for (index j = 0; j < s.keys; ++j)
              bias(b, h, i, j) = bias_value<T>(s.first_batch + b, s.first_head + h, i, j);
    }
    if (e.score)
      score = [first = s.first_head](T x, index, index h, index i, index j) { return own_score(x, first + h, i, j); };
  }
  reference::result reference_of(const law_reference_call& call) const {
    reference::full_softmax_options o;
    o.causal = entry.causal;
    call.set_lengths(o);
    if (entry.softcap) o.softcap = 2;
    if (entry.alibi) o.alibi_slopes = cast<double>(slopes);
    if (entry.sinks) o.sinks = cast<double>(sinks);
    if (entry.bias) o.bias = cast<double>(bias);
    if (entry.score)
      o.score = [first = first_head](double x, index, index h, index i, index j) {
        return own_score(x, first + h, i, j);
      };
    return reference::full_softmax(call.q, call.k, call.v, o);
  }
};

template <class T>
law_operator<T> operator_of(const full_softmax_entry& entry) {
  law_operator<T> op;
  op.name = entry.name;
  op.causal = entry.causal;
  op.averages = !entry.sinks;
  op.bind = [entry](const law_shape& shape) -> bound<T> {
    return [p = std::make_shared<parameters<T>>(entry, shape)](const law_call<T>& call) {
      compiled_full_softmax<T>::call(call.q, call.k, call.v, call.out,
                                     options_of(p->entry, call, p->slopes, p->sinks, p->bias), p->score,
                                     *call.execution);
    };
  };
  op.backward = [entry](const law_shape& shape) {
    auto d_slopes = std::make_shared<std::vector<T>>(entry.alibi ? shape.heads : 0);
    auto d_sinks = std::make_shared<std::vector<T>>(entry.sinks ? shape.heads : 0);
    auto d_bias = std::make_shared<tensor<T>>();
    auto p = std::make_shared<parameters<T>>(entry, shape);
    if (entry.bias) *d_bias = p->bias;
    return [=](const law_backward_call<T>& call) {
      attn::full_softmax_gradients<T> g{.q = call.dq, .k = call.dk, .v = call.dv};
      if (entry.alibi) g.alibi_slopes = *d_slopes;
      if (entry.sinks) g.sinks = *d_sinks;
      if (entry.bias) g.bias = view(*d_bias);
      const auto score_backward = [](T, T d, index, index, index, index) { return d / 2; };
      compiled_full_softmax<T>::backward(call.q, call.k, call.v, call.out, call.d_out, g,
                                         options_of(entry, call, p->slopes, p->sinks, p->bias), p->score,
                                         score_backward, *call.execution);
      call.give(*d_slopes, *d_sinks, d_bias->data);
    };
  };
  op.reference = [entry](const law_shape& shape) {
    return [p = std::make_shared<parameters<T>>(entry, shape)](const law_reference_call& call) {
      return p->reference_of(call);
    };
  };
  op.sees = [entry](const law_shape& s, index b, index h, index i, index j) {
    if (entry.bias && std::isinf(bias_value<T>(s.first_batch + b, s.first_head + h, i, j))) return false;
    return !entry.causal || j <= i + s.keys - s.queries;
  };
  if (entry.causal && !entry.bias)
    op.stream = [entry](const law_shape& shape) -> bound<T> {
      auto cache = std::make_shared<attn::kv_cache<T>>(attn::state_extents{
          .batch = shape.batch, .heads = shape.kv_heads, .dim = shape.dim, .value_dim = shape.value_dim});
      cache->reserve(shape.queries);
      return [cache, p = std::make_shared<parameters<T>>(entry, shape)](const law_call<T>& call) {
        auto options = options_of(p->entry, call, p->slopes, p->sinks, p->bias);
        compiled_full_softmax<T>::step(*cache, call.q, call.k, call.v, call.out, options, p->score, *call.execution);
      };
    };
  return op;
}

template <class T>
void add_full_softmax(std::vector<law_operator<T>>& all) {
  for (const full_softmax_entry& entry : {full_softmax_entry{"full_softmax"},
                                          {"full_softmax causal", true},
                                          {.name = "full_softmax with bias", .bias = true},
                                          {.name = "full_softmax causal with bias", .causal = true, .bias = true},
                                          {.name = "full_softmax with a score function", .score = true},
                                          {.name = "full_softmax causal, softcap, ALiBi, sinks",
                                          .causal = true,
                                          .softcap = true,
                                          .alibi = true,
                                          .sinks = true},
                                          {.name = "full_softmax with sinks", .sinks = true}})
    all.push_back(operator_of<T>(entry));
  all.back().without = {{"limits", "it is what others become"}};
}
const law_entries entries("full_softmax", [](auto& all) { add_full_softmax(all); });

}  // namespace
}  // namespace testing::full_softmax_law
