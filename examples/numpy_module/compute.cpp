// The operators, compiled once for each level of processors.
#include "compute.hpp"

#include <attn/aft/aft_simple.hpp>
#include <attn/kernel/linear.hpp>
#include <attn/softmax/full_softmax.hpp>
#include <attn/softmax/sliding_window.hpp>

/// Options by name, of which an operator reads those that it has.
struct keywords {
  const std::string& name;
  std::map<std::string, double> given;
  std::string known{};

  template <class T>
  keywords& read(const char* key, T& option) {
    known += (known.empty() ? "" : ", ") + std::string(key);
    if (const auto entry = given.extract(key)) option = T(entry.mapped());
    return *this;
  }
  void end() const {
    if (!given.empty())
      throw std::invalid_argument("attn::" + name + ": expected " + known + "; found the option " + given.begin()->first);
  }
};

template <class S>
static void compute_as(const numpy_view (&x)[4], keywords options) {
  const auto view = [&](int n) { return attn::tensor_view(static_cast<S*>(x[n].data), x[n].extents, x[n].strides); };
  const attn::tensor_view<const S> q = view(0), k = view(1), v = view(2);
  if (options.name == "full_softmax") {
    attn::full_softmax_options<S> o;
    options.read("scale", o.scale).read("causal", o.causal).end();
    attn::full_softmax(q, k, v, view(3), o);
  } else if (options.name == "sliding_window") {
    attn::sliding_window_options<S> o;
    options.read("scale", o.scale).read("causal", o.causal).read("left", o.left).read("right", o.right).end();
    attn::sliding_window(q, k, v, view(3), o);
  } else if (options.name == "linear") {
    attn::linear_options<S> o;
    options.read("causal", o.causal).read("eps", o.eps).end();
    attn::linear(q, k, v, view(3), o);
  } else {
    attn::aft_simple_options<S> o;
    options.read("causal", o.causal).read("gate", o.gate).end();
    attn::aft_simple(q, k, v, view(3), o);
  }
}

const char* level() { return ATTN_DISPATCH_LEVEL; }

void compute(const std::string& name, char type, const numpy_view& q, const numpy_view& k, const numpy_view& v,
             const numpy_view& out, const std::map<std::string, double>& options) {
  const auto as = type == 'e' ? compute_as<Eigen::half> : type == 'f' ? compute_as<float> : compute_as<double>;
  as({q, k, v, out}, {name, options});
}
