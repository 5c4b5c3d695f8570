// A call of a public verb, from its arguments to the fast path of its group.
//
// A plain call is one step here: its group is found, and the group's fast path is asked. Where anything is
// not plain, or the fast path declines, the function in Python gets the arguments as they came, and nothing
// has happened. It refuses wrong arguments, too.
#include "verb_calls.h"

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "main_thread.h"

using namespace nanobind::literals;

namespace meshdist {
namespace {

constexpr std::size_t kMostParameters = 8;
constexpr int kNone = -1;

namespace names {
const Name get{"get"}, group{"group"}, fast_path{"fast_path"}, starting{"starting"}, ranks{"ranks"},
    open_group{"open_group"}, is_on_stream{"is_on_stream"}, is_profiler_enabled{"_is_profiler_enabled"},
    current_level{"_current_level"};
}

// What all verbs look at: the names of torch's modules for profiles and for forward mode, the world of
// the context and of the process (a list of it), and the class of groups.
struct Surroundings {
  nb::dict profiler, forward_ad;
  nb::object context;
  nb::list process;
  nb::object group_type;

  bool are_profiled() const {
    return PyDict_GetItem(profiler.ptr(), names::is_profiler_enabled.object) != Py_False;
  }
  bool are_plain() const {
    PyObject* const level = PyDict_GetItem(forward_ad.ptr(), names::current_level.object);
    return level != nullptr && PyLong_AsLong(level) < 0;
  }

  // The group that an argument means; none where Python is to find it.
  nb::object find_group(nb::handle given) const {
    if (is_group(given)) return nb::borrow(given);
    if (given.is_none()) {
      nb::object world = call(context, names::get);
      if (world.is_none()) world = nb::borrow(PyList_GetItem(process.ptr(), 0));
      if (world.is_none()) return {};
      nb::object group = get(world, names::group);
      return is_group(group) ? group : nb::object();
    }
    return PyObject_HasAttrString(given.ptr(), "open_group") != 0 ? call(given, names::open_group)
                                                                   : nb::object();
  }

 private:
  bool is_group(nb::handle given) const { return given.type().is(group_type); }
};

class VerbCall {
 public:
  // `parameters` has the verb's own, as (name, default): a call gives an argument for each. `taken` names
  // those that the method of the fast path is given, and `root` that among them which names a member by
  // its rank in the world, as `group_root` does by its place in the group; `missing` is a tuple of the
  // rank that is meant where neither does, or empty. `stays_off_streams`: not where the group has a wire
  // on a stream. Where `watchers`, a list, is not empty, `watched` takes the call; where the fast path is
  // not taken, `function` as the verb that the main thread is in, or `slow`.
  VerbCall(const Surroundings& around, const std::string& name, const nb::list& parameters,
           const std::vector<std::string>& taken, const std::string& root, nb::tuple missing,
           bool stays_off_streams, nb::list watchers, nb::object watched, nb::object function,
           nb::object slow)
      : around_(around),
        method_(checked(PyUnicode_InternFromString(name.c_str()))),
        missing_(std::move(missing)),
        stays_off_streams_(stays_off_streams),
        watchers_(std::move(watchers)),
        watched_(std::move(watched)),
        function_(std::move(function)),
        slow_(std::move(slow)) {
    std::vector<std::string> names;
    for (nb::handle parameter : parameters) {
      names.push_back(nb::cast<std::string>(parameter[0]));
      defaults_.push_back(nb::object(parameter[1]));
    }
    if (names.size() > kMostParameters) throw std::invalid_argument("too many parameters");
    const auto place_of = [&](const std::string& name) {
      const auto found = std::find(names.begin(), names.end(), name);
      return found == names.end() ? kNone : static_cast<int>(found - names.begin());
    };
    group_ = place_of("group");
    async_op_ = place_of("async_op");
    root_ = place_of(root);
    group_root_ = place_of("group_" + root);
    for (const std::string& name : taken) taken_.push_back(place_of(name));
    for (int i = 0; i < static_cast<int>(names.size()); ++i) {
      const bool is_taken = std::find(taken_.begin(), taken_.end(), i) != taken_.end();
      if (!is_taken && i != group_ && i != async_op_ && i != group_root_) others_.push_back(i);
    }
  }

  PyObject* run(PyObject* const* given, std::size_t num_given) const {
    const auto call = [&](const nb::object& function) {
      return PyObject_Vectorcall(function.ptr(), given, num_given, nullptr);
    };
    if (num_given != defaults_.size()) throw std::invalid_argument("an argument for each parameter");
    if (PyList_Size(watchers_.ptr()) != 0) return call(watched_);
    if (around_.are_profiled()) return call(slow_);
    nb::object done = attempt(given);
    if (done.is_valid() && done.ptr() != Py_False) return done.release().ptr();
    if (MainThread::is_nested()) return call(slow_);
    const MainThread::Within within(method_);
    return call(function_);
  }

 private:
  // What the fast path returns; none, or False, where Python is to do it.
  nb::object attempt(PyObject* const* given) const {
    if (!around_.are_plain()) return {};
    for (int at : others_) {
      if (given[at] != defaults_[at].ptr()) return {};
    }
    const nb::object group = around_.find_group(given[group_]);
    if (!group.is_valid()) return {};
    nb::object path = get(group, names::fast_path);
    if (path.is_none()) return {};
    if (stays_off_streams_ && get(group, names::is_on_stream).ptr() != Py_False) return {};
    if (async_op_ != kNone && given[async_op_] != Py_False) {
      if (given[async_op_] != Py_True) return {};
      path = get(path, names::starting);
      if (path.is_none()) return {};
    }
    nb::object member;
    if (root_ != kNone) {
      member = find_member(group, given[root_], given[group_root_]);
      if (!member.is_valid()) return {};
    }
    std::array<PyObject*, kMostParameters + 1> passed{path.ptr()};
    std::size_t count = 1;
    for (int at : taken_) passed[count++] = at == root_ ? member.ptr() : given[at];
    return checked(PyObject_VectorcallMethod(method_.ptr(), passed.data(), count, nullptr));
  }

  // The place in the group of the member that is named in one of two ways; None for any, which a receive
  // may mean; none where Python is to say what is wrong.
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

  const Surroundings& around_;
  const nb::object method_;
  const nb::tuple missing_;
  const bool stays_off_streams_;
  const nb::list watchers_;
  const nb::object watched_, function_, slow_;
  std::vector<nb::object> defaults_;
  std::vector<int> taken_, others_;
  int group_, async_op_, root_, group_root_;
};

PyObject* call_verb(PyObject* self, PyObject* const* given, Py_ssize_t num_given) {
  const auto* const verb = static_cast<const VerbCall*>(PyCapsule_GetPointer(self, nullptr));
  try {
    return verb->run(given, static_cast<std::size_t>(num_given));
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

}  // namespace

void bind_verb_calls(nb::module_& m) {
  nb::class_<Surroundings>(m, "Surroundings")
      .def(
          "__init__",
          [](Surroundings* self, nb::dict profiler, nb::dict forward_ad, nb::object context,
             nb::list process, nb::object group_type) {
            new (self) Surroundings{std::move(profiler), std::move(forward_ad), std::move(context),
                                    std::move(process), std::move(group_type)};
          },
          nb::kw_only(), "profiler"_a, "forward_ad"_a, "context"_a, "process"_a, "group_type"_a);
  m.def(
      "verb_call",
      [](const Surroundings& around, const std::string& name, const nb::list& parameters,
         const std::vector<std::string>& taken, const std::string& root, nb::tuple missing,
         bool stays_off_streams, nb::list watchers, nb::object watched, nb::object function,
         nb::object slow) {
        // Verbs live as long as the process, and so does what calls them, and its surroundings.
        nb::find(around).inc_ref();
        auto* const verb = new VerbCall(around, name, parameters, taken, root, std::move(missing),
                                        stays_off_streams, std::move(watchers), std::move(watched),
                                        std::move(function), std::move(slow));
        static PyMethodDef method{
            "call_verb", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_verb)),
            METH_FASTCALL, nullptr};
        const nb::object self = checked(PyCapsule_New(verb, nullptr, nullptr));
        return checked(PyCFunction_NewEx(&method, self.ptr(), nullptr));
      },
      "around"_a, "name"_a, nb::kw_only(), "parameters"_a, "taken"_a, "root"_a, "missing"_a,
      "stays_off_streams"_a, "watchers"_a, "watched"_a, "function"_a,
      "slow"_a);
}

}  // namespace meshdist
