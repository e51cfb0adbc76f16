// The choices that ops take as small integers, and their names for messages. They are not strings
// because the conversion of a string argument in torch's stable headers leaks a copy of the string
// at every call. emblib/ops/codes.py has the same numbers and names, and a test compares both. The
// choices of optimizers are in optim/optimizers.h.
#pragma once

namespace emb {

// The pooling of the rows of a bag to an output row. Without, every lookup has an output row.
enum class Pooling : int { kSum, kMean, kNone };
inline constexpr const char* kPoolings[] = {"sum", "mean", "none"};

// The reaction of `bounds_check` to violations: raise, warn, or only repair. There is no code for
// BoundsCheck.NONE, for which the caller skips the op.
enum class BoundsMode : int { kFatal, kWarning, kIgnore };
inline constexpr const char* kBoundsModes[] = {"fatal", "warning", "ignore"};

// The replacement policy of a set of the cache: which missing rows take which ways.
//   LRU: missing rows in ascending order take the ways in order of age, the oldest first.
//   LFU: missing rows in order of their lookups so far, the most first, take the ways in order of
//        the lookups of their present rows, the fewest first; at equal numbers, the way that was
//        used last.
enum class Policy : int { kLru, kLfu };
inline constexpr const char* kPolicies[] = {"lru", "lfu"};

// The ranking of the entries of a bucket of a hash table; the lowest one is evicted first. The
// comment at a member names what is compared; the first difference decides.
enum class Order : int {
  kNone,     // nothing is compared: no entry is ever evicted
  kLru,      // stamp, key
  kLfu,      // score (a count), key
  kLruLfu,   // score (a count), stamp, key
  kAssigned  // score (from the caller), stamp, key
};
inline constexpr const char* kOrders[] = {"none", "lru", "lfu", "lru_lfu", "assigned"};

// The condition for a new key of a hash table to evict an entry: none (kWins), or a rank at least
// as high as that of the entry (kCompetes); otherwise the key is refused.
enum class InsertPolicy : int { kWins, kCompetes };
inline constexpr const char* kInsertPolicies[] = {"wins", "competes"};

// The accuracy of matrix products on tensor cores, see core/mma.cuh.
enum class MatmulPrecision : int { kFloat32, kTf32, kBf16 };
inline constexpr const char* kMatmulPrecisions[] = {"float32", "tf32", "bf16"};

// Elements of the vector `hyper`, float64, the hyperparameters of an optimizer.
enum HyperColumn : int {
  kLearningRate = 0,
  kStep = 1,          // number of the current step, from 1
  kL2 = 2,            // rate of the coupled L2 penalty: g += l2 * w before anything else
  kDecay = 3,         // rate of the decoupled decay: w *= 1 - lr * decay
  kSeed = 4,          // seed of stochastic rounding; negative to round to nearest
  kOptimizerArgs = 5  // the first of the optimizer's own arguments
};

}  // namespace emb
