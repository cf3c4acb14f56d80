// Which operator is tested by which law, and in which form: with lse, grouped queries, as many keys as one likes
// (cross). A cell that is empty without a reason fails, and so does a reason for one that is not; reasons are in the
// entries, as law_operator::without.
#include <set>
#include <sstream>

#include "laws/law.hpp"
#include "laws/stored.hpp"
#include "support/catch.hpp"

namespace testing::census_tests {
namespace {

// A column: does an entry have what the law needs?
template <class T>
struct column {
  std::string name;
  bool (*filled)(const law_operator<T>&);
};

template <class T>
std::vector<column<T>> columns() {
  return {{"causality", [](const law_operator<T>& op) { return op.causal; }},
          {"averages", [](const law_operator<T>& op) { return op.averages; }},
          {"lse", [](const law_operator<T>& op) { return op.lse; }},
          {"grouped", [](const law_operator<T>& op) { return op.grouped; }},
          {"cross", [](const law_operator<T>& op) { return op.cross; }},
          {"extremes", [](const law_operator<T>& op) { return op.bounded; }},
          {"padding", [](const law_operator<T>& op) { return op.padding; }},
          {"independence", [](const law_operator<T>& op) { return op.independent; }},
          {"quiet", [](const law_operator<T>& op) { return bool(op.sees); }},
          {"stream", [](const law_operator<T>& op) { return bool(op.stream); }},
          {"limits", [](const law_operator<T>& op) { return !op.limits.empty(); }},
          {"long_rows", [](const law_operator<T>& op) { return !op.long_rows.empty(); }},
          {"backward", [](const law_operator<T>& op) { return bool(op.backward); }}};
}

std::set<std::string> listed_operators() {
  std::set<std::string> names;
  std::istringstream list(ATTN_TEST_OPERATORS);
  for (std::string name; std::getline(list, name, ',');) names.insert(name);
  return names;
}

bool has_bfloat16_laws(const std::string& name) {
  const auto& table = stored_entries::table();
  return std::any_of(table.begin(), table.end(), [&](const auto* entries) { return entries->name() == name; });
}

}  // namespace

TEST_CASE("census: every operator is in the table of laws, and nothing else is", "[census]") {
  std::set<std::string> registered;
  for (const auto& op : operators<float>()) registered.insert(op.of);
  CHECK(registered == listed_operators());
}

TEST_CASE("census: every entry has a reference", "[census]") {
  for (const auto& op : operators<float>()) {
    INFO(op.name);
    CHECK(op.reference);
  }
}

TEST_CASE("census: every law has an entry of every operator, or a reason", "[census]") {
  std::map<std::string, std::vector<const law_operator<float>*>> forms;
  for (const auto& op : operators<float>()) forms[op.of].push_back(&op);
  for (const auto& [name, entries] : forms) {
    std::map<std::string, std::string> reasons;
    for (const auto* op : entries) reasons.insert(op->without.begin(), op->without.end());
    const auto check = [&, &of = name](const std::string& law, bool filled) {
      INFO(of << ", " << law << (filled ? ": has an entry and a reason for having none" : ": no entry and no reason"));
      CHECK(filled != (reasons.erase(law) == 1));
    };
    for (const auto& c : columns<float>())
      check(c.name, std::any_of(entries.begin(), entries.end(), [&](const auto* op) { return c.filled(*op); }));
    check("bfloat16", has_bfloat16_laws(name));
    for (const auto& [law, reason] : reasons) {
      INFO(name << " gives a reason for \"" << law << "\", which is no law");
      CHECK(false);
    }
  }
}

}  // namespace testing::census_tests
