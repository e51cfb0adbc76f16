// Happens-before and the accesses of operations; see races.h. Clocks follow from the calls of the
// host alone, so what counts as ordered does not depend on the schedule that ran.
#include "races.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>

#include "state.h"

namespace pretend::races {

namespace {

// One access by an operation or by the host, as later ones need it.
struct Access {
  const char* name;
  const char* caller;
  uint32_t actor;
  uint64_t tick;
  const char* verb = "enqueued at";
  bool by_copy = false;  // one that torch's allocator of pinned memory knows of
};

// Bytes with the same history: the last write, and the reads since that are not before each other.
struct Cell {
  uintptr_t end;
  uint32_t write;
  std::vector<uint32_t> reads;
};

struct Detector {
  bool on = false;
  uint32_t num_actors = 1;
  Clock host;  // what the host has waited for
  uint64_t host_tick = 1, host_version = 1;
  std::vector<Access> accesses{{}};  // the first stands for none
  std::map<uintptr_t, Cell> cells;
};

Detector& detector() {
  static auto* made = new Detector;
  return *made;
}

uint32_t add_access(const Access& access) {
  auto& all = detector().accesses;
  all.push_back(access);
  return static_cast<uint32_t>(all.size() - 1);
}

bool is_before(const Access& a, const Stamp& b) {
  if (a.actor == b.actor) return true;
  if (a.actor == kHost) return a.tick <= b.host;
  return b.past != nullptr && a.tick <= b.past->get(a.actor);
}

Stamp stamp_of_host() {
  const Detector& d = detector();
  return {kHost, d.host_tick, d.host_tick, std::make_shared<const Clock>(d.host)};
}

std::string describe(const Access& access) {
  return std::string(access.name) + ", " + access.verb + " " + access.caller;
}

std::string describe_place(uintptr_t at) {
  char text[500];
  pretend::describe_place(reinterpret_cast<const char*>(at), text, sizeof(text));
  return text;
}

void report(uint32_t before, uint32_t now, uintptr_t at, bool wrote, bool writes) {
  const auto& all = detector().accesses;
  set_error(std::string("race: nothing orders two accesses to ") + describe_place(at) + "; one " +
            (wrote ? "writes" : "reads") + ": " + describe(all[before]) + "; the other " +
            (writes ? "writes" : "reads") + ": " + describe(all[now]));
}

using Cells = std::map<uintptr_t, Cell>;

// Let a cell begin at `at`, if one contains it.
Cells::iterator split(uintptr_t at) {
  auto& cells = detector().cells;
  auto after = cells.lower_bound(at);
  if (after != cells.end() && after->first == at) return after;
  if (after == cells.begin()) return after;
  auto& [begin, cell] = *std::prev(after);
  if (cell.end <= at) return after;
  Cell rest = cell;
  cell.end = at;
  return cells.emplace_hint(after, at, std::move(rest));
}

// Compare an access with the history of a cell; return false for a race.
bool agrees(const Cell& cell, uintptr_t at, uint32_t now, const Stamp& stamp, bool is_write) {
  const auto& all = detector().accesses;
  if (cell.write != 0 && cell.write != now && !is_before(all[cell.write], stamp)) {
    report(cell.write, now, at, true, is_write);
    return false;
  }
  if (!is_write) return true;
  for (const uint32_t read : cell.reads) {
    if (read != now && !is_before(all[read], stamp)) {
      report(read, now, at, false, true);
      return false;
    }
  }
  return true;
}

void add_read(Cell& cell, uint32_t now, const Stamp& stamp) {
  const auto& all = detector().accesses;
  std::erase_if(cell.reads, [&](uint32_t read) { return is_before(all[read], stamp); });
  cell.reads.push_back(now);
}

bool read(Range range, uint32_t now, const Stamp& stamp) {
  auto& cells = detector().cells;
  auto it = split(range.begin);
  const auto last = split(range.end);
  bool fine = true;
  uintptr_t at = range.begin;
  while (at < range.end) {
    if (it == last || it->first > at) {  // no history
      const uintptr_t end = it == last ? range.end : it->first;
      cells.emplace_hint(it, at, Cell{end, 0, {now}});
      at = end;
      continue;
    }
    fine = agrees(it->second, at, now, stamp, false) && fine;
    add_read(it->second, now, stamp);
    at = it->second.end;
    ++it;
  }
  return fine;
}

bool write(Range range, uint32_t now, const Stamp& stamp) {
  auto& cells = detector().cells;
  split(range.begin);
  const auto last = split(range.end);
  const auto first = cells.lower_bound(range.begin);
  bool fine = true;
  for (auto it = first; it != last; ++it) {
    fine = agrees(it->second, it->first, now, stamp, true) && fine;
  }
  cells.emplace_hint(cells.erase(first, last), range.begin, Cell{range.end, now, {}});
  return fine;
}

// An operation that the host enqueued after it freed the memory.
void check_use_after_free(Range range, const Operation& operation) {
  const Block* block = find_block(reinterpret_cast<const void*>(range.begin));
  if (block == nullptr || block->released == 0 || operation.stamp.host < block->released) return;
  throw std::runtime_error("illegal memory access: " + describe_place(range.begin) + ", freed at " +
                           block->released_at);
}

Range range_of(const Block& block) {
  const auto begin = reinterpret_cast<uintptr_t>(block.data);
  return {begin, begin + block.size};
}

void share(Timeline& timeline) {
  const Detector& d = detector();
  if (timeline.host_version != d.host_version) {
    timeline.past.join(d.host);
    timeline.host_version = d.host_version;
    timeline.shared.reset();
  }
  if (timeline.shared == nullptr) timeline.shared = std::make_shared<const Clock>(timeline.past);
}

}  // namespace

uint64_t Clock::get(uint32_t actor) const {
  const auto found = std::lower_bound(ticks_.begin(), ticks_.end(), std::pair{actor, uint64_t{0}});
  return found != ticks_.end() && found->first == actor ? found->second : 0;
}

void Clock::raise(uint32_t actor, uint64_t tick) {
  const auto found = std::lower_bound(ticks_.begin(), ticks_.end(), std::pair{actor, uint64_t{0}});
  if (found == ticks_.end() || found->first != actor) {
    ticks_.insert(found, {actor, tick});
  } else if (found->second < tick) {
    found->second = tick;
  }
}

void Clock::join(const Clock& other) {
  for (const auto& [actor, tick] : other.ticks_) raise(actor, tick);
}

bool enabled() { return detector().on; }
void enable() { detector().on = true; }

void start(Timeline& timeline) { timeline.actor = detector().num_actors++; }

Stamp next(Timeline& timeline) {
  if (!enabled()) return {};
  share(timeline);
  return {timeline.actor, ++timeline.tick, detector().host_tick++, timeline.shared};
}

Past snapshot(Timeline& timeline) {
  if (!enabled()) return nullptr;
  share(timeline);
  Clock clock = timeline.past;
  clock.raise(timeline.actor, timeline.tick);
  return std::make_shared<const Clock>(std::move(clock));
}

void join(Timeline& timeline, const Past& past) {
  if (past == nullptr) return;
  timeline.past.join(*past);
  timeline.shared.reset();
}

void host_joins(const Past& past) {
  if (past == nullptr) return;
  detector().host.join(*past);
  ++detector().host_version;
}

uint64_t host_calls() { return detector().host_tick; }

void forget() {
  Detector& d = detector();
  d.host.clear();
  ++d.host_version;
  d.cells.clear();
  d.accesses.resize(1);
}

void start_branch(Timeline& branch, Graph& graph) {
  branch = {};
  branch.actor = static_cast<uint32_t>(graph.branches.lengths.size());
  graph.branches.lengths.push_back(0);
}

Stamp next_of_branch(Timeline& branch) {
  if (!enabled()) return {};
  if (branch.shared == nullptr) branch.shared = std::make_shared<const Clock>(branch.past);
  return {branch.actor, ++branch.tick, 0, branch.shared};
}

Past snapshot_of_branch(const Timeline& branch) {
  if (!enabled()) return nullptr;
  Clock clock = branch.past;
  clock.raise(branch.actor, branch.tick);
  return std::make_shared<const Clock>(std::move(clock));
}

void end_branch(const Timeline& branch, Graph& graph) {
  graph.branches.lengths[branch.actor] = branch.tick;
}

void stamp_replay(Graph& graph, Timeline& timeline, std::vector<Operation>& operations) {
  if (!enabled()) return;
  Branches& b = graph.branches;
  while (b.actors.size() < b.lengths.size()) {
    b.actors.push_back(detector().num_actors++);
    b.ends.push_back(0);
  }
  Clock base = *snapshot(timeline);
  for (size_t i = 0; i < b.actors.size(); ++i) base.raise(b.actors[i], b.ends[i]);
  const uint64_t host = detector().host_tick++;
  std::map<const Clock*, Past> translated;
  for (Operation& operation : operations) {
    Stamp& stamp = operation.stamp;
    Past& past = translated[stamp.past.get()];
    if (past == nullptr) {
      Clock clock = base;
      if (stamp.past != nullptr) {
        for (const auto& [branch, tick] : stamp.past->ticks()) {
          clock.raise(b.actors[branch], b.ends[branch] + tick);
        }
      }
      past = std::make_shared<const Clock>(std::move(clock));
    }
    stamp = {b.actors[stamp.actor], b.ends[stamp.actor] + stamp.tick, host, past};
  }
  for (size_t i = 0; i < b.actors.size(); ++i) {
    b.ends[i] += b.lengths[i];
    base.raise(b.actors[i], b.ends[i]);
  }
  join(timeline, std::make_shared<const Clock>(std::move(base)));
}

void on_allocate(const Block& block, const Timeline& timeline) {
  if (!enabled()) return;
  // Until the stream is here, earlier work of the stream may use the same memory.
  const Access access{"allocation", block.owner, timeline.actor, timeline.tick, "at"};
  const Range range = range_of(block);
  detector().cells[range.begin] = {range.end, add_access(access), {}};
}

void on_release(Block& block, const char* caller) {
  block.released = detector().host_tick;
  block.released_at = caller;
}

void on_reuse(const Block& block, const Operation& by) {
  const Access access{by.name, by.caller, by.stamp.actor, by.stamp.tick, "freed at"};
  write(range_of(block), add_access(access), by.stamp);
}

void on_unmap(const void* begin, size_t bytes) {
  if (!enabled()) return;
  const auto from = reinterpret_cast<uintptr_t>(begin);
  auto& cells = detector().cells;
  cells.erase(cells.lower_bound(from), cells.lower_bound(from + bytes));
}

bool on_host_access(const char* p, size_t bytes, bool is_write, const char* caller) {
  const auto begin = reinterpret_cast<uintptr_t>(p);
  const Stamp stamp = stamp_of_host();
  const uint32_t now = add_access({"the host", caller, kHost, stamp.tick, "at"});
  return is_write ? write({begin, begin + bytes}, now, stamp)
                  : read({begin, begin + bytes}, now, stamp);
}

void on_pinned_release(const char* p, size_t bytes, const char* caller) {
  if (!enabled()) return;
  const auto begin = reinterpret_cast<uintptr_t>(p);
  const Stamp stamp = stamp_of_host();
  const uint32_t now = add_access({"the host, which frees it", caller, kHost, stamp.tick, "at"});
  // Copies are known to torch's allocator, which waits for them.
  const auto& all = detector().accesses;
  const auto is_copy = [&](uint32_t access) { return all[access].by_copy; };
  auto& cells = detector().cells;
  for (auto it = cells.lower_bound(begin); it != cells.end() && it->first < begin + bytes; ++it) {
    std::erase_if(it->second.reads, is_copy);
    if (is_copy(it->second.write)) it->second.write = 0;
  }
  write({begin, begin + bytes}, now, stamp);
}

bool host_is_after(const Clock& uses) {
  const auto& ticks = uses.ticks();
  return std::all_of(ticks.begin(), ticks.end(),
                     [](const auto& use) { return use.second <= detector().host.get(use.first); });
}

Recording::Recording(const Operation& operation) : operation_(operation) {
  if (enabled()) begin_accesses();
}

Recording::~Recording() {
  if (enabled()) end_accesses();
}

void Recording::check() {
  if (!enabled()) return;
  const Accesses accesses = end_accesses();
  if (accesses.reads.empty() && accesses.writes.empty()) return;
  const Stamp& stamp = operation_.stamp;
  const uint32_t now = add_access({operation_.name, operation_.caller, stamp.actor, stamp.tick,
                                   "enqueued at", operation_.pinned != nullptr});
  for (const Range& range : accesses.reads) read(range, now, stamp);
  for (const Range& range : accesses.writes) write(range, now, stamp);
  for (const Range& range : accesses.reads) check_use_after_free(range, operation_);
  for (const Range& range : accesses.writes) check_use_after_free(range, operation_);
}

}  // namespace pretend::races
