// The text: what is learned from, what is held out, examples of both, and the loss.
#pragma once

#include "model.hpp"

#include <filesystem>
#include <fstream>
#include <iterator>

namespace byte_model {

[[noreturn]] inline void fail(const std::string& message) { throw std::runtime_error(message); }

// The files one after the other; without any, this machine's licences, or the headers of this library.
inline std::string read_text(std::vector<std::string> files) {
  namespace fs = std::filesystem;
  for (const char* folder : {"/usr/share/common-licenses", "include/attn", "../include/attn", "../../include/attn"}) {
    if (!files.empty()) break;
    if (!fs::is_directory(folder)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(folder))
      if (entry.is_regular_file() && !entry.is_symlink()) files.push_back(entry.path().string());
    std::sort(files.begin(), files.end());
  }
  if (files.empty()) fail("there is no text here to learn from: name a file");
  std::string text;
  for (const std::string& name : files) {
    std::ifstream file(name, std::ios::binary);
    if (!file || fs::is_directory(name)) fail("file not found: " + name);
    text.append(std::istreambuf_iterator<char>(file), {});
  }
  return text;
}

struct corpus {
  std::string train, held;
  double frequency_bits = 0;  // for a byte of held, known only how often each is in train
};

inline corpus hold_out_a_tenth(const std::string& text, index context) {
  const std::size_t held = text.size() / 10, least = static_cast<std::size_t>(context) + 1;
  if (held < least)
    fail("expected a text of at least " + std::to_string(10 * least) + " bytes, so that a tenth of it holds the context of " +
         std::to_string(context) + "; found " + std::to_string(text.size()));
  corpus c{text.substr(0, text.size() - held), text.substr(text.size() - held)};
  std::vector<double> count(byte_count, 1);
  for (const unsigned char byte : c.train) ++count[byte];
  for (const unsigned char byte : c.held)
    c.frequency_bits -= std::log2(count[byte] / double(c.train.size() + byte_count)) / double(held);
  return c;
}

inline std::vector<int> tokens_of(const std::string& text) {
  std::vector<int> tokens;
  for (const unsigned char byte : text) tokens.push_back(byte);
  return tokens;
}

// Windows of a text, one after the other: what the model sees, and what it is to find at each token, or -1.
struct examples {
  std::vector<int> tokens{}, targets{};
};

inline examples make_examples(const std::string& text, const std::vector<index>& begins, const sizes& s,
                              attn::random_numbers& random) {
  examples e;
  for (const index begin : begins) {
    const std::vector<int> bytes = tokens_of(text.substr(begin, s.context + 1));
    for (index n = 0; n < s.context; ++n) {
      const bool hidden = s.masked && random.below(100) < 15;
      e.tokens.push_back(hidden ? mask : bytes[n]);
      e.targets.push_back(!s.masked ? bytes[n + 1] : hidden ? bytes[n] : -1);
    }
  }
  return e;
}

// The mean of -log2 of what the targets' bytes are given; the logits become the gradient of that in natural units.
inline double loss(tensor& logits, const std::vector<int>& targets, execution& exec) {
  auto rows = rows_of(logits);
  const auto wanted = std::count_if(targets.begin(), targets.end(), [](int t) { return t >= 0; });
  const double count = std::max(1., double(wanted));
  std::vector<double> bits(targets.size());  // added up in order, whatever the threads
  exec.for_each((rows.rows() + 63) / 64, [&](index task, int) {
    for (index n = 64 * task; n < std::min<index>(rows.rows(), 64 * task + 64); ++n) {
      auto row = rows.row(n).array();
      const int target = targets[n];
      if (target < 0) {
        row = 0;
        continue;
      }
      row -= row.maxCoeff();
      const double logit = row[target];
      row = row.exp();
      const double sum = row.sum();
      bits[n] = (std::log(sum) - logit) / std::numbers::ln2;
      row *= float(1 / (sum * count));
      row[target] -= float(1 / count);
    }
  });
  double sum = 0;
  for (const double b : bits) sum += b;
  return sum / count;
}

}  // namespace byte_model
