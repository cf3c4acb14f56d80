// Law 3. Layout: any strides give the same result, bit by bit.
#include "laws/layouts.hpp"
#include "support/catch.hpp"

namespace testing::layout_tests {
namespace {

// The layouts of q, k, v, out and lse.
using layout_of_each = std::array<const layout*, 5>;

template <class T>
void check_layouts(const law_operator<T>& op, const law_shape& shape, const bound<T>& call, const law_inputs<T>& in,
                   const law_result<T>& plain, const layout_of_each& as) {
  INFO(op.name << ", " << text(shape) << ", q: " << as[0]->name << ", k: " << as[1]->name << ", v: " << as[2]->name
               << ", out: " << as[3]->name << ", lse: " << as[4]->name);
  law_result<T> fresh = fresh_result(op, shape);
  laid_out<T> q(in.q, *as[0]), k(in.k, *as[1]), v(in.v, *as[2]), out(fresh.out, *as[3]), lse(fresh.lse, *as[4]);
  const idx_t between = out.untouched();
  attn::tensor_view<T, 3> rows;
  if (op.lse) rows = lse.row_view();
  attn::execution serial;
  law_call<T> laid{q.view, k.view, v.view, out.view, rows, {}, &serial};
  call(laid);
  CHECK(identical(out.gathered(), plain.out));
  if (op.lse) CHECK(identical(lse.gathered(), plain.lse));
  CHECK(out.untouched() == between);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("law 3: any layout gives the same bits", "[layout]", exact_types) {
  using T = TestType;
  constexpr std::size_t count = std::size(layouts);
  for (const auto& op : operators<T>())
    for (std::size_t n = 0; law_shape shape : layout_shapes()) {
      shape = fitted(op, shape);
      ++n;
      const law_inputs<T> in = random_inputs<T>(shape);
      const law_result<T> plain = attend(op, shape, in);
      const bound<T> call = op.bind(shape);
      for (std::size_t a = 0; a < count; ++a) {
        const layout* const all = &layouts[a];
        if (by_turns<T> && (a + n) % 3 != 0) continue;
        check_layouts(op, shape, call, in, plain, {all, all, all, all, all});
      }
      // Each in another: from shape to shape each meets all layouts.
      const auto other = [&](std::size_t step) { return &layouts[(n + step) % count]; };
      check_layouts(op, shape, call, in, plain, {other(0), other(1), other(2), other(3), other(4)});
      if (by_turns<T>) continue;
      check_layouts(op, shape, call, in, plain, {other(4), other(2), other(0), other(5), other(1)});
    }
}

TEMPLATE_LIST_TEST_CASE("law 3: one head's memory may serve all heads", "[layout]", exact_types) {
  using T = TestType;
  for (const auto& op : operators<T>()) {
    const law_shape shape = fitted(op, {.queries = 65, .keys = 65});
    INFO(op.name);
    law_inputs<T> in = random_inputs<T>(shape);
    const law_inputs<T> first = {head(in.q, 0, 0), head(in.k, 0, 0), head(in.v, 0, 0)};
    const auto broadcast = [](const tensor<T>& x, idx_t batch, idx_t heads) {
      return in_view<T>(x.data.data(), {batch, heads, x.length(), x.dim()}, {0, 0, x.dim(), 1});
    };
    const auto copied = [](tensor<T>& to, const tensor<T>& from) {
      for (std::size_t n = 0; n < to.data.size(); ++n) to.data[n] = from.data[n % from.data.size()];
    };
    copied(in.q, first.q), copied(in.k, first.k), copied(in.v, first.v);
    law_result<T> r = fresh_result(op, shape);
    attn::execution serial;
    law_call<T> call = call_of(in, r, serial);
    call.q = broadcast(first.q, shape.batch, shape.heads);
    call.k = broadcast(first.k, shape.batch, shape.kv_heads);
    call.v = broadcast(first.v, shape.batch, shape.kv_heads);
    op.bind(shape)(call);
    CHECK(identical(r, attend(op, shape, in)));
  }
}

}  // namespace testing::layout_tests
