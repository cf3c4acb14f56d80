// In which order attn_bench runs what it has planned, by a clock of the test's own.
#include "order.hpp"

#include <algorithm>
#include <deque>
#include <string>
#include <vector>

#include "support/catch.hpp"

namespace testing {
namespace {

using bench::omission, bench::tier;

struct row {
  std::string name;
  tier worth;
  std::ptrdiff_t length;
  double takes;        // seconds
  int runs_of_a_visit;  // one, where a run is long
  std::vector<double> seconds{};
  int visits = 0;
  std::string failure{};
  omission omitted = omission::none;
};

struct sweep {
  double left;  // seconds
  std::deque<row> all;
  int visits = 5;
  std::vector<std::string> done{}, announced{};
  double most = 1e30;  // a row that takes longer is beyond the user's limit

  std::deque<row>& rows() { return all; }
  int most_visits() const { return visits; }
  double time_left() const { return left; }
  double visit_seconds(const row& r) const { return r.takes; }
  omission beyond_limits(const row& r) const { return r.takes > most ? omission::seconds : omission::none; }
  void announce(const std::vector<row*>& rest) {
    for (const row* r : rest) announced.push_back(r->name);
  }
  void visit(row& r, const char* what) {
    done.push_back(std::string(what) == "repetitions" ? r.name + " again" : r.name);
    for (int n = 0; n < r.runs_of_a_visit; ++n) r.seconds.push_back(r.takes);
    ++r.visits;
    left -= r.takes;
  }
  void run() { bench::order<sweep>(*this).run(); }
  omission omitted(const std::string& name) const {
    return std::find_if(all.begin(), all.end(), [&](const row& r) { return r.name == name; })->omitted;
  }
};

// As attn_bench plans them: by worth, then by length.
std::deque<row> planned() {
  return {{"full 256", tier::main_curve, 256, 1, 10},      {"full 4096", tier::main_curve, 4096, 2, 5},
          {"full 16384", tier::main_curve, 16384, 30, 1},  {"backward 4096", tier::other_forms, 4096, 5, 5},
          {"backward 1024", tier::other_forms, 1024, 3, 5}, {"full 2048", tier::between, 2048, 2, 5},
          {"window 32", tier::settings, 4096, 2, 5},       {"linear 65536", tier::longer, 65536, 20, 5}};
}

using names = std::vector<std::string>;
const names main_curve = {"full 256", "full 4096", "full 16384"};

}  // namespace

TEST_CASE("bench: the main curve is run whatever it takes, and announced", "[bench_order]") {
  sweep s{.left = 2, .all = planned()};
  s.run();
  CHECK(s.done == main_curve);
  CHECK(s.announced == names{"full 4096", "full 16384"});
  for (const auto* name : {"backward 1024", "backward 4096", "full 2048", "window 32", "linear 65536"})
    CHECK(s.omitted(name) == omission::time);
}

TEST_CASE("bench: a main curve of short lengths, or of one, is announced too", "[bench_order]") {
  sweep s{.left = 0, .all = {{"full 256", tier::main_curve, 256, 1, 5}, {"full 1024", tier::main_curve, 1024, 1, 5}}};
  s.run();
  CHECK(s.announced == names{"full 1024"});
  sweep one{.left = 0, .all = {planned()[2]}};
  one.run();
  CHECK(one.announced == names{"full 16384"});
  CHECK(one.done == one.announced);
}

TEST_CASE("bench: tiers in their order, of each what is quickest first", "[bench_order]") {
  sweep s{.left = 33 + 3 + 5 + 2, .all = planned()};
  s.run();
  names expected = main_curve;
  expected.insert(expected.end(), {"backward 1024", "backward 4096", "full 2048"});
  CHECK(s.done == expected);
  CHECK(s.omitted("window 32") == omission::time);
}

TEST_CASE("bench: a row that stands alone is repeated before longer lengths are run", "[bench_order]") {
  sweep s{.left = 45 + 30 + 19, .all = planned()};
  s.run();
  REQUIRE(s.done.size() > 7);
  CHECK(s.done[6] == "window 32");
  CHECK(s.done[7] == "full 16384 again");
  CHECK(s.omitted("linear 65536") == omission::time);
  // what is left goes to the others, and never beyond the budget
  CHECK(s.done[8] == "full 256 again");
  CHECK(s.left >= 0);
}

TEST_CASE("bench: with time enough every row is visited as often as is wanted", "[bench_order]") {
  for (int visits : {1, 5}) {
    sweep s{.left = 1e6, .all = planned(), .visits = visits};
    s.run();
    for (const row& r : s.all) {
      CHECK(r.visits == visits);
      CHECK(r.omitted == omission::none);
    }
  }
}

TEST_CASE("bench: what is beyond a limit or fails is not repeated", "[bench_order]") {
  sweep s{.left = 1e6, .all = planned(), .most = 10};
  s.all[0].failure = "it threw";
  s.run();
  CHECK(s.omitted("full 16384") == omission::seconds);
  CHECK(s.omitted("linear 65536") == omission::seconds);
  CHECK(s.all[0].visits == 1);
}

}  // namespace testing
