// Slices of several rows in registers, for the fused update (tbe/update.cuh).
//
// A group of lanes processes a row in *slices* of kColumns columns per lane. A lane that updated
// one slice at a time would wait for the loads of each slice. Instead it processes a batch of
// kSlices slices, of one row or of several, and has all their loads in flight at once. The dtype of
// a tensor is known at run time only: values are loaded in the format of the memory and converted
// afterwards, so that there is one uniform branch per tensor and batch.
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

// The location of a lane's columns of a slice. The functions below take a function of the number of
// the slice, `location_of(s)`, so that locations are computed when they are used.
struct SliceLocation {
  int64_t element;  // element of the lane's first column in weights and element-wise states
  int valid;        // columns from there to the end of the row; nothing is accessed if <= 0
};

// A lane's columns of the slices of a batch, as they are stored or as floats.
template <int kSlices>
using Slices = float[kSlices][kColumns];

// Load the four columns of a slice as they are stored: four columns of 16 bits fill the first two
// words. Loads nothing if valid <= 0. kReadOnly: no thread of the kernel writes the memory.
// `address` must be a multiple of the size of four columns.
template <class T, bool kReadOnly>
EMB_DEVICE void load_vector(const T* address, int valid, float (&x)[kColumns]) {
  using Pack = std::conditional_t<sizeof(T) == 4, simt::Pack16, simt::Pack8>;
  if (valid <= 0) return;
  const auto* packs = reinterpret_cast<const Pack*>(address);
  const Pack pack = kReadOnly ? simt::load(packs) : *packs;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Pack)) / 4; ++i) x[i] = float_from_bits(pack.word[i]);
}

// Load the four columns one by one, `step` columns apart; columns beyond the row load as 0.
template <class T>
EMB_DEVICE void load_columns_apart(int step, const T* address, int valid, float (&x)[kColumns]) {
  uint32_t bits[kColumns] = {};
#pragma unroll
  for (int k = 0; k < kColumns; ++k) {
    if (k * step >= valid) continue;
    if constexpr (sizeof(T) == 4) {
      bits[k] = float_bits(address[k * step]);
    } else {
      bits[k] = address[k * step].bits;
    }
  }
#pragma unroll
  for (int i = 0; i < kColumns * static_cast<int>(sizeof(T)) / 4; ++i) {
    x[i] = float_from_bits(sizeof(T) == 4 ? bits[i]
                                          : bits[(2 * i) % 4] | (bits[(2 * i + 1) % 4] << 16));
  }
}

// Do what load_slices does, for elements of type T; half16 is used for both 16-bit dtypes.
template <class T, bool kReadOnly, int kSlices, class LocationOf>
EMB_DEVICE void load_slices_of(bool uses_vectors, int step, const T* data,
                               const LocationOf& location_of, Slices<kSlices>& x) {
  if (uses_vectors) {
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      const SliceLocation location = location_of(s);
      load_vector<T, kReadOnly>(data + location.element, location.valid, x[s]);
    }
  } else {
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      const SliceLocation location = location_of(s);
      // The branch keeps the compiler from computing the addresses of all slices at once.
      if (!__any_sync(simt::kFullMask, location.valid > 0)) continue;
      load_columns_apart(step, data + location.element, location.valid, x[s]);
    }
  }
}

// Load the slices of a batch from `data`, of dtype `type`, as they are stored: in vectors, or else
// columns that are `step` apart. Called by all lanes of a warp.
template <bool kReadOnly, int kSlices, class LocationOf>
EMB_DEVICE void load_slices(bool uses_vectors, int step, const void* data, Dtype type,
                            const LocationOf& location_of, Slices<kSlices>& x) {
  if (type == Dtype::kFloat) {
    load_slices_of<float, kReadOnly, kSlices>(uses_vectors, step, static_cast<const float*>(data),
                                              location_of, x);
  } else {
    load_slices_of<half16, kReadOnly, kSlices>(uses_vectors, step, static_cast<const half16*>(data),
                                               location_of, x);
  }
}

// Convert slices that were loaded as 16-bit elements of type T to floats.
template <class T, int kSlices>
EMB_DEVICE void widen_from(Slices<kSlices>& x) {
#pragma unroll
  for (int s = 0; s < kSlices; ++s) {
    const uint32_t word[2] = {float_bits(x[s][0]), float_bits(x[s][1])};
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      x[s][k] = to_float(T{static_cast<uint16_t>(word[k / 2] >> ((k % 2) * 16))});
    }
  }
}

// Convert slices that were loaded from dtype `type` to floats.
template <int kSlices>
EMB_DEVICE void widen(Dtype type, Slices<kSlices>& x) {
  if (type == Dtype::kHalf) widen_from<half16, kSlices>(x);
  if (type == Dtype::kBfloat16) widen_from<bfloat16, kSlices>(x);
}

// Store the slices of a batch as elements of type T, rounded to nearest.
template <class T, int kSlices, class LocationOf>
EMB_DEVICE void store_slices_of(const RowLayout& layout, T* data, const LocationOf& location_of,
                                const Slices<kSlices>& x) {
  struct alignas(sizeof(T) * kColumns) Block {
    T element[kColumns];
  };
  if (layout.uses_vectors) {
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      const SliceLocation location = location_of(s);
      Block block;
#pragma unroll
      for (int k = 0; k < kColumns; ++k) block.element[k] = from_float<T>(x[s][k]);
      if (location.valid > 0) *reinterpret_cast<Block*>(data + location.element) = block;
    }
    return;
  }
#pragma unroll
  for (int s = 0; s < kSlices; ++s) {
    const SliceLocation location = location_of(s);
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      if (k * layout.column_distance() < location.valid)
        data[location.element + k * layout.column_distance()] = from_float<T>(x[s][k]);
    }
  }
}

// Store the slices of a batch in a tensor of dtype `type`, rounded to nearest.
template <int kSlices, class LocationOf>
EMB_DEVICE void store_slices(const RowLayout& layout, void* data, Dtype type,
                             const LocationOf& location_of, const Slices<kSlices>& x) {
  if (type == Dtype::kFloat) {
    store_slices_of<float, kSlices>(layout, static_cast<float*>(data), location_of, x);
  } else if (type == Dtype::kHalf) {
    store_slices_of<half16, kSlices>(layout, static_cast<half16*>(data), location_of, x);
  } else {
    store_slices_of<bfloat16, kSlices>(layout, static_cast<bfloat16*>(data), location_of, x);
  }
}

// Store column `column` of linear row `row` at `data`, rounded stochastically; the row and `tensor`
// (RoundedTensor) select the random numbers.
template <class T>
EMB_DEVICE void store_randomly(const Rounding& rounding, uint32_t tensor, int64_t row, int column,
                               T* data, float x) {
  const auto unsigned_column = static_cast<uint32_t>(column);
  const Random4 random = rounding.words(row, unsigned_column / kColumns, tensor);
  const uint32_t low = (unsigned_column & 1) ? random.word[1] : random.word[0];
  const uint32_t high = (unsigned_column & 1) ? random.word[3] : random.word[2];
  *data = round_randomly<T>(x, (unsigned_column & 2) ? high : low);
}

// Store a lane's columns of a slice of linear row `row` in 16 bits, rounded stochastically; `data`
// is the address of the first, from which `valid` columns are left to the end of the row.
template <class T>
EMB_DEVICE void store_slice_randomly(const RowLayout& layout, const Rounding& rounding,
                                     uint32_t tensor, int64_t row, T* data, int valid,
                                     const float (&x)[kColumns]) {
  if (valid <= 0) return;
  const int column = layout.dim - valid;
  if (layout.uses_vectors) {
    const Random4 random = rounding.words(row, static_cast<uint32_t>(column) / kColumns, tensor);
    simt::Pack8 pack;
    round_four<T>(x, random, pack.word);
    *reinterpret_cast<simt::Pack8*>(data) = pack;
  } else {
#pragma unroll 1
    for (int k = 0; k * layout.column_distance() < valid; ++k) {
      if (k >= kColumns) break;
      store_randomly(rounding, tensor, row, column + k * layout.column_distance(),
                     data + k * layout.column_distance(), x[k]);
    }
  }
}

// This lane's weights and element-wise states of a batch. Call load, convert, sum_rows (if the
// optimizer has sums), apply and store, in this order.
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

  // Add this lane's terms of the sums over each row to `sums`, slice by slice in order, so that the
  // last slice of a row has the lane's sums over the row's slices.
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

  // Update the rows; factors_of(s), called by all lanes, returns the factors of the row of slice s.
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

  // Call `store(tensor, data, type, slices)` for each tensor that the optimizer writes.
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
