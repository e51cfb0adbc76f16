// Quantised tables on the GPU: `quantize_rows_`, a warp per row, and `quant_lookup`, which reads
// rows as they are stored and adds up floats. quant/args.h has the format of rows.
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

// The arguments of quantize_kernel; pointers are to device memory that must live until it has run.
struct QuantizeKernelArgs {
  const void* weights;  // [num_rows, dim], dim > 0, of the dtype for which the kernel is chosen
  uint8_t* packed;  // [num_rows, row_bytes(dim, format)], an output, at a multiple of kWordBytes
  int64_t num_rows, dim;
  int format;  // a RowFormat
};

// Return the word of a packed row that begins with the number of column `column`; its bits after
// the last column are 0.
template <class T>
EMB_DEVICE uint32_t encode_word(const T* row, int64_t column, int64_t dim, InverseHeader header,
                                int format) {
  uint32_t word = 0;
  for (int shift = 0; shift < 32 && column < dim; shift += bits_per_column(format), ++column) {
    word |= encode(to_float(row[column]), header, format) << shift;
  }
  return word;
}

// Quantise rows of dtype T, args.packed: a warp per row, grid-stride. A first pass over the row
// finds its minimum and maximum, a second pass writes it word by word.
template <class T>
__global__ void quantize_kernel(QuantizeKernelArgs args) {
  const int64_t lane = lane_in_warp();
  const int64_t row_words = row_bytes(args.dim, args.format) / kWordBytes;
  const int header_words = header_bytes(args.format) / kWordBytes;  // 1, or 0
  for (int64_t r = simt::global_warp(); r < args.num_rows; r += simt::warps_in_grid()) {
    const T* row = static_cast<const T*>(args.weights) + r * args.dim;
    float minimum = to_float(row[0]), maximum = minimum;
    for (int64_t d = lane; d < args.dim; d += simt::kWarpLanes) {
      const float value = to_float(row[d]);
      minimum = value < minimum ? value : minimum;
      maximum = value > maximum ? value : maximum;
    }
    for (int offset = simt::kWarpLanes / 2; offset > 0; offset /= 2) {
      const float other_minimum = __shfl_xor_sync(simt::kFullMask, minimum, offset);
      const float other_maximum = __shfl_xor_sync(simt::kFullMask, maximum, offset);
      minimum = other_minimum < minimum ? other_minimum : minimum;
      maximum = other_maximum > maximum ? other_maximum : maximum;
    }
    const RowHeader header = row_header(minimum, maximum, args.format);
    uint32_t* out = reinterpret_cast<uint32_t*>(args.packed) + r * row_words;
    if (lane < header_words)
      out[0] = header.scale.bits | static_cast<uint32_t>(header.offset.bits) << 16;
    for (int64_t w = lane + header_words; w < row_words; w += simt::kWarpLanes) {
      const int64_t column = (w - header_words) * (32 / bits_per_column(args.format));
      out[w] = encode_word(row, column, args.dim, InverseHeader(header), args.format);
    }
  }
}

// Write args.packed; `type` is the dtype of args.weights. `launcher` is a CudaLauncher or, in
// tests, a simt::HostLauncher. Does not wait for the device.
template <class Launcher>
void launch_quantize(const Launcher& launcher, const QuantizeKernelArgs& args, Dtype type) {
  if (args.num_rows == 0) return;
  constexpr int kWarps = kQuantizeThreads / kWarpLanes;
  const unsigned num_blocks =
      blocks_for(args.num_rows, kWarps, launcher.max_grid_blocks(kResidentBlocksPerSm));
  if (type == Dtype::kFloat) {
    launcher(quantize_kernel<float>, num_blocks, kQuantizeThreads, args);
  } else if (type == Dtype::kHalf) {
    launcher(quantize_kernel<half16>, num_blocks, kQuantizeThreads, args);
  } else {
    launcher(quantize_kernel<bfloat16>, num_blocks, kQuantizeThreads, args);
  }
}

// The lookup. There are two kernels: quant_pool_kernel for long bags, and quant_short_bags_kernel
// for short bags and for lookups without pooling. In both, a group of 8 to 32 lanes reads a row. A
// lane has two *quads* of kQuad columns, which are kQuad * lanes columns apart. So each access of a
// group, to a row or to the output, is to neighbouring memory. (With 8 neighbouring columns per
// lane every access would touch half of each sector.) A quad is a part of a word, or one to four
// words. It is loaded by accesses of at most a word, because a row may begin at any word.
//
// Every lane reads index, header and weight of one lookup and passes them to the group by shuffles;
// scale and offset are passed only after the loads of the numbers have been issued. The groups of a
// warp run in lockstep, so all collectives name the full warp. Rows are added in the order of the
// lookups. If the formats of features differ, there is a launch per format, which skips the bags of
// other formats.

inline constexpr int kQuantThreads = 128;  // threads per block of both kernels
// Blocks per multiprocessor of quant_pool_kernel and of quant_short_bags_kernel. They leave a
// thread 80 and 72 registers. They are few because loads in flight matter more than occupancy.
inline constexpr int kQuantPoolBlocksPerSm = 6;
inline constexpr int kQuantShortBlocksPerSm = 7;
inline constexpr int kQuad = 4;          // columns
inline constexpr int kQuantColumns = 8;  // columns per lane: two quads
// Maximum rows of a bag in flight in quant_pool_kernel. Here and below, rows_in_flight() reduces
// the maximum for formats with wide numbers.
inline constexpr int kPoolRowsInFlight = 8;
// Minimum lanes per group, so that each row in flight has a lane that reads its header.
inline constexpr int kMinQuantLanes = kPoolRowsInFlight;

// Return the number of rows in flight for a format: `max_rows` for numbers of up to 8 bits. Wider
// numbers need more registers, so fewer of their rows are in flight.
constexpr int rows_in_flight(int format, int max_rows) {
  const int wide_rows = max_rows * 8 / bits_per_column(format);
  return bits_per_column(format) <= 8 ? max_rows : (wide_rows > 1 ? wide_rows : 1);
}

// The arguments of the lookup kernels. All pointers are to device memory that must live until they
// have run. Indices and offsets are repaired as they are read; `features` and `map` are trusted. An
// int counts the bits of a row, so rows must have fewer than 2^26 columns (MAX_DIM in emblib/specs
// is less).
struct QuantArgs {
  const uint8_t* packed;  // the rows of all tables
  void* output;           // [L, output_dim] without pooling, [output_dim] in a variable batch with
                          // pooling, else [B, output_dim]
  Dtype output_type;
  const Feature* features;  // [num_features]; weight_offset counts bytes of `packed`
  int num_features;
  IndexArray indices;  // [L]
  Bags bags;
  BagMap map;
  int64_t output_dim;  // columns of `output`, or in a variable batch with pooling its elements
  Pooling pooling;
  const float* sample_weights;  // [L] or null; null without pooling
  bool is_mixed;  // whether features may have several formats, which are then in Feature::tier

  // Return the number of output rows: one per bag, or per lookup without pooling.
  EMB_HD int64_t num_items() const {
    return pooling == Pooling::kNone ? bags.num_lookups : bags.num_bags;
  }
};

// The header of the row of lookup `i`, which is at `address`, and the weight of the lookup; both
// are 0 for a null address.
template <int kFormat>
struct WeightedHeader {
  uint32_t header = 0;
  float weight = 0.0f;

  EMB_DEVICE WeightedHeader(const QuantArgs& args, const uint8_t* address, int64_t i) {
    if (address == nullptr) return;
    if (has_scale(kFormat)) header = simt::load(reinterpret_cast<const uint32_t*>(address));
    weight = args.sample_weights ? args.sample_weights[i] : 1.0f;
  }

  // Return the factor of the row's numbers, which is 1 without a header, times the weight.
  EMB_DEVICE float scale() const {
    if (!has_scale(kFormat)) return weight;
    return weight * to_float(half16{static_cast<uint16_t>(header & 0xffffu)});
  }
  // Return the offset of the row, times the weight. Only rows with a header have one.
  EMB_DEVICE float offset() const {
    return weight * to_float(half16{static_cast<uint16_t>(header >> 16)});
  }
};

// Return the index, not yet repaired, of lookup i of a bag, -1 beyond its end.
EMB_DEVICE int64_t index_at(const QuantArgs& args, const BagTask& task, int i) {
  return i < task.length ? args.indices[task.begin + i] : -1;
}

// Return `task` if its rows are of this format, otherwise a task without rows and columns.
template <int kFormat>
EMB_DEVICE BagTask task_of_format(const QuantArgs& args, BagTask task) {
  if (args.is_mixed && task.feature->tier != kFormat) task.length = task.dim = 0;
  return task;
}

// Return the address of row i of a bag, null beyond its end and for a skipped lookup.
template <int kFormat>
EMB_DEVICE const uint8_t* row_address(const QuantArgs& args, const BagTask& task, int i) {
  const int64_t row = repair_index(index_at(args, task, i), task.feature->rows);
  if (i >= task.length || row < 0) return nullptr;
  return args.packed + task.feature->weight_offset + row * row_bytes(task.dim, kFormat);
}

// Return the address that lane `lane` passes. All 32 lanes must call this.
EMB_DEVICE const uint8_t* shuffle(const uint8_t* address, int lane) {
  const auto number = reinterpret_cast<int64_t>(address);
  return reinterpret_cast<const uint8_t*>(__shfl_sync(simt::kFullMask, number, lane));
}

// The columns of a lane in a stripe of kQuantColumns * lanes columns, which its group reads; the
// stripe begins at column `base`.
struct QuadColumns {
  int first, second;  // first column of the first and of the second quad

  EMB_DEVICE QuadColumns(const LaneGroup& lane, int base)
      : first(base + lane.rank * kQuad), second(first + lane.lanes * kQuad) {}
};

// The numbers (or values) of a row in the columns of a lane, two quads. Words that are not loaded
// stay 0.
template <int kFormat>
struct PackedSlice {
  static constexpr int kBits = bits_per_column(kFormat);
  static constexpr int kWords = kBits < 8 ? 1 : kBits / 8;  // words of a quad
  using Word =
      std::conditional_t<kBits >= 8, uint32_t, std::conditional_t<kBits == 4, uint16_t, uint8_t>>;

  uint32_t words[2][kWords] = {};

  // Load the two quads of a row, as far as they lie inside it. (Zeros follow the last column, up to
  // a whole word.)
  EMB_DEVICE void load(const uint8_t* row, const QuadColumns& columns, int dim) {
    load_quad(0, row + byte_of(columns.first), dim - columns.first);
    load_quad(1, row + byte_of(columns.second), dim - columns.second);
  }
  // Load the words of a quad that have any of its first `columns` columns.
  EMB_DEVICE void load_quad(int quad, const uint8_t* address, int columns) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if (w * 32 >= columns * kBits) break;
      words[quad][w] = simt::load(reinterpret_cast<const Word*>(address) + w);
    }
  }
  // Return the number of bytes from the beginning of a row to a column.
  EMB_DEVICE static uint32_t byte_of(int column) {
    return header_bytes(kFormat) + static_cast<uint32_t>(column) * kBits / 8;
  }

  // Return the number of column k of the lane, in [0, kQuantColumns), as a float. An integer is not
  // converted: its bits are put into the low bits of the mantissa of a power of two, and then this
  // power is subtracted.
  EMB_DEVICE float operator[](int k) const {
    const int bit = k % kQuad * kBits % 32;
    const uint32_t word = words[k / kQuad][k % kQuad * kBits / 32];
    if constexpr (kFormat == kFp32) return float_from_bits(word);
    if constexpr (kFormat == kFp16) return to_float(half16{static_cast<uint16_t>(word >> bit)});
    if constexpr (kFormat == kBf16) return to_float(bfloat16{static_cast<uint16_t>(word >> bit)});
    if constexpr (!is_integer(kFormat)) {
      const uint32_t magnitude = (word >> bit & 0x7fu) << (23 - mantissa_bits(kFormat));
      const float value = float_from_bits(magnitude) * float8_factor(kFormat);
      return float_from_bits(float_bits(value) | (word >> bit & 0x80u) << 24);
    }
    const int bit_of_half = bit % 16;
    const uint32_t half = bit < 16 ? word : word >> 16;
    const uint32_t power = static_cast<uint32_t>(127 + 23 - bit_of_half) << 23;
    const uint32_t mask = ((1u << (kBits & 15)) - 1) << bit_of_half;
    return float_from_bits(simt::mask_and_set(half, mask, power)) - float_from_bits(power);
  }
};

// Add scale * number + offset for each number of a slice to `sum`. In formats without a header
// `offset` is not read.
template <int kFormat>
EMB_DEVICE void add_slice(const PackedSlice<kFormat>& slice, float scale, float offset,
                          float (&sum)[kQuantColumns]) {
#pragma unroll
  for (int e = 0; e < kQuantColumns; ++e) {
    sum[e] += has_scale(kFormat) ? scale * slice[e] + offset : scale * slice[e];
  }
}

// Write the columns of a lane to the output of a bag, which begins at `element`. kVector requires
// that `dim` and `element` are multiples of kQuad and that the output is aligned to 16 bytes.
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

// Pooled lookup: a group takes a bag, and has up to kPoolRowsInFlight of its rows in flight.

// Add this lane's columns of all rows of a bag to `sum`. `max_length` is the maximum length of a
// bag in the warp. All 32 lanes must call this. `Row` is the unsigned type of the row numbers that
// lanes share: 64 bits cost another shuffle per row. For a skipped lookup row 0 is read, and its
// numbers are multiplied by 0, which saves a branch per row. In formats without a header values may
// be infinite, so no row is read for a skipped lookup.
template <int kFormat, class Row>
EMB_DEVICE void sum_packed(const QuantArgs& args, const BagTask& task, const LaneGroup& lane,
                           const QuadColumns& columns, int max_length,
                           float (&sum)[kQuantColumns]) {
  constexpr int kRows = rows_in_flight(kFormat, kPoolRowsInFlight);
  constexpr Row kNoRow = has_scale(kFormat) ? 0 : static_cast<Row>(-1);
  const uint8_t* table = args.packed + task.feature->weight_offset;
  const uint8_t* first_quads = table + PackedSlice<kFormat>::byte_of(columns.first);
  const uint8_t* second_quads = table + PackedSlice<kFormat>::byte_of(columns.second);
  simt::keep_in_registers(first_quads);
  simt::keep_in_registers(second_quads);
  const int64_t rows = task.feature->rows;
  const int dim = rows > 0 ? task.dim : 0;
  // The number of columns from the beginning of each quad to the end of the row.
  const int columns_of_first = dim - columns.first, columns_of_second = dim - columns.second;
  const auto stride = static_cast<uint32_t>(row_bytes(task.dim, kFormat));
  int64_t index = index_at(args, task, lane.rank);
  for (int tile = 0; tile < max_length; tile += lane.lanes) {
    const int i = tile + lane.rank;
    const int64_t row = i < task.length ? repair_index(index, rows) : -1;
    const WeightedHeader<kFormat> header(args, row < 0 ? nullptr : table + row * stride,
                                         task.begin + i);
    const Row lane_row = row < 0 ? kNoRow : static_cast<Row>(row);
    index = index_at(args, task, i + lane.lanes);
    const int tile_rows = max_length - tile < lane.lanes ? max_length - tile : lane.lanes;
    for (int k = 0; k < tile_rows; k += kRows) {
      PackedSlice<kFormat> slice[kRows];
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        if (u == kRows / 2 && k + u >= tile_rows) break;
        const Row read_row = __shfl_sync(simt::kFullMask, lane_row, k + u, lane.lanes);
        if (kNoRow != 0 && read_row == kNoRow) continue;
        const uint64_t row_begin = static_cast<uint64_t>(read_row) * stride;
        slice[u].load_quad(0, first_quads + row_begin, columns_of_first);
        slice[u].load_quad(1, second_quads + row_begin, columns_of_second);
      }
      const float lane_scale = header.scale(), lane_offset = header.offset();
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        if (u == kRows / 2 && k + u >= tile_rows) break;
        const float scale = __shfl_sync(simt::kFullMask, lane_scale, k + u, lane.lanes);
        const float offset = __shfl_sync(simt::kFullMask, lane_offset, k + u, lane.lanes);
        add_slice(slice[u], scale, offset, sum);
      }
    }
  }
}

// Pooled lookup, grid-stride over bags; `lanes` is the number of lanes per bag. The grid's second
// dimension divides the columns of rows that are wider than a stripe.
template <int kFormat>
__global__ void __launch_bounds__(kQuantThreads, kQuantPoolBlocksPerSm)
    quant_pool_kernel(QuantArgs args, int lanes) {
  const LaneGroup lane(lanes);
  const auto num_groups = static_cast<uint32_t>(lane.groups_in_warp());
  const auto num_bags = static_cast<uint32_t>(args.bags.num_bags);
  const uint32_t stride = static_cast<uint32_t>(simt::warps_in_grid()) * num_groups;
  for (uint32_t warp_bag = static_cast<uint32_t>(simt::global_warp()) * num_groups;
       warp_bag < num_bags; warp_bag += stride) {
    const BagTask task = task_of_format<kFormat>(args, BagTask(args, warp_bag + lane.group));
    const int max_length = __reduce_max_sync(simt::kFullMask, task.length);
    const int max_dim = __reduce_max_sync(simt::kFullMask, task.dim);
    const bool needs_64_bits = __any_sync(simt::kFullMask, task.feature->rows >> 32 != 0);
    for (int base = static_cast<int>(blockIdx.y) * lanes * kQuantColumns; base < max_dim;
         base += static_cast<int>(gridDim.y) * lanes * kQuantColumns) {
      const QuadColumns columns(lane, base);
      float sum[kQuantColumns] = {};
      if (needs_64_bits) {
        sum_packed<kFormat, uint64_t>(args, task, lane, columns, max_length, sum);
      } else {
        sum_packed<kFormat, uint32_t>(args, task, lane, columns, max_length, sum);
      }
      const float factor = mean_factor(args.pooling, task.length);
#pragma unroll
      for (int e = 0; e < kQuantColumns; ++e) sum[e] *= factor;
      write_quads<false>(args, task.bag_output_element(args, warp_bag + lane.group), columns,
                         task.dim, sum);
    }
  }
}

// Lookup of short bags, and of single rows without pooling. The rows of one short bag cannot
// saturate the memory system. So each lane has the metadata of another bag, and the headers of 32
// rows are in flight at once. Then a group of lanes reads the numbers of several bags at a time,
// one row of each: of kSingleRowsInFlight bags if no bag of the warp has a second row, because then
// no sums take registers, otherwise of kQuantBagsInFlight bags.

inline constexpr int kQuantBagsInFlight = 2;
inline constexpr int kSingleRowsInFlight = 8;

// Row i of a bag.
template <int kFormat>
struct QuantRow {
  const uint8_t* address;  // null if there is none
  WeightedHeader<kFormat> header;

  EMB_DEVICE QuantRow(const QuantArgs& args, const BagTask& task, int i)
      : address(row_address<kFormat>(args, task, i)),
        header(args, address, int64_t{task.begin} + i) {}
};

// Write this lane's columns of as many bags of its group as it has single rows in flight. The bags
// have at most one row each; a bag without a row gets zeros. Lane `first_lane` of the warp has the
// metadata and the row of the group's first bag, and the lanes of the next bags are `num_groups`
// lanes apart. `lane_element` is the first output element of this lane's bag. All 32 lanes must
// call this.
template <int kFormat>
EMB_DEVICE void write_single_rows(const QuantArgs& args, const BagTask& task,
                                  const QuantRow<kFormat>& row, int64_t lane_element,
                                  const QuadColumns& columns, int first_lane, int num_groups) {
  constexpr int kRows = rows_in_flight(kFormat, kSingleRowsInFlight);
  PackedSlice<kFormat> slice[kRows];
  int dim[kRows];
#pragma unroll
  for (int s = 0; s < kRows; ++s) {
    const int source = first_lane + s * num_groups;
    const uint8_t* address = shuffle(row.address, source);
    dim[s] = __shfl_sync(simt::kFullMask, task.dim, source);
    slice[s].load(address, columns, address != nullptr ? dim[s] : 0);
  }
  const float lane_scale = row.header.scale(), lane_offset = row.header.offset();
#pragma unroll
  for (int s = 0; s < kRows; ++s) {
    const int source = first_lane + s * num_groups;
    const float scale = __shfl_sync(simt::kFullMask, lane_scale, source);
    const float offset = __shfl_sync(simt::kFullMask, lane_offset, source);
    const int64_t element = __shfl_sync(simt::kFullMask, lane_element, source);
    float sum[kQuantColumns] = {};
    add_slice(slice[s], scale, offset, sum);
    write_quads<true>(args, element, columns, dim[s], sum);
  }
}

// Sum and write this lane's columns of kQuantBagsInFlight bags of its group (fewer for wide
// numbers), as write_single_rows does for single rows. `has_bag` says whether this lane has the
// metadata of a bag that a group of the warp processes in this call. `row` is the first row of this
// lane's bag, again when the call returns.
template <int kFormat>
EMB_DEVICE void pool_short_bags(const QuantArgs& args, const BagTask& task, QuantRow<kFormat>& row,
                                int64_t lane_element, const QuadColumns& columns, int first_lane,
                                int num_groups, bool has_bag) {
  constexpr int kBags = rows_in_flight(kFormat, kQuantBagsInFlight);
  const int max_length = __reduce_max_sync(simt::kFullMask, has_bag ? task.length : 0);
  float sum[kBags][kQuantColumns] = {};
  for (int i = 0; i < max_length; ++i) {
    PackedSlice<kFormat> slice[kBags];
#pragma unroll
    for (int s = 0; s < kBags; ++s) {
      const uint8_t* address = shuffle(row.address, first_lane + s * num_groups);
      const int dim = __shfl_sync(simt::kFullMask, task.dim, first_lane + s * num_groups);
      slice[s].load(address, columns, address != nullptr ? dim : 0);
    }
    const float lane_scale = row.header.scale(), lane_offset = row.header.offset();
#pragma unroll
    for (int s = 0; s < kBags; ++s) {
      const float scale = __shfl_sync(simt::kFullMask, lane_scale, first_lane + s * num_groups);
      const float offset = __shfl_sync(simt::kFullMask, lane_offset, first_lane + s * num_groups);
      add_slice(slice[s], scale, offset, sum[s]);
    }
    if (max_length > 1 && has_bag) {
      const int next = i + 1 < max_length ? i + 1 : 0;  // at the end the first row again
      row = QuantRow<kFormat>(args, task, next);
    }
  }
  const float lane_factor = mean_factor(args.pooling, task.length);
#pragma unroll
  for (int s = 0; s < kBags; ++s) {
    const int64_t element = __shfl_sync(simt::kFullMask, lane_element, first_lane + s * num_groups);
    const int dim = __shfl_sync(simt::kFullMask, task.dim, first_lane + s * num_groups);
    const float factor = __shfl_sync(simt::kFullMask, lane_factor, first_lane + s * num_groups);
#pragma unroll
    for (int e = 0; e < kQuantColumns; ++e) sum[s][e] *= factor;
    write_quads<false>(args, element, columns, dim, sum[s]);
  }
}

// Lookup of short bags, or without pooling; grid-stride over items, 32 per warp. `lanes` is the
// number of lanes per group.
template <int kFormat>
__global__ void __launch_bounds__(kQuantThreads, kQuantShortBlocksPerSm)
    quant_short_bags_kernel(QuantArgs args, int lanes) {
  constexpr int kWarpLanes = simt::kWarpLanes;
  constexpr int kBags = rows_in_flight(kFormat, kQuantBagsInFlight);
  constexpr int kRows = rows_in_flight(kFormat, kSingleRowsInFlight);
  const LaneGroup lane(lanes);
  const int num_groups = lane.groups_in_warp();
  const int this_lane = lane_in_warp();
  const auto num_items = static_cast<uint32_t>(args.num_items());
  const auto stride = static_cast<uint32_t>(simt::threads_in_grid());
  for (auto warp_item = static_cast<uint32_t>(simt::global_warp() * simt::kWarpLanes);
       warp_item < num_items; warp_item += stride) {
    const BagTask task = task_of_format<kFormat>(
        args, BagTask(args, int64_t{warp_item} + this_lane, args.num_items()));
    QuantRow<kFormat> row(args, task, 0);
    const int64_t element = task.output_element(args, warp_item + this_lane);
    const int max_dim = __reduce_max_sync(simt::kFullMask, task.dim);
    const bool uses_vectors =
        task.dim % kQuad == 0 && element % kQuad == 0 && is_aligned(args.output, 16);
    const bool has_single_rows = __all_sync(simt::kFullMask, task.length <= 1 && uses_vectors);
    for (int base = static_cast<int>(blockIdx.y) * lanes * kQuantColumns; base < max_dim;
         base += static_cast<int>(gridDim.y) * lanes * kQuantColumns) {
      const QuadColumns columns(lane, base);
      if (has_single_rows) {
        for (int k = 0; k < kWarpLanes; k += kRows * num_groups) {
          write_single_rows<kFormat>(args, task, row, element, columns, k + lane.group, num_groups);
        }
        continue;
      }
      for (int k = 0; k < kWarpLanes; k += kBags * num_groups) {
        const bool has_bag = this_lane >= k && this_lane < k + kBags * num_groups;
        pool_short_bags<kFormat>(args, task, row, element, columns, k + lane.group, num_groups,
                                 has_bag);
      }
    }
  }
}

// Return whether to use quant_short_bags_kernel: without pooling, or if bags have at most
// kMeanLookups lookups on average. The bound is not measured.
inline bool has_short_quant_bags(const QuantArgs& args) {
  constexpr int64_t kMeanLookups = 4;
  return args.pooling == Pooling::kNone ||
         args.bags.num_lookups <= kMeanLookups * args.bags.num_bags;
}

// A grid has at most this many times kResidentBlocksPerSm blocks per multiprocessor and stripe.
// Bags differ in length, so new blocks replace those that end early.
inline constexpr int kQuantWaves = 8;

// Look up the features whose rows are of this format.
template <int kFormat, class Launcher>
void launch_quant_format(const Launcher& launcher, const QuantArgs& args) {
  const int64_t width = mean_output_columns(args);
  const int row_lanes = lanes_per_row(width, kQuantColumns);
  const int lanes = row_lanes < kMinQuantLanes ? kMinQuantLanes : row_lanes;
  const unsigned num_stripes = blocks_for(width, lanes * kQuantColumns, kMaxStripes);
  const bool is_short = has_short_quant_bags(args);
  const int64_t items_per_block =
      (is_short ? kWarpLanes : kWarpLanes / lanes) * (kQuantThreads / kWarpLanes);
  const unsigned num_blocks =
      blocks_for(args.num_items(), items_per_block,
                 launcher.max_grid_blocks(kQuantWaves * kResidentBlocksPerSm));
  launcher(is_short ? quant_short_bags_kernel<kFormat> : quant_pool_kernel<kFormat>,
           simt::Dim3(num_blocks, num_stripes), simt::Dim3(kQuantThreads), args, lanes);
}

// Write args.output: elements of no bag are not written, rows of lookups of no bag become 0.
// `formats` is a mask of the formats of the features, RowFormats::mask. `launcher` is a
// CudaLauncher or, in tests, a simt::HostLauncher. Does not wait for the device.
template <class Launcher>
void launch_quant_lookup(const Launcher& launcher, const QuantArgs& args, uint64_t formats) {
  if (args.output_dim == 0 || args.num_items() == 0) return;
  const auto launch = [&]<int kFormat>(std::integral_constant<int, kFormat>) {
    if (((formats >> kFormat) & 1) != 0) launch_quant_format<kFormat>(launcher, args);
  };
  launch(std::integral_constant<int, kInt2>());
  launch(std::integral_constant<int, kInt4>());
  launch(std::integral_constant<int, kInt8>());
  launch(std::integral_constant<int, kFp8E4m3>());
  launch(std::integral_constant<int, kFp8E5m2>());
  launch(std::integral_constant<int, kFp16>());
  launch(std::integral_constant<int, kBf16>());
  launch(std::integral_constant<int, kFp32>());
}

}  // namespace emb::cuda
