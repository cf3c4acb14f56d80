// attn: a backward call of the delta rule or of dplr.
#pragma once

#include <attn/kernel/detail/correcting_call.hpp>
#include <attn/kernel/detail/recurrence_backward_driver.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <rule R, class S, class Gradients, class Options>
void run_correcting_backward(const char* name, const kernel_views<S>& x, const Gradients& g, const Options& options,
                             execution& exec) {
  call_views check{name};
  read_inputs(check, x, options);
  name_gradients(check, x, g, options);
  auto call = check_correcting_call<R>(check, x, options, exec, &g);
  const auto wanted = backward_call_of(call, x, g);
  if (wanted.any()) recurrence_backward_driver<R, compute_type<S>>{wanted}.run(exec);
}

}}}  // namespace attn::ATTN_ISA::detail
