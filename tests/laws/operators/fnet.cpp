#include "reference/fnet.hpp"

#include "laws/law.hpp"
#include "laws/stored.hpp"
#include "support/call_fourier.hpp"

namespace testing::fnet_law {
namespace {

template <class T>
bound<T> bind_fnet() {
  return [](const law_call<T>& call) {
    compiled_fnet<T>::call(call.q, call.out, {.lengths = call.lengths}, *call.execution);
  };
}

// Only the even part of a sequence counts; it comes back L D times as large.
template <class T>
law_limit<T> twice_is_even_part() {
  return {"twice",
          [](const law_shape& s) -> bound<T> {
            auto once = std::make_shared<tensor<T>>(s.batch, s.heads, s.queries, s.dim);
            return [once, fnet = bind_fnet<T>()](law_call<T> call) {
              const out_view<T> out = call.out;
              call.out = view(*once), fnet(call);
              call.q = view(std::as_const(*once)), call.out = out, fnet(call);
            };
          },
          [](const law_shape& s) -> bound<T> {
            return [s](const law_call<T>& call) {
              const T size = static_cast<T>(s.queries * s.dim) / 2;
              for (idx_t b = 0; b < s.batch; ++b)
                for (idx_t h = 0; h < s.heads; ++h)
                  for (idx_t t = 0; t < s.queries; ++t)
                    for (idx_t d = 0; d < s.dim; ++d)
                      call.out(b, h, t, d) =
                          size * (call.q(b, h, t, d) + call.q(b, h, (s.queries - t) % s.queries, (s.dim - d) % s.dim));
            };
          }};
}

// q is x; k and v are not looked at. Every token sees every other, and nothing is a mean.
template <class T>
void add_fnet(std::vector<law_operator<T>>& all) {
  law_operator<T> op;
  op.name = "fnet";
  op.averages = op.grouped = op.cross = op.lse = false;
  op.square = op.tied = true;
  op.bind = [](const law_shape&) { return bind_fnet<T>(); };
  op.limits = {twice_is_even_part<T>()};
  op.reads_values = false;
  op.reference = [](const law_shape&) {
    return [](const law_reference_call& call) {
      return reference::result{reference::fnet(call.q, reference::fnet_options{call.lengths}), {}};
    };
  };
  op.backward = [](const law_shape&) {
    return [](const law_backward_call<T>& call) {
      compiled_fnet<T>::backward(call.d_out, {.x = call.dq}, {.lengths = call.lengths}, *call.execution);
    };
  };
  all.push_back(op);
  all.back().without = {{"lse", "there is no softmax"},
                        {"grouped", "there are no keys"},
                        {"cross", "there are no keys"},
                        {"causality", "bidirectional by definition"},
                        {"averages", "there are no weights"},
                        {"quiet", "every token reaches every other"},
                        {"stream", "bidirectional by definition"},
                        {"long_rows", "there are no weights"}};
}
const law_entries entries("fnet", [](auto& all) { add_fnet(all); });

template <class S>
void add_stored(std::vector<stored_operator<S>>& all) {
  all.push_back({"fnet", false,
                 [](const stored_call<S>& c) {
                   // there are no keys and no values
                   using compiled = compiled_fnet<S>;
                   const auto options = c.template options<compiled>(false);
                   compiled::call(c.q, c.out, options, c.execution);
                   compiled::backward(c.d_out, {.x = c.dq}, options, c.execution);
                   for (idx_t b = 0; b < c.dv.extent(0); ++b)
                     for (idx_t h = 0; h < c.dv.extent(1); ++h)
                       for (idx_t i = 0; i < c.dv.extent(2); ++i)
                         for (idx_t d = 0; d < c.dv.extent(3); ++d) c.dv(b, h, i, d) = S(0);
                 },
                 stored::heads, true});
}
const stored_entries stored_form("fnet", [](auto& all) { add_stored(all); });

}  // namespace
}  // namespace testing::fnet_law
