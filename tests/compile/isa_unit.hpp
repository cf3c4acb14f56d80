#pragma once
// What a file compiled for one set of vector instructions offers to the others: nothing of attn or Eigen in it.
inline constexpr int isa_length = 70, isa_dim = 33;

struct isa_unit {
  const char *name, *type;
  int packet;
  void (*attend)(const float* q, const float* k, const float* v, float* out);
  void (*attend_bf16)(const float* q, const float* k, const float* v, float* out);  // all rounded to bf16
};
