#include "laws/operators/patterns.hpp"
#include "support/call_topk_blocks.hpp"

namespace testing {
namespace {

struct topk_entry {
  std::string name;
  index block, topk;
  bool softcap_and_sinks = false;
};

template <class T>
struct parameters {
  topk_entry entry;
  std::vector<T> sinks, d_sinks;

  parameters(const topk_entry& e, const law_shape& s) : entry(e) {
    for (index h = 0; h < s.heads; ++h) sinks.push_back(static_cast<T>(s.first_head + h) - 1);
    d_sinks = sinks;
  }
  attn::topk_blocks_options<T> options(const auto& call) const {
    attn::topk_blocks_options<T> o{.block = entry.block, .topk = entry.topk};
    if (entry.softcap_and_sinks) o.softcap = T(2), o.sinks = sinks;
    call.set_lengths(o);
    o.lse = call.lse;
    return o;
  }
};

template <class T>
bound<T> bind_topk(const topk_entry& entry, const law_shape& s) {
  return [p = std::make_shared<parameters<T>>(entry, s)](const law_call<T>& call) {
    compiled_topk_blocks<T>::call(call.q, call.k, call.v, call.out, p->options(call), {}, *call.execution);
  };
}

template <class T>
law_operator<T> operator_of(const topk_entry& entry) {
  law_operator<T> op;
  op.name = entry.name;
  op.causal = true;
  op.averages = !entry.softcap_and_sinks;
  op.bind = [entry](const law_shape& s) { return bind_topk<T>(entry, s); };
  op.backward = [entry](const law_shape& s) {
    return [p = std::make_shared<parameters<T>>(entry, s)](const law_backward_call<T>& call) {
      attn::topk_blocks_gradients<T> g{.q = call.dq, .k = call.dk, .v = call.dv};
      if (p->entry.softcap_and_sinks) g.sinks = p->d_sinks;
      compiled_topk_blocks<T>::backward(call.q, call.k, call.v, call.out, call.d_out, g, p->options(call), {}, {},
                                        *call.execution);
      call.give(p->d_sinks);
    };
  };
  op.stream = [entry](const law_shape& s) {
    auto cache = std::make_shared<attn::topk_blocks_cache<T>>(
        attn::state_extents{.batch = s.batch, .heads = s.kv_heads, .dim = s.dim, .value_dim = s.value_dim},
        attn::topk_blocks_cache_options{.block = entry.block});
    cache->reserve(s.keys);
    auto p = std::make_shared<parameters<T>>(entry, s);
    return [cache, p](const law_call<T>& call) {
      attn::topk_blocks_step_options<T> o{.topk = p->entry.topk, .lse = call.lse};
      if (p->entry.softcap_and_sinks) o.softcap = T(2), o.sinks = p->sinks;
      compiled_topk_blocks<T>::step(*cache, call.q, call.k, call.v, call.out, o, {}, *call.execution);
    };
  };
  return op;
}

}  // namespace

// Which keys a query sees depends on the keys.
template <class T>
void add_topk_blocks(std::vector<law_operator<T>>& all) {
  law_operator<T> op = operator_of<T>({.name = "topk_blocks", .block = 16, .topk = 3});
  for (const topk_entry& entry : {topk_entry{"", 7, 300}, {"", 300, 1}})
    op.limits.push_back({entry.topk > 1 ? "as many blocks as there are" : "one block of all keys",
                         [entry](const law_shape& s) { return bind_topk<T>(entry, s); }, full_binder<T>(true)});
  all.push_back(op);
  all.push_back(operator_of<T>({.name = "topk_blocks of everything", .block = 5, .topk = 4, .softcap_and_sinks = true}));
}
template void add_topk_blocks(std::vector<law_operator<float>>&);
#if !defined(ATTN_TEST_FEW_TYPES)
template void add_topk_blocks(std::vector<law_operator<double>>&);
#endif

}  // namespace testing
