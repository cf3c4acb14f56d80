// Text as tokens: bytes, or the pieces of a tokenizer's file of llama2.c, which has the length of the longest piece
// (32 bits), then for every piece a score (float), its length (32 bits) and its bytes. Of neighbours whose union is a
// piece, those are merged first whose union has the highest score (byte pair encoding).
//
//   const tokenizer pieces("tok512.bin");
//   pieces.text_of(pieces.tokens_of("Once upon a time", 512))
//
// Throws std::runtime_error, which names the file and what is wrong with it.
#pragma once

#include <array>
#include <limits>

#include "../support/arrays.hpp"

namespace decoder {

class tokenizer {
 public:
  tokenizer() {  // of bytes
    for (int byte = 0; byte < 256; ++byte) pieces_.emplace_back(1, static_cast<char>(byte)), of_bytes_[byte] = byte;
    texts_ = pieces_;
  }
  explicit tokenizer(const std::string& path) : has_marks_(true) {
    const std::string file = support::read_file(path);
    std::size_t at = 0;
    const auto bytes = [&](std::size_t count) {
      if (count > file.size() - at)
        support::fail(path, "expected a tokenizer of llama2.c; the file ends within piece " +
                                std::to_string(pieces_.size()));
      at += count;
      return std::string_view(file).substr(at - count, count);
    };
    const auto number = [&] {
      std::size_t n = 0;
      int shift = 0;
      for (const char c : bytes(4)) n |= std::size_t{static_cast<unsigned char>(c)} << shift, shift += 8;
      return n;
    };
    number();  // the longest piece
    while (at < file.size()) {
      scores_.push_back(support::array_of<float>(path, {1}, bytes(4)).numbers[0]);
      pieces_.emplace_back(bytes(number()));
      token_of_.emplace(pieces_.back(), int(pieces_.size()) - 1);
    }
    texts_ = pieces_;
    for (int byte = 0; byte < 256; ++byte) {
      constexpr const char* digits = "0123456789ABCDEF";
      const std::string name = std::string("<0x") + digits[byte / 16] + digits[byte % 16] + ">";
      const auto found = token_of_.find(name);
      if (found == token_of_.end()) support::fail(path, "expected a piece " + name + "; found none");
      of_bytes_[byte] = found->second;
      texts_[found->second] = static_cast<char>(byte);
    }
  }

  std::ptrdiff_t size() const { return std::ssize(pieces_); }
  /// Whether a token is no text: it says where one begins or ends.
  bool is_mark(int token) const { return has_marks_ && (token == begin || token == end); }

  /// Throws std::runtime_error for a text of more tokens than `most`.
  std::vector<int> tokens_of(const std::string& text, std::ptrdiff_t most) const {
    const auto fail = [&](std::size_t count, const char* what) {
      throw std::runtime_error("prompt: expected at most " + std::to_string(most) +
                               " tokens, the positions of the model; found " + std::to_string(count) + what);
    };
    std::size_t longest = 0;
    for (const std::string& p : pieces_) longest = std::max(longest, p.size());
    if (text.size() > longest * most) fail(text.size(), " bytes");
    const std::string all = has_marks_ && !text.empty() ? " " + text : text;  // as in training
    std::vector<int> tokens;
    for (std::size_t at = 0, next; at < all.size(); at = next) {  // a character of UTF-8, or its bytes
      for (next = at + 1; next < all.size() && next < at + 4 && (all[next] & 0xc0) == 0x80;) ++next;
      const auto found = token_of_.find(all.substr(at, next - at));
      if (found != token_of_.end()) tokens.push_back(found->second);
      else for (; at < next; ++at) tokens.push_back(of_bytes_[static_cast<unsigned char>(all[at])]);
    }
    for (;;) {
      float best = -std::numeric_limits<float>::infinity();
      std::size_t where = tokens.size();
      int merged = 0;
      for (std::size_t n = 0; n + 1 < tokens.size(); ++n) {
        const auto found = token_of_.find(pieces_[tokens[n]] + pieces_[tokens[n + 1]]);
        if (found == token_of_.end() || !(scores_[found->second] > best)) continue;
        best = scores_[found->second], where = n, merged = found->second;
      }
      if (where == tokens.size()) break;
      tokens[where] = merged;
      tokens.erase(tokens.begin() + std::ptrdiff_t(where) + 1);
    }
    if (has_marks_) tokens.insert(tokens.begin(), begin);
    if (std::ssize(tokens) > most) fail(tokens.size(), "");
    return tokens;
  }

  std::string text_of(const std::vector<int>& tokens) const {
    std::string text;
    for (const int token : tokens)
      if (!is_mark(token)) text += texts_[token];
    return has_marks_ && text.starts_with(' ') ? text.substr(1) : text;
  }

 private:
  static constexpr int begin = 1, end = 2;
  bool has_marks_ = false;
  std::vector<std::string> pieces_, texts_;
  std::vector<float> scores_;
  std::map<std::string, int> token_of_;
  std::array<int, 256> of_bytes_{};
};

}  // namespace decoder
