// Finding keys on one CPU thread. A key costs two lines of memory that nothing predicts, the tags
// of its bucket and its entry, so a key goes through four steps that are many keys apart, and every
// step asks for the line that the next one reads. No step branches on what it finds: keys that are
// not where they were looked for first are noted, and looked for again once per chunk.
#include "hash/match.h"

namespace emb::EMB_ISA {
namespace {

constexpr int kChunk = 64;  // keys that are hashed at once, and between two looks at the noted ones
constexpr int kRing = 4 * kChunk;  // keys that the longest way through the steps spans, and more
// How far behind the asking for its tags a key's steps are.
constexpr int kToFirst = 16;
constexpr int kToSecond = kToFirst + 24;
constexpr int kToCompare = kToFirst + kChunk;

// What is known of the keys that are under way, by the number of the key modulo kRing.
struct Probes {
  int64_t first[kRing], second[kRing];  // buckets
  int64_t slot[kRing];                  // of the lowest candidate
  uint32_t candidates[kRing];           // of the bucket of `slot`
  uint8_t tag[kRing];

  static int at(int64_t i) { return static_cast<int>(i & (kRing - 1)); }
};

// Numbers of keys that were not what their lowest candidate says.
struct Noted {
  int64_t keys[kChunk];
  int count = 0;
};

EMB_HD int64_t lowest_slot(int64_t bucket, uint32_t candidates) {
  return bucket * kSlots + lowest(candidates | uint32_t{1} << (kSlots - 1));
}

// Asks for a line: tags are read at once; entries, of which many are under way, go to the second
// level of the cache, where there is room for them. A choice is made by bits: of `?:` the compiler
// makes a branch, which takes as long as the rest of the way wherever it is not foreseen.
EMB_HD void ask_for_tags(const HashTable& table, int64_t bucket) {
  __builtin_prefetch(table.tags + bucket * kSlots);
}
EMB_HD void ask_for_either(bool entry, const HashTable& table, int64_t slot, int64_t bucket) {
  const auto line = reinterpret_cast<uintptr_t>(table.entry(slot));
  const auto tags = reinterpret_cast<uintptr_t>(table.tags + bucket * kSlots);
  const uintptr_t chosen = tags ^ ((line ^ tags) & -uintptr_t{entry});
  __builtin_prefetch(reinterpret_cast<const void*>(chosen), 0, 2);
}

EMB_HD void hash_keys(const HashTable& table, const int64_t* ids, int64_t begin, int64_t n,
                      Probes* p) {
  const int64_t buckets = table.buckets;
  const uint64_t mask = table.mask;
  const int size = static_cast<int>(n - begin < kChunk ? n - begin : kChunk);
  const int at = Probes::at(begin);  // chunks do not wrap around
  for (int i = 0; i < size; ++i) {
    const uint64_t mixed = table.hash(ids[begin + i]);
    p->first[at + i] = address(first_hash(mixed), buckets, mask);
    p->second[at + i] = address(second_hash(mixed), buckets, mask);
    p->tag[at + i] = tag_of(mixed);
  }
}

EMB_HD void probe_first(const HashTable& table, int64_t key, Probes* p) {
  const int i = Probes::at(key);
  const uint32_t candidates = match(table.tags + p->first[i] * kSlots, p->tag[i]);
  const int64_t slot = lowest_slot(p->first[i], candidates);
  const int64_t second = p->second[i] * kSlots;
  p->slot[i] = second ^ ((slot ^ second) & -int64_t{candidates != 0});
  ask_for_either(candidates != 0, table, slot, p->second[i]);
}

// The slot whose entry is read: where there is no candidate one that is always at hand, for that of
// an empty slot would be a line of memory for nothing.
EMB_HD int64_t read_slot(int64_t slot, uint32_t candidates) {
  return slot & -int64_t{candidates != 0};
}

// Again in the bucket that was chosen, which is the first one for most keys, then at hand.
EMB_HD void probe_chosen(const HashTable& table, int64_t key, Probes* p) {
  const int i = Probes::at(key);
  const int64_t bucket = p->slot[i] / kSlots;
  p->candidates[i] = match(table.tags + bucket * kSlots, p->tag[i]);
  p->slot[i] = lowest_slot(bucket, p->candidates[i]);
  __builtin_prefetch(table.entry(read_slot(p->slot[i], p->candidates[i])), 0, 2);
}

// The slot of the key if it is the lowest candidate, else -1; noted if it may be elsewhere.
EMB_HD int64_t compare(const HashTable& table, int64_t key, int64_t id, const Probes& p,
                       Noted* noted) {
  const int i = Probes::at(key);
  const int64_t slot = p.slot[i];
  const uint32_t candidates = p.candidates[i];
  const int64_t* entry = table.entry(read_slot(slot, candidates));
  const bool miss =
      (static_cast<uint64_t>(entry[kKey] ^ id) | static_cast<uint64_t>(candidates == 0)) != 0;
  const bool elsewhere =
      ((candidates & (candidates - 1)) | static_cast<uint32_t>(slot / kSlots == p.first[i])) != 0;
  noted->keys[noted->count & (kChunk - 1)] = key;
  noted->count += static_cast<int>(miss) & static_cast<int>(elsewhere);
  return slot | -static_cast<int64_t>(miss);
}

// Other threads may use the same entry: all store the same stamp, and counts add up in any order.
EMB_HD void use_entry(const HashUse& use, int64_t* entry, int64_t position) {
  __atomic_store_n(entry + kStamp, use.stamp, __ATOMIC_RELAXED);
  if (!has_scores(use.order)) return;
  if (!counts_uses(use.order)) {
    return __atomic_store_n(entry + kScore, use.given, __ATOMIC_RELAXED);
  }
  const int64_t count = use.counts == nullptr ? 1 : use.counts[position];
  // Whoever makes the sum wrap puts it right after that, so in the end it is.
  const int64_t before = __atomic_fetch_add(entry + kScore, count, __ATOMIC_RELAXED);
  if (count_overflows(before, count)) {
    __atomic_store_n(entry + kScore, INT64_MAX, __ATOMIC_RELAXED);
  }
}

// Asks for the line at which looking for the noted keys goes on.
EMB_HD void ask_for_noted(const HashTable& table, const Noted& noted, const Probes& p) {
  for (int k = 0; k < noted.count; ++k) {
    const int i = Probes::at(noted.keys[k]);
    const uint32_t rest = p.candidates[i] & (p.candidates[i] - 1);
    ask_for_either(rest != 0, table, lowest_slot(p.slot[i] / kSlots, rest), p.second[i]);
  }
}

// The other candidates of a noted key, and its second bucket if those were of the first.
EMB_HD int64_t resolve(const HashTable& table, int64_t key, int64_t id, const Probes& p) {
  const int i = Probes::at(key);
  const int64_t bucket = p.slot[i] / kSlots;
  const uint32_t rest = p.candidates[i] & (p.candidates[i] - 1);
  const int64_t slot = find_among(table, bucket, rest, id);
  if (slot != kNoSlot || bucket != p.first[i]) return slot;
  return find_in(table, p.second[i], p.tag[i], id);
}

template <bool kUses>
int64_t find_all(const HashTable& shared, const int64_t* ids, int64_t n, const HashUse* use,
                 int64_t* slots) {
  const HashTable table = shared;  // nothing that is written here can be a part of it
  Probes p;
  Noted noted[2];
  int64_t hits = 0;
  const auto tell = [&](int64_t key, int64_t slot) {
    slots[key] = slot;
    hits += slot != kNoSlot;
    if (kUses && slot != kNoSlot) use_entry(*use, table.entry(slot), key);
  };
  const auto in = [&](int64_t key) { return key >= 0 && key < n; };
  for (int64_t begin = 0; begin < n + kToCompare + kChunk; begin += kChunk) {
    Noted& now = noted[begin / kChunk % 2];
    now.count = 0;
    if (begin < n) hash_keys(table, ids, begin, n, &p);
    const bool whole = begin >= kToCompare && begin + kChunk <= n;  // all four steps for all keys
    for (int64_t i = begin; i < begin + kChunk; ++i) {
      if (whole || in(i)) ask_for_tags(table, p.first[Probes::at(i)]);
      if (whole || in(i - kToFirst)) probe_first(table, i - kToFirst, &p);
      if (whole || in(i - kToSecond)) probe_chosen(table, i - kToSecond, &p);
      const int64_t last = i - kToCompare;
      if (whole || in(last)) tell(last, compare(table, last, ids[last], p, &now));
    }
    ask_for_noted(table, now, p);
    const Noted& before = noted[(begin / kChunk + 1) % 2];
    for (int k = 0; k < before.count; ++k) {
      const int64_t key = before.keys[k];
      tell(key, resolve(table, key, ids[key], p));
    }
  }
  return hits;
}
int64_t find(const HashTable& table, const int64_t* ids, int64_t n, const HashUse* use,
             int64_t* slots) {
  return use == nullptr ? find_all<false>(table, ids, n, use, slots)
                        : find_all<true>(table, ids, n, use, slots);
}

void refresh(const HashTable& table, const int64_t* ids, int64_t n, int64_t* slots) {
  for (int64_t i = 0; i < n; ++i) {
    if (slots[i] < 0) continue;
    const bool there = slots[i] < table.buckets * kSlots && table.tags[slots[i]] != kEmptyTag &&
                       table.entry(slots[i])[kKey] == ids[i];
    if (!there) slots[i] = find_key(table, ids[i]);
  }
}

}  // namespace

extern const HashFindKernels kHashFindKernels;
const HashFindKernels kHashFindKernels = {find, refresh};

}  // namespace emb::EMB_ISA
