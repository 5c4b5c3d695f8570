// A call of a public collective, from its arguments to the fast path of its group.
//
// A plain call is one step here: look up its group, and call the group's fast path. If anything is not plain,
// or the fast path declines, the function in Python gets the arguments unchanged, and nothing has happened.
// It also rejects wrong arguments.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <string>
#include <tuple>

#include "fast_path.h"
#include "main_thread.h"

using namespace nanobind::literals;

namespace meshdist {
namespace {

constexpr std::size_t kMostParameters = 8;
constexpr int kNone = -1;

namespace names {
const Name get{"get"}, group{"group"}, fast_path{"fast_path"}, fast_path_on_device{"fast_path_on_device"},
    ranks{"ranks"}, open_group{"open_group"}, is_on_stream{"is_on_stream"},
    is_profiler_enabled{"_is_profiler_enabled"}, current_level{"_current_level"};
}

// What all collectives look at: the names of torch's modules for profiles and for forward mode, lists of the
// context variable of worlds, once it is in use, and of the group of the process's world, and the class
// of groups.
struct LaunchEnvironment {
  nb::dict profiler, forward_ad;
  nb::list contexts, group_of_process;
  nb::object group_type;

  bool are_profiled() const { return find_in(profiler, names::is_profiler_enabled.object) != Py_False; }
  bool are_plain() const {
    PyObject* const level = find_in(forward_ad, names::current_level.object);
    return level != nullptr && PyLong_AsLong(level) < 0;
  }

  // The group that an argument means; none where Python is to find it.
  nb::object find_group(nb::handle given) const {
    if (is_group(given)) return nb::borrow(given);
    if (given.is_none()) {
      nb::object world = nb::none();
      if (PyList_Size(contexts.ptr()) != 0) world = call(PyList_GetItem(contexts.ptr(), 0), names::get);
      nb::object group =
          world.is_none() ? nb::borrow(PyList_GetItem(group_of_process.ptr(), 0)) : get(world, names::group);
      return is_group(group) ? group : nb::object();
    }
    return PyObject_HasAttrString(given.ptr(), "open_group") != 0 ? call(given, names::open_group)
                                                                  : nb::object();
  }

 private:
  bool is_group(nb::handle given) const { return given.type().is(group_type); }
};

class OperationCall {
 public:
  // A call has an argument for each parameter of the collective; `defaults` has the defaults. Parameters are
  // identified by index, -1 for none. `taken` are the parameters of the fast path's method. `places` are the
  // group, whether the call is only started, the index in `taken` of the member's global rank, and of its
  // group rank; `missing` is a tuple of the rank to use if neither is given, or empty. With
  // `stays_off_streams`, the fast path is not used in a group that has a backend on a stream. If the list
  // `watchers` is not empty, `watched` runs the call. Without the fast path, `function` runs it as the
  // collective that the main thread is in, or `slow` does.
  OperationCall(const LaunchEnvironment& around, const std::string& name, const nb::kwargs& facts)
      : around_(around), name_(checked(PyUnicode_InternFromString(name.c_str()))),
        method_(find_fast_method(name)), missing_(nb::borrow<nb::tuple>(facts["missing"])),
        stays_off_streams_(nb::cast<bool>(facts["stays_off_streams"])),
        watchers_(nb::borrow<nb::list>(facts["watchers"])), watched_(facts["watched"]),
        function_(facts["function"]), slow_(facts["slow"]),
        defaults_(nb::cast<std::vector<nb::object>>(facts["defaults"])),
        taken_(nb::cast<std::vector<int>>(facts["taken"])) {
    std::tie(group_, async_op_, root_, group_root_) =
        nb::cast<std::tuple<int, int, int, int>>(facts["places"]);
    if (defaults_.size() > kMostParameters) throw std::invalid_argument("too many parameters");
    for (int i = 0; i < static_cast<int>(defaults_.size()); ++i) {
      const bool is_taken = std::find(taken_.begin(), taken_.end(), i) != taken_.end();
      if (!is_taken && i != group_ && i != async_op_ && i != group_root_) others_.push_back(i);
    }
  }

  nb::object run(PyObject* const* given, std::size_t num_given) const {
    const auto call = [&](const nb::object& function) {
      return checked(PyObject_Vectorcall(function.ptr(), given, num_given, nullptr));
    };
    if (num_given != defaults_.size()) throw std::invalid_argument("an argument for each parameter");
    if (PyList_Size(watchers_.ptr()) != 0) return call(watched_);
    if (around_.are_profiled()) return call(slow_);
    nb::object done = attempt(given);
    if (done.is_valid()) return done;
    if (MainThread::is_nested()) return call(slow_);
    const MainThread::Within within(name_);
    return call(function_);
  }

 private:
  // What the group's fast path returns, of CPU tensors or of a device's; none where Python is to do it.
  nb::object attempt(PyObject* const* given) const {
    if (!around_.are_plain()) return {};
    for (int at : others_) {
      if (given[at] != defaults_[at].ptr()) return {};
    }
    const nb::object group = around_.find_group(given[group_]);
    if (!group.is_valid()) return {};
    if (stays_off_streams_ && get(group, names::is_on_stream).ptr() != Py_False) return {};
    const bool is_async = async_op_ != kNone && given[async_op_] != Py_False;
    if (is_async && given[async_op_] != Py_True) return {};
    nb::object member;
    if (root_ != kNone) {
      member = find_member(group, given[root_], given[group_root_]);
      if (!member.is_valid()) return {};
    }
    std::array<PyObject*, kMostParameters + 1> passed;
    std::size_t count = 1;
    for (int at : taken_) passed[count++] = at == root_ ? member.ptr() : given[at];
    for (const Name* kind : {&names::fast_path, &names::fast_path_on_device}) {
      nb::object path = get(group, *kind);
      if (is_async && !path.is_none()) path = starting_path(path);
      if (path.is_none()) continue;
      passed[0] = path.ptr();
      const nb::object done =
          is_fast_path(path) ? checked(method_(path.ptr(), &passed[1], count - 1))
                             : checked(PyObject_VectorcallMethod(name_.ptr(), passed.data(), count, nullptr));
      if (done.ptr() != Py_False) return done;
    }
    return {};
  }

  // The group rank of the member, given by global or group rank; None for any, which a receive accepts; no
  // value if Python has to report the error.
  nb::object find_member(nb::handle group, nb::handle rank, nb::handle place) const {
    nb::handle given = rank.is_none() ? place : rank;
    if (given.is_none()) {
      if (PyTuple_Size(missing_.ptr()) == 0) return {};
      given = PyTuple_GetItem(missing_.ptr(), 0);
      if (given.is_none()) return nb::none();
    } else if (!rank.is_none() && !place.is_none()) {
      return {};
    }
    if (!PyLong_CheckExact(given.ptr())) return {};
    const nb::object ranks = get(group, names::ranks);
    int overflow = 0;
    const auto wanted = PyLong_AsLongLongAndOverflow(given.ptr(), &overflow);
    const auto size = static_cast<long long>(PyTuple_Size(ranks.ptr()));
    if (overflow != 0 || wanted < 0) return {};
    const auto is_at = [&](long long i) {
      return PyLong_AsLongLong(PyTuple_GetItem(ranks.ptr(), i)) == wanted;
    };
    if (!place.is_none() || (wanted < size && is_at(wanted))) {
      return wanted < size ? nb::borrow(given) : nb::object();
    }
    for (long long i = 0; i < size; ++i) {
      if (is_at(i)) return whole(i);
    }
    return {};
  }

  const LaunchEnvironment& around_;
  const nb::object name_;
  const FastFunction method_;
  const nb::tuple missing_;
  const bool stays_off_streams_;
  const nb::list watchers_;
  const nb::object watched_, function_, slow_;
  const std::vector<nb::object> defaults_;
  const std::vector<int> taken_;
  std::vector<int> others_;
  int group_, async_op_, root_, group_root_;
};

PyObject* call_operation(PyObject* self, PyObject* const* given, Py_ssize_t num_given) {
  const auto* const operation = static_cast<const OperationCall*>(PyCapsule_GetPointer(self, nullptr));
  return returned([&] { return operation->run(given, static_cast<std::size_t>(num_given)); });
}

}  // namespace

void bind_operation_calls(nb::module_& m) {
  nb::class_<LaunchEnvironment>(m, "LaunchEnvironment")
      .def("__init__", filled_in<LaunchEnvironment, nb::dict, nb::dict, nb::list, nb::list, nb::object>(),
           nb::kw_only(), "profiler"_a, "forward_ad"_a, "contexts"_a, "group_of_process"_a, "group_type"_a);
  m.def("operation_call", [](const LaunchEnvironment& around, const std::string& name, const nb::kwargs& facts) {
    // Collectives live as long as the process, and so does what calls them, and its launch environment.
    nb::find(around).inc_ref();
    static PyMethodDef method = fast_method("call_operation", call_operation);
    const nb::object self = checked(PyCapsule_New(new OperationCall(around, name, facts), nullptr, nullptr));
    return checked(PyCFunction_NewEx(&method, self.ptr(), nullptr));
  });
}

}  // namespace meshdist
