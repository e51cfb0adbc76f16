// Slices of several rows in registers, for the fused update (tbe/update.cuh).
//
// A group of lanes processes a row in *slices* of kColumns columns per lane. A lane that updated
// one slice at a time would wait for the loads of each slice. Instead it processes a *batch* of
// kSlices slices, of one row or of several, and has all their loads in flight at once. The dtype of
// a tensor is known at run time only. So values are loaded as they are stored and converted
// afterwards, which takes one branch per tensor and batch, the same in all lanes.
#pragma once

#include "core/rounding.h"
#include "core/row_slice.cuh"
#include "optim/optimizer_step.cuh"

namespace emb::cuda {

// The columns of a row that each lane processes. If rows can be read in vectors, the four columns
// of a lane in a slice are neighbours; otherwise they are `lanes` apart, so that the lanes of a
// group read neighbours at once. All members except `rank`, `lane_column` and `lanes_of_group` are
// the same in all lanes of a warp.
struct RowLayout {
  int dim = 0, lanes = 4;
  int log2_slices = 0;  // slices of a row in a batch
  bool uses_vectors;    // whether rows are read in vectors

  // Rows of `columns` columns, in batches of at most `max_slices` slices, a power of two.
  EMB_DEVICE RowLayout(int columns, bool can_use_vectors, int max_slices)
      : dim(columns), uses_vectors(can_use_vectors) {
    while (lanes < kWarpLanes && lanes * kColumns < dim) lanes *= 2;
    while ((1 << log2_slices) < max_slices && (slice_columns() << log2_slices) < dim) ++log2_slices;
  }

  // Return the number of the lane in its group.
  EMB_DEVICE int rank() const { return static_cast<int>(threadIdx.x) & (lanes - 1); }
  // Return the first column of the lane in a slice, counted from the first column of the slice.
  EMB_DEVICE int lane_column() const { return uses_vectors ? rank() * kColumns : rank(); }
  // Return the distance between the columns of a lane in a slice.
  EMB_DEVICE int column_distance() const { return uses_vectors ? 1 : lanes; }
  // Return the number of columns of a slice, and of a row's columns in a batch.
  EMB_DEVICE int slice_columns() const { return lanes * kColumns; }
  EMB_DEVICE int batch_columns() const { return slice_columns() << log2_slices; }
  // Return the number, within its row, of slice s of a batch.
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

// The location of a lane's columns of a slice. The functions below take `location_of(s)`, which
// returns the location for slice s of the batch, so that locations are computed when they are used.
struct SliceLocation {
  int64_t element;  // element of the lane's first column in the tensor
  int num_valid;    // columns from there to the end of the row; nothing is accessed if <= 0
};

// A lane's columns of the slices of a batch, as they are stored or as floats.
template <int kSlices>
using Slices = float[kSlices][kColumns];

// Load four neighbouring columns as they are stored: four columns of 16 bits fill the first two
// words of `columns`. If num_valid <= 0, `columns` does not change. kReadOnly must be false if a
// thread of the kernel writes the memory. `address` must be a multiple of the size of four columns.
template <class T, bool kReadOnly>
EMB_DEVICE void load_vector(const T* address, int num_valid, float (&columns)[kColumns]) {
  using Pack = std::conditional_t<sizeof(T) == 4, simt::Pack16, simt::Pack8>;
  if (num_valid <= 0) return;
  const auto* packs = reinterpret_cast<const Pack*>(address);
  const Pack pack = kReadOnly ? simt::load(packs) : *packs;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Pack)) / 4; ++i)
    columns[i] = float_from_bits(pack.word[i]);
}

// Load four columns that are `distance` columns apart as they are stored, one by one. Columns
// beyond the end of the row load as 0.
template <class T>
EMB_DEVICE void load_columns_apart(int distance, const T* address, int num_valid,
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
    columns[i] = float_from_bits(
        sizeof(T) == 4 ? bits[i] : bits[(2 * i) % 4] | (bits[(2 * i + 1) % 4] << 16));
  }
}

// Do what load_slices does, for elements of type T; half16 is used for both 16-bit dtypes.
template <class T, bool kReadOnly, int kSlices, class LocationOf>
EMB_DEVICE void load_slices_of(bool uses_vectors, int distance, const T* data,
                               const LocationOf& location_of, Slices<kSlices>& slices) {
  if (uses_vectors) {
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      const SliceLocation location = location_of(s);
      load_vector<T, kReadOnly>(data + location.element, location.num_valid, slices[s]);
    }
  } else {
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      const SliceLocation location = location_of(s);
      // The branch keeps the compiler from computing the addresses of all slices at once.
      if (!__any_sync(simt::kFullMask, location.num_valid > 0)) continue;
      load_columns_apart(distance, data + location.element, location.num_valid, slices[s]);
    }
  }
}

// Load the slices of a batch from `data`, of dtype `type`, as they are stored. A lane's columns of
// a slice are neighbours if `uses_vectors`, else `distance` apart. All 32 lanes must call this.
template <bool kReadOnly, int kSlices, class LocationOf>
EMB_DEVICE void load_slices(bool uses_vectors, int distance, const void* data, Dtype type,
                            const LocationOf& location_of, Slices<kSlices>& slices) {
  if (type == Dtype::kFloat) {
    load_slices_of<float, kReadOnly, kSlices>(uses_vectors, distance,
                                              static_cast<const float*>(data), location_of, slices);
  } else {
    load_slices_of<half16, kReadOnly, kSlices>(
        uses_vectors, distance, static_cast<const half16*>(data), location_of, slices);
  }
}

// Convert slices that were loaded as 16-bit elements of type T to floats.
template <class T, int kSlices>
EMB_DEVICE void widen_from(Slices<kSlices>& slices) {
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
EMB_DEVICE void widen(Dtype type, Slices<kSlices>& slices) {
  if (type == Dtype::kHalf) widen_from<half16, kSlices>(slices);
  if (type == Dtype::kBfloat16) widen_from<bfloat16, kSlices>(slices);
}

// Store the slices of a batch as elements of type T, rounded to nearest.
template <class T, int kSlices, class LocationOf>
EMB_DEVICE void store_slices_of(const RowLayout& layout, T* data, const LocationOf& location_of,
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
    store_slices_of<float, kSlices>(layout, static_cast<float*>(data), location_of, slices);
  } else if (type == Dtype::kHalf) {
    store_slices_of<half16, kSlices>(layout, static_cast<half16*>(data), location_of, slices);
  } else {
    store_slices_of<bfloat16, kSlices>(layout, static_cast<bfloat16*>(data), location_of, slices);
  }
}

// Store `value`, column `column` of linear row `row`, at `data`, rounded stochastically. The row,
// the column and `tensor` (RoundedTensor) select the random numbers.
template <class T>
EMB_DEVICE void store_randomly(const Rounding& rounding, uint32_t tensor, int64_t row, int column,
                               T* data, float value) {
  const auto unsigned_column = static_cast<uint32_t>(column);
  const Random4 random = rounding.words(row, unsigned_column / kColumns, tensor);
  const uint32_t low = (unsigned_column & 1) ? random.word[1] : random.word[0];
  const uint32_t high = (unsigned_column & 1) ? random.word[3] : random.word[2];
  *data = round_randomly<T>(value, (unsigned_column & 2) ? high : low);
}

// Store a lane's columns of a slice of linear row `row` in 16 bits, rounded stochastically. `data`
// is the address of the first column; the row ends `num_valid` columns after it. The row and
// `tensor` (RoundedTensor) select the random numbers.
template <class T>
EMB_DEVICE void store_slice_randomly(const RowLayout& layout, const Rounding& rounding,
                                     uint32_t tensor, int64_t row, T* data, int num_valid,
                                     const float (&columns)[kColumns]) {
  if (num_valid <= 0) return;
  const int column = layout.dim - num_valid;
  if (layout.uses_vectors) {
    const Random4 random = rounding.words(row, static_cast<uint32_t>(column) / kColumns, tensor);
    simt::Pack8 pack;
    round_four<T>(columns, random, pack.word);
    *reinterpret_cast<simt::Pack8*>(data) = pack;
  } else {
#pragma unroll 1
    for (int k = 0; k * layout.column_distance() < num_valid; ++k) {
      if (k >= kColumns) break;
      store_randomly(rounding, tensor, row, column + k * layout.column_distance(),
                     data + k * layout.column_distance(), columns[k]);
    }
  }
}

// This lane's weights and element-wise states of a batch. Call load, convert, sum_rows (if the
// optimizer has sums), apply and store, in this order. All 32 lanes must call load and apply. The
// first argument of a function only passes the type of a Selection.
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
    widen<kSlices>(tier.weight_type, weights);
    if (Selection::num_stepped_states(args) > 0) widen<kSlices>(tier.state_types[0], state0);
    if (Selection::num_stepped_states(args) > 1) widen<kSlices>(tier.state_types[1], state1);
  }

  // Add this lane's terms of the sums over each row to `sums`, which is by slice. Then the entry of
  // the last slice of a row has the lane's sums over all slices of the row in this batch.
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
      Selection::visit(args, step, [&](const auto& opt) {
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

  // Update the values in registers. All lanes call factors_of(s), which returns the factors of the
  // row of slice s. `gradient` includes the L2 penalty.
  template <class Selection, class FactorsOf>
  EMB_DEVICE void apply(Selection, const OptimizerStepArgs& args, const BlockStep& step,
                        const Slices<kSlices>& gradient, const FactorsOf& factors_of) {
    RowFactors factors[kSlices];
#pragma unroll
    for (int s = 0; s < kSlices; ++s) factors[s] = factors_of(s);
    Selection::visit(args, step, [&](const auto& opt) {
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

  // Call `store(tensor, data, type, slices)` for the weights and each state that the optimizer
  // updates; `tensor` is a RoundedTensor, `data` and `type` are those of the tier.
  template <class Selection, class Store>
  EMB_DEVICE void store(Selection, const OptimizerStepArgs& args, const TierMemory& tier,
                        const Store& store) const {
    store(kRoundWeights, tier.weights, tier.weight_type, weights);
    if (Selection::num_stepped_states(args) > 0)
      store(kRoundState, tier.element_states[0], tier.state_types[0], state0);
    if (Selection::num_stepped_states(args) > 1)
      store(kRoundState + 1, tier.element_states[1], tier.state_types[1], state1);
  }
};

}  // namespace emb::cuda
