// Every folder under tests/golden, and under each folder in ATTN_GOLDEN_DIRS (colon-separated), is a
// case: what an original implementation computed. README.md beside this file gives the format.
#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <sstream>

#include "golden/operators.hpp"
#include "support/catch.hpp"
#include "support/measure.hpp"

using namespace testing;
namespace fs = std::filesystem;

namespace {

std::vector<fs::path> case_folders() {
  std::vector<fs::path> parents{ATTN_GOLDEN_DIR};
  if (const char* more = std::getenv("ATTN_GOLDEN_DIRS")) {
    std::istringstream list(more);
    for (std::string parent; std::getline(list, parent, ':');)
      if (!parent.empty()) parents.emplace_back(parent);
  }
  std::vector<fs::path> folders;
  for (const fs::path& parent : parents)
    for (const auto& entry : fs::directory_iterator(parent))
      if (entry.is_directory()) folders.push_back(entry.path());
  std::sort(folders.begin(), folders.end());
  return folders;
}

enum class runner { reference, in_double, in_float };

// The entry of a case's operator. None, with a word about it, for a case from ATTN_GOLDEN_DIRS whose operator is not
// built: the cases here are all run.
const golden_operator* entry_of(const golden_case& golden) {
  const std::string name = golden.text("operator");
  for (const golden_operator& entry : golden_entry::table())
    if (entry.name == name) return &entry;
  if (fs::exists(fs::path(ATTN_GOLDEN_DIR) / golden.name()))
    throw std::runtime_error(golden.name() + ": no operator is called " + name);
  std::cout << "skipped: " << golden.name() << " (operator " << name << " is not built)\n";
  return nullptr;
}

// float may be off by what single precision makes of the originals' inputs.
double bound_of(const golden_case& golden, runner by) {
  const double allowed = golden.number("tolerance");
  return by == runner::in_float ? std::max(allowed, 2e-5) : allowed;
}

void check_case(const golden_case& golden, runner by) {
  const golden_operator* const known = entry_of(golden);
  if (!known) return;
  for (const std::string& thing : golden.unknown(known->keys, known->arrays)) {
    INFO("unknown " << thing);
    CHECK(false);
  }
  golden.text("source");
  const double bound = bound_of(golden, by);
  const auto& run = by == runner::reference   ? known->by_reference
                    : by == runner::in_double ? known->in_double
                                              : known->in_float;
  const reference::result result = run(golden);
  CHECK(relative_error(result.out, golden.array(known->result)) <= bound);
  if (golden.has_array("lse")) CHECK(relative_error(result.lse, golden.row_array("lse")) <= bound);
  if (golden.has_array("final_state"))
    CHECK(relative_error(result.final_state, golden.array("final_state")) <= bound);
}

// How many gradients of the case were compared.
int check_gradients(const golden_case& golden, runner by) {
  const std::set<std::string> names = golden.gradients();
  const golden_operator* const known = names.empty() ? nullptr : entry_of(golden);
  if (!known) return 0;
  const auto& run = by == runner::reference   ? known->gradients_by_reference
                    : by == runner::in_double ? known->gradients_in_double
                                              : known->gradients_in_float;
  if (!run) throw std::runtime_error(golden.name() + ": its gradients are compared with nothing");
  const auto result = run(golden);
  for (const std::string& name : names) {
    INFO("gradient of " << name);
    REQUIRE(result.count(name) == 1);
    tensor<double> wanted = golden.array("d" + name);
    REQUIRE(result.at(name).size() == wanted.size());
    wanted.extents = result.at(name).extents;  // a case may leave out extents of 1
    double bound = bound_of(golden, by);
    if (by == runner::in_float && known->float_gradient_factor) bound *= known->float_gradient_factor(golden, name);
    CHECK(relative_error(result.at(name), wanted) <= bound);
  }
  return static_cast<int>(names.size());
}

// The sum of check(case) over all cases.
template <class Check>
int check_all(Check check) {
  int sum = 0;
  for (const fs::path& folder : case_folders()) {
    INFO("case " << folder.string());
    try {
      sum += check(golden_case(folder));
    } catch (const std::exception& error) {
      INFO(error.what());
      CHECK(false);
    }
  }
  return sum;
}

void check_all(runner by) {
  check_all([by](const golden_case& golden) { return check_case(golden, by), 1; });
}

void check_all_gradients(runner by) {
  const int compared = check_all([by](const golden_case& golden) { return check_gradients(golden, by); });
  std::cout << "gradients compared: " << compared << "\n";
  CHECK(compared > 0);
}

}  // namespace

TEST_CASE("the references reproduce the golden cases", "[reference]") { check_all(runner::reference); }
#if !defined(ATTN_TEST_FEW_TYPES)
TEST_CASE("the library reproduces the golden cases in double", "[double]") { check_all(runner::in_double); }
TEST_CASE("the library reproduces the golden gradients in double", "[double]") {
  check_all_gradients(runner::in_double);
}
#endif
TEST_CASE("the library reproduces the golden cases in float", "[float]") { check_all(runner::in_float); }

TEST_CASE("the references reproduce the golden gradients", "[gradients]") { check_all_gradients(runner::reference); }
TEST_CASE("the library reproduces the golden gradients in float", "[gradients]") {
  check_all_gradients(runner::in_float);
}
