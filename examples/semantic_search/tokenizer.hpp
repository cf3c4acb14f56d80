// From text to the tokens of the model: the likeliest split into pieces of its vocabulary (the unigram model of
// SentencePiece), by Viterbi's algorithm, as the model's own runtime does it.
//
//   const semantic_search::tokenizer split(pieces);   // pieces and the logarithms of their probabilities
//   const std::vector<int> tokens = split("any text in UTF-8");
//
// Of Unicode's normal form NFKC it applies what texts in English contain: spaces, ligatures, full-width forms, styled
// letters and digits, fractions, and accents that follow their letter. Other characters stay as they are; most of them
// are unknown to the vocabulary.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace semantic_search {

/// Throws std::runtime_error, beginning with the name given, for what is no UTF-8.
inline std::u32string from_utf8(std::string_view text, const std::string& name) {
  std::u32string result;
  for (std::size_t at = 0; at < text.size();) {
    const auto byte = [&](std::size_t n) -> char32_t {
      return at + n < text.size() ? static_cast<unsigned char>(text[at + n]) : 0;
    };
    const char32_t first = byte(0);
    const std::size_t length = first < 0x80   ? 1
                               : first < 0xc2 ? 0
                               : first < 0xe0 ? 2
                               : first < 0xf0 ? 3
                               : first < 0xf5 ? 4
                                              : 0;
    char32_t c = length < 2 ? first : first & (0xff >> (length + 1));
    bool valid = length > 0;
    for (std::size_t n = 1; n < length; ++n) {
      valid = valid && (byte(n) & 0xc0) == 0x80;
      c = c << 6 | (byte(n) & 0x3f);
    }
    constexpr char32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    if (!valid || c < least[length] || c > 0x10ffff || (c >= 0xd800 && c < 0xe000))
      throw std::runtime_error(name + ": expected UTF-8; found another byte at " + std::to_string(at));
    result += c;
    at += length;
  }
  return result;
}

/// What NFKC puts in place of a character, or nothing where it stays.
inline std::u32string compatible(char32_t c) {
  const auto one = [](char32_t x) { return std::u32string(1, x); };
  const auto digit = [&](char32_t n) { return one(U'0' + n); };
  if (c < 0xa0) return {};
  if (c == 0xa0 || (c >= 0x2000 && c <= 0x200a) || c == 0x202f || c == 0x205f || c == 0x3000) return U" ";
  if (c >= 0xff01 && c <= 0xff5e) return one(c - 0xff01 + U'!');       // full width
  if (c >= 0x1d7ce && c <= 0x1d7ff) return digit((c - 0x1d7ce) % 10);  // bold, sans-serif, ...
  if (c >= 0x1d400 && c <= 0x1d6a3)
    return one((c - 0x1d400) % 52 < 26 ? U'A' + (c - 0x1d400) % 52 : U'a' + (c - 0x1d400) % 52 - 26);
  if (c == 0x2070 || (c >= 0x2074 && c <= 0x2079)) return digit(c - 0x2070);
  if (c >= 0x2080 && c <= 0x2089) return digit(c - 0x2080);
  if (c >= 0x2460 && c <= 0x2468) return digit(c - 0x2460 + 1);  // in circles
  static const std::unordered_map<char32_t, const char32_t*> others = {
      {U'\u00b2', U"2"},        {U'\u00b3', U"3"},        {U'\u00b9', U"1"},
      {U'\u00aa', U"a"},        {U'\u00ba', U"o"},        {U'\u00b5', U"\u03bc"},
      {U'\u00bc', U"1\u20444"}, {U'\u00bd', U"1\u20442"}, {U'\u00be', U"3\u20444"},
      {U'\u2153', U"1\u20443"}, {U'\u2154', U"2\u20443"}, {U'\u0132', U"IJ"},
      {U'\u0133', U"ij"},       {U'\u017f', U"s"},        {U'\u2024', U"."},
      {U'\u2025', U".."},       {U'\u2026', U"..."},      {U'\u2033', U"\u2032\u2032"},
      {U'\u203c', U"!!"},       {U'\u2047', U"??"},       {U'\u2048', U"?!"},
      {U'\u2049', U"!?"},       {U'\u207f', U"n"},        {U'\u2103', U"\u00b0C"},
      {U'\u2109', U"\u00b0F"},  {U'\u2116', U"No"},       {U'\u2120', U"SM"},
      {U'\u2122', U"TM"},       {U'\u212a', U"K"},        {U'\ufb00', U"ff"},
      {U'\ufb01', U"fi"},       {U'\ufb02', U"fl"},       {U'\ufb03', U"ffi"},
      {U'\ufb04', U"ffl"},      {U'\ufb05', U"st"},       {U'\ufb06', U"st"}};
  const auto found = others.find(c);
  return found == others.end() ? std::u32string() : found->second;
}

/// The letter with an accent, or 0 where the vocabulary has none.
inline char32_t composed(char32_t letter, char32_t accent) {
  struct row {
    char32_t accent;
    std::u32string_view letters, composed;
  };
  static constexpr row rows[] = {{0x300, U"aeiou", U"\u00e0\u00e8\u00ec\u00f2\u00f9"},
                                 {0x301, U"aeioucE", U"\u00e1\u00e9\u00ed\u00f3\u00fa\u0107\u00c9"},
                                 {0x302, U"aeo", U"\u00e2\u00ea\u00f4"},
                                 {0x303, U"an", U"\u00e3\u00f1"},
                                 {0x304, U"ao", U"\u0101\u014d"},
                                 {0x308, U"aeou", U"\u00e4\u00eb\u00f6\u00fc"},
                                 {0x30a, U"a", U"\u00e5"},
                                 {0x30c, U"s", U"\u0161"},
                                 {0x327, U"c", U"\u00e7"}};
  for (const row& r : rows)
    if (r.accent == accent)
      if (const std::size_t at = r.letters.find(letter); at != std::u32string_view::npos) return r.composed[at];
  return 0;
}

inline std::u32string normalised(const std::u32string& text) {
  std::u32string result;
  for (const char32_t c : text) {
    const std::u32string other = compatible(c);
    const char32_t letter = result.empty() || !other.empty() ? 0 : composed(result.back(), c);
    if (letter)
      result.back() = letter;
    else if (other.empty())
      result += c;
    else
      result += other;
  }
  return result;
}

/// A piece of text and the logarithm of its probability.
using piece = std::pair<std::string, double>;

class tokenizer {
 public:
  static constexpr char32_t space = 0x2581;  // in place of a space, and before the first word
  static constexpr int unknown = 0, reserved = 6;

  /// The first pieces are reserved: the unknown one and markers that no text contains.
  explicit tokenizer(const std::vector<piece>& pieces) {
    for (std::size_t n = reserved; n < pieces.size(); ++n) {
      const std::u32string symbols = from_utf8(pieces[n].first, "vocabulary");
      std::uint32_t at = 0;
      for (const char32_t c : symbols) {
        const auto next = static_cast<std::uint32_t>(children_.size() + 1);
        at = children_.try_emplace(key(at, c), next).first->second;
      }
      ends_.resize(children_.size() + 1);
      if (!symbols.empty()) ends_[at] = {static_cast<int>(n), pieces[n].second};
    }
  }

  /// Throws std::runtime_error for what is no UTF-8.
  std::vector<int> operator()(std::string_view text) const {
    std::u32string symbols = normalised(from_utf8(text, "text"));
    if (symbols.empty()) return {};
    symbols.insert(symbols.begin(), U' ');
    for (char32_t& c : symbols)
      if (c == U' ') c = space;

    // The best split of what ends at each place: its score, its last token and where that begins.
    struct split {
      double score = 0;
      int token = unknown;
      std::size_t begin = 0;
      bool reached = false;
    };
    std::vector<split> best(symbols.size() + 1);
    for (std::size_t begin = 0; begin < symbols.size(); ++begin) {
      const auto offer = [&](std::size_t end, int token, double score) {
        score += best[begin].score;
        if (!best[end].reached || score >= best[end].score) best[end] = {score, token, begin, true};
      };
      bool known = false;
      std::uint32_t at = 0;
      for (std::size_t end = begin; end < symbols.size(); ++end) {
        const auto child = children_.find(key(at, symbols[end]));
        if (child == children_.end()) break;
        at = child->second;
        if (ends_[at].token == unknown) continue;
        offer(end + 1, ends_[at].token, ends_[at].score);
        known = true;
      }
      if (!known) offer(begin + 1, unknown, 0);
    }
    std::vector<int> tokens;  // several unknown characters in a row are one token
    for (std::size_t end = symbols.size(); end > 0; end = best[end].begin)
      if (best[end].token != unknown || tokens.empty() || tokens.back() != unknown) tokens.push_back(best[end].token);
    return {tokens.rbegin(), tokens.rend()};
  }

 private:
  struct end_of_piece {
    int token = unknown;
    double score = 0;
  };
  static std::uint64_t key(std::uint32_t node, char32_t c) { return std::uint64_t{node} << 21 | c; }

  std::unordered_map<std::uint64_t, std::uint32_t> children_;  // of a trie: the node after a node and a character
  std::vector<end_of_piece> ends_ = std::vector<end_of_piece>(1);
};

}  // namespace semantic_search
