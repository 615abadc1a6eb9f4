// Running without Python's global interpreter lock (GIL).
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#ifdef __GLIBCXX__
#include <cxxabi.h>
#endif

namespace megavm {

// Other threads of Python run while this object lives.
//
// Like pybind11's gil_scoped_release, except when the interpreter ends before this object does,
// because this thread is a daemon: until Python 3.13 taking the lock then ends the thread by
// unwinding its stack, which may not pass a destructor, and the process aborts. Here the thread
// sleeps until the process has ended, as from Python 3.14 on.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;
  ~GilReleased() {
#ifdef __GLIBCXX__
    try {
      PyEval_RestoreThread(state_);
    } catch (const abi::__forced_unwind&) {
      for (;;) pause();
    }
#else
    PyEval_RestoreThread(state_);
#endif
  }

 private:
  PyThreadState* state_;
};

}  // namespace megavm
