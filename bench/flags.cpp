#include "flags.hpp"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <stdexcept>
#include <variant>

namespace bench {
namespace {

struct known_flag {
  const char* name;
  std::variant<flags::idx_t flags::*, double flags::*, std::string flags::*, bool flags::*> member;
  double least;
  const char* help;
  bool shown_if_default = true;  // in labels
  double most = 0x1p40;
};

constexpr double most_threads = 1024;

const known_flag known[] = {
    {"heads", &flags::heads, 1, "heads (when decoding: key/value heads, each shared by 4 query heads)"},
    {"dim", &flags::dim, 1, "size of a head"},
    {"threads", &flags::threads, 1, "threads of the execution, at most 1024", true, most_threads},
    {"virtual-threads", &flags::virtual_threads, 1,
     "times that this many threads would give, simulated on one: see bench/README.md", false, most_threads},
    {"step-tokens", &flags::step_tokens, 1, "tokens that a decoder is fed at once, as drafts are", false},
    {"block", &flags::block, 1, "tokens of a block"},
    {"stride", &flags::stride, 1, "the stride, or the size of the blocks"},
    {"relative-bias", &flags::relative_bias, 0,
     "full_softmax, sliding_window: a bias by distance up to this one; 0: none",
     false},
    {"relative-keys", &flags::relative_keys, 0, "the same: keys by distance up to this one; 0: none", false},
    {"position-queries", &flags::position_queries, 0, "the same: queries by distance up to this one; 0: none", false},
    {"log-decay", &flags::log_decay, 0, "the same, causal: 1: log decays, of which all are 0", false},
    {"key-mask", &flags::key_mask, 0, "the same: 1: a mask of keys, which hides none", false},
    {"dropout", &flags::dropout, 0, "the same: percent of the weights that are dropped; not in errors", false},
    {"skip", &flags::skip, 0, "tiles are left out whose scores lie so far below the largest so far"},
    {"rounds", &flags::rounds, 1, "hashes of every token"},
    {"topk", &flags::topk, 1, "blocks of --block keys that a query sees, its own among them"},
    {"selected", &flags::selected, 1, "entries of a list, or keys of a list of blocks"},
    {"list-block", &flags::list_block, 1, "keys that an entry of a list names", false},
    {"shared-lists", &flags::shared_lists, 0, "one list and one key head for all heads, not one for each", false},
    {"axes", &flags::axes, 1, "axes of the grid, 1 to 3"},
    {"kernel", &flags::kernel, 1, "neighbours along each axis"},
    {"features", &flags::features, 1, "rows of the feature matrix"},
    {"window", &flags::window, 0,
     "keys on each side of a query; the width of a convolution is the odd number below it"},
    {"rank", &flags::rank, 1, "projected keys"},
    {"landmarks", &flags::landmarks, 1, "segments whose means stand for the sequence"},
    {"exact-inverse", &flags::exact_inverse, 0, "the exact pseudo-inverse, not the iteration", false},
    {"random", &flags::random, 0, "random blocks of every block of queries"},
    {"exact", &flags::exact, 0, "keys a block of queries takes exactly; 0: the operator's default", false},
    {"clusters", &flags::clusters, 0, "clusters, causal of every segment; 0: the operator's default", false},
    {"probe", &flags::probe, 0, "queries of a mean by which a block chooses; 0: the operator's default", false},
    {"query-block", &flags::query_block, 0, "queries that choose together; 0: the operator's default", false},
    {"far", &flags::far, 0, "share of the blocks of rows of which one row and channel takes the exact path"},
    {"type", &flags::type, 0,
     "type of elements: float, or others this was built for, several with commas between them"},
    {"cache-type", &flags::cache_type, 0,
     "types of caches, each a line more for a decoder: half, bfloat16, float8_e4m3, float8_e5m2, int8, int8_rotated, "
     "int8_channels, int4, several with commas between them"},
    {"weights", &flags::weights, 0,
     "how weights are given: rows [outputs, inputs], columns (its transpose), packed; packed as half, bfloat16, int8",
     false},
    {"precision", &flags::precision, 0,
     "standard, or fast: lines NAME_fast more, with precision::fast, where that changes anything on this machine"},
    {"input", &flags::input, 0,
     "folder with q.npy, k.npy, v.npy [batch, heads, length, dim] to measure the error on; heads and dim are then "
     "theirs, and errors are shown beside times at their length, unless --min-length or --max-length exclude it"},
    {"save", &flags::save, 0,
     "folder to write what operators read and what they compute to, as .npy, each row's after its last run", false},
    {"min-length", &flags::min_length, 1, "shortest length; lengths double from here"},
    {"max-length", &flags::max_length, 0, "longest length; 0: 16384, 262144 for caches, 1048576 for what is linear"},
    {"max-seconds", &flags::max_seconds, 0,
     "leave out lengths at which one run takes longer; 0: only the budget decides"},
    {"budget", &flags::budget, 0,
     "seconds the sweep may take: first the main curve, whatever it takes (every operator at 256, 1024, 4096, 16384), "
     "then other forms, the lengths between and settings, then a second run where there is one alone, then longer "
     "lengths, "
     "then repetitions, up to 5 of each line"},
    {"efficiency", &flags::efficiency, 0,
     "with --threads, every operator beside as many processes of one thread each, at one length; --efficiency=false: "
     "not"},
    {"smoke", &flags::smoke, 0, "short lengths, one short repetition: does everything run? (some seconds)"},
    {"help", &flags::help, 0, "print this text"},
};

template <class T>
T number(const known_flag& flag, const std::string& text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool is_number = error == std::errc{} && end == text.data() + text.size();
  if (is_number && static_cast<double>(value) >= flag.least && static_cast<double>(value) <= flag.most) return value;
  const bool beyond = is_number ? static_cast<double>(value) > flag.most
                                : error == std::errc::result_out_of_range && !text.starts_with('-');
  throw std::invalid_argument("attn_bench: --" + std::string(flag.name) + " expects a number " +
                              (beyond ? "<= " + std::to_string(static_cast<flags::idx_t>(flag.most))
                                      : ">= " + std::to_string(static_cast<flags::idx_t>(flag.least))) +
                              "; found \"" + text + "\"");
}

bool boolean(const std::string& name, const std::string& text) {
  if (text == "true" || text == "1") return true;
  if (text == "false" || text == "0") return false;
  throw std::invalid_argument("attn_bench: --" + name + " expects true or false; found \"" + text + "\"");
}

struct setter {
  flags& set;
  const known_flag& flag;
  const std::string& text;
  void operator()(flags::idx_t flags::*m) const { set.*m = number<flags::idx_t>(flag, text); }
  void operator()(double flags::*m) const { set.*m = number<double>(flag, text); }
  void operator()(std::string flags::*m) const { set.*m = text; }
  void operator()(bool flags::*m) const { set.*m = boolean(flag.name, text); }
};

std::string shown(const flags& set, const known_flag& flag) {
  struct printer {
    const flags& f;
    std::string operator()(flags::idx_t flags::*m) const { return std::to_string(f.*m); }
    std::string operator()(double flags::*m) const {
      char text[32];
      return {text, std::to_chars(text, text + sizeof text, f.*m).ptr};
    }
    std::string operator()(std::string flags::*m) const {
      return !(f.*m).empty() ? f.*m : m == &flags::input || m == &flags::save ? "DIR" : "TYPE";
    }
    std::string operator()(bool flags::*m) const { return f.*m ? "true" : "false"; }
  };
  return std::visit(printer{set}, flag.member);
}

}  // namespace

flags take_flags(std::vector<std::string>& arguments) {
  flags set;
  const bool real_threads = !value_of(arguments, "threads", "").empty();
  std::erase_if(arguments, [&](const std::string& argument) {
    for (const known_flag& flag : known) {
      const std::string head = std::string("--") + flag.name;
      const bool alone = argument == head && std::holds_alternative<bool flags::*>(flag.member);
      if (!alone && !argument.starts_with(head + "=")) continue;
      const std::string text = alone ? "true" : argument.substr(head.size() + 1);
      std::visit(setter{set, flag, text}, flag.member);
      return true;
    }
    return false;
  });
  if (set.virtual_threads > 0 && real_threads)
    throw std::invalid_argument("attn_bench: expected --threads or --virtual-threads; found both");
  if (set.virtual_threads > 0) set.threads = set.virtual_threads;
  return set;
}

bool is_given(const std::vector<std::string>& arguments, const std::string& name) {
  std::string variable = name;
  std::ranges::transform(variable, variable.begin(), [](unsigned char c) { return std::toupper(c); });
  return std::getenv(variable.c_str()) != nullptr ||
         std::ranges::any_of(arguments, [head = "--" + name](const std::string& a) {
           return a.starts_with(head) && (a.size() == head.size() || a[head.size()] == '=');
         });
}

std::string value_of(const std::vector<std::string>& arguments, const std::string& name, const std::string& otherwise) {
  const std::string head = "--" + name + "=";
  std::string value = otherwise;
  for (const std::string& a : arguments)
    if (a.starts_with(head)) value = a.substr(head.size());
  return value;
}

std::string flags_help(const std::map<std::string, std::string>& users) {
  std::string text = "attn_bench measures the operators of attn: time, memory, share of the machine's peak, error.\n\n";
  for (const known_flag& flag : known) {
    std::string left = std::string("  --") + flag.name;
    if (!std::holds_alternative<bool flags::*>(flag.member)) left += '=' + shown({}, flag);
    left.resize(std::max<std::size_t>(left.size() + 2, 24), ' ');
    const auto operators = users.find(flag.name);
    text += left + flag.help + (operators == users.end() ? "" : " (" + operators->second + ")") + "\n";
  }
  return text + "\nand those of Google Benchmark:\n\n";
}

std::string describe(const flags& set, const std::vector<std::string>& names) {
  std::string text;
  for (const known_flag& flag : known)
    if (std::ranges::find(names, flag.name) != names.end() &&
        (flag.shown_if_default || shown(set, flag) != shown({}, flag)))
      text += (text.empty() ? "" : ", ") + std::string(flag.name) + "=" + shown(set, flag);
  return text;
}

std::vector<setting> settings_of(flags::idx_t flags::*flag, std::initializer_list<flags::idx_t> values) {
  std::vector<setting> settings;
  for (const flags::idx_t value : values) settings.push_back({{flag, value}});
  return settings;
}

flags with(flags set, const setting& values) {
  for (const auto& [flag, value] : values) set.*flag = value;
  return set;
}

std::string name_of(const setting& values) {
  std::string text;
  for (const auto& [member, value] : values)
    for (const known_flag& flag : known)
      if (const auto* number = std::get_if<flags::idx_t flags::*>(&flag.member); number && *number == member)
        text += (text.empty() ? std::string() : std::string(",")) + flag.name + ':' + std::to_string(value);
  return text;
}

}  // namespace bench
