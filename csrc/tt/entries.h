// Entries of tensor-train tables on the CPU that other entries call. TtTables are checked cores and
// factors (tt/check.h); `tables` and `feature_tables` are int64 [T, 10] and [F, 10], rows of
// TtTableIds by table and by feature (tt/args.h).
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "core/check.h"

namespace emb {

struct TtPlan;
struct TtTables;

// Return the key of each lookup within its table, int64 [L]: see tt_key. Indices are repaired. A
// lookup before the first bag, which no bag uses, gets a key of any one of the tables.
Tensor tt_keys(const Tensor& indices, const Tensor& offsets, std::optional<Tensor> bag_layout,
               const Tensor& feature_tables);

// Return the plan of a batch, int32 tensors in the order of TtPlanTensor: see TtPlan. `keys`, int64
// [L], are the distinct keys of all tables, numbered table after table and ascending, of which the
// first `count`, int32 [1], exist: what tbe_group returns for keys. left_ids and right_ids are the
// numbers of ids of halves of all tables.
std::vector<Tensor> tt_plan(const Tensor& keys, const Tensor& count, const Tensor& tables,
                            int64_t left_ids, int64_t right_ids);

// Write the distinct rows of all tables to `rows`, [capacity of the plan, dim of the widest table],
// and the values of the first left halves, if they are pairs, to `prefixes`, float32 [saved,
// value_size]. The caller must have checked the contents of `plan`, or tt_plan must have made it.
void tt_make_rows(const TtTables& tables, const TtPlan& plan, const Tensor& prefixes, float* rows);

// Apply the optimizer, in place, to the core rows whose gradient is not zero throughout. The plan,
// `prefixes` (values of left halves that the forward pass saved), `row_grads` (float32 [L, dim]),
// `states` (all states of the first core, then all of the second, and so on) and `hyper` are
// checked first. Does not count the step.
void tt_update_rows(const char* op, const TtTables& tables, const std::vector<Tensor>& cores,
                    const std::vector<Tensor>& states, const Tensor& hyper, int64_t optimizer,
                    const std::vector<Tensor>& plan_tensors, const Tensor& prefixes,
                    const Tensor& row_grads);

}  // namespace emb
