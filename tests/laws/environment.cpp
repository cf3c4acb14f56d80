// The floating-point environment of the caller: rounding modes other than to nearest cost digits, nothing else, and
// what lies in scratch memory raises no exception.
#include <cfenv>
#include <set>
#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include "laws/law.hpp"
#include "support/catch.hpp"

namespace testing::environment_tests {
namespace {

class rounding {
 public:
  explicit rounding(int mode) { std::fesetround(mode); }
  ~rounding() { std::fesetround(FE_TONEAREST); }
  rounding(const rounding&) = delete;
  rounding& operator=(const rounding&) = delete;
};

// Exponentials are then polynomials fitted to half the interval that they are used on, off by 1.5e-5, and every
// rounding goes one way. Choices between keys of nearly equal scores may differ: operators that choose are left out.
bool only_rounds(const std::string& of) {
  return of != "lsh" && of != "topk_blocks" && of != "multipole";
}
constexpr double most = 5e-4;

}  // namespace

#if defined(FE_UPWARD) && defined(FE_DOWNWARD) && defined(FE_TOWARDZERO)
TEST_CASE("environment: operators in other rounding modes", "[environment]") {
  for (const auto& op : operators<float>()) {
    if (!only_rounds(op.of)) continue;
    const law_shape shape = fitted(op, {.batch = 1, .queries = 70, .keys = 70, .dim = 9, .value_dim = 12});
    const law_inputs<float> in = random_inputs<float>(shape);
    attn::execution serial, threads(3, 0);
    const law_result<float> nearest = attend(op, shape, in, serial);
    for (int mode : {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO}) {
      law_result<float> r, shared;
      {
        const rounding all_that_follows(mode);
        r = attend(op, shape, in, serial), shared = attend(op, shape, in, threads);
      }
      INFO(op.name << ", mode " << mode);
      CHECK(relative_error(cast<double>(r.out), cast<double>(nearest.out)) <= op.error_factor * most);
      CHECK(identical(shared, r));  // threads round as the caller does
    }
  }
}
#endif

#if defined(__GLIBC__) && defined(FE_INVALID) && defined(FE_OVERFLOW) && defined(FE_DIVBYZERO)
// Fresh memory is filled with numbers near the largest: whatever is computed of them overflows.
TEST_CASE("environment: no exceptions by scratch memory", "[environment]") {
  const auto raised_by = [](const auto& op, law_shape shape) {
    shape = fitted(op, shape);
    const law_inputs<float> in = random_inputs<float>(shape);
    law_result<float> r = fresh_result(op, shape);
    const auto bound = op.bind(shape);
    mallopt(M_PERTURB, 0x80);  // bytes 0x7f
    attn::execution serial;
    std::feclearexcept(FE_ALL_EXCEPT);
    bound(call_of(in, r, serial));
    const int raised = std::fetestexcept(FE_INVALID | FE_OVERFLOW | FE_DIVBYZERO);
    mallopt(M_PERTURB, 0);
    return raised;
  };
  for (const auto& op : operators<float>()) {
    // Kernels compute on lanes of blocks that no token fills, and biases of -infinity raise FE_INVALID by themselves in
    // AFT: the guide says so.
    const std::set<std::string> others{"linear", "performer", "rfa", "delta_rule", "dplr", "aft_full", "aft_local",
                                       "aft_conv"};
    if (others.count(op.of)) continue;
    for (idx_t length : {1, 7, 65, 130})
      for (idx_t dim : {6, 16, 33}) {
        INFO(op.name << ", length " << length << ", dim " << dim);
        CHECK(raised_by(op, {.batch = 1, .queries = length, .keys = length, .dim = dim, .value_dim = dim + 1}) == 0);
      }
  }
}
#endif

}  // namespace testing::environment_tests
