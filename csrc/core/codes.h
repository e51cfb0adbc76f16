// The choices that ops take as small integers. They are not strings because the conversion of a
// string argument in torch's stable headers leaks a copy of the string at every call.
// emblib/ops/codes.py has the same numbers and names; those of the optimizers are in
// optim/optimizers.h. A test compares both.
#pragma once

namespace emb {

enum class Pooling : int { kSum, kMean, kNone };
inline constexpr const char* kPoolings[] = {"sum", "mean", "none"};

// What `bounds_check` does about violations. The caller skips the op for BoundsCheck.NONE.
enum class BoundsMode : int { kFatal, kWarning, kIgnore };
inline constexpr const char* kBoundsModes[] = {"fatal", "warning", "ignore"};

// The replacement policy of a set of the cache. LRU: the missing rows in ascending order take the
// ways by age. LFU: the missing rows by lookups so far, most first, take the ways by lookups of
// their row so far, fewest first, then by age.
enum class Policy : int { kLru, kLfu };
inline constexpr const char* kPolicies[] = {"lru", "lfu"};

// How the entries of a bucket of a hash table are ranked; the lowest is evicted. Ranked by
enum class Order : int {
  kNone,     // nothing: no entry is ever evicted
  kLru,      // stamp, key
  kLfu,      // score (a count), key
  kLruLfu,   // score (a count), stamp, key
  kAssigned  // score (from the caller), stamp, key
};
inline constexpr const char* kOrders[] = {"none", "lru", "lfu", "lru_lfu", "assigned"};

// Whether a new key of a hash table must rank at least as high as the entry that it evicts.
enum class InsertPolicy : int { kWins, kCompetes };
inline constexpr const char* kInsertPolicies[] = {"wins", "competes"};

// How exact the products of matrices are that run on tensor cores, see core/mma.cuh.
enum class MatmulPrecision : int { kFloat32, kTf32, kBf16 };
inline constexpr const char* kMatmulPrecisions[] = {"float32", "tf32", "bf16"};

// Columns of `hyper`, float64: learning rate, step (from 1), rate of the coupled L2 penalty (g +=
// l2 * w before anything else), rate of the decoupled decay (w *= 1 - lr * decay), seed of
// stochastic rounding (negative: round to nearest), then the optimizer's arguments.
enum HyperColumn : int {
  kLearningRate = 0,
  kStep = 1,
  kL2 = 2,
  kDecay = 3,
  kSeed = 4,
  kOptimizerArgs = 5
};

}  // namespace emb
