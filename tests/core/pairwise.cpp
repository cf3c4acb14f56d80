// The tests' own selection of option combinations: every pair is in it, and it is small.
#include "support/pairwise.hpp"

#include "support/catch.hpp"

namespace testing::pairwise_tests {

TEST_CASE("pairwise: every two values of two options meet", "[pairwise]") {
  std::vector<std::array<int, 4>> all;
  for (int a = 0; a < 4; ++a)
    for (int b = 0; b < 3; ++b)
      for (int c = 0; c < 2; ++c)
        for (int d = 0; d < 2; ++d)
          if (a != 3 || c == 0) all.push_back({a, b, c, d});
  const auto levels = [](const auto& choice) { return choice; };
  CHECK(selected(all, levels, false) == all);
  const auto some = selected(all, levels, true);
  CHECK(some.size() <= 16);
  CHECK(some.size() >= 12);
  for (const auto& wanted : all)
    for (std::size_t a = 0; a < 4; ++a)
      for (std::size_t b = 0; b < 4; ++b) {
        bool met = false;
        for (const auto& choice : some) met = met || (choice[a] == wanted[a] && choice[b] == wanted[b]);
        CHECK(met);
      }
  CHECK(selected_bits(6, false).size() == 64);
  CHECK(selected_bits(6, true).size() <= 10);
  CHECK(selected_bits(1, true).size() == 2);
}

}  // namespace testing::pairwise_tests
