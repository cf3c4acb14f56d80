// A decoder in the shape of Llama (RMS norm, rotary positions, grouped queries, SwiGLU) tells a story, with the weights
// and the tokenizer of a model of llama2.c. It then decodes in all ways that attn has, and compares:
//
//   prompts  many at once: one that ends makes room for the next one, prompts are read in chunks while others decode,
//            and all of them share the pages of what they begin with. The tokens are those of one prompt at a time.
//   drafts   what followed the last two tokens where they occurred before is fed as a tree, in one step with a mask; of
//            the tree the caches keep the branch that the model takes. The tokens are the same again, in fewer rounds.
//   beams    the likeliest of several texts, whose caches are reordered after each token.
//   caches   in fewer bits: after how many tokens the text is another one.
//
//   19_decoder [--model=MODEL.bin --tokenizer=TOKENIZER.bin] [--prompt=TEXT] [--tokens=N] [--beams=N]
//              [--operator=full|window|topk_blocks|multipole|linear]
//
// Without a model the weights are random, tokens are bytes, and the text, which is noise, is not shown.
#include <charconv>
#include <chrono>
#include <cstdio>

#include "decoder/model.hpp"
#include "decoder/tokenizer.hpp"

namespace decoder {

struct request {
  std::vector<int> tokens;  // the prompt, then what follows it
  idx_t wanted = 0;         // tokens in the end, unless the text ends before
  idx_t fed = 0;
};

struct served {
  idx_t rounds = 0, drafts = 0, accepted = 0;
};

// Serves all requests, `slots` of them at a time, each after the common beginning, which the model's last item keeps.
served serve(model& m, idx_t slots, const tokenizer& pieces, std::vector<request>& requests, bool drafts) {
  constexpr idx_t chunk = 16;  // tokens of a prompt that are read at a time
  std::vector<fed_tokens> fed(slots + 1);
  const std::vector<int>& first = requests[0].tokens;
  idx_t common = std::ssize(first) - 1;
  for (const request& r : requests) {
    common = std::min(common, std::ssize(r.tokens) - 1);
    common = std::mismatch(first.begin(), first.begin() + common, r.tokens.begin()).first - first.begin();
  }
  for (idx_t at = 0; at < common; at += chunk) {
    fed[slots].tokens.assign(first.begin() + at, first.begin() + std::min(at + chunk, common));
    m.feed(fed);
  }
  fed[slots] = {};
  std::vector<request*> active(slots, nullptr);
  std::size_t waiting = 0;
  for (served all;; ++all.rounds) {
    for (idx_t slot = 0; slot < slots; ++slot) {
      request*& r = active[slot];
      if (!r && waiting < requests.size()) {
        r = &requests[waiting++];
        r->fed = common;
        m.copy_item(slots, slot);
      }
      fed[slot] = {};
      if (!r) continue;
      const idx_t count = std::min<idx_t>(chunk, std::ssize(r->tokens) - r->fed);
      if (drafts && count == 1) fed[slot] = with_drafts(r->tokens);
      else fed[slot].tokens.assign(r->tokens.begin() + r->fed, r->tokens.begin() + r->fed + count);
      r->fed += count;
    }
    if (std::all_of(active.begin(), active.end(), [](const request* r) { return !r; })) return all;
    const std::vector<matrix> logits = m.feed(fed);
    for (idx_t slot = 0; slot < slots; ++slot) {
      request*& r = active[slot];
      if (!r || r->fed < std::ssize(r->tokens)) continue;  // of a prompt's chunks, the last one says what follows
      idx_t last = fed[slot].size() - 1;
      if (fed[slot].is_tree()) {  // along the drafts that are what follows
        std::vector<idx_t> branch = {last = 0};
        while (std::ssize(r->tokens) + 1 < r->wanted) {
          const idx_t n = child_of(fed[slot], last, likeliest(logits[slot], last));
          if (n < 0 || pieces.is_mark(fed[slot].tokens[n])) break;
          branch.push_back(last = n);
          r->tokens.push_back(fed[slot].tokens[n]);
        }
        m.keep(slot, fed[slot].size(), branch);
        r->fed += std::ssize(branch) - 1;
        all.drafts += fed[slot].size() - 1, all.accepted += std::ssize(branch) - 1;
      }
      r->tokens.push_back(likeliest(logits[slot], last));
      if (std::ssize(r->tokens) < r->wanted && !pieces.is_mark(r->tokens.back())) continue;
      m.reset(slot);
      r = nullptr;
    }
  }
}

struct beam {
  std::vector<int> tokens;
  double log_probability = 0;
};

// The likeliest of the texts that remain where after every token the `width` likeliest ones do.
beam best_of_beams(model& m, idx_t width, const tokenizer& pieces, const request& r) {
  struct candidate {
    double log_probability;
    idx_t from;
    int token;
  };
  std::vector<beam> beams{{r.tokens}};
  std::vector<fed_tokens> fed(width);
  for (fed[0].tokens = r.tokens;;) {
    const std::vector<matrix> logits = m.feed(fed);
    std::vector<candidate> all;
    for (idx_t b = 0; b < std::ssize(beams); ++b) {
      if (fed[b].size() == 0) all.push_back({beams[b].log_probability, b, -1});  // it has ended
      else
        for (int token = 0; const double more : log_probabilities(logits[b], fed[b].size() - 1))
          all.push_back({beams[b].log_probability + more, b, token++});
    }
    std::stable_sort(all.begin(), all.end(),
                     [](const auto& a, const auto& b) { return a.log_probability > b.log_probability; });
    std::vector<beam> next;
    std::vector<idx_t> order;
    bool done = true;
    for (idx_t n = 0; n < width; ++n) {
      order.push_back(all[n].from);
      next.push_back({beams[all[n].from].tokens, all[n].log_probability});
      fed[n] = {};
      if (all[n].token < 0) continue;
      next[n].tokens.push_back(all[n].token);
      if (pieces.is_mark(all[n].token) || std::ssize(next[n].tokens) >= r.wanted) continue;
      fed[n].tokens = {all[n].token};
      done = false;
    }
    beams = std::move(next);
    if (done) return beams[0];
    m.reorder(order);
  }
}

struct task {
  std::string model, tokenizer, prompt = "Once upon a time", operator_name = "full";
  idx_t tokens = 256, beams = 4;
};

int run(const task& to_do) {
  const weights w = to_do.model.empty() ? draw_weights() : read_weights(to_do.model);
  const tokenizer pieces = to_do.tokenizer.empty() ? tokenizer() : tokenizer(to_do.tokenizer);
  const shape& s = w.sizes;
  if (pieces.size() != s.vocabulary)
    throw std::runtime_error("--tokenizer: expected one of " + std::to_string(s.vocabulary) + " pieces, as the model " +
                             "has; found " + std::to_string(pieces.size()));
  const auto asked = [&](const std::string& prompt, idx_t more) {
    const std::vector<int> tokens = pieces.tokens_of(prompt, s.positions);
    if (tokens.empty()) throw std::runtime_error("--prompt=: expected a text; found none");
    return request{tokens, std::min(std::ssize(tokens) + more, s.positions + 1)};  // the last token is not fed
  };
  const request story = asked(to_do.prompt, to_do.tokens);
  std::vector<request> requests;
  for (const char* prompt : {"girl named Lily.", "boy who had a red ball.", "dog. The dog liked to", "bird",
                             "fish that lived in the sea. One day,", "tree. The tree was very old, but", "car",
                             "cat and a big"})
    requests.push_back(asked("Once upon a time, there was a little " + std::string(prompt),
                             24 + 8 * std::ssize(requests)));

  const auto serve_all = [&](const char* how, std::vector<request> all, idx_t slots, bool drafts = false,
                             const char* cache = "float") {
    idx_t before = 0, after = 0, longest = 0;
    for (const request& r : all) before += std::ssize(r.tokens), longest = std::max(longest, r.wanted);
    const auto start = std::chrono::steady_clock::now();
    model m(w, to_do.operator_name, cache, slots + 1, longest);
    const served of = serve(m, slots, pieces, all, drafts);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    for (const request& r : all) after += std::ssize(r.tokens);
    std::printf("%s: %td tokens after %td in %td rounds, %.0f a second", how, after - before, before, of.rounds,
                double(after - before) / seconds.count());
    if (drafts) std::printf("; of %td drafts %td were what follows", of.drafts, of.accepted);
    if (slots > 1) std::printf("; pages kept: %td", m.pages());
    std::printf("\n");
    return all;
  };
  bool right = true;
  const auto same = [&](const std::vector<request>& a, const std::vector<request>& b) {
    bool all = true;
    for (std::size_t n = 0; n < a.size(); ++n) all &= a[n].tokens == b[n].tokens;
    right &= all;
    return all ? "yes" : "no";
  };

  const std::vector<request> told = serve_all("one token at a time", {story}, 1);
  std::printf("(%td layers of %td, %td heads over %td key heads, vocabulary %td)\n", s.layers, s.width(), s.heads,
              s.kv_heads, s.vocabulary);
  if (!to_do.model.empty()) std::printf("\n%s\n\n", pieces.text_of(told[0].tokens).c_str());
  const bool full = to_do.operator_name == "full";  // whose step takes a mask, and whose caches have elements
  if (full) std::printf("the same text: %s\n", same(serve_all("drafts in trees", {story}, 1, true), told));

  const std::vector<request> alone = serve_all("1 prompt at a time", requests, 1);
  std::printf("the same texts: %s\n", same(serve_all("4 prompts at a time", requests, 4), alone));
  if (full) std::printf("the same texts: %s\n", same(serve_all("4 with drafts", requests, 4, true), alone));

  const auto read_at_once = [&](const std::vector<int>& tokens) {  // the log probability after the prompt
    model m(w, to_do.operator_name, "float", 1, std::ssize(tokens));
    const matrix logits = m.feed({{{tokens.begin(), tokens.end() - 1}, {}}})[0];
    double sum = 0;
    for (idx_t n = std::ssize(story.tokens); n < std::ssize(tokens); ++n)
      sum += log_probabilities(logits, n - 1)[tokens[n]];
    return sum;
  };
  const double own = read_at_once(told[0].tokens);
  for (const idx_t width : {idx_t(1), to_do.beams}) {
    model m(w, to_do.operator_name, "float", width, story.wanted);
    const beam best = best_of_beams(m, width, pieces, story);
    const double again = read_at_once(best.tokens), difference = std::abs(again - best.log_probability);
    right &= difference <= 1e-3 * double(best.tokens.size());  // the caches of another beam would err by 1 or more
    std::printf("%td %s: log probability %.2f, %.2f where the text is read at once\n", width,
                width > 1 ? "beams" : "beam", best.log_probability, again);
    if (width == 1) std::printf("the same text: %s\n", same({{best.tokens}}, told));
    else std::printf("at least that of the text above, %.2f: %s\n", own, again >= own - difference ? "yes" : "no");
    if (width > 1 && !to_do.model.empty()) std::printf("\n%s\n\n", pieces.text_of(best.tokens).c_str());
  }
  for (const char* cache : {"bf16", "int8", "int4"}) {
    if (!full) break;
    const std::vector<int> other = serve_all(cache, {story}, 1, false, cache)[0].tokens, &first = told[0].tokens;
    const auto until = std::mismatch(first.begin(), first.end(), other.begin(), other.end()).first - first.begin();
    std::printf("the same text for %td of %td tokens\n", until, std::ssize(first));
  }
  return right ? 0 : 1;
}

int run(const std::vector<std::string>& arguments) {
  task to_do;
  const auto number = [](const std::string& name, const std::string& text, idx_t& n, idx_t most) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
    if (error != std::errc() || end != text.data() + text.size() || n < 1 || n > most)
      throw std::runtime_error(name + ": expected a number from 1 to " + std::to_string(most) + "; found " + text);
  };
  for (const std::string& x : arguments) {
    const std::size_t end = std::min(x.find('='), x.size());
    const std::string name = x.substr(0, end), value = x.substr(std::min(end + 1, x.size()));
    if (name == "--model") to_do.model = value;
    else if (name == "--tokenizer") to_do.tokenizer = value;
    else if (name == "--prompt") to_do.prompt = value;
    else if (name == "--operator") to_do.operator_name = value;
    else if (name == "--tokens") number(name, value, to_do.tokens, 1000000);
    else if (name == "--beams") number(name, value, to_do.beams, 64);
    else
      throw std::runtime_error("usage: 19_decoder [--model=MODEL.bin --tokenizer=TOKENIZER.bin] [--prompt=TEXT] "
                               "[--tokens=N] [--beams=N] [--operator=NAME]");
  }
  return run(to_do);
}

}  // namespace decoder

int main(int argc, char** argv) try {
  return decoder::run({argv + 1, argv + argc});
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
