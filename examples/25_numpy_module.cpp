// A module for Python, built once for every processor: numpy_module.full_softmax(q, k, v, causal=True).
// numpy_module/compute.cpp is compiled once for each level of processors (attn_dispatch), this file once.
#include "numpy_module/compute.hpp"
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

namespace py = pybind11;
static std::string text_of(py::handle x) { return py::str(x); }
static char type_of(const py::array& x) {
  for (const char* letter : {"e", "f", "d"})
    if (x.dtype().equal(py::dtype(letter))) return *letter;
  throw py::value_error("expected arrays of float16, float32 or float64; found " + text_of(x.dtype()));
}

/// An array of 2 to 4 axes where it lies.
static numpy_view view_of(const py::array& x, char type) {
  if (type_of(x) != type) throw py::value_error("expected arrays of q's type; found " + text_of(x.dtype()));
  if (x.ndim() < 2 || x.ndim() > 4)
    throw py::value_error("expected 2 to 4 axes [batch, head, length, dim]; found " + std::to_string(x.ndim()));
  numpy_view view{const_cast<void*>(x.data()), {1, 1, 1, 1}, {0, 0, 0, 0}};
  bool whole = (x.flags() & py::detail::npy_api::NPY_ARRAY_ALIGNED_) != 0;
  for (py::ssize_t axis = 0, to = 4 - x.ndim(); axis < x.ndim(); ++axis, ++to) {
    view.extents[to] = x.shape(axis), view.strides[to] = x.strides(axis) / x.itemsize();
    whole = whole && x.strides(axis) % x.itemsize() == 0;
  }
  if (!whole) throw py::value_error("expected aligned elements; found others: copy the array");
  return view;
}

PYBIND11_MODULE(numpy_module, m) {
  m.attr("level") = level();
  for (const char* name : {"full_softmax", "sliding_window", "linear", "aft_simple"})
    m.def(name, [name](py::array q, py::array k, py::array v, std::optional<py::array> out, const py::kwargs& options) {
      const char type = type_of(q);
      const numpy_view Q = view_of(q, type), K = view_of(k, type), V = view_of(v, type);
      if (!out) {
        std::vector<py::ssize_t> shape(q.shape(), q.shape() + q.ndim());
        shape.back() = v.shape(v.ndim() - 1);
        out.emplace(q.dtype(), shape);
      }
      const numpy_view O = view_of(*out, type);
      if (!out->writeable()) throw py::value_error("expected out to be writeable; found an array that is not");
      const auto given = options.cast<std::map<std::string, double>>();
      {
        const py::gil_scoped_release others_may_run;
        compute(name, type, Q, K, V, O, given);
      }
      return *out;
    }, py::arg("q").noconvert(), py::arg("k").noconvert(), py::arg("v").noconvert(), py::arg("out") = py::none());
}
