// attn_bench: writing what operators are given and what they compute, for other programs to compare with.
#pragma once

#include <string>

#include "variant.hpp"

namespace bench {

/// Writes into the folder, as float .npy files of one axis, what operators of this length read (query, key, value,
/// gradient, parameter, rate, log_decay, bias, features, projection_e, projection_f) and what the last run of the
/// variant has written: NAME_LENGTH.npy, of a backward pass NAME_LENGTH_q, _k and _v.
/// Throws std::runtime_error naming the file that cannot be written.
void save(const std::string& folder, const flags&, const variant&, idx_t length);

}  // namespace bench
