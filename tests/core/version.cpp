// The version in the headers is the one CMake knows, which names the package.
#include <attn/core/detail/config.hpp>

#include "support/catch.hpp"

TEST_CASE("the version of the headers is that of the package", "[version]") {
  CHECK(ATTN_VERSION == 10000 * ATTN_TEST_VERSION_MAJOR + 100 * ATTN_TEST_VERSION_MINOR + ATTN_TEST_VERSION_PATCH);
  CHECK(ATTN_VERSION >= 200);
}
