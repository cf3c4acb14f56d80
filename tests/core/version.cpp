// The version in the headers is the one CMake knows, which names the package.
#if __has_include(<strings.h>)
#include <strings.h>
#endif

#include <attn/attn.hpp>

#include "support/catch.hpp"

TEST_CASE("the version of the headers is that of the package", "[version]") {
  CHECK(ATTN_VERSION == 10000 * ATTN_TEST_VERSION_MAJOR + 100 * ATTN_TEST_VERSION_MINOR + ATTN_TEST_VERSION_PATCH);
  CHECK(ATTN_VERSION >= 300);
}

// Unlike `index`, which POSIX has as a function, the name of the type can be used without attn::.

namespace testing::names_tests {
using namespace attn;
using attn::idx_t;
inline constexpr idx_t three = 3;
}  // namespace testing::names_tests

TEST_CASE("all names of attn can be used without attn::", "[version]") { CHECK(testing::names_tests::three == 3); }
