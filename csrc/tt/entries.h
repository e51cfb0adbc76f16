// Functions for tensor-train tables on the CPU that several files call: two ops, and the parts of
// ops that batch_cpu.cpp combines. TtTables are checked cores and factors (tt/check.h). `tables`
// and `feature_tables` are int64 [T, 10] and [F, 10], rows of TtTableIds (tt/args.h) by table and
// by feature. Wrong arguments throw before anything is written, unless a comment calls them
// trusted. L may be 0.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "core/check.h"

namespace emb {

struct TtPlan;
struct TtTables;

// Return the key of each lookup within its table, int64 [L], -1 for a lookup to skip: tt_key says
// which key an invalid index gets. The indices, offsets and bag layout are those of tbe_lookup. A
// lookup before the first bag, which no bag uses, gets the key of its index in one of the tables.
Tensor tt_keys(const Tensor& indices, const Tensor& offsets, std::optional<Tensor> bag_layout,
               const Tensor& feature_tables);

// Return the plan of a batch, int32 tensors in the order of TtPlanTensor (see TtPlan). `keys`,
// int64 [L], and `count`, int32 [1], are what tbe_group returns for the keys of a batch: the first
// `count` keys are the distinct keys of all tables, numbered table after table, ascending.
// `left_ids` and `right_ids` are the numbers of ids of left and right halves, summed over the
// tables.
std::vector<Tensor> tt_plan(const Tensor& keys, const Tensor& count, const Tensor& tables,
                            int64_t left_ids, int64_t right_ids);

// Write the distinct rows of all tables to `rows`, [capacity of the plan, tables.max_dim], and the
// values of the first N left halves to `left_values`, float32 [N, tables.left_value_size] for any
// N. Rows after the last one, columns beyond the dim of a table, and values of halves of one core
// are not written. The arguments are trusted: `plan` must be what tt_plan returned, or have passed
// check_plan_contents.
void tt_make_rows(const TtTables& tables, const TtPlan& plan, const Tensor& left_values,
                  float* rows);

// Apply the optimizer, in place, to the core rows whose gradient is not zero throughout, and to
// their states. Does not count the step in `hyper`.
//   cores          those of `tables`, in one list, table after table
//   states         all states of the first core, then all of the second, and so on
//   plan_tensors   of tt_plan, for the batch
//   left_values    of tt_make_rows for this batch and these cores, or with 0 rows
//   row_grads      float32 [distinct rows or more, tables.max_dim]
void tt_update_rows(const char* op, const TtTables& tables, const std::vector<Tensor>& cores,
                    const std::vector<Tensor>& states, const Tensor& hyper, int64_t optimizer,
                    const std::vector<Tensor>& plan_tensors, const Tensor& left_values,
                    const Tensor& row_grads);

}  // namespace emb
