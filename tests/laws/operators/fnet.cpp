#include "reference/fnet.hpp"

#include "laws/law.hpp"
#include "support/call_fourier.hpp"

namespace testing::fnet_law {
namespace {

// q is x; k and v are not looked at. Every token sees every other, and nothing is a mean.
template <class T>
void add_fnet(std::vector<law_operator<T>>& all) {
  law_operator<T> op;
  op.name = "fnet";
  op.averages = op.grouped = op.cross = op.lse = false;
  op.square = op.tied = true;
  op.bind = [](const law_shape&) -> bound<T> {
    return [](const law_call<T>& call) {
      compiled_fnet<T>::call(call.q, call.out, {.lengths = call.lengths}, *call.execution);
    };
  };
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
  all.back().without = {{"causality", "bidirectional by definition"},
                        {"averages", "there are no weights"},
                        {"quiet", "every token reaches every other"},
                        {"stream", "bidirectional by definition"},
                        {"limits", "fourier/fnet.cpp tests that twice gives the even part of the sequence"}};
}
const law_entries entries("fnet", [](auto& all) { add_fnet(all); });

}  // namespace
}  // namespace testing::fnet_law
