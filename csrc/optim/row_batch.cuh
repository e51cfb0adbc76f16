// Slices of several rows in registers, for the fused update (tbe/update.cuh).
//
// A group of lanes divides a row into *slices*, of which each lane has kColumns columns. A lane
// that loaded one slice at a time would wait for the loads of each slice. Instead it processes a
// *batch* of kSlices slices, of one row or of several, and has all their loads in flight at once.
// The dtype of a tensor is known at run time only. So the slices are loaded as they are stored and
// converted afterwards (widen_slices): that takes one branch per tensor and batch, and all lanes
// take the same one.
//
// RowLayout and SliceLocation say where the columns of a lane are. The functions after them load,
// convert and store the slices of one tensor. RowBatch does so for weights and states, and applies
// the optimizer.
#pragma once

#include "core/rounding.h"
#include "core/row_slice.cuh"
#include "optim/optimizer_step.cuh"

namespace emb::cuda {

// The columns of a row that each lane processes. If rows can be read in vectors, the kColumns
// columns of a lane in a slice are neighbours. Otherwise they are `lanes` apart, so that
// neighbouring lanes read neighbouring columns at once. All members except `rank`, `lane_column`
// and `lanes_of_group` are the same in all lanes of a warp.
struct RowLayout {
  int dim;              // columns of a row
  int lanes = 4;        // lanes of a group: a power of two from 4 to 32
  int log2_slices = 0;  // log2 of the number of slices of a row in a batch
  bool uses_vectors;    // whether rows are read in vectors

  // Lay out rows of `dim_` columns, in batches of at most `max_slices` slices, a power of two.
  // `can_use_vectors`: whether `dim_` is a multiple of kColumns, and so is the address of every row
  // of weights and element-wise states, counted in elements.
  EMB_DEVICE RowLayout(int dim_, bool can_use_vectors, int max_slices)
      : dim(dim_), uses_vectors(can_use_vectors) {
    while (lanes < kWarpLanes && lanes * kColumns < dim) lanes *= 2;
    while ((1 << log2_slices) < max_slices && (slice_columns() << log2_slices) < dim) ++log2_slices;
  }

  // Return the number of the lane in its group.
  EMB_DEVICE int rank() const { return static_cast<int>(threadIdx.x) & (lanes - 1); }
  // Return the first column of the lane in a slice, counted from the first column of the slice.
  EMB_DEVICE int lane_column() const { return uses_vectors ? rank() * kColumns : rank(); }
  // Return the distance between the columns of a lane in a slice.
  EMB_DEVICE int column_distance() const { return uses_vectors ? 1 : lanes; }
  // Return the number of columns of a slice, of all lanes together.
  EMB_DEVICE int slice_columns() const { return lanes * kColumns; }
  // Return the number of columns of a row that a batch has, or would have if the row had them.
  EMB_DEVICE int batch_columns() const { return slice_columns() << log2_slices; }
  // Return the number of slice s of a batch among the slices of its row in this batch.
  EMB_DEVICE int slice_of_row(int s) const { return s & ((1 << log2_slices) - 1); }
  EMB_DEVICE bool is_first_slice(int s) const { return slice_of_row(s) == 0; }
  EMB_DEVICE bool is_last_slice(int s) const { return slice_of_row(s + 1) == 0; }
  // Return the bit mask of the lanes of this lane's group.
  EMB_DEVICE unsigned lanes_of_group() const {
    if (lanes == kWarpLanes) return simt::kFullMask;
    return ((1u << lanes) - 1) << ((threadIdx.x % simt::kWarpLanes) &
                                   ~static_cast<unsigned>(lanes - 1));
  }
};

// The location of a lane's columns of a slice in a tensor. With vectors `element` must be a
// multiple of kColumns, and so must a positive `num_valid`. The functions below take
// `location_of(s)`, which returns the location for slice s of the batch: so a location is computed
// when it is used, and takes no registers before. It is called by all 32 lanes, once per slice and
// call.
struct SliceLocation {
  int64_t element;  // element of the tensor that is the lane's first column
  int num_valid;    // columns from there to the end of the row; if <= 0, nothing is accessed
};

// A lane's columns of the slices of a batch, as they are stored or as floats.
template <int kSlices>
using Slices = float[kSlices][kColumns];

// Load kColumns neighbouring columns as they are stored: columns of 16 bits fill the first two
// words of `columns`. If num_valid <= 0, `columns` does not change; otherwise all kColumns must
// exist, and `address` must be a multiple of their size. kReadOnly uses the read-only path: it must
// be false if a thread of the kernel writes the memory.
template <class T, bool kReadOnly>
EMB_DEVICE void load_adjacent_columns(const T* address, int num_valid, float (&columns)[kColumns]) {
  using Pack = std::conditional_t<sizeof(T) == 4, simt::Pack16, simt::Pack8>;
  if (num_valid <= 0) return;
  const auto* packs = reinterpret_cast<const Pack*>(address);
  const Pack pack = kReadOnly ? simt::load(packs) : *packs;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Pack)) / 4; ++i)
    columns[i] = float_from_bits(pack.word[i]);
}

// Load kColumns columns that are `distance` columns apart, one by one, in the format of
// load_adjacent_columns. Columns beyond the end of the row become 0.
template <class T>
EMB_DEVICE void load_spaced_columns(int distance, const T* address, int num_valid,
                                    float (&columns)[kColumns]) {
  uint32_t bits[kColumns] = {};
#pragma unroll
  for (int k = 0; k < kColumns; ++k) {
    if (k * distance >= num_valid) continue;
    if constexpr (sizeof(T) == 4) {
      bits[k] = float_bits(address[k * distance]);
    } else {
      bits[k] = address[k * distance].bits;
    }
  }
#pragma unroll
  for (int i = 0; i < kColumns * static_cast<int>(sizeof(T)) / 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      columns[i] = float_from_bits(bits[i]);
    } else {
      columns[i] = float_from_bits(bits[2 * i] | bits[2 * i + 1] << 16);
    }
  }
}

// Do what load_slices does for elements of type T. For both 16-bit dtypes T is half16, since their
// bits are only moved.
template <class T, bool kReadOnly, int kSlices, class LocationOf>
EMB_DEVICE void load_slices_as(bool uses_vectors, int distance, const T* data,
                               const LocationOf& location_of, Slices<kSlices>& slices) {
  if (uses_vectors) {
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      const SliceLocation location = location_of(s);
      load_adjacent_columns<T, kReadOnly>(data + location.element, location.num_valid, slices[s]);
    }
  } else {
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      const SliceLocation location = location_of(s);
      // The branch keeps the compiler from computing the addresses of all slices at once.
      if (!__any_sync(simt::kFullMask, location.num_valid > 0)) continue;
      load_spaced_columns(distance, data + location.element, location.num_valid, slices[s]);
    }
  }
}

// Load the slices of a batch from `data`, of dtype `type`, as they are stored. A lane's columns of
// a slice are neighbours if `uses_vectors`, else `distance` apart. `slices` must be 0 before: where
// a lane has no column, its value becomes 0 or does not change. All 32 lanes must call this.
template <bool kReadOnly, int kSlices, class LocationOf>
EMB_DEVICE void load_slices(bool uses_vectors, int distance, const void* data, Dtype type,
                            const LocationOf& location_of, Slices<kSlices>& slices) {
  if (type == Dtype::kFloat) {
    load_slices_as<float, kReadOnly, kSlices>(uses_vectors, distance,
                                              static_cast<const float*>(data), location_of, slices);
  } else {
    load_slices_as<half16, kReadOnly, kSlices>(
        uses_vectors, distance, static_cast<const half16*>(data), location_of, slices);
  }
}

// Convert slices that were loaded as 16-bit elements of type T to floats.
template <class T, int kSlices>
EMB_DEVICE void widen_slices_as(Slices<kSlices>& slices) {
#pragma unroll
  for (int s = 0; s < kSlices; ++s) {
    const uint32_t word[2] = {float_bits(slices[s][0]), float_bits(slices[s][1])};
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      slices[s][k] = to_float(T{static_cast<uint16_t>(word[k / 2] >> ((k % 2) * 16))});
    }
  }
}

// Convert slices that were loaded from dtype `type` to floats; floats do not change.
template <int kSlices>
EMB_DEVICE void widen_slices(Dtype type, Slices<kSlices>& slices) {
  if (type == Dtype::kHalf) widen_slices_as<half16, kSlices>(slices);
  if (type == Dtype::kBfloat16) widen_slices_as<bfloat16, kSlices>(slices);
}

// Store the slices of a batch as elements of type T, rounded to nearest.
template <class T, int kSlices, class LocationOf>
EMB_DEVICE void store_slices_as(const RowLayout& layout, T* data, const LocationOf& location_of,
                                const Slices<kSlices>& slices) {
  struct alignas(sizeof(T) * kColumns) Block {
    T element[kColumns];
  };
  if (layout.uses_vectors) {
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      const SliceLocation location = location_of(s);
      Block block;
#pragma unroll
      for (int k = 0; k < kColumns; ++k) block.element[k] = from_float<T>(slices[s][k]);
      if (location.num_valid > 0) *reinterpret_cast<Block*>(data + location.element) = block;
    }
    return;
  }
#pragma unroll
  for (int s = 0; s < kSlices; ++s) {
    const SliceLocation location = location_of(s);
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      if (k * layout.column_distance() < location.num_valid)
        data[location.element + k * layout.column_distance()] = from_float<T>(slices[s][k]);
    }
  }
}

// Store the slices of a batch in a tensor of dtype `type`, rounded to nearest.
template <int kSlices, class LocationOf>
EMB_DEVICE void store_slices(const RowLayout& layout, void* data, Dtype type,
                             const LocationOf& location_of, const Slices<kSlices>& slices) {
  if (type == Dtype::kFloat) {
    store_slices_as<float, kSlices>(layout, static_cast<float*>(data), location_of, slices);
  } else if (type == Dtype::kHalf) {
    store_slices_as<half16, kSlices>(layout, static_cast<half16*>(data), location_of, slices);
  } else {
    store_slices_as<bfloat16, kSlices>(layout, static_cast<bfloat16*>(data), location_of, slices);
  }
}

// Store `value` at `data` in 16 bits, rounded stochastically. It is column `column` of linear row
// `row`; the row, the column and `tensor` (RoundedTensor) select the random word.
template <class T>
EMB_DEVICE void store_column_randomly(const Rounding& rounding, uint32_t tensor, int64_t row,
                                      int column, T* data, float value) {
  const auto unsigned_column = static_cast<uint32_t>(column);
  const Random4 random = rounding.words(row, unsigned_column / kColumns, tensor);
  // word[column % kColumns] would put the words in memory.
  const uint32_t word_0_or_1 = (unsigned_column & 1) ? random.word[1] : random.word[0];
  const uint32_t word_2_or_3 = (unsigned_column & 1) ? random.word[3] : random.word[2];
  *data = round_randomly<T>(value, (unsigned_column & 2) ? word_2_or_3 : word_0_or_1);
}

// Store a lane's columns of a slice of linear row `row` in 16 bits, rounded stochastically. `data`
// is the address of the lane's first column, and `num_valid` is as in SliceLocation. The row, the
// columns and `tensor` (RoundedTensor) select the random words. `#pragma unroll 1` below, because
// random words take many registers.
template <class T>
EMB_DEVICE void store_slice_randomly(const RowLayout& layout, const Rounding& rounding,
                                     uint32_t tensor, int64_t row, T* data, int num_valid,
                                     const float (&columns)[kColumns]) {
  if (num_valid <= 0) return;
  const int column = layout.dim - num_valid;
  if (layout.uses_vectors) {
    const Random4 random = rounding.words(row, static_cast<uint32_t>(column) / kColumns, tensor);
    simt::Pack8 pack;
    round_and_pack<T>(columns, random, pack.word);
    *reinterpret_cast<simt::Pack8*>(data) = pack;
  } else {
#pragma unroll 1
    for (int k = 0; k * layout.column_distance() < num_valid; ++k) {
      if (k >= kColumns) break;
      store_column_randomly(rounding, tensor, row, column + k * layout.column_distance(),
                            data + k * layout.column_distance(), columns[k]);
    }
  }
}

// This lane's weights and element-wise states of a batch. Call load, convert, sum_rows (if the
// optimizer has sums over a row), apply and store, in this order. The caller adds the L2 penalty to
// `gradient`, the gradients of the batch as floats, before sum_rows. All 32 lanes must call load,
// and apply and store as their last arguments require. The first argument only passes the type of a
// Selection (optimizer_step.cuh).
template <int kSlices>
struct RowBatch {
  Slices<kSlices> weights = {}, state0 = {}, state1 = {};

  // Load the weights and the states that the optimizer updates, as they are stored.
  template <class Selection, class LocationOf>
  EMB_DEVICE void load(Selection, const OptimizerStepArgs& args, const RowLayout& layout,
                       const TierMemory& tier, const LocationOf& location_of) {
    load_slices<false, kSlices>(layout.uses_vectors, layout.column_distance(), tier.weights,
                                tier.weight_type, location_of, weights);
    if (Selection::num_stepped_states(args) > 0) {
      load_slices<false, kSlices>(layout.uses_vectors, layout.column_distance(),
                                  tier.element_states[0], tier.state_types[0], location_of, state0);
    }
    if (Selection::num_stepped_states(args) > 1) {
      load_slices<false, kSlices>(layout.uses_vectors, layout.column_distance(),
                                  tier.element_states[1], tier.state_types[1], location_of, state1);
    }
  }

  // Convert the loaded values to floats.
  template <class Selection>
  EMB_DEVICE void convert(Selection, const OptimizerStepArgs& args, const TierMemory& tier) {
    widen_slices<kSlices>(tier.weight_type, weights);
    if (Selection::num_stepped_states(args) > 0) widen_slices<kSlices>(tier.state_types[0], state0);
    if (Selection::num_stepped_states(args) > 1) widen_slices<kSlices>(tier.state_types[1], state1);
  }

  // Add this lane's terms of the sums over each row to `sums`: those of slice s to sums[s]. Then
  // add up the slices of each row, so that the entry of its last slice has the lane's sums over all
  // slices of the row in this batch.
  template <class Selection>
  EMB_DEVICE void sum_rows(Selection, const OptimizerStepArgs& args, const BlockStep& step,
                           const RowLayout& layout, const Slices<kSlices>& gradient,
                           float (&sums)[kSlices][kMaxRowSums]) const {
    if (Selection::sums_need_gradient_only(args)) {
#pragma unroll
      for (int s = 0; s < kSlices; ++s) {
#pragma unroll
        for (int k = 0; k < kColumns; ++k) sums[s][0] += gradient[s][k] * gradient[s][k];
      }
    } else {
      Selection::visit_functor(args, step, [&](const auto& opt) {
#pragma unroll
        for (int s = 0; s < kSlices; ++s) {
#pragma unroll
          for (int k = 0; k < kColumns; ++k) {
            opt.template add_sums<ScalarMath>(weights[s][k], gradient[s][k], state0[s][k],
                                              state1[s][k], sums[s]);
          }
        }
      });
    }
#pragma unroll
    for (int s = 1; s < kSlices; ++s) {
#pragma unroll
      for (int k = 0; k < kMaxRowSums; ++k) {
        if (k < Selection::num_row_sums(args) && !layout.is_first_slice(s))
          sums[s][k] += sums[s - 1][k];
      }
    }
  }

  // Update the values in registers. factors_of(s) returns the factors of the row of slice s. It is
  // called for every s, so it may exchange values between lanes if all of them call `apply`.
  template <class Selection, class FactorsOf>
  EMB_DEVICE void apply(Selection, const OptimizerStepArgs& args, const BlockStep& step,
                        const Slices<kSlices>& gradient, const FactorsOf& factors_of) {
    RowFactors factors[kSlices];
#pragma unroll
    for (int s = 0; s < kSlices; ++s) factors[s] = factors_of(s);
    Selection::visit_functor(args, step, [&](const auto& opt) {
#pragma unroll
      for (int s = 0; s < kSlices; ++s) {
#pragma unroll
        for (int k = 0; k < kColumns; ++k) {
          weights[s][k] =
              opt.template step<ScalarMath>(step.decay.factor * weights[s][k], gradient[s][k],
                                            &state0[s][k], &state1[s][k], factors[s]);
        }
      }
    });
  }

  // Call `store_tensor(tensor, data, type, slices)` for the weights and each state that the
  // optimizer updates. `tensor` is a RoundedTensor; `data` and `type` are those of the tier.
  template <class Selection, class StoreTensor>
  EMB_DEVICE void store(Selection, const OptimizerStepArgs& args, const TierMemory& tier,
                        const StoreTensor& store_tensor) const {
    store_tensor(kRoundWeights, tier.weights, tier.weight_type, weights);
    if (Selection::num_stepped_states(args) > 0)
      store_tensor(kRoundState, tier.element_states[0], tier.state_types[0], state0);
    if (Selection::num_stepped_states(args) > 1)
      store_tensor(kRoundState + 1, tier.element_states[1], tier.state_types[1], state1);
  }
};

}  // namespace emb::cuda
