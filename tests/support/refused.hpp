#pragma once
// Lists of what is refused: a good call, made wrong in one place at a time.
#include <algorithm>
#include <functional>

#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "support/reshaped.hpp"

namespace testing {

template <class Call>
struct refused {
  const char* what;
  const char* says;  // the message names what is wrong
  std::function<void(Call&)> alter;
};

// run(Call(given...)) goes through, and after each change it is refused in one sentence that says it. Call::written()
// gives the tensors that a call writes, full of 7, and nothing is written.
template <class Call, class... Given>
void check_refused(const std::string& name, const std::vector<refused<Call>>& list,
                   const std::function<void(std::type_identity_t<Call>&)>& run, const Given&... given) {
  INFO(name);
  Call good(given...);
  CHECK(refusal([&] { run(good); }) == "");
  for (const auto& bad : list) {
    Call d(given...);
    bad.alter(d);
    const std::string message = refusal([&] { run(d); });
    INFO(bad.what << ": " << message);
    CHECK(well_formed(message, name));
    CHECK(message.find(bad.says) != std::string::npos);
    for (const tensor<float>* x : d.written())
      CHECK(std::all_of(x->data.begin(), x->data.end(), [](float value) { return value == 7; }));
  }
}

}  // namespace testing
