// A language model of bytes, trained from scratch: a decoder of pre-norm blocks around any causal operator of the
// library; or, with --masked, an encoder around any bidirectional one, which learns to find masked bytes.
//
//   15_byte_language_model                                   trains on this machine's licences, or on this library
//   15_byte_language_model my.txt --operator linear --save weights --prompt "Once "
//   15_byte_language_model my.txt --operator linear --load weights --steps 0 --prompt "Once "
//   15_byte_language_model --masked --operator nystrom --prompt "Once upo_ a t_me"
//   15_byte_language_model --compare --steps 300             every operator: a table, curves as .csv and as a picture
//
// Other options, and their values unless given: --layers 4 --width 256 --heads 4 --context 512 --batch 4 --steps 1500
// --rate 0.002 --seed 1 --threads (all) --temperature 0.7 --bytes 300 (after the prompt), --reversible (the memory of
// training does not grow with the layers). The last tenth of every file is held out. One seed gives the same model with
// any number of threads. Its other headers are in the folder byte_language_model.
#include "byte_language_model/model.hpp"
#include "byte_language_model/text.hpp"
#include "byte_language_model/weights.hpp"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <variant>

namespace byte_model {

struct settings : sizes {
  std::vector<std::string> files{};
  std::string op = "full_softmax", load{}, save{}, prompt{};
  bool compare = false, self_test = false;
  idx_t batch = 4, steps = 1500, seed = 1, threads = std::max<idx_t>(1, std::thread::hardware_concurrency()),
        bytes = 300;
  idx_t reports = 20;  // of what is held out, in training
  double rate = 2e-3, temperature = 0.7;
};

settings parse(int count, char** arguments) {
  settings s;
  const std::pair<std::string, std::variant<bool*, idx_t*, double*, std::string*>> options[] = {
      {"--operator", &s.op},     {"--load", &s.load},
      {"--save", &s.save},       {"--prompt", &s.prompt},
      {"--masked", &s.masked},   {"--compare", &s.compare},
      {"--layers", &s.layers},   {"--reversible", &s.reversible},
      {"--width", &s.width},     {"--heads", &s.heads},
      {"--context", &s.context}, {"--temperature", &s.temperature},
      {"--batch", &s.batch},     {"--steps", &s.steps},
      {"--seed", &s.seed},       {"--self-test", &s.self_test},
      {"--threads", &s.threads}, {"--bytes", &s.bytes},
      {"--rate", &s.rate}};
  for (int n = 1; n < count; ++n) {
    const std::string name = arguments[n];
    if (!name.starts_with("--")) {
      s.files.push_back(name);
      continue;
    }
    const auto* found = std::find_if(std::begin(options), std::end(options), [&](auto& o) { return o.first == name; });
    if (found == std::end(options)) fail("there is no option " + name);
    if (const auto flag = std::get_if<bool*>(&found->second)) {
      **flag = true;
      continue;
    }
    if (n + 1 == count) fail(name + " needs a value");
    const std::string value = arguments[++n];
    char* end = nullptr;
    errno = 0;
    if (const auto text = std::get_if<std::string*>(&found->second)) **text = value;
    if (const auto whole = std::get_if<idx_t*>(&found->second)) **whole = std::strtol(value.c_str(), &end, 10);
    if (const auto number = std::get_if<double*>(&found->second)) **number = std::strtod(value.c_str(), &end);
    if (end && (*end || value.empty() || errno != 0)) fail(name + " needs a number; found " + value);
  }
  const std::pair<const char*, idx_t> least_1[] = {{"--layers", s.layers}, {"--width", s.width},
                                                   {"--heads", s.heads},   {"--context", s.context},
                                                   {"--batch", s.batch},   {"--threads", s.threads}};
  for (const auto& [name, value] : least_1)
    if (value < 1) fail(name + std::string(" must be at least 1; found ") + std::to_string(value));
  if (s.width % s.heads != 0) fail("--heads must divide --width");
  if (s.steps < 0 || s.bytes < 0 || !(s.rate > 0)) fail("--steps and --bytes must not be negative, --rate positive");
  return s;
}

// Training ------------------------------------------------------------------------------------------------------------

// Bits for a byte of held-out text, over up to 64 windows of it.
double held_out_bits(model& m, const std::string& text, execution& exec) {
  const idx_t places = std::ssize(text) - m.s.context, windows = std::min<idx_t>(64, 1 + (places - 1) / m.s.context);
  activations a(m.s, 1, m.s.context, false);
  attn::random_numbers masks(7);
  double bits = 0;
  for (idx_t n = 0; n < windows; ++n) {
    const examples one = make_examples(text, {n * (places - 1) / std::max<idx_t>(1, windows - 1)}, m.s, masks);
    m.forward(a, one.tokens, exec);
    bits += loss(a.logits, one.targets, exec) / double(windows);
  }
  return bits;
}

struct point {
  idx_t step = 0;
  double seconds = 0, bits = 0;  // of training until then; held-out bits per byte
};
struct progress {
  list<point> curve{};
  double step_seconds = 0, mebibytes = 0;
};

progress train(model& m, const corpus& text, const settings& s, bool quiet = false) {
  execution exec(static_cast<int>(s.threads));
  activations a(m.s, s.batch, s.context, true);
  attn::random_numbers random(static_cast<std::uint64_t>(s.seed), 1);
  progress p;
  times spent;  // in training alone: m also counts evaluation
  list<double> steps, bits, peaks;
  for (idx_t step = 1; step <= s.steps; ++step) {
    m.spent = spent;
    const double start = seconds();
    list<idx_t> begins(static_cast<std::size_t>(s.batch));
    for (idx_t& begin : begins) begin = random.below(std::ssize(text.train) - s.context);
    const examples batch = make_examples(text.train, begins, m.s, random);
    m.forward(a, batch.tokens, exec);
    {
      const stopwatch watch(m.spent.loss);
      bits.push_back(loss(a.logits, batch.targets, exec));
    }
    m.backward(a, batch.tokens, exec);
    // The rate rises over the first steps and falls by a cosine.
    const double rising = double(step) / std::min(100., 0.1 * double(s.steps));
    m.update(s.rate * std::min(rising, 0.55 + 0.45 * std::cos(std::numbers::pi * double(step) / double(s.steps))),
             exec);
    steps.push_back(seconds() - start);
    spent = m.spent;
    if (step % std::max<idx_t>(1, s.steps / s.reports) != 0 && step != s.steps) continue;

    p.curve.push_back({step, std::accumulate(steps.begin(), steps.end(), 0.), held_out_bits(m, text.held, exec)});
    p.mebibytes = (m.bytes() + a.bytes() + double(exec.scratch_bytes())) / (1 << 20);
    p.step_seconds = median(steps);
    if (quiet) continue;
    peaks.push_back(peak(exec));
    const double mean = std::accumulate(bits.begin(), bits.end(), 0.) / double(bits.size());
    std::printf("%6td steps, %4.0f s: %.3f bits per byte, %.3f held out; %.0f bytes/s, %.0f MiB\n", step,
                p.curve.back().seconds, mean, p.curve.back().bits, double(s.batch * s.context) / p.step_seconds,
                p.mebibytes);
    std::fflush(stdout);
    bits.clear();
  }
  if (quiet || steps.empty()) return p;

  const double total = p.curve.back().seconds, ms = 1e3 / double(s.steps);
  std::printf(
      "a step takes %.1f ms: %s %.1f, the rest of the blocks %.1f, embedding %.1f, logits %.1f, cross entropy %.1f, "
      "Adam %.1f\n%s%.2f of the peak of %.0f GFLOP/s\n",
      ms * total, s.op.c_str(), ms * spent.mixing, ms * (spent.blocks - spent.mixing), ms * spent.embedding,
      ms * spent.logits, ms * spent.loss, ms * spent.update,
      m.op.scores > 0 ? "" : "without the operator's own arithmetic, ",
      m.operations(s.batch) / p.step_seconds / median(peaks), 1e-9 * median(peaks));
  return p;
}

// Writing -------------------------------------------------------------------------------------------------------------

// A byte by its logits: the likeliest, or, with a temperature, one drawn by e^(logit / temperature).
int pick(const auto& logits, double temperature, attn::random_numbers& random) {
  idx_t best = 0;
  const double most = logits.maxCoeff(&best);
  if (temperature <= 0) return static_cast<int>(best);
  const Eigen::ArrayXd chance = ((logits.template cast<double>().array() - most) / temperature).exp();
  double left = double(random.bits() >> 11) * 0x1p-53 * chance.sum();
  for (int byte = 0; byte < byte_count; ++byte)
    if ((left -= chance[byte]) < 0) return byte;
  return static_cast<int>(best);
}

// What follows the prompt, by the operator's streaming step: the prompt at once, then byte by byte. Operators that have
// none compute everything again for each byte.
list<int> continue_prompt(model& m, const std::string& prompt, const settings& s, execution& exec) {
  if (prompt.empty() || std::ssize(prompt) > s.context)
    fail("expected a prompt of 1 to " + std::to_string(s.context) + " bytes; found " + std::to_string(prompt.size()));
  list<int> tokens = tokens_of(prompt);
  list<operation> streams;
  for (idx_t n = 0; m.op.stream && n < s.layers; ++n) streams.push_back(m.op.stream());
  attn::random_numbers random(static_cast<std::uint64_t>(s.seed), 2);
  for (idx_t n = 0; n < s.bytes && std::ssize(tokens) < s.context; ++n) {
    const idx_t first = n > 0 && m.op.stream ? std::ssize(tokens) - 1 : 0;
    activations a(m.s, 1, std::ssize(tokens) - first, false);
    m.forward(a, {tokens.begin() + first, tokens.end()}, exec, first, streams);
    tokens.push_back(pick(rows_of(a.logits).row(a.length - 1), s.temperature, random));
  }
  return tokens;
}

// Whether the parallel form, which sees the whole text at once, writes the same bytes.
bool parallel_agrees(model& m, const list<int>& tokens, idx_t prompt, const settings& s, execution& exec) {
  activations a(m.s, 1, std::ssize(tokens), false);
  m.forward(a, tokens, exec);
  attn::random_numbers random(static_cast<std::uint64_t>(s.seed), 2);
  for (idx_t n = prompt; n < std::ssize(tokens); ++n)
    if (pick(rows_of(a.logits).row(n - 1), s.temperature, random) != tokens[n]) return false;
  return true;
}

// The prompt with every _ replaced by the likeliest byte.
std::string fill_in(model& m, std::string prompt, const settings& s, execution& exec) {
  if (prompt.empty() || std::ssize(prompt) > s.context)
    fail("expected a prompt of 1 to " + std::to_string(s.context) + " bytes; found " + std::to_string(prompt.size()));
  list<int> tokens = tokens_of(prompt);
  std::replace(tokens.begin(), tokens.end(), int('_'), mask);
  activations a(m.s, 1, std::ssize(tokens), false);
  m.forward(a, tokens, exec);
  attn::random_numbers random(0);
  for (idx_t n = 0; n < std::ssize(tokens); ++n)
    if (tokens[n] == mask) prompt.begin()[n] = static_cast<char>(pick(rows_of(a.logits).row(n), 0, random));
  return prompt;
}

void write(model& m, const corpus& text, const settings& s) {
  execution exec(static_cast<int>(s.threads));
  std::string prompt = s.prompt;
  if (prompt.empty()) prompt = part_of(text.held, 0, std::min<idx_t>(200, (s.context + 1) / 2));
  if (s.masked) {
    if (s.prompt.empty())
      for (std::size_t n = 3; n < prompt.size(); n += 6) prompt[n] = '_';
    std::printf("\n%s\n\nfilled in:\n\n%s\n", prompt.c_str(), fill_in(m, prompt, s, exec).c_str());
    return;
  }
  const double start = seconds();
  const list<int> tokens = continue_prompt(m, prompt, s, exec);
  const double time = seconds() - start;
  const std::string all(tokens.begin(), tokens.end());
  std::printf("\n%s|%s\n\n%.0f bytes/s; ", prompt.c_str(), all.substr(prompt.size()).c_str(),
              double(tokens.size() - prompt.size()) / time);
  if (!m.op.stream)
    std::puts("this operator has no streaming step: each byte took the whole text once more");
  else if (parallel_agrees(m, tokens, std::ssize(prompt), s, exec))
    std::puts("the parallel form writes the same bytes");
  else
    std::puts("the parallel form writes other bytes: two were nearly as likely");
}

// Comparing -----------------------------------------------------------------------------------------------------------

void compare(settings s, const corpus& text) {
  const std::string name = s.masked ? "masked_bytes" : "byte_language_model";
  std::ofstream curves(name + ".csv");
  if (!curves) fail("cannot write " + name + ".csv");
  curves << "operator,step,seconds,bits\n";
  std::printf("%td steps of %td x %td bytes, %td blocks of width %td; byte frequencies alone: %.3f bits\n\n", s.steps,
              s.batch, s.context, s.layers, s.width, text.frequency_bits);
  std::printf("%-16s %14s %12s %12s %12s\n", "operator", "held-out bits", "time a step", "bytes/s", "memory");
  for (const mixer& op : mixers(s)) {
    model m(s, op, static_cast<std::uint64_t>(s.seed));
    const progress p = train(m, text, s, true);
    for (const point& q : p.curve)  // by the median step: nothing else that ran meanwhile is in the curves
      curves << op.name << ',' << q.step << ',' << double(q.step) * p.step_seconds << ',' << q.bits << '\n';
    if (p.curve.empty()) continue;
    std::printf("%-16s %14.3f %9.1f ms %12.0f %8.1f MiB\n", op.name.c_str(), p.curve.back().bits, 1e3 * p.step_seconds,
                double(s.batch * s.context) / p.step_seconds, p.mebibytes);
    std::fflush(stdout);
  }
  curves.close();
  // The same colour and dashes in both pictures; the best operator first.
  const std::string draw = R"(
import csv, sys, matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
name = sys.argv[1]
curves = {}
for line in csv.DictReader(open(name + ".csv")):
    curves.setdefault(line["operator"], []).append([float(line[c]) for c in ("step", "seconds", "bits")])
figure, axes = plt.subplots(1, 2, figsize=(12, 5), sharey=True)
highest = 0
for n, op in enumerate(sorted(curves, key=lambda op: curves[op][-1][2])):
    steps, seconds, bits = zip(*curves[op])
    highest = max(highest, bits[1 if len(bits) > 1 else 0])
    for axis, x in zip(axes, (steps, seconds)):
        axis.plot(x, bits, ("-", "--")[n >= 10], color=plt.cm.tab10(n % 10), label=f"{bits[-1]:.2f}  {op}")
axes[0].set(xlabel="steps", ylabel="held-out bits per byte")
axes[1].set(xlabel="seconds of training")
axes[0].set_ylim(top=highest)
for axis in axes: axis.grid(alpha=0.3)
axes[1].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
figure.tight_layout()
figure.savefig(name + ".png", dpi=120)
)";
  int drawn = 1;
  for (const char* python : {"python3", "/usr/bin/python3"})
    if (drawn != 0) drawn = std::system((std::string(python) + " -c '" + draw + "' " + name + " 2> /dev/null").c_str());
  std::printf(drawn == 0 ? "\nThe curves are in %s.csv and .png.\n"
                         : "\nThe curves are in %s.csv; for a picture, python3 with matplotlib is lacking.\n",
              name.c_str());
}

// Testing -------------------------------------------------------------------------------------------------------------

// Paragraphs of three letters each: the letters around a byte tell which.
std::string made_text() {
  attn::random_numbers random(3);
  std::string text;
  while (text.size() < 20000) {
    char letters[3];
    for (char& letter : letters) letter = static_cast<char>('a' + random.below(20));
    for (int n = 0; n < 128; ++n) text += letters[random.below(3)];
  }
  return text;
}

// Tests that every operator learns more of a small text than the frequencies of bytes, and the other promises of this
// program.
int self_test() {
  settings s;
  s.layers = 2, s.width = 32, s.heads = 2, s.context = 64, s.batch = 4, s.bytes = 24;
  s.threads = s.reports = 1;
  const corpus text = hold_out({made_text()}, s.context);
  execution exec;
  bool passed = true;
  const auto expect = [&](bool right, const std::string& what) {
    if (!right) std::printf(" [FAILED: %s]", what.c_str());
    passed = passed && right;
  };
  for (const bool masked : {false, true})
    for (const bool reversible : {false, true}) {
      s.masked = masked, s.reversible = reversible;
      s.steps = masked ? 150 : 60, s.rate = masked ? 0.01 : 0.005;  // few bytes are masked: there is less to learn from
      std::printf("%s%s, byte frequencies alone %.3f:", masked ? "masked" : "causal", reversible ? ", reversible" : "",
                  text.frequency_bits);
      for (const mixer& op : mixers(s)) {
        model m(s, op, 1);
        const double bits = train(m, text, s, true).curve.back().bits;
        std::printf(" %s %.3f", op.name.c_str(), bits);
        expect(bits < text.frequency_bits - 0.03, op.name + " learns");
        if (masked || !op.stream) continue;
        const std::string prompt = text.held.substr(0, 11);
        const list<int> tokens = continue_prompt(m, prompt, s, exec);
        expect(std::ssize(tokens) == std::ssize(prompt) + s.bytes &&
                   parallel_agrees(m, tokens, std::ssize(prompt), s, exec),
               op.name + ": the same bytes by stream and parallel");
      }
      std::puts("");
    }

  s.masked = s.reversible = false;
  s.steps = 5;
  const mixer op = mixer_of(mixers(s), "full_softmax");
  model one(s, op, 1), two(s, op, 1), other(s, op, 2);
  train(one, text, s, true);
  s.threads = 3;
  train(two, text, s, true);
  const auto same = [](const model& a, const model& b) {
    return std::equal(a.parameters.begin(), a.parameters.end(), b.parameters.begin(),
                      [](const parameter& p, const parameter& q) { return p.value == q.value; });
  };
  expect(same(one, two) && !same(one, other), "one seed, the same weights with any number of threads");
  const std::string folder = "byte_language_model_test";
  check_folder(one, folder);
  save(one, folder);
  load(other, folder);
  expect(same(one, other), "what is saved is loaded");
  s.width = 16;
  model narrow(s, op, 1);
  const auto refuses = [&](const auto& action) {
    try {
      return action(), false;
    } catch (const std::runtime_error&) {
      return true;
    }
  };
  expect(refuses([&] { load(narrow, folder); }) && refuses([&] { check_folder(narrow, folder); }),
         "other shapes are refused");
  std::filesystem::remove_all(folder);
  std::puts(passed ? "passed" : "\nfailed");
  return passed ? 0 : 1;
}

int run(const settings& s) {
  if (s.self_test) return self_test();
  const list<mixer> all = mixers(s);
  model m(s, mixer_of(all, s.op), static_cast<std::uint64_t>(s.seed));
  const corpus text = hold_out(read_texts(s.files), s.context);
  if (s.compare) return compare(s, text), 0;
  if (!s.load.empty()) load(m, s.load);
  if (!s.save.empty()) check_folder(m, s.save);
  std::printf("%s, %td blocks of width %td with %td heads; %zu bytes to learn from, %zu held out\n", s.op.c_str(),
              s.layers, s.width, s.heads, text.train.size(), text.held.size());
  std::printf("byte frequencies alone: %.3f bits per byte\n", text.frequency_bits);
  train(m, text, s);
  if (!s.save.empty()) save(m, s.save);
  write(m, text, s);
  return 0;
}

}  // namespace byte_model

int main(int argc, char** argv) try {
  return byte_model::run(byte_model::parse(argc, argv));
} catch (const std::exception& error) {
  return std::fprintf(stderr, "%s\n", error.what()), 1;
}
