// Alignment: at which characters of its input a translator looks while it writes its own (Bahdanau, Cho & Bengio 2014,
// figure 3). Here it learns, in seconds, to write dates such as "3 March 1987" as 1987-03-03.
// Usage: 30_alignment [picture.pgm]
#include <attn/core/random.hpp>
#include <attn/core/tensor.hpp>
#include <attn/layers/multi_head_backward.hpp>
#include <attn/layers/project_backward.hpp>
#include <attn/softmax/attention_weights.hpp>
#include <attn/softmax/sliding_window_backward.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

using attn::idx_t;
using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using tensor = attn::tensor<float, 3>;  // [dates, length, width]
using idx_list = attn::list_view<idx_t>;
using strings = std::vector<std::string>;
const idx_t width = 48, characters = 128;   // a token is a character of ASCII
const idx_t longest = 17, iso_length = 10;  // of "30 September 1987" and "1987-09-30"

struct parameter {
  matrix value, gradient, mean, square;  // the last two are Adam's
  parameter(idx_t rows, idx_t columns, attn::random_numbers& random, double deviation = 0.1)
      : value(rows, columns), gradient(matrix::Zero(rows, columns)), mean(gradient), square(gradient) {
    for (idx_t n = 0; n < value.size(); ++n) value.data()[n] = float(deviation * random.normal());
  }
  void update(double rate, int step) {  // Adam (Kingma & Ba 2015)
    const float b1 = 0.9f, b2 = 0.98f;
    const float by = float(rate / (1 - std::pow(b1, step))), unbiased = float(1 / (1 - std::pow(b2, step)));
    mean = b1 * mean + (1 - b1) * gradient;
    square.array() = b2 * square.array() + (1 - b2) * gradient.array().square();
    value.array() -= by * mean.array() / ((unbiased * square.array()).sqrt() + 1e-8f);
  }
};

auto all(tensor& x) { return Eigen::Map<Eigen::VectorXf>(x.data(), x.size()); }
auto row(tensor& x, idx_t b, idx_t i) { return Eigen::Map<Eigen::RowVectorXf>(&x(b, i, 0), x.extent(2)); }

// Of every character the sum of two learned rows, its own and that of its position.
tensor embed(const parameter& table, const strings& texts) {
  const idx_t length = table.value.rows() - characters;
  tensor x({std::ssize(texts), length, width});
  for (idx_t b = 0; b < std::ssize(texts); ++b)
    for (idx_t i = 0; i < std::min(length, std::ssize(texts[b])); ++i)
      row(x, b, i) = table.value.row(texts[b][i]) + table.value.row(characters + i);
  return x;
}
void embed_backward(parameter& table, const strings& texts, tensor dx) {
  table.gradient.setZero();
  for (idx_t b = 0; b < std::ssize(texts); ++b)
    for (idx_t i = 0; i < std::min(dx.extent(1), std::ssize(texts[b])); ++i)
      for (const idx_t n : {idx_t(texts[b][i]), characters + i}) table.gradient.row(n) += row(dx, b, i);
}

// x plus attention to what is at most `reach` away, in x itself or in a context of lengths n.
struct layer {
  attn::random_numbers& random;
  idx_t heads, reach;
  parameter query{width, width, random}, key{width, width, random}, value{width, width, random},
      output{width, width, random};
  attn::multi_head_weights<float> parts() const {
    return {.query = query.value, .key = key.value, .value = value.value, .output = output.value};
  }
  attn::sliding_window_options<float> window(idx_list n) const {
    return {.key_lengths = n, .first_position = 0, .left = reach, .right = reach};
  }
  auto attend(idx_list n, attn::tensor_view<float> weights = {}) const {
    return [=, this](auto q, auto k, auto v, auto out, attn::execution& exec) {
      attn::sliding_window(q, k, v, out, window(n), exec);
      if (weights) attn::attention_weights(q, k, {}, weights, {.key_lengths = n}, {}, exec);
    };
  }
  // Writes the weights too, if given: [dates, heads, length, length of the context].
  tensor forward(tensor& x, const tensor& context, idx_list n, attn::tensor_view<float> weights = {}) const {
    tensor out = x;
    attn::multi_head(x, out, parts(), attend(n, weights), {.heads = heads, .context = context});
    all(out) += all(x);
    return out;
  }
  tensor backward(tensor& x, tensor& d_out, const tensor& context, attn::tensor_view<float, 3> d_context, idx_list n) {
    const auto attend_backward = [&](auto q, auto k, auto v, auto out, auto d, auto dq, auto dk, auto dv, auto& exec) {
      attn::sliding_window_backward(q, k, v, out, d, {.q = dq, .k = dk, .v = dv}, window(n), exec);
    };
    tensor dx = x;
    attn::multi_head_backward(x, parts(), attend(n), attend_backward, d_out,
                              {.x = dx, .context = d_context, .query = query.gradient, .key = key.gradient,
                               .value = value.gradient, .output = output.gradient},
                              {.heads = heads, .context = context});
    all(dx) += all(d_out);
    return dx;
  }
};

struct translator {
  attn::random_numbers random{1};
  parameter read{characters + longest, width, random, 0.5}, wrote{characters + iso_length, width, random, 0.5};
  layer encoder{random, 2, 3}, decoder{random, 1, attn::unlimited};
  parameter readout{characters, width, random};
  tensor x, encoded, y, decoded, logits;
  std::vector<idx_t> lengths;

  // The logits of what follows each character that is written.
  void forward(const strings& texts, const strings& written, attn::tensor_view<float> weights = {}) {
    lengths.clear();
    for (const std::string& text : texts) lengths.push_back(std::ssize(text));
    x = embed(read, texts), y = embed(wrote, written);
    logits = tensor({std::ssize(texts), iso_length, characters});
    encoded = encoder.forward(x, {}, lengths);
    decoded = decoder.forward(y, encoded, lengths, weights);
    attn::project(decoded, logits, {.weight = readout.value});
  }
  // A step of training; returns the cross entropy. What is to be written begins with a character that is there before.
  double learn(const strings& texts, const strings& written, double rate, int step) {
    forward(texts, written);
    double loss = 0;
    for (idx_t b = 0; b < std::ssize(texts); ++b)
      for (idx_t t = 0; t < iso_length; ++t) {  // logits become gradients, of the sum: Adam divides by their size
        auto p = row(logits, b, t).array();
        p = (p - p.maxCoeff()).exp();
        p /= p.sum();
        loss -= std::log(p[written[b][t + 1]]);
        p[written[b][t + 1]] -= 1;
      }
    tensor d_encoded = x, d_decoded = y;
    attn::project_backward(decoded, {.weight = readout.value}, logits, {.x = d_decoded, .weight = readout.gradient});
    embed_backward(wrote, written, decoder.backward(y, d_decoded, encoded, d_encoded, lengths));
    embed_backward(read, texts, encoder.backward(x, d_encoded, {}, {}, lengths));
    for (parameter* p : {&read, &wrote, &readout}) p->update(rate, step);
    for (layer* l : {&encoder, &decoder})
      for (parameter* p : {&l->query, &l->key, &l->value, &l->output}) p->update(rate, step);
    return loss / double(texts.size() * iso_length);
  }
  // The likeliest characters, one after the other.
  strings write(const strings& texts, attn::tensor_view<float> weights) {
    strings written(texts.size(), ">");
    for (idx_t t = 0, best = 0; t < iso_length; ++t) {
      forward(texts, written, weights);
      for (idx_t b = 0; b < std::ssize(texts); ++b) row(logits, b, t).maxCoeff(&best), written[b] += char(best);
    }
    return written;
  }
};

// Adds a date, and behind the character from which writing starts how it is to be written.
void draw(attn::random_numbers& random, strings& texts, strings& written) {
  const char* const months[] = {"January", "February", "March",     "April",   "May",      "June",
                                "July",    "August",   "September", "October", "November", "December"};
  const auto two = [](idx_t n) { return (n < 10 ? "-0" : "-") + std::to_string(n); };
  const idx_t day = 1 + random.below(28), month = 1 + random.below(12), year = 1000 + random.below(2000);
  texts.push_back(std::to_string(day) + ' ' + months[month - 1] + ' ' + std::to_string(year));
  written.push_back('>' + std::to_string(year) + two(month) + two(day));
}

int main(int argc, char** argv) {
  attn::random_numbers random(38);
  strings held, expected;  // dates that are not learned from
  while (held.size() < 200) draw(random, held, expected);
  translator model;
  for (int step = 1, steps = 500; step <= steps; ++step) {
    strings texts, written;
    while (texts.size() < 32) {
      draw(random, texts, written);
      if (std::find(held.begin(), held.end(), texts.back()) != held.end()) texts.pop_back(), written.pop_back();
    }
    const double rate = 0.005 * std::min({1., step / 40., 2 - 2. * step / steps});  // rises first, falls at last
    const double loss = model.learn(texts, written, rate, step);
    if (step % 100 == 0) std::printf("%d steps of 32 dates: cross entropy %.4f\n", step, loss);
  }

  attn::tensor<float> weights({std::ssize(held), 1, iso_length, longest});
  const strings results = model.write(held, weights);
  double right = 0, on_year = 0;  // parts: dates; what digits of the year give to those of the input of their weight
  for (idx_t b = 0; b < std::ssize(held); ++b) {
    right += (results[b] == expected[b]) / double(held.size());
    for (idx_t n = 0; n < 16; ++n) on_year += weights(b, 0, n / 4, std::ssize(held[b]) - 1 - n % 4) / 4. / held.size();
  }
  std::printf("%.1f %% of %zu dates held out are right; the year's digits give %.1f %% of their weight to the year\n\n",
              100 * right, held.size(), 100 * on_year);
  // Of the first date, a row for each character written, a column for each one read. In the picture weight is light.
  std::ofstream file(argc > 1 ? argv[1] : "alignment.pgm", std::ios::binary);
  const std::size_t size = 16;
  file << "P5\n" << size * held[0].size() << ' ' << size * iso_length << "\n255\n";
  std::printf("  %s\n", held[0].c_str());
  for (idx_t t = 0; t < iso_length; ++t) {
    std::string shades, pixels;
    for (idx_t i = 0; i < std::ssize(held[0]); ++i) {
      shades += " .:-=+*#%@"[int(9.99f * weights(0, 0, t, i))];
      pixels.append(size, char(std::lround(255 * weights(0, 0, t, i))));
    }
    std::printf("%c %s\n", results[0][1 + t], shades.c_str());
    for (std::size_t n = 0; n < size; ++n) file << pixels;
  }
  if (!file.flush()) return std::fprintf(stderr, "cannot write the picture\n"), 1;
  return right >= 0.95 && on_year > 0.5 ? 0 : 1;
}
