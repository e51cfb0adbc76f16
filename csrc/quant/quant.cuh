// Quantised tables on the GPU: `quantize_rows_`, a warp per row, and `quant_lookup`, which reads
// rows as they are stored and adds them up in float. quant/args.h has the format of rows.
//
// The lookup has two kernels, described where they are: quant_pool_kernel for long bags, in which a
// group of lanes has eight rows of a bag in flight, and quant_short_bags_kernel for short bags and
// for lookups without pooling, in which it has a row each of several bags in flight.
#pragma once

#include <type_traits>

#include "core/bag_task.cuh"
#include "core/dtype.h"
#include "core/half.h"
#include "core/layout.h"
#include "core/row_slice.cuh"
#include "core/simt.cuh"
#include "quant/args.h"

namespace emb::cuda {

inline constexpr int kQuantizeThreads = 256;

struct QuantizeRows {
  const void* weights;  // [rows, dim], dim > 0; the kernel is chosen by dtype
  uint8_t* packed;      // [rows, row_bytes(dim, bits)], an output, at a multiple of 4 bytes
  int64_t rows, dim;
  int bits;  // 8 or 4
};

// Return the 32-bit word with the numbers of the columns from `column` on; zeros behind the row.
template <class T>
EMB_DEVICE uint32_t quantized_word(const T* row, int64_t column, int64_t dim, RowStep step,
                                   int bits) {
  uint32_t word = 0;
  for (int shift = 0; shift < 32 && column < dim; shift += bits, ++column) {
    word |= static_cast<uint32_t>(quantized(to_float(row[column]), step, bits)) << shift;
  }
  return word;
}

// Quantise all rows, of dtype T; a warp takes a row, grid-stride.
template <class T>
__global__ void quantize_kernel(QuantizeRows args) {
  const auto lane = static_cast<int64_t>(threadIdx.x % simt::kWarp);
  const int64_t words = row_bytes(args.dim, args.bits) / kWordBytes;
  for (int64_t r = simt::global_warp(); r < args.rows; r += simt::warps_in_grid()) {
    const T* row = static_cast<const T*>(args.weights) + r * args.dim;
    float low = to_float(row[0]), high = low;
    for (int64_t d = lane; d < args.dim; d += simt::kWarp) {
      const float value = to_float(row[d]);
      low = value < low ? value : low;
      high = value > high ? value : high;
    }
    for (int offset = simt::kWarp / 2; offset > 0; offset /= 2) {
      const float other_low = __shfl_xor_sync(simt::kFullMask, low, offset);
      const float other_high = __shfl_xor_sync(simt::kFullMask, high, offset);
      low = other_low < low ? other_low : low;
      high = other_high > high ? other_high : high;
    }
    const RowScale scale = row_scale(low, high, args.bits);
    uint32_t* out = reinterpret_cast<uint32_t*>(args.packed) + r * words;
    if (lane == 0) out[0] = scale.scale.bits | static_cast<uint32_t>(scale.offset.bits) << 16;
    for (int64_t w = lane + 1; w < words; w += simt::kWarp) {
      const int64_t column = (w - 1) * (32 / args.bits);
      out[w] = quantized_word(row, column, args.dim, RowStep(scale), args.bits);
    }
  }
}

template <class Launcher>
void launch_quantize(const Launcher& launcher, const QuantizeRows& args, Dtype type) {
  if (args.rows == 0) return;
  constexpr int kWarps = kQuantizeThreads / static_cast<int>(simt::kWarp);
  const int64_t wanted = (args.rows + kWarps - 1) / kWarps, max_blocks = launcher.blocks(32);
  const auto blocks = static_cast<unsigned>(wanted < max_blocks ? wanted : max_blocks);
  if (type == Dtype::kFloat) {
    launcher(quantize_kernel<float>, blocks, kQuantizeThreads, args);
  } else if (type == Dtype::kHalf) {
    launcher(quantize_kernel<half16>, blocks, kQuantizeThreads, args);
  } else {
    launcher(quantize_kernel<bfloat16>, blocks, kQuantizeThreads, args);
  }
}

// The lookup. A group of 8 to 32 lanes reads a row. A lane owns two *quads* of columns, four each,
// 4 * lanes columns apart, so that each access of a group, to a row or to the output, is to
// neighbouring memory. (With 8 neighbouring columns per lane, every access would touch half of each
// sector.) A quad is a word with 8 bits, half a word with 4, since a row begins at any word. Each
// lane reads index, header and weight of one lookup and passes them on by shuffles: scale and
// offset only after the loads of the numbers have been issued. The groups of a warp run in
// lockstep, so all collectives name the full warp. Rows are added in the order of the lookups.

inline constexpr int kQuantThreads = 128;
// Blocks per multiprocessor, for 80 and 72 registers: loads in flight matter more than occupancy.
inline constexpr int kQuantPoolBlocks = 6;
inline constexpr int kQuantShortBlocks = 7;
inline constexpr int kQuad = 4;          // columns
inline constexpr int kQuantColumns = 8;  // columns per lane: two quads
inline constexpr int kQuantRowsInFlight = 8;
inline constexpr int kMinQuantLanes = kQuantRowsInFlight;  // a lane for each row in flight

// Pointers are to device memory. The entry has checked shapes and dtypes; indices and offsets are
// repaired as they are read, `features` and `map` are trusted.
struct QuantArgs {
  const uint8_t* packed;  // the tables of the module, at a multiple of 4 bytes
  void* output;           // [B, columns], [columns] in a variable batch, or [L, columns] for NONE
  Dtype output_type;
  const Feature* features;  // [num_features]; weight_offset is in bytes
  int num_features;
  IndexArray indices;  // [L]
  Bags bags;
  BagMap map;
  int64_t columns;  // columns of `output`
  Pooling pooling;
  const float* sample_weights;  // [L]; null: all are 1

  // Return the rows of the output: bags, or lookups without pooling.
  EMB_HD int64_t items() const { return pooling == Pooling::kNone ? bags.num_lookups : bags.count; }
};

// The scale and offset of the row of lookup `i`, which is at `address`, and the weight of the
// lookup; zeros for a null address.
struct QuantHeader {
  uint32_t header = 0;
  float weight = 0.0f;

  EMB_DEVICE QuantHeader(const QuantArgs& args, const uint8_t* address, int64_t i) {
    if (address == nullptr) return;
    header = simt::load(reinterpret_cast<const uint32_t*>(address));
    weight = args.sample_weights ? args.sample_weights[i] : 1.0f;
  }

  // Return the scale and the offset of the row, times the weight.
  EMB_DEVICE float scale() const {
    return weight * to_float(half16{static_cast<uint16_t>(header & 0xffffu)});
  }
  EMB_DEVICE float shift() const {
    return weight * to_float(half16{static_cast<uint16_t>(header >> 16)});
  }
};

// Return the index of lookup i of a bag, -1 beyond its end.
EMB_DEVICE int64_t index_at(const QuantArgs& args, const BagTask& task, int i) {
  return i < task.length ? args.indices[task.begin + i] : -1;
}

// Return the address of the row of lookup i of a bag, null if there is none.
template <int kBits>
EMB_DEVICE const uint8_t* row_address(const QuantArgs& args, const BagTask& task, int i) {
  const int64_t row = repair_index(index_at(args, task, i), task.feature->rows);
  if (i >= task.length || row < 0) return nullptr;
  return args.packed + task.feature->weight_offset + row * row_bytes(task.dim, kBits);
}

// Return the address that `lane` of the warp passes.
EMB_DEVICE const uint8_t* shuffle(const uint8_t* address, int lane) {
  const auto number = reinterpret_cast<int64_t>(address);
  return reinterpret_cast<const uint8_t*>(__shfl_sync(simt::kFullMask, number, lane));
}

// The columns of a lane in the kQuantColumns * lanes columns of its group from `base` on.
struct QuadColumns {
  int first, second;  // first column of either quad

  EMB_DEVICE QuadColumns(const LaneGroup& lane, int base)
      : first(base + lane.rank * kQuad), second(first + lane.lanes * kQuad) {}
};

// The numbers of a lane in a row, as they are stored.
template <int kBits>
struct PackedSlice {
  using Word = std::conditional_t<kBits == 8, uint32_t, uint16_t>;  // a quad

  uint32_t quad[2] = {};

  // Load the quads that begin before the end of a row of `dim` columns. The last one may reach
  // beyond the end, where the row has zeros up to a word.
  EMB_DEVICE void load(const uint8_t* row, const QuadColumns& columns, int dim) {
    if (columns.first < dim) quad[0] = load_quad(row + byte_offset(columns.first));
    if (columns.second < dim) quad[1] = load_quad(row + byte_offset(columns.second));
  }
  EMB_DEVICE static uint32_t load_quad(const uint8_t* address) {
    return simt::load(reinterpret_cast<const Word*>(address));
  }
  // Return the bytes from the beginning of a row to a column.
  EMB_DEVICE static uint32_t byte_offset(int column) {
    return kHeaderBytes + static_cast<uint32_t>(column) * kBits / 8;
  }

  // Return number k as a float, without a conversion: put into the low bits of the mantissa of a
  // power of two it adds to this power, which is then subtracted.
  EMB_DEVICE float operator[](int k) const {
    const int bit = k % kQuad * kBits, shift = bit % 16;
    const uint32_t half = bit < 16 ? quad[k / kQuad] : quad[k / kQuad] >> 16;
    const uint32_t power = static_cast<uint32_t>(127 + 23 - shift) << 23;
    const uint32_t mask = ((1u << kBits) - 1) << shift;
    return bits_float(simt::mask_and_set(half, mask, power)) - bits_float(power);
  }
};

// Add scale * number + shift to `sum` for each number of a slice.
template <int kBits>
EMB_DEVICE void add_slice(const PackedSlice<kBits>& slice, float scale, float shift,
                          float (&sum)[kQuantColumns]) {
#pragma unroll
  for (int e = 0; e < kQuantColumns; ++e) sum[e] += scale * slice[e] + shift;
}

// Write the columns of a lane to the output row of `dim` columns that begins at `element`. kVector:
// the row is a multiple of quads and aligned to 16 bytes.
template <bool kVector>
EMB_DEVICE void write_quads(const QuantArgs& args, int64_t element, const QuadColumns& columns,
                            int dim, const float (&sum)[kQuantColumns]) {
#pragma unroll
  for (int q = 0; q < 2; ++q) {
    const int column = q == 0 ? columns.first : columns.second;
    if (column >= dim) continue;
    float values[kQuad];
#pragma unroll
    for (int e = 0; e < kQuad; ++e) values[e] = sum[q * kQuad + e];
    if constexpr (kVector) {
      stream_vector(args.output, args.output_type, element + column, values);
    } else {
      stream_columns(args.output, args.output_type, element + column, dim - column, values);
    }
  }
}

// Pooled lookup of bags of any length: a group takes a bag and has eight of its rows in flight.

// Add this lane's columns of the rows of a bag, times their weights, to `sum`. `longest` is the
// maximum length in the warp. Row is the type of row numbers, which are passed by shuffles: 64 bits
// cost another shuffle per row. For a lookup to skip, row 0 is read and multiplied by 0, which
// saves a branch per row. Called by all lanes of the warp.
template <int kBits, class Row>
EMB_DEVICE void sum_packed(const QuantArgs& args, const BagTask& task, const LaneGroup& lane,
                           const QuadColumns& columns, int longest, float (&sum)[kQuantColumns]) {
  constexpr int R = kQuantRowsInFlight;
  const uint8_t* table = args.packed + task.feature->weight_offset;
  const uint8_t* first = table + PackedSlice<kBits>::byte_offset(columns.first);
  const uint8_t* second = table + PackedSlice<kBits>::byte_offset(columns.second);
  simt::keep_in_registers(first);
  simt::keep_in_registers(second);
  const int64_t rows = task.feature->rows;
  const int dim = rows > 0 ? task.dim : 0;
  const bool has_first = columns.first < dim, has_second = columns.second < dim;
  const auto stride = static_cast<uint32_t>(row_bytes(task.dim, kBits));
  int64_t index = index_at(args, task, lane.rank);
  for (int tile = 0; tile < longest; tile += lane.lanes) {
    const int i = tile + lane.rank;
    const int64_t row = i < task.length ? repair_index(index, rows) : -1;
    const QuantHeader header(args, row < 0 ? nullptr : table + row * stride, task.begin + i);
    const Row row_of_lane = row < 0 ? 0 : static_cast<Row>(row);
    index = index_at(args, task, i + lane.lanes);
    const int steps = longest - tile < lane.lanes ? longest - tile : lane.lanes;
    for (int k = 0; k < steps; k += R) {
      PackedSlice<kBits> slice[R];
#pragma unroll
      for (int u = 0; u < R; ++u) {
        if (u == R / 2 && k + u >= steps) break;
        const Row passed = __shfl_sync(simt::kFullMask, row_of_lane, k + u, lane.lanes);
        const uint64_t bytes = static_cast<uint64_t>(passed) * stride;
        if (has_first) slice[u].quad[0] = PackedSlice<kBits>::load_quad(first + bytes);
        if (has_second) slice[u].quad[1] = PackedSlice<kBits>::load_quad(second + bytes);
      }
      const float scale_of_lane = header.scale(), shift_of_lane = header.shift();
#pragma unroll
      for (int u = 0; u < R; ++u) {
        if (u == R / 2 && k + u >= steps) break;
        const float scale = __shfl_sync(simt::kFullMask, scale_of_lane, k + u, lane.lanes);
        const float shift = __shfl_sync(simt::kFullMask, shift_of_lane, k + u, lane.lanes);
        add_slice(slice[u], scale, shift, sum);
      }
    }
  }
}

// Pool all bags, grid-stride; `lanes` is the number of lanes per bag. The grid's second dimension
// divides the columns of rows wider than a group.
template <int kBits>
__global__ void __launch_bounds__(kQuantThreads, kQuantPoolBlocks)
    quant_pool_kernel(QuantArgs args, int lanes) {
  constexpr int N = kQuantColumns;
  const LaneGroup lane(lanes);
  const auto groups = static_cast<uint32_t>(lane.groups_in_warp());
  const auto bags = static_cast<uint32_t>(args.bags.count);
  const uint32_t stride = static_cast<uint32_t>(simt::warps_in_grid()) * groups;
  for (uint32_t first = static_cast<uint32_t>(simt::global_warp()) * groups; first < bags;
       first += stride) {
    const BagTask task(args, first + lane.group);
    const int longest = __reduce_max_sync(simt::kFullMask, task.length);
    const int widest = __reduce_max_sync(simt::kFullMask, task.dim);
    const bool large = __any_sync(simt::kFullMask, task.feature->rows >> 32 != 0);
    for (int base = static_cast<int>(blockIdx.y) * lanes * N; base < widest;
         base += static_cast<int>(gridDim.y) * lanes * N) {
      const QuadColumns columns(lane, base);
      float sum[N] = {};
      if (large) {
        sum_packed<kBits, uint64_t>(args, task, lane, columns, longest, sum);
      } else {
        sum_packed<kBits, uint32_t>(args, task, lane, columns, longest, sum);
      }
      const float factor = mean_factor(args.pooling, task.length);
#pragma unroll
      for (int e = 0; e < N; ++e) sum[e] *= factor;
      write_quads<false>(args, task.bag_element(args, first + lane.group), columns, task.dim, sum);
    }
  }
}

// Lookup of short bags, and of single rows without pooling. The rows of one bag cannot saturate the
// memory system. So a warp takes 32 bags: each lane *holds* one, which means that it reads the
// bag's metadata and the header of its row, so that 32 headers are in flight at once. Then a group
// of lanes takes the numbers of several bags at a time, one row of each: of eight bags if no bag of
// the warp has a second row, so that there are no sums to keep, else of two.

inline constexpr int kQuantBagsInFlight = 2;
inline constexpr int kSingleRowsInFlight = 8;

// The row of lookup i of a bag: its address, null if there is none, and its header.
template <int kBits>
struct QuantRow {
  const uint8_t* address;
  QuantHeader header;

  EMB_DEVICE QuantRow(const QuantArgs& args, const BagTask& task, int i)
      : address(row_address<kBits>(args, task, i)),
        header(args, address, int64_t{task.begin} + i) {}
};

// Write this lane's columns of kSingleRowsInFlight bags of its group that have one row or none.
// `task`, `row` and `element_of_lane`, the first element of the output row, are those of the bag
// that this lane holds. Lane `holder` of the warp holds the group's first bag, lane holder + groups
// the next one, and so on. Called by all lanes of the warp.
template <int kBits>
EMB_DEVICE void write_single_rows(const QuantArgs& args, const BagTask& task,
                                  const QuantRow<kBits>& row, int64_t element_of_lane,
                                  const QuadColumns& columns, int holder, int groups) {
  constexpr int N = kQuantColumns, S = kSingleRowsInFlight, kWarp = simt::kWarp;
  PackedSlice<kBits> slice[S];
  int dim[S];
#pragma unroll
  for (int s = 0; s < S; ++s) {
    const int source = holder + s * groups;
    const uint8_t* address = shuffle(row.address, source);
    dim[s] = __shfl_sync(simt::kFullMask, task.dim, source);
    slice[s].load(address, columns, address != nullptr ? dim[s] : 0);
  }
  const float scale_of_lane = row.header.scale(), shift_of_lane = row.header.shift();
#pragma unroll
  for (int s = 0; s < S; ++s) {
    const int source = holder + s * groups;
    const float scale = __shfl_sync(simt::kFullMask, scale_of_lane, source);
    const float shift = __shfl_sync(simt::kFullMask, shift_of_lane, source);
    const int64_t element = __shfl_sync(simt::kFullMask, element_of_lane, source);
    float sum[N] = {};
    add_slice(slice[s], scale, shift, sum);
    write_quads<true>(args, element, columns, dim[s], sum);
  }
}

// Sum and write this lane's columns of kQuantBagsInFlight bags of its group; arguments as above.
// `is_holder`: this lane holds a bag that some group of the warp takes now. `row` is the first row
// of the bag, before and after.
template <int kBits>
EMB_DEVICE void pool_short_bags(const QuantArgs& args, const BagTask& task, QuantRow<kBits>& row,
                                int64_t element_of_lane, const QuadColumns& columns, int holder,
                                int groups, bool is_holder) {
  constexpr int N = kQuantColumns, S = kQuantBagsInFlight, kWarp = simt::kWarp;
  const int longest = __reduce_max_sync(simt::kFullMask, is_holder ? task.length : 0);
  float sum[S][N] = {};
  for (int step = 0; step < longest; ++step) {
    PackedSlice<kBits> slice[S];
#pragma unroll
    for (int s = 0; s < S; ++s) {
      const uint8_t* address = shuffle(row.address, holder + s * groups);
      const int dim = __shfl_sync(simt::kFullMask, task.dim, holder + s * groups);
      slice[s].load(address, columns, address != nullptr ? dim : 0);
    }
    const float scale_of_lane = row.header.scale(), shift_of_lane = row.header.shift();
#pragma unroll
    for (int s = 0; s < S; ++s) {
      const float scale = __shfl_sync(simt::kFullMask, scale_of_lane, holder + s * groups);
      const float shift = __shfl_sync(simt::kFullMask, shift_of_lane, holder + s * groups);
      add_slice(slice[s], scale, shift, sum[s]);
    }
    if (longest > 1 && is_holder) {
      const int next = step + 1 < longest ? step + 1 : 0;  // the first again, for other columns
      row = QuantRow<kBits>(args, task, next);
    }
  }
  const float factor_of_lane = mean_factor(args.pooling, task.length);
#pragma unroll
  for (int s = 0; s < S; ++s) {
    const int64_t element = __shfl_sync(simt::kFullMask, element_of_lane, holder + s * groups);
    const int dim = __shfl_sync(simt::kFullMask, task.dim, holder + s * groups);
    const float factor = __shfl_sync(simt::kFullMask, factor_of_lane, holder + s * groups);
#pragma unroll
    for (int e = 0; e < N; ++e) sum[s][e] *= factor;
    write_quads<false>(args, element, columns, dim, sum[s]);
  }
}

// Look up all bags, or lookups without pooling, grid-stride; `lanes` is the number of lanes per
// row.
template <int kBits>
__global__ void __launch_bounds__(kQuantThreads, kQuantShortBlocks)
    quant_short_bags_kernel(QuantArgs args, int lanes) {
  constexpr int N = kQuantColumns, S = kQuantBagsInFlight, kWarp = simt::kWarp;
  const LaneGroup lane(lanes);
  const int groups = lane.groups_in_warp();
  const auto lane_of_warp = static_cast<int>(threadIdx.x % simt::kWarp);
  const auto items = static_cast<uint32_t>(args.items());
  const auto stride = static_cast<uint32_t>(simt::threads_in_grid());
  for (auto first = static_cast<uint32_t>(simt::global_warp() * simt::kWarp); first < items;
       first += stride) {
    const BagTask task(args, int64_t{first} + lane_of_warp, args.items());
    QuantRow<kBits> row(args, task, 0);
    const int64_t element = task.element(args, first + lane_of_warp);
    const int widest = __reduce_max_sync(simt::kFullMask, task.dim);
    const bool vector =
        task.dim % kQuad == 0 && element % kQuad == 0 && is_aligned(args.output, 16);
    const bool single = __all_sync(simt::kFullMask, task.length <= 1 && vector);
    for (int base = static_cast<int>(blockIdx.y) * lanes * N; base < widest;
         base += static_cast<int>(gridDim.y) * lanes * N) {
      const QuadColumns columns(lane, base);
      if (single) {
        for (int k = 0; k < kWarp; k += kSingleRowsInFlight * groups) {
          write_single_rows<kBits>(args, task, row, element, columns, k + lane.group, groups);
        }
        continue;
      }
      for (int k = 0; k < kWarp; k += S * groups) {
        const bool is_holder = lane_of_warp >= k && lane_of_warp < k + S * groups;
        pool_short_bags<kBits>(args, task, row, element, columns, k + lane.group, groups,
                               is_holder);
      }
    }
  }
}

// Return whether quant_short_bags_kernel serves a batch: bags have at most kShort lookups on
// average, or there is no pooling, which quant_pool_kernel does not support.
inline bool has_short_quant_bags(const QuantArgs& args) {
  constexpr int64_t kShort = 4;
  return args.pooling == Pooling::kNone || args.bags.num_lookups <= kShort * args.bags.count;
}

template <int kBits, class Launcher>
void launch_quant_lookup_of(const Launcher& launcher, const QuantArgs& args) {
  constexpr int kWarp = static_cast<int>(simt::kWarp);
  const int64_t width = mean_width(args);
  const int min_lanes = lanes_for(width, kQuantColumns);
  const int lanes = min_lanes < kMinQuantLanes ? kMinQuantLanes : min_lanes;
  const unsigned stripes = blocks_for(width, lanes * kQuantColumns, 64);
  const bool is_short = has_short_quant_bags(args);
  const int64_t items_of_block = (is_short ? kWarp : kWarp / lanes) * (kQuantThreads / kWarp);
  const unsigned blocks = blocks_for(args.items(), items_of_block, launcher.blocks(256));
  launcher(is_short ? quant_short_bags_kernel<kBits> : quant_pool_kernel<kBits>,
           simt::Dim3(blocks, stripes), simt::Dim3(kQuantThreads), args, lanes);
}

// Write args.output: every row of a bag or, without pooling, of a lookup.
template <class Launcher>
void launch_quant_lookup(const Launcher& launcher, const QuantArgs& args, int bits) {
  if (args.columns == 0 || args.items() == 0) return;
  if (bits == 8) {
    launch_quant_lookup_of<8>(launcher, args);
  } else {
    launch_quant_lookup_of<4>(launcher, args);
  }
}

}  // namespace emb::cuda
