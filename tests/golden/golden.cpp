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

void check_case(const fs::path& folder, runner by) {
  const golden_case golden(folder);
  const std::string name = golden.text("operator");
  const auto table = golden_operators();
  const auto known = std::find_if(table.begin(), table.end(), [&](const auto& entry) { return entry.name == name; });
  if (known == table.end()) {
    std::cout << "skipped: " << golden.name() << " (operator " << name << " is not built)\n";
    return;
  }
  for (const std::string& thing : golden.unknown(known->keys, known->arrays)) {
    INFO("unknown " << thing);
    CHECK(false);
  }
  golden.text("source");
  // float results may be off by what single precision makes of the originals' inputs
  const double allowed = golden.number("tolerance");
  const double bound = by == runner::in_float ? std::max(allowed, 2e-5) : allowed;
  const auto& run = by == runner::reference   ? known->by_reference
                    : by == runner::in_double ? known->in_double
                                              : known->in_float;
  const reference::result result = run(golden);
  CHECK(relative_error(result.out, golden.array("out")) <= bound);
  if (golden.has_array("lse")) CHECK(relative_error(result.lse, golden.row_array("lse")) <= bound);
}

void check_all(runner by) {
  for (const fs::path& folder : case_folders()) {
    INFO("case " << folder.string());
    try {
      check_case(folder, by);
    } catch (const std::exception& error) {
      INFO(error.what());
      CHECK(false);
    }
  }
}

}  // namespace

TEST_CASE("the references reproduce the golden cases", "[reference]") { check_all(runner::reference); }
TEST_CASE("the library reproduces the golden cases in double", "[double]") { check_all(runner::in_double); }
TEST_CASE("the library reproduces the golden cases in float", "[float]") { check_all(runner::in_float); }
