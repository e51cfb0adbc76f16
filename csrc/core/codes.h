// The options that ops take as small integers (*codes*), as enums. The array after an enum has the
// names of its values, in order, for messages. Ops do not take strings, because the conversion of a
// string argument in torch's stable headers leaks a copy of the string at every call.
// emblib/ops/codes.py has the same codes and names, and a test compares both. The codes of
// optimizers are in optim/optimizers.h.
#pragma once

namespace emb {

// The pooling of the rows of a bag to an output row. With kNone every lookup has an output row.
enum class Pooling : int { kSum, kMean, kNone };
inline constexpr const char* kPoolings[] = {"sum", "mean", "none"};

// The reaction of `bounds_check` to violations: raise (on a GPU: trap), warn, or only repair. For a
// warning the op counts the violations, and on the CPU it throws where a repair would lose data
// (tbe/check.h). There is no code for BoundsCheck.NONE, for which the caller skips the op.
enum class BoundsMode : int { kFatal, kWarning, kIgnore };
inline constexpr const char* kBoundsModes[] = {"fatal", "warning", "ignore"};

// The replacement policy of a set of the cache: which missing rows take which ways.
// Empty ways are taken first; ways that a batch in flight uses are not taken.
//   LRU: missing rows in ascending order take the ways in order of age, the oldest first.
//   LFU: the count of a row is its number of lookups so far, those of the batch included. Missing
//        rows in descending order of their counts take the ways in ascending order of the counts of
//        the rows in them. Of ways with equal counts, the most recently used one is taken first. A
//        row takes no way whose row has a higher count.
enum class CachePolicy : int { kLru, kLfu };
inline constexpr const char* kCachePolicies[] = {"lru", "lfu"};

// The ranking of the entries of a bucket of a hash table. The entry of the lowest rank is evicted
// first. The comment at an enumerator lists what is compared, the most significant first; the lower
// value ranks lower.
enum class HashOrder : int {
  kNone,     // nothing is compared: no entry is ever evicted
  kLru,      // stamp, key
  kLfu,      // score (a count), key
  kLruLfu,   // score (a count), stamp, key
  kAssigned  // score (from the caller), stamp, key
};
inline constexpr const char* kHashOrders[] = {"none", "lru", "lfu", "lru_lfu", "assigned"};

// Whether a new key evicts the entry of the lowest rank from a full bucket of a hash table. If it
// does not, or if no entry may be evicted, the key is refused. The names are the values of
// emblib.InsertPolicy; the comments are its members.
enum class InsertPolicy : int {
  kWins,     // always (ALWAYS_EVICT)
  kCompetes  // if the entry ranks lower than the key (EVICT_IF_LOWER)
};
inline constexpr const char* kInsertPolicies[] = {"wins", "competes"};

// The accuracy of matrix products on a GPU's tensor cores, see core/mma.cuh.
enum class MatmulPrecision : int { kFloat32, kTf32, kBf16 };
inline constexpr const char* kMatmulPrecisions[] = {"float32", "tf32", "bf16"};

// Elements of the vector `hyper`, float64 [kOptimizerArgs + n]: the hyperparameters of an optimizer
// that has n arguments of its own.
struct Hyper {
  enum Column : int {
    kLearningRate = 0,
    kStep = 1,   // number of the current step, from 1
    kL2 = 2,     // rate of the coupled L2 penalty: g += l2 * w
    kDecay = 3,  // rate of the decoupled decay: w *= 1 - lr * decay
    // Seed of stochastic rounding, an integer below 2^53, which float64 has exactly; negative to
    // round to nearest.
    kSeed = 4,
    kOptimizerArgs = 5  // the first of the optimizer's own arguments
  };
};

}  // namespace emb
