// The text: what is learned from, what is held out, examples of both, and the loss.
#pragma once

#include "model.hpp"

#include <filesystem>
#include <fstream>
#include <iterator>

namespace byte_model {

[[noreturn]] inline void fail(const std::string& message) { throw std::runtime_error(message); }

// The text of the files; without any, of this machine's licences, or of the headers of this library.
inline list<std::string> read_texts(std::vector<std::string> files) {
  namespace fs = std::filesystem;
  for (const char* folder : {"/usr/share/common-licenses", "include/attn", "../include/attn", "../../include/attn"}) {
    if (!files.empty()) break;
    if (!fs::is_directory(folder)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(folder))
      if (entry.is_regular_file() && !entry.is_symlink()) files.push_back(entry.path().string());
    std::sort(files.begin(), files.end());
  }
  if (files.empty()) fail("there is no text here to learn from: name a file");
  list<std::string> texts;
  for (const std::string& name : files) {
    std::ifstream file(name, std::ios::binary);
    if (!file || fs::is_directory(name)) fail("file not found: " + name);
    texts.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return texts;
}

inline std::string part_of(const std::string& text, idx_t begin, idx_t count) {
  return text.substr(static_cast<std::size_t>(begin), static_cast<std::size_t>(count));
}

inline list<int> tokens_of(const std::string& text) {
  list<int> tokens;
  for (const char byte : text) tokens.push_back(static_cast<unsigned char>(byte));
  return tokens;
}

struct corpus {
  std::string train{}, held{};
  double frequency_bits = 0;  // for a byte of held, known only how often each is in train
};

// The last tenth of every text is held out.
inline corpus hold_out(const list<std::string>& texts, idx_t context) {
  corpus c;
  std::size_t size = 0;
  for (const std::string& text : texts) {
    size += text.size();
    c.train += text.substr(0, text.size() - text.size() / 10);
    c.held += text.substr(text.size() - text.size() / 10);
  }
  if (std::ssize(c.held) <= context)
    fail("expected a text of at least " + std::to_string(10 * (context + 1)) +
         " bytes, so that a tenth of it holds the context of " + std::to_string(context) + "; found " +
         std::to_string(size));
  list<double> count(byte_count, 1);
  for (const int byte : tokens_of(c.train)) ++count[byte];
  for (const int byte : tokens_of(c.held))
    c.frequency_bits -= std::log2(count[byte] / double(c.train.size() + byte_count)) / double(c.held.size());
  return c;
}

// Windows of a text, one after the other: what the model sees, and what it is to find at each token, or -1.
struct examples {
  list<int> tokens{}, targets{};
};

inline examples make_examples(const std::string& text, const list<idx_t>& begins, const sizes& s,
                              attn::random_numbers& random) {
  examples e;
  for (const idx_t begin : begins) {
    const list<int> bytes = tokens_of(part_of(text, begin, s.context + 1));
    for (idx_t n = 0; n < s.context; ++n) {
      const bool hidden = s.masked && random.below(100) < 15;
      e.tokens.push_back(hidden ? mask : bytes[n]);
      e.targets.push_back(!s.masked ? bytes[n + 1] : hidden ? bytes[n] : -1);
    }
  }
  return e;
}

// The mean of -log2 of what the targets' bytes are given; the logits become the gradient of that in natural units.
inline double loss(tensor& logits, const list<int>& targets, execution& exec) {
  auto rows = rows_of(logits);
  const auto wanted = std::count_if(targets.begin(), targets.end(), [](int t) { return t >= 0; });
  const double count = std::max(1., double(wanted));
  list<double> bits(targets.size());  // added up in order, whatever the threads
  exec.for_each((rows.rows() + 63) / 64, [&](idx_t task, int) {
    for (idx_t n = 64 * task; n < std::min<idx_t>(rows.rows(), 64 * task + 64); ++n) {
      const int target = targets[n];
      if (target < 0) {
        rows.row(n).setZero();
        continue;
      }
      // A copy, because in what order Eigen adds depends on where a row begins in memory.
      Eigen::Array<float, 1, byte_count> row = rows.row(n);
      row -= row.maxCoeff();
      const double logit = row[target];
      row = row.exp();
      const double sum = row.sum();
      bits[n] = (std::log(sum) - logit) / std::numbers::ln2;
      row *= float(1 / (sum * count));
      row[target] -= float(1 / count);
      rows.row(n) = row;
    }
  });
  double sum = 0;
  for (const double b : bits) sum += b;
  return sum / count;
}

}  // namespace byte_model
