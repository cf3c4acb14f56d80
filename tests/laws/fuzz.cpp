// Random calls, seeded: any operator of the table, with any shape, layout, lengths and numbers, a third of the calls
// wrong in one thing. A call is refused in one sentence and writes nothing, or gives what the naive reference gives and
// writes nothing but its results.
//
//   ATTN_FUZZ_CALLS=1000000 ATTN_FUZZ_SEED=7 attn_test_laws '[fuzz]'     without them 20 s on one processor at most
#include "laws/fuzz.hpp"
#include "laws/layouts.hpp"

namespace testing::fuzz_tests {
namespace {

const layout contiguous{"contiguous", [](const strides& e) {
                          return strides{e[1] * e[2] * e[3], e[2] * e[3], e[3], 1};
                        }};

// What is wrong with a call. All of these must be refused, wherever they make a difference.
enum class fault { none, extent, negative, null, stride, overlap, length, count };
constexpr std::array faults = {fault::extent, fault::negative, fault::null,  fault::stride,
                               fault::overlap, fault::length,  fault::count};

// What numbers a call has: those of the laws; equal; of the size at which weights are 0 or 1; small.
enum class numbers { normal, equal, extreme, small };
constexpr std::array kinds = {numbers::normal, numbers::normal, numbers::normal,
                              numbers::equal,  numbers::extreme, numbers::small};

template <class T>
struct fuzz_case {
  const law_operator<T>& op;
  law_shape shape;
  numbers kind;
  fault wrong;
  std::vector<idx_t> lengths{}, query_lengths{}, key_lengths{};
  std::array<const layout*, 5> as{};
  bool threads = false, in_chunks = false;

  bool tokens() const { return !lengths.empty() || !query_lengths.empty(); }
  std::string text() const {
    return op.name + ", " + testing::text(shape) + ", fault " + std::to_string(static_cast<int>(wrong)) + ", numbers " +
           std::to_string(static_cast<int>(kind)) + (tokens() ? ", with lengths" : "") +
           (in_chunks ? ", in chunks" : "");
  }
};

template <class T>
fuzz_case<T> draw(random_source& random) {
  constexpr std::array<idx_t, 20> extents = {0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 24, 31, 32, 33, 47, 65};
  constexpr std::array<idx_t, 9> dims = {1, 2, 3, 4, 7, 8, 15, 16, 33};
  fuzz_case<T> c{.op = operators<T>()[static_cast<std::size_t>(random.below(std::ssize(operators<T>())))],
                 .shape = {}, .kind = one_of(random, kinds),
                 .wrong = random.below(3) == 0 ? one_of(random, faults) : fault::none};
  law_shape& s = c.shape;
  s.batch = 1 + random.below(3), s.kv_heads = 1 + random.below(3), s.heads = s.kv_heads * (1 + random.below(3));
  s.dim = one_of(random, dims), s.value_dim = one_of(random, dims);
  s.queries = one_of(random, extents), s.keys = c.op.cross && random.below(2) ? one_of(random, extents) : s.queries;
  s = fitted(c.op, s);
  const auto list = [&](idx_t longest) {
    std::vector<idx_t> all;
    for (idx_t b = 0; b < s.batch; ++b) all.push_back(random.below(longest + 1));
    return all;
  };
  if (c.op.padding && random.below(3) == 0) {
    if (s.queries == s.keys && (random.below(2) || !c.op.cross)) c.lengths = list(s.keys);
    else if (c.op.cross) c.query_lengths = list(s.queries), c.key_lengths = list(s.keys);
  }
  for (const layout*& each : c.as) each = random.below(2) ? &contiguous : &layouts[random.below(std::ssize(layouts))];
  if (c.kind == numbers::extreme && !c.op.bounded) c.kind = numbers::normal;
  c.threads = random.below(50) == 0;
  c.in_chunks = c.op.stream && c.wrong == fault::none && !c.tokens() && s.queries == s.keys && random.below(2);
  return c;
}

template <class T>
law_inputs<T> inputs_of(const fuzz_case<T>& c, random_source& random) {
  if (c.kind == numbers::extreme) return extreme_inputs<T>(c.shape);
  law_inputs<T> in = random_inputs<T>(c.shape, 1 + static_cast<std::uint64_t>(random.below(3)));
  for (auto* x : {&in.q, &in.k})
    for (T& value : x->data) {
      if (c.kind == numbers::equal) value = x == &in.q ? T(0.5) : T(-0.25);
      if (c.kind == numbers::small) value *= T(1e-3);
    }
  return in;
}

// Puts the fault into the call; false where it makes no difference to what the operator reads.
template <class T>
bool make_wrong(const fuzz_case<T>& c, law_call<T>& call, random_source& random) {
  constexpr idx_t huge = std::numeric_limits<idx_t>::max() / 2;
  in_view<T> out(call.out);
  in_view<T>* const views[] = {&call.q, &call.k, &call.v, &out};
  constexpr std::array<idx_t, 3> but_k = {0, 2, 3};  // lsh does not read k, fnet neither k nor v
  const idx_t which = c.op.of == "fnet"  ? random.below(2) * 3
                      : c.op.of == "lsh" ? one_of(random, but_k)
                                         : random.below(4);
  in_view<T>& x = *views[which];
  auto extents = x.extents(), steps = x.strides();
  const int axis = static_cast<int>(random.below(4));
  const auto at = static_cast<std::size_t>(axis);
  if (c.op.of == "aft_conv" && which == 1 && axis == 3) return false;  // one channel for all
  switch (c.wrong) {
    case fault::none: return true;
    case fault::extent:
      // Only larger, for it is the same memory; heads by one that divides nothing.
      extents[at] += axis == 1 ? 3 * c.shape.heads + 1 : 1;
      if (x.empty() || (which == 1 && axis == 1)) return false;
      break;
    case fault::negative: extents[at] = -1 - random.below(3); break;
    case fault::null:
      if (x.empty()) return false;
      x = {nullptr, extents, steps};
      break;
    case fault::stride:
      if (extents[at] < 2 || x.empty()) return false;
      steps[at] = random.below(2) ? huge : -huge;
      break;
    case fault::overlap:
      if (out.empty() || x.empty() || which == 3) return false;
      call.out = {const_cast<T*>(x.data()), out.extents(), out.strides()};
      return true;
    case fault::length:
      if (!c.tokens()) return false;
      (c.lengths.empty() ? call.key_lengths : call.lengths)[0] = random.below(2) ? -1 : c.shape.keys + 1;
      return true;
    case fault::count:
      if (!c.tokens()) return false;
      (c.lengths.empty() ? call.key_lengths : call.lengths).push_back(0);
      return true;
  }
  if (c.wrong != fault::null) x = {x.data(), extents, steps};
  if (which == 3) call.out = {const_cast<T*>(out.data()), out.extents(), out.strides()};
  return true;
}

// What is wrong with the outcome of a case, empty if nothing is.
template <class T>
std::string outcome(const fuzz_case<T>& c, random_source& random, attn::execution& serial, attn::execution& threads,
                    fuzz_tally& sum) {
  const law_inputs<T> in = inputs_of(c, random);
  law_result<T> fresh = fresh_result(c.op, c.shape);
  laid_out<T> q(in.q, *c.as[0]), k(in.k, *c.as[1]), v(in.v, *c.as[2]);
  laid_out<T> out(fresh.out, *c.as[3]), lse(fresh.lse, *c.as[4]);
  const idx_t between = out.untouched();
  attn::tensor_view<T, 3> rows;
  if (c.op.lse) rows = lse.row_view();
  law_call<T> call{q.view, k.view, v.view, out.view, rows, c.lengths, c.threads ? &threads : &serial,
                   c.query_lengths, c.key_lengths};
  const bool must_refuse = make_wrong(c, call, random) && c.wrong != fault::none;
  if (c.wrong != fault::none && !must_refuse) return {};
  ++sum.calls;
  std::string message;
  try {
    if (c.in_chunks) {
      const bound<T> step = c.op.stream(c.shape);
      for (idx_t begin = 0, some; begin < c.shape.queries; begin += some) {
        some = 1 + random.below(c.shape.queries - begin);
        law_call<T> chunk = call;
        chunk.q = call.q.slice(2, begin, some), chunk.k = call.k.slice(2, begin, some);
        chunk.v = call.v.slice(2, begin, some), chunk.out = call.out.slice(2, begin, some);
        if (c.op.lse) chunk.lse = call.lse.slice(2, begin, some);
        step(chunk);
      }
    } else {
      c.op.bind(c.shape)(call);
    }
  } catch (const std::invalid_argument& error) {
    message = error.what();
  } catch (const std::exception& error) {
    return std::string("an exception of another kind: ") + error.what();
  }
  if (!message.empty()) {
    ++sum.refused;
    if (!must_refuse) return "refused: " + message;
    if (!well_formed(message, c.op.of)) return "not one sentence: " + message;
    if (!identical(out.gathered(), fresh.out) || !identical(q.gathered(), in.q))
      return "refused, but written: " + message;
    return out.untouched() == between ? "" : "refused, but written outside of out";
  }
  if (must_refuse) return "not refused";
  if (out.untouched() != between) return "written outside of out";
  const tensor<T> result = out.gathered();
  if (c.kind == numbers::extreme) {  // law 9
    if (!all_finite(result)) return "not finite";
    const bool mean = c.op.averages && c.op.positive;
    const double most = largest(in.v) * (1 + 300 * static_cast<double>(std::numeric_limits<T>::epsilon()));
    return mean && largest(result) > most ? "no mean of values" : "";
  }
  law_reference_call at{cast<double>(in.q), cast<double>(in.k), cast<double>(in.v), c.lengths, c.query_lengths,
                        c.key_lengths};
  // A feature errs by some units, a sum by up to half a unit for each of its terms (kernel_state.hpp).
  const double of_terms = std::numeric_limits<T>::epsilon() * static_cast<double>(8 + c.shape.keys);
  tensor<double> terms;
  at.terms = &terms;
  const reference::result wanted = c.op.reference(c.shape)(at);
  at.terms = nullptr;
  const auto deviation_of = [&](const auto& r, const auto& r_lse) {
    // A row of features of both signs, whose denominator nearly cancels, is ill-conditioned by itself: its tolerance
    // is that of its terms. Of one key the result does not depend on the inputs at all, and yet errs as much.
    const double factor = terms.data.empty() ? c.op.error_factor : 1;
    double error = deviation(r, wanted.out, largest(in.v), factor * tolerance<T>::out, terms, of_terms);
    if (c.op.lse) error = std::max(error, deviation(r_lse, wanted.lse, 1, c.op.error_factor * tolerance<T>::lse));
    return error;
  };
  double error = deviation_of(result, lse.gathered());
  if (error > allowed_deviation && terms.data.empty()) {
    // What inputs change that are off by as much as sums are is nobody's fault.
    for (auto* x : {&at.q, &at.k})
      for (double& number : x->data) number *= 1 + of_terms * (2 * random.uniform() - 1);
    const reference::result moved = c.op.reference(c.shape)(at);
    error /= 1 + deviation_of(moved.out, moved.lse);
  }
  return sum.judge(error, c.op.name + ", " + text(c.shape));
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("random calls are refused in one sentence, or right", "[fuzz]", exact_types) {
  using T = TestType;
  attn::execution serial, threads(3, 0);
  fuzz(20000, 12.0 / static_cast<double>(std::tuple_size_v<exact_types>), [&](random_source& random, fuzz_tally& sum) {
    const fuzz_case<T> c = draw<T>(random);
    std::string what = outcome(c, random, serial, threads, sum);
    return std::pair{std::move(what), c.text()};
  });
}

}  // namespace testing::fuzz_tests
