// Laws 3, 4 and 11 of gradients: any strides, any number of threads, and calls at the same time give the same bits.
#include <thread>

#include "laws/gradient_law.hpp"
#include "laws/layouts.hpp"
#include "support/catch.hpp"

namespace testing::gradients_layout_tests {
namespace {

// Each of the tensors of a backward call in the layout pick(n), n = 0, 1, ...
template <class T, class Pick>
void check_gradient_layouts(const law_operator<T>& op, const law_shape& shape, const law_inputs<T>& in,
                            const law_result<T>& forward, const tensor<T>& d_out, const law_gradients<T>& plain,
                            Pick pick) {
  const law_gradients<T> fresh = fresh_gradients(op, shape);
  laid_out<T> q(in.q, *pick(0)), k(in.k, *pick(1)), v(in.v, *pick(2)), out(forward.out, *pick(3)), d(d_out, *pick(4)),
      lse(forward.lse, *pick(5)), dq(fresh.q, *pick(6)), dk(fresh.k, *pick(7)), dv(fresh.v, *pick(8));
  const idx_t between[] = {dq.untouched(), dk.untouched(), dv.untouched()};
  attn::execution serial;
  std::vector<T> parameters;
  law_backward_call<T> call{.q = q.view,
                            .k = k.view,
                            .v = v.view,
                            .out = out.view,
                            .d_out = d.view,
                            .lse = {},
                            .dq = dq.view,
                            .dk = {},
                            .dv = {},
                            .lengths = {},
                            .execution = &serial};
  call.parameters = &parameters;
  if (op.lse) call.lse = lse.row_view();
  if (!op.tied) call.dk = dk.view;
  if (op.reads_values) call.dv = dv.view;
  op.backward(shape)(call);
  const auto gathered = [](const laid_out<T>& x, bool given) { return given ? x.gathered() : tensor<T>{}; };
  CHECK(identical<T>({dq.gathered(), gathered(dk, !op.tied), gathered(dv, op.reads_values), parameters}, plain));
  CHECK(dq.untouched() == between[0]);
  CHECK(dk.untouched() == between[1]);
  CHECK(dv.untouched() == between[2]);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("law 3 of gradients: any layout gives the same bits", "[gradient_layout]", exact_types) {
  using T = TestType;
  constexpr std::size_t count = std::size(layouts);
  for (const auto& op : operators<T>()) {
    if (!op.backward) continue;
    for (std::size_t n = 0; law_shape shape : layout_shapes()) {
      shape = fitted(op, shape);
      ++n;
      const law_inputs<T> in = random_inputs<T>(shape);
      const tensor<T> d_out = random_d_out<T>(shape);
      const law_result<T> forward = attend(op, shape, in);
      attn::execution serial;
      const law_gradients<T> plain = differentiate(op, shape, in, forward, d_out, serial);
      for (std::size_t a = 0; a < count; ++a) {
        if ((by_turns<T> || shape.keys > 65) && (a + n) % 3 != 0) continue;
        INFO(op.name << ", " << text(shape) << ", all: " << layouts[a].name);
        check_gradient_layouts(op, shape, in, forward, d_out, plain, [a](std::size_t) { return &layouts[a]; });
      }
      INFO(op.name << ", " << text(shape) << ", each in another layout from " << n);
      check_gradient_layouts(op, shape, in, forward, d_out, plain,
                             [n](std::size_t of) { return &layouts[(n + of * 5 + of / 6) % count]; });
    }
  }
}

TEMPLATE_LIST_TEST_CASE("law 4 of gradients: any number of threads gives the same bits", "[gradient_threads]",
                        exact_types) {
  using T = TestType;
  attn::execution two(2, 0), three(3, 0), seven(7, 0);
  for (const auto& op : operators<T>()) {
    if (!op.backward) continue;
    // Where only races are looked for, lengths that divide the work in other ways than these find none.
    std::vector<law_shape> shapes = races_only ? law_shapes({65}) : law_shapes({7, 65, 257, 0, 1});
    shapes.push_back({.batch = 1, .heads = 1, .kv_heads = 1, .queries = 1100, .keys = 1100, .dim = 8, .value_dim = 24});
    // More heads than any wave takes.
    if (!few_shapes) shapes.push_back({.batch = 4, .heads = 24, .kv_heads = 12, .queries = 70, .keys = 70, .dim = 24});
    shapes.push_back({.batch = 3, .heads = 6, .kv_heads = 2, .queries = 96, .keys = 96, .dim = 24});
    if (op.cross) shapes.push_back({.batch = 1, .heads = 2, .kv_heads = 1, .queries = 2, .keys = 3000});
    for (law_shape shape : shapes) {
      shape = fitted(op, shape);
      INFO(op.name << ", " << text(shape));
      const law_inputs<T> in = random_inputs<T>(shape);
      const tensor<T> d_out = random_d_out<T>(shape);
      const law_result<T> forward = attend(op, shape, in);
      attn::execution serial;
      law_gradients<T> alone;
      if (!races_only) alone = differentiate(op, shape, in, forward, d_out, serial);
      for (attn::execution* threads : {&two, &three, &seven}) {
        if (by_turns<T> && threads != &three) continue;
        INFO(threads->threads() << " threads");
        const law_gradients<T> shared = differentiate(op, shape, in, forward, d_out, *threads);
        CHECK((races_only || identical(shared, alone)));
      }
    }
  }
}

TEMPLATE_LIST_TEST_CASE("law 11 of gradients: concurrent calls with separate executions", "[gradient_concurrent]",
                        exact_types) {
  using T = TestType;
  for (const auto& op : operators<T>()) {
    if (!op.backward) continue;
    const law_shape shape = fitted(op, {.queries = 90, .keys = 90});
    const law_inputs<T> in = random_inputs<T>(shape);
    const tensor<T> d_out = random_d_out<T>(shape);
    const law_gradients<T> wanted = differentiate(op, shape, in, d_out);
    std::vector<law_gradients<T>> results(3);
    std::vector<std::thread> callers;
    for (std::size_t n = 0; n < results.size(); ++n)
      callers.emplace_back([&, n] {
        attn::execution own(n % 2 ? 2 : 1, 0);
        for (int times = 0; times < 2; ++times) results[n] = differentiate(op, shape, in, d_out, own);
      });
    for (auto& caller : callers) caller.join();
    INFO(op.name);
    for (const auto& result : results) CHECK(identical(result, wanted));
  }
}

}  // namespace testing::gradients_layout_tests
