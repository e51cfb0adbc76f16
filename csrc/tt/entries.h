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

void tt_update_(std::vector<Tensor> cores, std::vector<Tensor> states, const Tensor& hyper,
                int64_t optimizer, std::vector<Tensor> plan_tensors, const Tensor& prefixes,
                const Tensor& row_grads, std::vector<int64_t> row_factors,
                std::vector<int64_t> dim_factors, std::vector<int64_t> num_cores);

}  // namespace emb
