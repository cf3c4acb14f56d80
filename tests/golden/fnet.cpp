#include "reference/fnet.hpp"
#include "golden/operators.hpp"
#include "support/call_fourier.hpp"
#include "support/run.hpp"

namespace testing {
namespace {

template <class T>
reference::result run_fnet(const golden_case& golden) {
  const tensor<T> x = cast<T>(golden.array("x"));
  tensor<T> out(x.batch(), x.heads(), x.length(), x.dim(), T(7));
  attn::execution serial;
  compiled_fnet<T>::call(view(x), view(out), {}, serial);
  return {cast<double>(out), {}};
}

}  // namespace

// Cases hold x as [B, L, D]; it is read with the items as heads, which are transformed apart all the same.
golden_operator golden_fnet() {
  return {"fnet",
          {"operator", "source", "tolerance"},
          {"x", "out"},
          [](const golden_case& golden) -> reference::result {
            return {reference::fnet(golden.array("x")), {}};
          },
          run_fnet<double>,
          run_fnet<float>};
}

}  // namespace testing
