#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <limits>
#include <map>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "vm/verify/fast_order.hpp"

namespace megavm::verify {
namespace {

constexpr std::size_t kMaxSetBytes = std::size_t{4} << 30;  // of all sets of events

// A set of events. All words before begin_ are full, and all after words_ are empty: events are
// numbered in about the order in which they happen, so a node knows all of the old ones.
class EventSet {
 public:
  bool has(std::uint32_t event) const {
    const std::size_t word = event / 64;
    if (word < begin_) return true;
    if (word >= begin_ + words_.size()) return false;
    return words_[word - begin_] >> (event % 64) & 1;
  }

  void add(std::uint32_t event) {
    const std::size_t word = event / 64;
    if (word < begin_) return;
    if (word >= begin_ + words_.size()) words_.resize(word - begin_ + 1, 0);
    words_[word - begin_] |= std::uint64_t{1} << (event % 64);
    drop_full_words();
  }

  void unite(const EventSet& from) {
    if (from.begin_ > begin_) drop_words(from.begin_ - begin_);
    const auto end = from.begin_ + from.words_.size();
    if (end > begin_ + words_.size()) words_.resize(end - begin_, 0);
    for (auto word = std::max(begin_, from.begin_); word < end; ++word)
      words_[word - begin_] |= from.words_[word - from.begin_];
    drop_full_words();
  }

  std::size_t bytes() const { return sizeof(*this) + words_.capacity() * sizeof(words_[0]); }

 private:
  void drop_words(std::size_t count) {
    const auto dropped = static_cast<std::ptrdiff_t>(std::min(count, words_.size()));
    words_.erase(words_.begin(), words_.begin() + dropped);
    begin_ += count;
  }

  void drop_full_words() {
    const auto is_full = [](std::uint64_t word) { return word == ~std::uint64_t{0}; };
    const auto first = std::find_if_not(words_.begin(), words_.end(), is_full);
    if (first != words_.begin()) drop_words(static_cast<std::size_t>(first - words_.begin()));
  }

  std::size_t begin_ = 0;
  std::vector<std::uint64_t> words_;
};

// An *event* of a step: all signals of a barrier have been given, or all words of a group of tagged
// writers have been written. A node knows the set of events that come before it. Nodes that wait
// for the same events know the same and share a set.
class EventOrder final : public FastOrder {
 public:
  EventOrder(const Index& index, const TagGroups& tags, const std::vector<char>& trusted)
      : FastOrder(index, tags, trusted),
        knowledge_of_(index.program.instructions.size() * kAnalysedSteps, 0) {
    number_sources();
    number_kinds();
  }

  std::size_t kind(Node node) const override {
    return static_cast<std::size_t>(node.step) * kinds_.size() + kinds_[node.instruction];
  }

  void enter(Node node) override {
    current_ = node;
    std::vector<std::uint32_t> before;
    for (const auto& wait : index_.program.instructions[node.instruction].waits) {
      if (wait.barrier < 0 || !trusted_[wait.barrier]) continue;
      const bool all = wait.target == index_.signals(wait.barrier);
      if (all && wait.target > 0) before.push_back(barrier_event(wait.barrier, node.step));
      if (!all && node.step > 0) before.push_back(barrier_event(wait.barrier, node.step - 1));
    }
    std::sort(before.begin(), before.end());
    const auto of_header = before.size();
    for (const auto group : tags_.needs[node.instruction])
      before.push_back(group_event(group, node.step));
    std::sort(before.begin() + static_cast<std::ptrdiff_t>(of_header), before.end());
    const auto [entry, is_new] =
        by_events_.try_emplace(before, static_cast<std::uint32_t>(knowledge_.size()));
    knowledge_of_[number(node)] = entry->second;
    if (!is_new) return;
    Knowledge knowledge;
    for (std::size_t i = 0; i < before.size(); ++i) {
      if (i == of_header) {
        knowledge.header = knowledge.over;
        knowledge.header_read = knowledge.read;
      }
      const auto& joined = join(before[i]);
      knowledge.over.unite(joined.over);
      knowledge.read.unite(joined.read);
    }
    if (of_header == before.size()) {
      knowledge.header = knowledge.over;
      knowledge.header_read = knowledge.read;
    }
    count_bytes(knowledge.header.bytes() + knowledge.header_read.bytes() + knowledge.over.bytes() +
                knowledge.read.bytes());
    knowledge_.push_back(std::move(knowledge));
  }

  bool over_before_reads(Node node) const override {
    return is_over(knowledge_[knowledge_of_[number(current_)]].header, node);
  }
  bool over_before_writes(Node node) const override {
    const auto& knowledge = knowledge_[knowledge_of_[number(current_)]];
    return is_over(writes_early() ? knowledge.header : knowledge.over, node);
  }
  bool read_before_writes(Node node) const override {
    const auto& knowledge = knowledge_[knowledge_of_[number(current_)]];
    const auto& known = writes_early() ? knowledge.header_read : knowledge.read;
    const auto barrier = index_.program.instructions[node.instruction].signal;
    if (barrier >= 0 && known.has(barrier_event(barrier, node.step))) return true;
    if (index_.program.instructions[node.instruction].reads_late) return false;
    const auto& groups = tags_.memberships[node.instruction];
    return std::any_of(groups.begin(), groups.end(), [&](std::int32_t group) {
      return known.has(group_event(group, node.step));
    });
  }

  bool steps_are_apart(std::int32_t barrier) const override {
    const auto& signallers = index_.signallers[barrier];
    return std::all_of(signallers.begin(), signallers.end(), [&](std::int32_t instruction) {
      return knowledge_[knowledge_of_[number({instruction, 1})]].over.has(
          over_event(static_cast<std::size_t>(barrier), 0));
    });
  }

 private:
  bool over_with_signals(std::int32_t barrier, std::int32_t step, Node node) override {
    return is_over(join(barrier_event(barrier, step)).over, node);
  }

  // Sets of events. After an event of header or over, its signallers are over; these have barriers
  // only, numbered among themselves (over_event). After one of header_read or read, at least the
  // reads of its signallers or writers are over.
  struct Knowledge {
    EventSet header, header_read;  // before the reads of the node
    EventSet over, read;           // before its writes
  };
  struct Joined {
    EventSet over, read;
  };

  // Number the sources of events, barriers and then groups, in the order of their last members.
  void number_sources() {
    const auto barriers = index_.signallers.size();
    std::vector<std::pair<std::int32_t, std::uint32_t>> sources;
    for (std::size_t source = 0; source < barriers + tags_.members.size(); ++source) {
      std::int32_t last = 0;
      for (const auto member : members_of(source))
        last = std::max(last, index_.places[member].position);
      sources.emplace_back(last, static_cast<std::uint32_t>(source));
    }
    std::sort(sources.begin(), sources.end());
    numbers_.resize(sources.size());
    for (std::size_t number = 0; number < sources.size(); ++number)
      numbers_[sources[number].second] = static_cast<std::uint32_t>(number);
    sources_.reserve(sources.size());
    barrier_numbers_.resize(barriers);
    std::uint32_t count = 0;
    for (const auto& [last, source] : sources) {
      sources_.push_back(source);
      if (source < barriers) barrier_numbers_[source] = count++;
    }
  }
  // Questions about an instruction ask for the events that it signals and writes for.
  void number_kinds() {
    const auto count = index_.program.instructions.size();
    std::map<std::pair<std::int32_t, Instructions>, std::uint32_t> known;
    kinds_.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
      const auto& instruction = index_.program.instructions[i];
      const auto& groups = instruction.reads_late ? Instructions() : tags_.memberships[i];
      const auto next = static_cast<std::uint32_t>(known.size());
      kinds_.push_back(known.try_emplace({instruction.signal, groups}, next).first->second);
    }
  }
  const Instructions& members_of(std::size_t source) const {
    const auto barriers = index_.signallers.size();
    return source < barriers ? index_.signallers[source] : tags_.members[source - barriers];
  }

  void count_bytes(std::size_t bytes) {
    bytes_ += bytes;
    if (bytes_ <= kMaxSetBytes) return;
    char text[256];
    std::snprintf(text, sizeof(text),
                  "the program's %zu instructions wait for %zu different sets of events in two "
                  "steps, and the analysis may keep %zu GiB of such sets: let more instructions "
                  "wait for the same",
                  index_.program.instructions.size(), knowledge_.size(), kMaxSetBytes >> 30);
    throw std::length_error(text);
  }

  bool writes_early() const {
    return index_.program.instructions[current_.instruction].writes_early;
  }
  std::uint32_t event(std::size_t source, std::int32_t step) const {
    return static_cast<std::uint32_t>(numbers_.size()) * static_cast<std::uint32_t>(step) +
           numbers_[source];
  }
  std::uint32_t barrier_event(std::int32_t barrier, std::int32_t step) const {
    return event(static_cast<std::size_t>(barrier), step);
  }
  std::uint32_t group_event(std::int32_t group, std::int32_t step) const {
    return event(index_.signallers.size() + static_cast<std::size_t>(group), step);
  }
  // The number of a barrier's event in sets without groups.
  std::uint32_t over_event(std::size_t barrier, std::int32_t step) const {
    return static_cast<std::uint32_t>(barrier_numbers_.size()) * static_cast<std::uint32_t>(step) +
           barrier_numbers_[barrier];
  }
  bool is_over(const EventSet& set, Node node) const {
    const auto barrier = index_.program.instructions[node.instruction].signal;
    return barrier >= 0 && set.has(over_event(static_cast<std::size_t>(barrier), node.step));
  }

  // The accesses that an event proves to be over.
  const Joined& join(std::uint32_t event) {
    const auto [entry, is_new] = joined_.try_emplace(event);
    if (!is_new) return entry->second;
    Joined& joined = entry->second;
    const auto step = static_cast<std::int32_t>(event / sources_.size());
    const auto source = sources_[event % sources_.size()];
    const bool is_barrier = source < index_.signallers.size();
    std::uint32_t last = std::numeric_limits<std::uint32_t>::max();
    for (const auto instruction : members_of(source)) {
      const auto known = knowledge_of_[number({instruction, step})];
      if (known == last) continue;
      last = known;
      joined.over.unite(knowledge_[known].over);
      joined.read.unite(knowledge_[known].read);
    }
    if (is_barrier) joined.over.add(over_event(source, step));
    joined.read.add(event);
    count_bytes(joined.over.bytes() + joined.read.bytes());
    return joined;
  }

  std::vector<std::uint32_t> numbers_;  // by source
  std::vector<std::uint32_t> sources_;  // by number
  std::vector<std::uint32_t> barrier_numbers_;
  std::vector<std::uint32_t> kinds_;         // by instruction
  std::size_t bytes_ = 0;                    // that all sets of events take
  std::vector<std::uint32_t> knowledge_of_;  // by node
  std::vector<Knowledge> knowledge_;
  std::map<std::vector<std::uint32_t>, std::uint32_t> by_events_;
  std::unordered_map<std::uint32_t, Joined> joined_;
};

}  // namespace

std::unique_ptr<FastOrder> make_event_order(const Index& index, const TagGroups& tags,
                                            const std::vector<char>& trusted) {
  return std::make_unique<EventOrder>(index, tags, trusted);
}

}  // namespace megavm::verify
