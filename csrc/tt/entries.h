// Entries of tensor-train tables on the CPU that other entries call.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "core/check.h"

namespace emb {

struct TtPlan;
struct TtTables;

Tensor tt_keys(const Tensor& indices, const Tensor& offsets, std::optional<Tensor> bag_layout,
               const Tensor& feature_tables);

std::vector<Tensor> tt_plan(const Tensor& keys, const Tensor& count, const Tensor& tables,
                            int64_t left_ids, int64_t right_ids);

// Make the distinct rows of all tables, and save the values of the first rows of `prefixes` left
// halves; `plan` has been checked.
void tt_make_rows(const TtTables& tables, const TtPlan& plan, const Tensor& prefixes, float* rows);

// Apply the optimizer to the core rows that the batch uses; checks the plan and all else.
void tt_update_rows(const char* op, const TtTables& tables, const std::vector<Tensor>& cores,
                    const std::vector<Tensor>& states, const Tensor& hyper, int64_t optimizer,
                    const std::vector<Tensor>& plan_tensors, const Tensor& prefixes,
                    const Tensor& row_grads);

}  // namespace emb
