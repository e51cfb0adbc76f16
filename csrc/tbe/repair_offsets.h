// Offsets as the CPU kernels want them: int32, clamped to [0, L], never decreasing, the last equal
// to L. The usual case, all valid, is one branch-free loop; the rest runs only where it is not. A
// first offset above 0 is invalid as well, though nothing repairs it: what comes before it would be
// in no bag. That, and offsets without the last entry, is another form rather than a wrong number:
// repaired, it would silently lose ids or a whole bag.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/check.h"
#include "core/codes.h"

namespace emb {

inline constexpr const char* kLastOffset =
    "; append it where it is left out (in a KeyedJaggedTensor it never is), or make the module "
    "with include_last_offset=False, which takes offsets in the form of nn.EmbeddingBag (are they "
    "offsets, not lengths?)";

// Whether offsets are valid; copies them on the way. A negative sign anywhere in the differences or
// in the offsets themselves means no, so that all that the loop needs is subtraction and or.
template <class I>
bool copy_if_valid(const I* given, int64_t num_bags, int64_t num_lookups, int32_t* fixed) {
  using U = std::make_unsigned_t<I>;
  U signs = 0;
  for (int64_t i = 0; i < num_bags; ++i) {
    signs |=
        static_cast<U>(given[i + 1]) | (static_cast<U>(given[i + 1]) - static_cast<U>(given[i]));
    fixed[i] = static_cast<int32_t>(given[i]);
  }
  fixed[num_bags] = static_cast<int32_t>(given[num_bags]);
  return static_cast<I>(signs) >= 0 && given[0] == 0 &&
         (num_bags == 0 || static_cast<int64_t>(given[num_bags]) == num_lookups);
}

// Returns how many offsets are invalid. kFatal raises at the first one, kWarning for another form,
// which `one_feature` tells from a wrong number: with several features the number of bags gives it
// away.
inline int64_t repair_offsets(IndexArray given, int64_t num_bags, int64_t num_lookups,
                              BoundsMode mode, bool one_feature, int32_t* fixed) {
  const bool valid =
      given.is_int64
          ? copy_if_valid(static_cast<const int64_t*>(given.data), num_bags, num_lookups, fixed)
          : copy_if_valid(static_cast<const int32_t*>(given.data), num_bags, num_lookups, fixed);
  if (valid) return 0;
  const bool fatal = mode == BoundsMode::kFatal, warning = mode == BoundsMode::kWarning;
  STD_TORCH_CHECK(!warning || given[0] <= 0, "bounds_check: offsets must begin with 0, got ",
                  given[0],
                  ": no bag would have the ids before it; leave them out of the indices (are they "
                  "offsets, not lengths?)");
  int64_t floor = 0, bad = 0;
  for (int64_t i = 0; i <= num_bags; ++i) {
    floor = std::max(floor, std::min(given[i], num_lookups));
    if (i == num_bags && num_bags > 0) {
      STD_TORCH_CHECK(!warning || !one_feature || floor == num_lookups,
                      "bounds_check: offsets must end with the number of indices = ", num_lookups,
                      ", got ", given[i], ": the last bag would be lost", kLastOffset);
      floor = num_lookups;
    }
    const bool valid_here = floor == given[i] && (i > 0 || floor == 0);
    STD_TORCH_CHECK(valid_here || !fatal,
                    "bounds_check: offsets must start at 0, not decrease, and end at the number of "
                    "indices = ",
                    num_lookups, "; got ", given[i], " at position ", i, kLastOffset);
    bad += !valid_here;
    fixed[i] = static_cast<int32_t>(floor);
  }
  return bad;
}

}  // namespace emb
