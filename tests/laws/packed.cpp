// Sequences packed one after another give what each gives alone, forward and backward, for any number of threads.
#include <attn/core/packed.hpp>

#include "laws/gradient_law.hpp"
#include "support/catch.hpp"

namespace testing::packed_tests {
namespace {

// A tensor [1, heads, total, dim] in [total, heads, dim] memory, of parts [1, heads, length, dim].
template <class T>
struct packed_tensor {
  std::vector<T> memory;
  idx_t total = 0, heads = 0, dim = 0;

  packed_tensor(const std::vector<const tensor<T>*>& parts) : heads(parts[0]->heads()), dim(parts[0]->dim()) {
    for (const tensor<T>* part : parts)
      for (idx_t t = 0; t < part->length(); ++t, ++total)
        for (idx_t h = 0; h < heads; ++h)
          for (idx_t d = 0; d < dim; ++d) memory.push_back((*part)(0, h, t, d));
  }
  attn::tensor_view<T> view() { return {memory.data(), {1, heads, total, dim}, {0, dim, heads * dim, 1}}; }
  attn::tensor_view<T, 3> rows() { return {memory.data(), {1, heads, total}, {0, 1, heads}}; }

  bool holds(const tensor<T>& part, idx_t begin) {
    for (idx_t h = 0; h < heads; ++h)
      for (idx_t t = 0; t < part.length(); ++t)
        for (idx_t d = 0; d < dim; ++d)
          if (std::memcmp(&view()(0, h, begin + t, d), &part(0, h, t, d), sizeof(T)) != 0) return false;
    return true;
  }
};

}  // namespace

TEMPLATE_LIST_TEST_CASE("packed sequences give what each gives alone", "[packed]", exact_types) {
  using T = TestType;
  const std::vector<idx_t> lengths = {33, 0, 5, 1, 97, 64};
  std::vector<idx_t> offsets = {0};
  for (idx_t n : lengths) offsets.push_back(offsets.back() + n);
  for (const auto& op : operators<T>()) {
    INFO(op.name);
    struct part {
      law_shape shape;
      law_inputs<T> in;
      tensor<T> d_out;
      law_result<T> r;
      law_gradients<T> g, fresh;
      bound<T> run;
      std::function<void(const law_backward_call<T>&)> back;
    };
    std::vector<part> parts;
    attn::execution serial, three(3, 0);
    for (idx_t n : lengths) {
      law_shape shape{.batch = 1, .queries = n, .keys = n};
      shape = fitted(op, shape);
      const law_inputs<T> in = random_inputs<T>(shape);
      part p{shape, in, random_d_out<T>(shape), attend(op, shape, in), {}, fresh_gradients(op, shape), op.bind(shape),
             {}};
      if (op.backward) p.g = differentiate(op, shape, in, p.r, p.d_out, serial), p.back = op.backward(shape);
      parts.push_back(std::move(p));
    }
    const auto all = [&](auto member) {
      std::vector<const tensor<T>*> list;
      for (const part& p : parts) list.push_back(&member(p));
      return packed_tensor<T>(list);
    };
    const auto of = [&](auto member) {
      packed_tensor<T> x = all(member);
      std::fill(x.memory.begin(), x.memory.end(), T(7));
      return x;
    };
    auto q = all([](const part& p) -> auto& { return p.in.q; }), k = all([](const part& p) -> auto& { return p.in.k; }),
         v = all([](const part& p) -> auto& { return p.in.v; }),
         d_out = all([](const part& p) -> auto& { return p.d_out; });
    auto out = of([](const part& p) -> auto& { return p.r.out; }),
         lse = of([](const part& p) -> auto& { return p.r.lse; });
    auto dq = of([](const part& p) -> auto& { return p.fresh.q; }),
         dk = of([](const part& p) -> auto& { return p.fresh.k; }),
         dv = of([](const part& p) -> auto& { return p.fresh.v; });
    const auto lse_of = [&](const auto& s) { return op.lse ? s.queries(lse.rows()) : attn::tensor_view<T, 3>(); };
    for (attn::execution* exec : {&serial, &three}) {
      attn::for_each_sequence({.offsets = offsets}, *exec, [&](const attn::packed_sequence& s, attn::execution& inner) {
        parts[static_cast<std::size_t>(s.number())].run({.q = s.queries(q.view()), .k = s.queries(k.view()),
                                                         .v = s.queries(v.view()), .out = s.queries(out.view()),
                                                         .lse = lse_of(s), .lengths = {}, .execution = &inner});
      });
      bool same = true;
      for (std::size_t n = 0; n < parts.size(); ++n) {
        same = same && out.holds(parts[n].r.out, offsets[n]);
        if (op.lse) same = same && lse.holds(parts[n].r.lse, offsets[n]);
      }
      CHECK(same);
      if (!op.backward) continue;
      attn::for_each_sequence({.offsets = offsets}, *exec, [&](const attn::packed_sequence& s, attn::execution& inner) {
        const auto given = [&](packed_tensor<T>& x) { return x.dim > 0 ? s.queries(x.view()) : out_view<T>(); };
        parts[static_cast<std::size_t>(s.number())].back({.q = s.queries(q.view()), .k = s.queries(k.view()),
                                                          .v = s.queries(v.view()), .out = s.queries(out.view()),
                                                          .d_out = s.queries(d_out.view()), .lse = lse_of(s),
                                                          .dq = given(dq), .dk = given(dk), .dv = given(dv),
                                                          .lengths = {}, .execution = &inner});
      });
      for (std::size_t n = 0; n < parts.size(); ++n)
        same = same && dq.holds(parts[n].g.q, offsets[n]) && (op.tied || dk.holds(parts[n].g.k, offsets[n])) &&
               (!op.reads_values || dv.holds(parts[n].g.v, offsets[n]));
      CHECK(same);
    }
  }
}

}  // namespace testing::packed_tests
