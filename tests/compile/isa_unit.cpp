// Compiled several times into one program, each time with other vector instructions: see isa_main.cpp.
#include <attn/softmax/full_softmax.hpp>

#include <algorithm>
#include <typeinfo>

#include "isa_unit.hpp"

#define ATTN_TEST_TEXT_OF(name) #name
#define ATTN_TEST_TEXT(name) ATTN_TEST_TEXT_OF(name)

isa_unit ATTN_TEST_UNIT() {
  return {ATTN_TEST_TEXT(ATTN_ISA), typeid(attn::execution).name(), Eigen::internal::packet_traits<float>::size,
          [](const float* q, const float* k, const float* v, float* out) {
            using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
            const Eigen::Map<const matrix> queries(q, isa_length, isa_dim), keys(k, isa_length, isa_dim),
                values(v, isa_length, isa_dim);
            Eigen::Map<matrix> result(out, isa_length, isa_dim);
            attn::full_softmax(queries, keys, values, result);
          },
          [](const float* q, const float* k, const float* v, float* out) {
            using matrix = Eigen::Matrix<Eigen::bfloat16, isa_length, isa_dim, Eigen::RowMajor>;
            const auto rounded = [](const float* x) {
              matrix y;
              std::transform(x, x + y.size(), y.data(), [](float number) { return Eigen::bfloat16(number); });
              return y;
            };
            const matrix queries = rounded(q), keys = rounded(k), values = rounded(v);
            matrix result;
            attn::full_softmax(queries, keys, values, result);
            std::transform(result.data(), result.data() + result.size(), out,
                           [](Eigen::bfloat16 number) { return static_cast<float>(number); });
          }};
}
