// The choices that ops take as small integers. They are not strings because the conversion of a
// string argument in torch's stable headers leaks a copy of it at every call. emblib/ops/codes.py
// has the same numbers and names, those of optimizers are in optim/optimizers.h; a test compares.
#pragma once

namespace emb {

enum class Pooling : int { kSum, kMean, kNone };
inline constexpr const char* kPoolings[] = {"sum", "mean", "none"};

// What `bounds_check` does about violations; BoundsCheck.NONE does not call it.
enum class BoundsMode : int { kFatal, kWarning, kIgnore };
inline constexpr const char* kBoundsModes[] = {"fatal", "warning", "ignore"};

// The order of a set of the cache. LRU: the missing rows ascending, the ways by age. LFU: the
// missing rows by lookups so far, most first, the ways by lookups of their row so far, least first,
// then by age.
enum class Policy : int { kLru, kLfu };
inline constexpr const char* kPolicies[] = {"lru", "lfu"};

// Which entry of a bucket of a hash table gives way: the least by
enum class Order : int {
  kNone,     // none does
  kLru,      // stamp, key
  kLfu,      // score (a count), key
  kLruLfu,   // score (a count), stamp, key
  kAssigned  // score (from the caller), stamp, key
};
inline constexpr const char* kOrders[] = {"none", "lru", "lfu", "lru_lfu", "assigned"};

// Whether a new key of a hash table must rank above the entry that gives way to it.
enum class Newcomer : int { kWins, kCompetes };
inline constexpr const char* kNewcomers[] = {"wins", "competes"};

}  // namespace emb
