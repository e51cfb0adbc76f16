// Every native operation of emblib. Kernels register beside their code (`*_cpu.cpp`, `*_cuda.cu`);
// shapes and gradients are in emblib/ops; the meaning is emblib/reference. Terms: F features,
// B batch, L lookups, U unique rows, D dim; `features` is int64 [F, 5] (weight_offset, row_base,
// rows, dim, column), see core/dtype.h.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(emblib, m) {
  // Lookups by key: unique keys, where each group starts, and the stable order that groups them.
  m.def(
      "group(Tensor keys, SymInt num_keys)"
      " -> (Tensor unique, Tensor segments, Tensor permutation, Tensor count)");
  m.def("group_inverse(Tensor segments, Tensor permutation, Tensor count) -> Tensor");

  // Table-batched embeddings.
  m.def(
      "bounds_check(Tensor indices, Tensor offsets, Tensor features, str mode)"
      " -> (Tensor offsets, Tensor violations)");
  m.def(
      "tbe_lookup(Tensor weights, Tensor features, Tensor indices, Tensor offsets,"
      " Tensor? sample_weights, str pooling, SymInt columns, ScalarType output_dtype) -> Tensor");
  m.def(
      "tbe_group(Tensor features, Tensor indices, Tensor offsets, SymInt total_rows)"
      " -> (Tensor rows, Tensor segments, Tensor lookups, Tensor bags, Tensor count)");
  m.def(
      "tbe_row_grads(Tensor grad, Tensor features, Tensor rows, Tensor segments, Tensor lookups,"
      " Tensor bags, Tensor count, Tensor offsets, Tensor? sample_weights, str pooling, SymInt dim)"
      " -> Tensor");
  m.def(
      "tbe_update_(Tensor(a!) weights, Tensor(b!)[] states, Tensor hyper, str optimizer,"
      " Tensor grad, Tensor features, Tensor rows, Tensor segments, Tensor lookups, Tensor bags,"
      " Tensor count, Tensor offsets, Tensor? sample_weights, str pooling) -> ()");
  m.def(
      "tbe_sample_weight_grad(Tensor grad, Tensor weights, Tensor features, Tensor indices,"
      " Tensor offsets, str pooling) -> Tensor");

  // Tensor-train tables: a provider of rows for the ops above.
  m.def("tt_keys(Tensor indices, SymInt rows, int[] row_factors) -> Tensor");
  m.def("tt_plan(Tensor keys, Tensor count, int[] row_factors) -> Tensor[]");
  m.def(
      "tt_rows(Tensor[] cores, Tensor[] plan, int[] row_factors, int[] dim_factors, SymInt kept)"
      " -> (Tensor rows, Tensor prefixes)");
  m.def(
      "tt_core_grads(Tensor[] cores, Tensor[] plan, Tensor prefixes, Tensor row_grads,"
      " int[] row_factors, int[] dim_factors) -> Tensor[]");

  // Optimizers on whole matrices, and memory.
  m.def(
      "update_rows_(Tensor(a!) weights, Tensor(b!)[] states, Tensor hyper, str optimizer,"
      " Tensor grads) -> ()");
  m.def("advise_huge_pages_(Tensor(a!) tensor) -> ()");

  // Counter-based random numbers.
  m.def("fill_uniform_(Tensor(a!) tensor, float low, float high, int seed) -> ()");
}
