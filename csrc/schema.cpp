// The schema of every native operation of emblib. `*_cpu.cpp` and `*_cuda.cu` register the kernels.
// A comment here says what an op is for. The file of emblib/ops that is named at the beginning of a
// section, or the header that a comment names, describes shapes, dtypes, errors and gradients,
// where the comment does not; emblib/reference defines the results.
//
// Notation: F features, L lookups. core/layout.h describes `features`, int64 [F, 8] (Feature);
// `bag_layout`, int64 [bags, 2] (BagLayout); `weights`, a list of one tensor per memory tier
// (Tier); and `slots`, the cache slots of rows. `pooling`, `policy`, `order` and the like are codes
// of core/codes.h. `mode` and `check` are codes of its BoundsMode; a `check` of None means no
// check. `optimizer` is the number of an optimizer in optim/optimizers.h. `repaired` says that the
// offsets are a result of `bounds_check`. An op changes the arguments that are marked with `!`, and
// no others.
//
// Where the length of a list depends on the contents of a batch, the op on fake tensors, which have
// none, returns what a valid batch without missing keys has.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(emblib, m) {
  // Grouping (emblib/ops/primitives.py).
  //
  // Group positions by key. Return the distinct keys, the start of each group, the positions in a
  // stable order by key, and the number of groups.
  m.def(
      "group(Tensor keys, SymInt num_keys)"
      " -> (Tensor unique, Tensor segments, Tensor permutation, Tensor count)");
  // Return the group of each position, from the results of `group` or `tbe_group`.
  m.def("group_inverse(Tensor segments, Tensor permutation, Tensor count) -> Tensor");

  // Table-batched embeddings (emblib/ops/tbe.py).
  //
  // Check a batch. Return the repaired offsets, and the numbers of invalid indices and of offset
  // violations.
  m.def(
      "bounds_check(Tensor indices, Tensor offsets, Tensor features, Tensor? bag_layout, int mode)"
      " -> (Tensor offsets, Tensor violations)");
  // Check a batch and return only the repaired offsets. In the mode "warning", add the numbers of
  // invalid indices and of offset violations to `violations`.
  m.def(
      "bounds_check_(Tensor indices, Tensor offsets, Tensor features, Tensor? bag_layout,"
      " int check, Tensor(a!) violations) -> Tensor");
  // Read the rows of all lookups, and pool them per bag unless `pooling` is NONE.
  m.def(
      "tbe_lookup(Tensor[] weights, Tensor features, Tensor indices, Tensor offsets, Tensor? slots,"
      " Tensor? bag_layout, Tensor? sample_weights, int pooling, SymInt output_dim,"
      " ScalarType output_dtype) -> Tensor");
  // A lookup that checks its batch in the same call. The CPU returns [output], or [] for an invalid
  // batch, with or without `check`. A GPU returns [output] without `check`. With it, the GPU does
  // what `bounds_check_` does before the lookup, and returns [output, repaired offsets].
  m.def(
      "tbe_lookup_checked_(Tensor[] weights, Tensor features, Tensor indices, Tensor offsets,"
      " Tensor? sample_weights, int pooling, SymInt output_dim, ScalarType output_dtype,"
      " int? check, Tensor(a!) violations, Tensor? slots=None) -> Tensor[]");
  // A backward pass in one call: group the lookups, count the step in `hyper`, and update the
  // weights and states. If `is_finite`, a bool tensor of one element, is false, nothing changes.
  // `located`, [rows, segments, lookups, bags, count, row_slots] of `cache_prefetch_`, replaces the
  // grouping; the CPU also takes a list without row_slots.
  m.def(
      "tbe_backward_(Tensor(a!)[] weights, Tensor(b!)[] states, Tensor(c!) hyper, int optimizer,"
      " Tensor grad, Tensor features, Tensor indices, Tensor offsets, Tensor? sample_weights,"
      " int pooling, SymInt total_rows, bool repaired=False, Tensor? is_finite=None,"
      " Tensor[]? located=None) -> ()");
  // Group the lookups by linear row id, as `group` does; `lookups` is the permutation. Also return
  // the bag of each lookup in this order.
  m.def(
      "tbe_group(Tensor features, Tensor indices, Tensor offsets, Tensor? bag_layout,"
      " SymInt total_rows, bool repaired=False)"
      " -> (Tensor rows, Tensor segments, Tensor lookups, Tensor bags, Tensor count)");
  // Return the gradient of each distinct row. Here and below, `rows` to `count` are the results of
  // `tbe_group`.
  m.def(
      "tbe_row_grads(Tensor grad, Tensor features, Tensor rows, Tensor segments, Tensor lookups,"
      " Tensor bags, Tensor count, Tensor offsets, Tensor? bag_layout, Tensor? sample_weights,"
      " int pooling, SymInt dim) -> Tensor");
  // Compute the gradients of the distinct rows and update weights and states by them. `row_slots`
  // are the cache slots of the rows.
  m.def(
      "tbe_update_(Tensor(a!)[] weights, Tensor(b!)[] states, Tensor hyper, int optimizer,"
      " Tensor grad, Tensor features, Tensor rows, Tensor segments, Tensor lookups, Tensor bags,"
      " Tensor count, Tensor offsets, Tensor? row_slots, Tensor? bag_layout,"
      " Tensor? sample_weights, int pooling) -> ()");
  // Return the gradient of each sample weight.
  m.def(
      "tbe_sample_weight_grad(Tensor grad, Tensor[] weights, Tensor features, Tensor indices,"
      " Tensor offsets, Tensor? slots, Tensor? bag_layout, int pooling) -> Tensor");

  // The software cache in front of tables in slow memory (emblib/ops/cache.py).
  //
  // Decide which of the distinct rows of a batch get which cache slots, and which rows are evicted.
  // No row is moved.
  m.def(
      "cache_plan_(Tensor(a!) tags, Tensor(b!) stamps, Tensor(c!) counts, Tensor(d!) counters,"
      " Tensor clock, Tensor tables, Tensor rows, Tensor segments, Tensor count, int policy)"
      " -> (Tensor row_slots, Tensor evicted)");
  // Return the rows that `cache_plan_` would evict. On the CPU only, for DISK tables: their rows
  // must be journaled before they are written back.
  m.def(
      "cache_evictions(Tensor tags, Tensor stamps, Tensor counts, Tensor counters, Tensor clock,"
      " Tensor tables, Tensor rows, Tensor segments, Tensor count, int policy) -> Tensor");
  // Return the cache slot of each distinct row, without planning.
  m.def("cache_locate(Tensor tags, Tensor tables, Tensor rows, Tensor count) -> Tensor");
  // Return the cache slot of each lookup, given those of the distinct rows.
  m.def(
      "cache_lookup_slots(Tensor row_slots, Tensor segments, Tensor lookups, Tensor count)"
      " -> Tensor");
  // Move rows as planned: write evicted rows back, then fetch rows into their slots.
  m.def(
      "cache_move_(Tensor(a!)[] weights, Tensor(b!)[] states, Tensor hyper, Tensor tables,"
      " Tensor rows, Tensor count, Tensor row_slots, Tensor evicted, Tensor(c!)[] postponed)"
      " -> ()");
  // A prefetch in one call: check the batch, group it, advance the clock to it, plan, and move the
  // rows. The oldest batch in flight is `lag` batches before this one. `cache` is [tags, stamps,
  // counts, counters, clock, conflicts]. With `check` the CPU returns [] for an invalid batch.
  // Otherwise the result is [rows, segments, lookups, bags, count, row_slots, slots], then, if
  // `postpones`, the postponed fetches [rows, slots, count], then, on a GPU with `check`, the
  // repaired offsets.
  m.def(
      "cache_prefetch_(Tensor(a!)[] weights, Tensor(b!)[] states, Tensor hyper,"
      " Tensor(c!)[] cache, Tensor tables, int policy, int lag, bool postpones, Tensor features,"
      " Tensor indices, Tensor offsets, Tensor? bag_layout, SymInt total_rows, bool repaired,"
      " int? check, Tensor(d!) violations) -> Tensor[]");
  // Write all rows in the cache back; they stay in the cache.
  m.def(
      "cache_flush_(Tensor(a!)[] weights, Tensor(b!)[] states, Tensor hyper, Tensor tables,"
      " Tensor tags) -> ()");

  // The hash index of dynamic tables (emblib/ops/hash.py). `index` is [tags, entries, tables,
  // clock, counters], and on the CPU optionally `queues` after them.
  //
  // Return the slot of each id, -1 for a missing key.
  m.def("hash_find(Tensor[] index, Tensor ids, Tensor starts, Tensor tables) -> Tensor");
  // Check the offsets of a batch and find its keys; [] if they are invalid. On the CPU only.
  m.def(
      "hash_find_batch(Tensor[] index, Tensor features, Tensor ids, Tensor offsets, Tensor tables,"
      " Tensor? fallback) -> Tensor[]");
  // Find the keys of a training batch, record their uses, and list the distinct missing keys.
  m.def(
      "hash_touch_(Tensor(a!)[] index, Tensor ids, Tensor starts, Tensor tables, Tensor? counts,"
      " Tensor? batch_scores, int order)"
      " -> (Tensor slots, Tensor first, Tensor groups, Tensor totals, Tensor offsets)");
  // Split buckets of tables that have too few for their missing keys, and move keys and rows.
  m.def(
      "hash_grow_(Tensor(a!)[] index, Tensor(b!)[] row_buffers, Tensor row_layout, Tensor ids,"
      " Tensor starts, Tensor tables, Tensor(c!) slots, Tensor offsets, Tensor? admitted) -> ()");
  // Insert the missing keys that `hash_touch_` has listed.
  m.def(
      "hash_insert_(Tensor(a!)[] index, Tensor ids, Tensor first, Tensor totals, Tensor offsets,"
      " Tensor? admitted, Tensor? batch_scores, int order, int insert_policy, Tensor? slots=None,"
      " Tensor? groups=None) -> (Tensor inserted, Tensor status, Tensor evicted,"
      " Tensor key_slots, Tensor key_status)");
  // Find the keys of a training batch, and record their uses, before `hash_insert_batch_`. Return
  // the slots of its distinct keys, then key, number of uses and table of those without one and,
  // with `thresholds`, the threshold of each.
  m.def(
      "hash_touch_batch_(Tensor(a!)[] index, Tensor features, Tensor ids, Tensor offsets,"
      " Tensor tables, Tensor? batch_scores, int order, Tensor? thresholds=None) -> Tensor[]");
  // Insert the keys of a training batch and group its lookups in one call, on the CPU. Return
  // [offsets, starts, slots, rows, segments, lookups, bags, count], then, if keys were missing, the
  // status of every position; with `fallback` its row; and the misses if `returns_misses`. The
  // groups are like those of `tbe_group`, but not in ascending order of rows; entries after the
  // last group are unspecified. csrc/hash/batch_cpu.cpp lists the batches that it supports; for
  // others it returns [] and changes nothing.
  m.def(
      "hash_insert_batch_(Tensor(a!)[] index, Tensor(b!)[] row_buffers, Tensor features,"
      " Tensor ids,"
      " Tensor offsets, Tensor tables, Tensor? batch_scores, int order, int insert_policy,"
      " Tensor layout, Tensor rules, int seed, Tensor? fallback=None, Tensor? touched=None,"
      " Tensor? admitted=None, bool returns_misses=False) -> Tensor[]");
  // Remove keys. Return the slots that they had.
  m.def("hash_erase_(Tensor(a!)[] index, Tensor ids, Tensor starts, Tensor tables) -> Tensor");
  // Remove the keys of a range of buckets that were last used before clock `before`.
  m.def(
      "hash_expire_(Tensor(a!)[] index, SymInt table, SymInt first_bucket, SymInt num_buckets,"
      " SymInt before) -> Tensor");
  // Ops on rows by slot. `values` is [slots, dim]; a slot outside of it, such as -1, has no row.
  m.def(
      "hash_find_rows(Tensor[] index, Tensor ids, Tensor starts, Tensor tables, Tensor values,"
      " float default_value) -> (Tensor rows, Tensor found)");
  m.def("hash_read_rows(Tensor values, Tensor slots, float default_value) -> Tensor");
  m.def(
      "hash_start_rows_(Tensor(a!) values, Tensor slots, Tensor groups, Tensor first,"
      " Tensor starting, float default_value, bool returns_rows) -> Tensor");
  m.def("hash_write_rows_(Tensor(a!) values, Tensor slots, Tensor rows) -> ()");
  m.def(
      "hash_add_rows_(Tensor(a!) values, Tensor slots, Tensor segments, Tensor permutation,"
      " Tensor count, Tensor rows) -> ()");
  m.def(
      "hash_evicted_rows(Tensor[] values, Tensor slots, Tensor status, Tensor evicted)"
      " -> (Tensor keys, Tensor[] rows, Tensor stamps, Tensor scores, Tensor count)");
  m.def(
      "hash_initial_rows_(Tensor(a!)[] row_buffers, Tensor layout, Tensor rules, Tensor ids,"
      " Tensor first, Tensor offsets, Tensor slots, int seed) -> ()");
  // Count the missing keys of an admission on the CPU, exactly or in sketches.
  m.def("hash_count_(Tensor(a!)[] index, Tensor keys, Tensor counts, Tensor tables) -> Tensor[]");
  m.def(
      "sketch_count_(Tensor(a!) counters, Tensor layout, Tensor keys, Tensor counts, Tensor tables)"
      " -> Tensor");

  // Move rows between a dynamic table and its backing store, on the CPU (emblib/ops/tiers.py).
  //
  // After `hash_insert_`, copy the rows of evicted keys out of a table, and stored rows of inserted
  // keys into it. `slots`, `status` and `evicted` are results of `hash_insert_` for the misses of
  // one table.
  m.def(
      "tier_swap_(Tensor(a!)[] row_buffers, Tensor slots, Tensor status, Tensor evicted,"
      " Tensor found, Tensor rows, SymInt first_overflow) -> (Tensor slots, Tensor status,"
      " Tensor demoted, Tensor demoted_rows, Tensor refused, Tensor found_slots)");
  // hash_insert_batch_ for tables with backing stores in host memory, which it changes if
  // `changes_stores`. It then first writes the overflow rows of the last batch back to them.
  m.def(
      "tier_insert_batch_(Tensor(a!)[] index, Tensor(b!)[] row_buffers, Tensor features,"
      " Tensor ids,"
      " Tensor offsets, Tensor tables, Tensor? batch_scores, int order, int insert_policy,"
      " Tensor layout, Tensor rules, int seed, Tensor(c!)[] store_indices, Tensor(d!)[] records,"
      " int[] store_orders, int[] first_overflow, Tensor[] overflow, bool changes_stores)"
      " -> Tensor[]");
  // hash_find_batch for such tables: it copies rows of keys in a store into overflow rows.
  m.def(
      "tier_find_batch_(Tensor[] index, Tensor(a!)[] row_buffers, Tensor features, Tensor ids,"
      " Tensor offsets, Tensor tables, Tensor? fallback, Tensor layout, Tensor rules,"
      " Tensor[] store_indices, Tensor[] records, int[] store_orders, int[] first_overflow)"
      " -> Tensor[]");
  // Remove promoted keys from a store, and put evicted rows into it.
  m.def(
      "tier_put_(Tensor(a!)[] store_index, Tensor(b!) records, Tensor lifted, Tensor entries,"
      " Tensor rows, int order) -> (Tensor dropped, Tensor dropped_rows)");
  // Read records of a store by slot.
  m.def(
      "tier_read(Tensor records, Tensor slots, SymInt row_bytes)"
      " -> (Tensor positions, Tensor words, Tensor values)");
  // Write records of a store by slot.
  m.def("tier_write_(Tensor(a!) records, Tensor slots, Tensor words, Tensor values) -> ()");

  // Ops on the pages of the files of a store, which are mapped into memory, on the CPU
  // (emblib/ops/pages.py).
  //
  // Return the CRC-32 of each of the pages.
  m.def("page_crc32(Tensor data, Tensor pages, SymInt page_bytes) -> Tensor");
  // Return the pages of rows whose mark is 0.
  m.def(
      "pages_without_mark(Tensor marks, Tensor rows, SymInt row_bytes, SymInt first_byte,"
      " SymInt page_bytes) -> Tensor");
  // Set the marks of the pages of rows to 1.
  m.def(
      "mark_pages_(Tensor(a!)[] marks, Tensor rows, SymInt row_bytes, SymInt first_byte,"
      " SymInt page_bytes) -> ()");
  // Return where the rows of slots are in a file.
  m.def("file_slots(Tensor slots, Tensor file_slots, Tensor? is_hidden) -> Tensor");
  // Read the pages of rows from the file into memory, before they are used.
  m.def(
      "fetch_pages(Tensor data, Tensor rows, SymInt row_bytes, SymInt first_byte)"
      " -> (Tensor unreadable, Tensor num_ranges)");

  // Tensor-train tables (emblib/ops/tt.py): they produce rows for the ops above.
  //
  // Return a sort key of each lookup: ids that share cores have neighbouring keys.
  m.def(
      "tt_keys(Tensor indices, Tensor offsets, Tensor? bag_layout, Tensor feature_tables)"
      " -> Tensor");
  // Find which left and right halves of the trains the distinct rows share.
  m.def(
      "tt_plan(Tensor keys, Tensor count, Tensor tables, int left_ids, int right_ids)"
      " -> Tensor[]");
  // Compute the distinct rows, and the first `num_saved` left halves for the backward pass.
  m.def(
      "tt_rows(Tensor[] cores, Tensor[] plan, int[] row_factors, int[] dim_factors,"
      " int[] num_cores, SymInt num_saved, int matmul_precision=0)"
      " -> (Tensor rows, Tensor left_values)");
  // Return the gradients of all cores.
  m.def(
      "tt_core_grads(Tensor[] cores, Tensor[] plan, Tensor left_values, Tensor row_grads,"
      " int[] row_factors, int[] dim_factors, int[] num_cores, int matmul_precision=0)"
      " -> Tensor[]");
  // Compute the gradients of the cores and update cores and states by them.
  m.def(
      "tt_update_(Tensor(a!)[] cores, Tensor(b!)[] states, Tensor hyper, int optimizer,"
      " Tensor[] plan, Tensor left_values, Tensor row_grads, int[] row_factors, int[] dim_factors,"
      " int[] num_cores, int matmul_precision=0) -> ()");
  // Forward and backward pass in one call each, see csrc/tt/batch_cpu.cpp and
  // forward_backward_cuda.cu. `features` has F rows for keys, F for ids, which a check reads, and F
  // for the rows that a GPU computes. With `check` the CPU returns [] for an invalid batch.
  // Otherwise the result is the output; then, if num_saved >= 0, the tensors `kept` of the backward
  // pass, 14 on the CPU and one on a GPU; then, on a GPU with `check`, the repaired offsets.
  // `is_stale` means that the cores have changed since the lookup. If `is_finite`, a bool tensor of
  // one element, is false, the backward pass changes nothing.
  m.def(
      "tt_lookup_checked_(Tensor[] cores, Tensor tables, Tensor feature_tables, Tensor features,"
      " Tensor indices, Tensor offsets, Tensor? bag_layout, Tensor? sample_weights, int pooling,"
      " SymInt output_dim, ScalarType output_dtype, int[] row_factors, int[] dim_factors,"
      " int[] num_cores, SymInt num_saved, int? check, Tensor(a!) violations,"
      " int matmul_precision=0) -> Tensor[]");
  m.def(
      "tt_backward_(Tensor(a!)[] cores, Tensor(b!)[] states, Tensor(c!) hyper, int optimizer,"
      " Tensor grad, Tensor features, Tensor indices, Tensor offsets, Tensor? bag_layout,"
      " Tensor? sample_weights, int pooling, Tensor[] kept, int[] row_factors, int[] dim_factors,"
      " int[] num_cores, bool is_stale=False, int matmul_precision=0, Tensor? is_finite=None)"
      " -> ()");

  // Tensor trains with stored rows: divide the lookups between the cores and the stored rows.
  // TtStoredArgs in csrc/tt/cached.h describes the arguments and results.
  m.def(
      "tt_stored(Tensor indices, Tensor ids, Tensor keys, Tensor? slots, Tensor row_of_slot)"
      " -> (Tensor cold, Tensor rows, Tensor counted)");
  // Add the lookups and the hits of each table to the first two columns of `counters`.
  m.def(
      "tt_count_(Tensor counted, Tensor rows, Tensor starts, Tensor tables, Tensor(a!) counters)"
      " -> ()");

  // Routing of ids to the ranks that store their rows, and combination of the pooled rows that
  // these ranks return (emblib/ops/route.py).
  //
  // Concatenate the segments `order` of `values`, `total` rows in all.
  m.def("gather_segments(Tensor values, Tensor starts, Tensor order, SymInt total) -> Tensor");
  // Return the number of ids of each output bag, one bag after the other for every unit.
  m.def(
      "route_lengths(Tensor ids, Tensor offsets, Tensor first_bags, Tensor features, Tensor blocks,"
      " Tensor copies, Tensor units, SymInt num_bags) -> Tensor");
  // Return the ids of all output bags, their positions in `ids`, and their weights.
  m.def(
      "route_ids(Tensor ids, Tensor offsets, Tensor first_bags, Tensor features, Tensor blocks,"
      " Tensor copies, Tensor units, Tensor starts, SymInt total, Tensor? weights)"
      " -> (Tensor ids, Tensor positions, Tensor weights)");
  // Write the targets of a flat output, each the sum of pieces of a flat source.
  m.def(
      "combine(Tensor source, Tensor targets, Tensor pieces, Tensor? rows, Tensor? lengths,"
      " SymInt out_numel, ScalarType dtype, float scale, Tensor? local=None, SymInt local_begin=0)"
      " -> Tensor");
  // The adjoint of `combine`. `combine_backward_` writes the part of the result that is in `local`
  // there; it is a separate op because inductor does not compile an optional argument that is
  // written.
  m.def(
      "combine_backward(Tensor grad, Tensor targets, Tensor pieces, Tensor? rows, Tensor? lengths,"
      " SymInt source_numel, ScalarType dtype, float scale) -> Tensor");
  m.def(
      "combine_backward_(Tensor grad, Tensor targets, Tensor pieces, Tensor? rows, Tensor? lengths,"
      " SymInt source_numel, float scale, Tensor(a!) local, SymInt local_begin) -> Tensor");

  // Quantised tables (emblib/ops/quant.py).
  //
  // Quantise rows of `weights` into rows of `packed`.
  m.def("quantize_rows_(Tensor(a!) packed, Tensor weights, int format) -> ()");
  // Decode the rows of all lookups, and pool them per bag unless `pooling` is NONE.
  m.def(
      "quant_lookup(Tensor packed, Tensor features, Tensor indices, Tensor offsets,"
      " Tensor? bag_layout, Tensor? sample_weights, int pooling, int format, SymInt output_dim,"
      " ScalarType output_dtype) -> Tensor");
  // quant_lookup that with `check` checks its batch in the same call. Then the CPU returns [] for
  // an invalid batch, and a GPU does what `bounds_check_` does before the lookup. Otherwise the
  // result is [output].
  m.def(
      "quant_lookup_checked_(Tensor packed, Tensor features, Tensor indices, Tensor offsets,"
      " Tensor? sample_weights, int pooling, int format, SymInt output_dim,"
      " ScalarType output_dtype, int? check, Tensor(a!) violations) -> Tensor[]");

  // Return the row of each id in `index`, int64 [L].
  m.def(
      "map_ids(Tensor index, Tensor tables, Tensor features, Tensor indices, Tensor offsets,"
      " Tensor? bag_layout) -> Tensor");

  // Optimizers on whole matrices, and memory advice.
  m.def(
      "update_rows_(Tensor(a!) weights, Tensor(b!)[] states, Tensor hyper, int optimizer,"
      " Tensor grads, int first_row=0) -> ()");
  m.def("advise_huge_pages_(Tensor(a!) tensor) -> ()");

  // Counter-based random numbers.
  m.def("fill_uniform_(Tensor(a!) tensor, float low, float high, int seed) -> ()");
}
