// Events of streams, written to sockets by a thread of its own that never needs Python's global
// interpreter lock. The module megavm.server._event_writer.
//
// Most events of a stream differ in their text only. Python gives their head and tail once, and
// then the texts of all streams of a step in one call. The thread makes events of them, and of the
// events of a stream one chunk of HTTP/1.1. A socket that takes no more delays no other: its events
// wait in the stream.

#include <pthread.h>
#include <pybind11/pybind11.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace megavm {
namespace {

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

// A file descriptor that is closed with this object.
class File {
 public:
  explicit File(int number) : number_(number) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() { close(); }

  int number() const { return number_; }
  void close() {
    if (number_ >= 0) ::close(number_);
    number_ = -1;
  }

 private:
  int number_;
};

// A counter that makes its descriptor readable.
class Bell {
 public:
  Bell() : file_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (file_.number() < 0) fail("eventfd");
  }
  int number() const { return file_.number(); }
  void ring() const {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(file_.number(), &one, sizeof one);
  }
  void silence() const {
    uint64_t count;
    [[maybe_unused]] const ssize_t count_read = read(file_.number(), &count, sizeof count);
  }

 private:
  File file_;
};

// One answer. EventWriter's mutex guards all but `out` and `sent`, which the thread owns.
struct Stream {
  Stream(int descriptor, std::string head, std::string tail)
      : file(descriptor), head(std::move(head)), tail(std::move(tail)) {}

  File file;
  const std::string head;
  const std::string tail;
  std::string waiting;     // events that are in no chunk yet
  bool busy = false;       // the thread has it, or will take it: it must write something
  bool ending = false;     // takes no more events, and is closed when all are written
  bool discarded = false;  // events that wait are dropped
  std::string out;         // a chunk
  size_t sent = 0;         // bytes of it
};

using StreamPointer = std::shared_ptr<Stream>;

class EventWriter {
 public:
  EventWriter() : epoll_(epoll_create1(EPOLL_CLOEXEC)), process_(getpid()) {
    if (epoll_.number() < 0) fail("epoll_create1");
    epoll_event event{.events = EPOLLIN, .data = {.ptr = nullptr}};
    if (epoll_ctl(epoll_.number(), EPOLL_CTL_ADD, wake_.number(), &event) < 0) fail("epoll_ctl");
    thread_ = std::thread([this] { serve(); });
    pthread_setname_np(thread_.native_handle(), "megavm-events");
  }
  EventWriter(const EventWriter&) = delete;
  EventWriter& operator=(const EventWriter&) = delete;
  ~EventWriter() { close(); }

  // Stops the thread; what is not written yet is lost.
  void close() {
    if (!thread_.joinable()) return;
    if (process_ != getpid()) {  // a forked child does not have the thread
      thread_.detach();
      return;
    }
    {
      const std::lock_guard lock(mutex_);
      quit_ = true;
    }
    wake_.ring();
    thread_.join();
  }

  StreamPointer open(int descriptor, std::string head, std::string tail) {
    // A copy: Python may close its own while the thread writes.
    const int own = dup(descriptor);
    if (own < 0) fail("dup");
    return std::make_shared<Stream>(own, std::move(head), std::move(tail));
  }

  // Adds an event for each text to the stream at the same place.
  void write(const py::list& streams, const py::list& texts) {
    const size_t count = streams.size();
    if (count != texts.size()) throw py::value_error("as many texts as streams are needed");
    std::vector<std::pair<Stream*, std::string_view>> events(count);
    for (size_t i = 0; i < count; ++i) {
      Py_ssize_t size = 0;
      const char* text = PyUnicode_AsUTF8AndSize(texts[i].ptr(), &size);
      if (text == nullptr) throw py::error_already_set();
      events[i] = {streams[i].cast<Stream*>(), {text, static_cast<size_t>(size)}};
    }
    {
      const std::lock_guard lock(mutex_);
      for (size_t i = 0; i < count; ++i) {
        const auto& [stream, text] = events[i];
        if (stream->ending || stream->discarded) continue;
        stream->waiting.append(stream->head).append(text).append(stream->tail);
        if (!stream->busy) {
          stream->busy = true;
          dirty_.push_back(streams[i].cast<StreamPointer>());
        }
      }
    }
    wake_.ring();
  }

  // Takes no more events for a stream. Whether all are written; else it is among `take_ended` once
  // they are.
  bool end(const StreamPointer& stream) {
    const std::lock_guard lock(mutex_);
    stream->ending = true;
    if (stream->busy) return false;
    stream->file.close();
    return true;
  }

  // Ends a stream at once; what is left is lost.
  void discard(const StreamPointer& stream) {
    {
      const std::lock_guard lock(mutex_);
      stream->discarded = true;
      stream->waiting.clear();
      if (!stream->busy) {
        stream->file.close();
        return;
      }
      dirty_.push_back(stream);  // the thread may wait for its socket
    }
    wake_.ring();
  }

  // Becomes readable when `take_ended` has something to return.
  int fileno() const { return ended_bell_.number(); }

  py::list take_ended() {
    std::vector<StreamPointer> ended;
    {
      const std::lock_guard lock(mutex_);
      ended_bell_.silence();
      ended.swap(ended_);
    }
    py::list result;
    for (StreamPointer& stream : ended) result.append(py::cast(std::move(stream)));
    return result;
  }

 private:
  void serve() {
    std::array<epoll_event, 64> events;
    std::vector<StreamPointer> ready;
    for (;;) {
      const int count = epoll_wait(epoll_.number(), events.data(), events.size(), -1);
      ready.clear();
      for (int i = 0; i < count; ++i) {
        if (events[i].data.ptr == nullptr) {
          wake_.silence();
        } else {
          ready.push_back(blocked_.at(static_cast<Stream*>(events[i].data.ptr)));
        }
      }
      {
        const std::lock_guard lock(mutex_);
        if (quit_) return;
        ready.insert(ready.end(), dirty_.begin(), dirty_.end());
        dirty_.clear();
      }
      for (const StreamPointer& stream : ready) write_out(stream);
    }
  }

  // Writes what a stream has, as far as its socket takes it.
  void write_out(const StreamPointer& stream) {
    while (next_chunk(stream)) {
      const ssize_t written = send(stream->file.number(), stream->out.data() + stream->sent,
                                   stream->out.size() - stream->sent, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (written >= 0) {
        stream->sent += static_cast<size_t>(written);
      } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
        block(stream);
        return;
      } else if (errno != EINTR) {
        // The client is gone, as the event loop will notice.
        const std::lock_guard lock(mutex_);
        stream->discarded = true;
      }
    }
  }

  // Whether there is something to write; a chunk of the events that wait if the last one is
  // written.
  bool next_chunk(const StreamPointer& stream) {
    const std::lock_guard lock(mutex_);
    if (!stream->busy) return false;
    if (!stream->discarded && stream->sent < stream->out.size()) return true;
    stream->out.clear();
    stream->sent = 0;
    if (stream->discarded || stream->waiting.empty()) {
      stream->busy = false;
      stream->waiting.clear();
      if (blocked_.erase(stream.get()) > 0) {
        epoll_ctl(epoll_.number(), EPOLL_CTL_DEL, stream->file.number(), nullptr);
      }
      if (stream->ending) {
        ended_.push_back(stream);
        ended_bell_.ring();
      }
      if (stream->ending || stream->discarded) stream->file.close();
      return false;
    }
    std::array<char, 2 * sizeof(size_t)> size;
    const auto end =
        std::to_chars(size.data(), size.data() + size.size(), stream->waiting.size(), 16).ptr;
    stream->out.append(size.data(), end).append("\r\n").append(stream->waiting).append("\r\n");
    stream->waiting.clear();
    return true;
  }

  // Waits until a socket takes more.
  void block(const StreamPointer& stream) {
    if (!blocked_.emplace(stream.get(), stream).second) return;
    epoll_event event{.events = EPOLLOUT, .data = {.ptr = stream.get()}};
    epoll_ctl(epoll_.number(), EPOLL_CTL_ADD, stream->file.number(), &event);
  }

  const File epoll_;
  const Bell wake_;
  const Bell ended_bell_;
  const pid_t process_;
  std::mutex mutex_;
  std::vector<StreamPointer> dirty_;
  std::vector<StreamPointer> ended_;
  bool quit_ = false;
  std::unordered_map<Stream*, StreamPointer> blocked_;  // only the thread uses it
  std::thread thread_;
};

}  // namespace
}  // namespace megavm

PYBIND11_MODULE(_event_writer, module) {
  using megavm::EventWriter;
  py::class_<megavm::Stream, megavm::StreamPointer>(module, "Stream");
  py::class_<EventWriter>(module, "EventWriter")
      .def(py::init())
      .def("close", &EventWriter::close)
      .def("open", &EventWriter::open, py::arg("descriptor"), py::arg("head"), py::arg("tail"))
      .def("write", &EventWriter::write, py::arg("streams"), py::arg("texts"))
      .def("end", &EventWriter::end, py::arg("stream"))
      .def("discard", &EventWriter::discard, py::arg("stream"))
      .def("fileno", &EventWriter::fileno)
      .def("take_ended", &EventWriter::take_ended);
}
