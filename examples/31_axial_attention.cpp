// Axial attention: over one axis of a video at a time, by views of one block of memory, without a copy (Ho 2019, "Axial
// attention in multidimensional transformers"; Bertasius 2021, "TimeSformer": along time, then within each frame).
#include <attn/core/random.hpp>
#include <attn/softmax/full_softmax.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <vector>

using attn::idx_t;

// The block is [frames, height, width, heads, dim]; these are its strides.
const idx_t frames = 8, height = 14, width = 16, heads = 2, dim = 32, tokens = frames * height * width;
const idx_t of_pixel = heads * dim, of_row = width * of_pixel, of_frame = height * of_row;

// Sequences of `length` tokens, one every `step` numbers. A view has one stride for all sequences of its batch: where
// they fill two axes that are not next to each other, as columns do, each index of the outer one is a view of its own.
struct axis {
  const char* name;
  idx_t length, step, batch, stride, outer = 1, outer_stride = 0;
  bool same_frame = true, same_row = true, same_column = true;  // what the tokens of a sequence have in common

  template <class T>
  attn::tensor_view<T> view(T* x, idx_t n) const {
    return {x + n * outer_stride, {batch, heads, length, dim}, {stride, dim, step, 1}};
  }
};
const axis axes[] = {
    {.name = "time", .length = frames, .step = of_frame, .batch = height * width, .stride = of_pixel,
     .same_frame = false},
    {.name = "space", .length = height * width, .step = of_pixel, .batch = frames, .stride = of_frame,
     .same_row = false, .same_column = false},
    {.name = "rows", .length = width, .step = of_pixel, .batch = frames * height, .stride = of_row,
     .same_column = false},
    {.name = "columns", .length = height, .step = of_row, .batch = width, .stride = of_pixel, .outer = frames,
     .outer_stride = of_frame, .same_row = false},
    {.name = "everything", .length = tokens, .step = of_pixel, .batch = 1, .stride = 0,
     .same_frame = false, .same_row = false, .same_column = false}};

using floats = std::vector<float>;

void attend(const axis& a, const floats& q, const floats& k, const floats& v, floats& out) {
  for (idx_t n = 0; n < a.outer; ++n)
    attn::full_softmax(a.view(q.data(), n), a.view(k.data(), n), a.view(v.data(), n), a.view(out.data(), n));
}

// The same for one token and head in plain loops over all tokens: the largest difference from out.
double difference(const axis& a, const floats& q, const floats& k, const floats& v, const floats& out, idx_t i,
                  idx_t h) {
  double sum = 0, worst = 0, result[dim] = {};
  for (idx_t j = 0; j < tokens; ++j) {
    const bool sees = (!a.same_frame || i / (height * width) == j / (height * width)) &&
                      (!a.same_row || i / width % height == j / width % height) &&
                      (!a.same_column || i % width == j % width);
    if (!sees) continue;
    const idx_t from = i * of_pixel + h * dim, to = j * of_pixel + h * dim;
    double score = 0;
    for (idx_t d = 0; d < dim; ++d) score += double(q[from + d]) * k[to + d] / std::sqrt(double(dim));
    sum += std::exp(score);
    for (idx_t d = 0; d < dim; ++d) result[d] += std::exp(score) * v[to + d];
  }
  for (idx_t d = 0; d < dim; ++d) worst = std::max(worst, std::abs(result[d] / sum - out[i * of_pixel + h * dim + d]));
  return worst;
}

int main() {
  attn::random_numbers random(1);
  floats blocks[4];
  for (floats& block : blocks)
    for (idx_t n = 0; n < tokens * of_pixel; ++n) block.push_back(float(random.normal()));
  auto& [q, k, v, out] = blocks;
  bool right = true;
  std::vector<double> times;
  std::printf("%td frames of %td x %td pixels, %td heads of %td\n", frames, height, width, heads, dim);
  std::printf("%12s %12s %14s %8s %12s\n", "over", "sequences", "scores", "ms", "difference");
  for (const axis& a : axes) {
    double best = 1e9, worst = 0;
    for (int repeat = 0; repeat < 5; ++repeat) {
      const auto start = std::chrono::steady_clock::now();
      attend(a, q, k, v, out);
      const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
      best = std::min(best, time.count());
    }
    times.push_back(best);
    for (idx_t i = 0; i < tokens; i += 5)
      for (idx_t h = 0; h < heads; ++h) worst = std::max(worst, difference(a, q, k, v, out, i, h));
    right &= worst < 1e-5;  // sums of float: 1e-7 times the size of their numbers, 4 at most, with a margin
    std::printf("%12s %12td %14td %8.2f %12.1e\n", a.name, a.outer * a.batch, heads * tokens * a.length, best, worst);
  }
  std::printf("time, then space: %.1f times as fast as everything at once\n", times[4] / (times[0] + times[1]));
  return right ? 0 : 1;
}
