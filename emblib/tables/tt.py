"""A table stored as tensor-train cores, with the optimizer fused into the backward pass."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from emblib import ops
from emblib.ops import autograd, tt
from emblib.optim import Optimizer
from emblib.specs import BoundsCheck, Pooling, Precision, TTSpec, brief, check_float_dtype
from emblib.tables import optimizer_hooks
from emblib.tables.base import FusedTables, SpecKind, append_last_offset, check_bounds
from emblib.tt import layout_entry
from emblib.tt.initializers import INITIALIZERS, CoreLayout
from emblib.tt.shapes import check_ranks

_DENSE_CHUNK = 1 << 18  # rows made at a time by to_dense
_ASSIGN = "assign_to_params_buffers"  # of a module's metadata, by load_state_dict(assign=True)


class Cores(nn.ParameterList):
    """The cores; loading a state dict copies into these parameters and never replaces them."""

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *arguments: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, _copying(local_metadata), *arguments)


def _copying(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a load that copies values, whatever `assign` says."""
    return {key: value for key, value in metadata.items() if key != _ASSIGN}


class TTEmbeddingBag(FusedTables):
    """Looks up one tensor-train table and pools the rows into one `[B, D]` output.

    Every distinct row of the batch is computed once from 2 to 4 small cores. Backward forms the
    gradients of the cores and applies `optimizer` to every core row that contributed; with
    `optim.External()` it leaves dense gradients on `cores` instead.

    Args:
        spec: rows, dim, ranks and factors.
        optimizer: one of `emblib.optim`; its "row" is the row of a core.
        pooling: SUM, MEAN, or NONE for one vector per lookup.
        init: "gaussian", "uniform", "sampled_gaussian" (TT-Rec's) or "approx_uniform"; all give
            rows the standard deviation 1/sqrt(3 * rows), that of a dense table's uniform start.
        output_dtype: float32, float16 or bfloat16. Cores and sums are float32 in any case.
        bounds_check: what happens to invalid indices and offsets, see `BoundsCheck`.
        device: of the cores.
        include_last_offset: False for offsets without their last entry, the number of indices, as
            `nn.EmbeddingBag` takes them.

    Threads may read a module at the same time; simultaneous updates may be lost (docs/threads.md).

    Cores cover `prod(row_factors) >= rows` rows; the surplus is never read, computed or trained.

    A module may be a slice of a table whose other slices are in other modules: `share_gradients`,
    if set, gets the gradients of the cores in every backward pass, to sum those of shared cores.
    """

    cores: Cores
    spec_kind = SpecKind(TTSpec, "TTSpec(1000, 64, ranks=(8, 8))", "use TableBatchedEmbeddingBags")

    def __init__(
        self,
        spec: TTSpec,
        optimizer: Optimizer | None = None,
        *,
        pooling: Pooling = Pooling.SUM,
        init: str = "gaussian",
        output_dtype: torch.dtype = torch.float32,
        bounds_check: BoundsCheck = BoundsCheck.WARNING,
        device: torch.device | str | None = None,
        include_last_offset: bool = True,
    ) -> None:
        check_float_dtype("output_dtype", output_dtype)
        precision = Precision(output=output_dtype)
        super().__init__([spec], optimizer, pooling, None, precision, bounds_check)
        self.include_last_offset = include_last_offset
        if optimizer_hooks.is_periodic(self.optimizer) or optimizer_hooks.global_decay(
            self.optimizer
        ):
            raise ValueError(
                f"{self.optimizer} reads rows of a dense table; a tensor-train table has none: "
                "use TableBatchedEmbeddingBags, or RowwiseAdagrad without counter and global_decay"
            )
        self.spec = spec
        self.init = init
        self.share_gradients: tt.ShareGradients | None = None
        self._check_ranks()
        if init not in INITIALIZERS:
            raise ValueError(f"init must be one of {', '.join(INITIALIZERS)}, got {init!r}")
        device = torch.empty(0, device=device).device
        ops.require_kernels(device)
        self._allocate(device)
        self.reset_parameters()

    def _check_ranks(self) -> None:
        check_ranks(self.spec.ranks, self.spec.row_factors, self.spec.dim_factors)

    def _allocate(self, device: torch.device) -> None:
        spec, has_gradient = self.spec, not autograd.updates_in_backward(self.optimizer)
        shapes = self._core_layout(device).shapes()
        self.cores = Cores(
            nn.Parameter(
                torch.empty(shape, dtype=torch.float32, device=device), requires_grad=has_gradient
            )
            for shape in shapes
        )
        for k, (p, width) in enumerate(shapes):
            for state in self.optimizer.states:
                size = (p,) if state.per_row else (p, width)
                self.register_buffer(
                    f"state_{state.name}_{k}", torch.zeros(size, dtype=torch.float32, device=device)
                )
        self._mark_parameters()
        self._layout = [
            (0, 0, math.prod(spec.row_factors), spec.dim, 0, 0, 0, 0),  # the range of the keys
            (0, 0, spec.rows, spec.dim, 0, 0, 0, 0),  # the range of the indices
        ]
        self.register_buffer(layout_entry.NAME, layout_entry.entry(spec).to(device))
        self._register_common(device)

    def _restore(self) -> None:
        super()._restore()
        setattr(self, layout_entry.NAME, layout_entry.entry(self.spec).to(self.hyperparams.device))

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """Load the states; the cores, which are loaded next, are loaded only if they fit.

        Values are copied, with `assign=True` too: a module on `meta` moves to their device.
        """
        metadata, *rest = arguments
        missing: list[str] = arguments[2]
        errors: list[str] = arguments[4]
        if not layout_entry.may_load(state_dict, prefix, self.spec, self.cores, errors):
            return
        keys = [f"{prefix}cores.{k}" for k in range(len(self.cores))]
        if (
            self.hyperparams.is_meta
            and metadata.get(_ASSIGN)
            and all(key in state_dict for key in keys)
        ):
            self.to_empty(device=state_dict[keys[0]].device)
        super()._load_from_state_dict(state_dict, prefix, _copying(metadata), *rest)
        if f"{prefix}cores.0" in state_dict and f"{prefix}{layout_entry.NAME}" in missing:
            missing.remove(
                f"{prefix}{layout_entry.NAME}"
            )  # the shapes of the cores identify the layout

    def set_trained(self, parameter: nn.Parameter, *, trained: bool) -> None:
        """Train the cores from the next forward on, or freeze them: all, or none."""
        self._frozen_cores = frozenset(
            k
            for k, core in enumerate(self.cores)
            if (not trained if core is parameter else k in self._frozen_cores)
        )
        self._frozen = bool(self._frozen_cores)

    _frozen_cores: frozenset[int] = frozenset()

    def _check_frozen(self) -> None:
        if 0 < len(self._frozen_cores) < len(self.cores):
            raise RuntimeError(
                f"cores {sorted(self._frozen_cores)} of {len(self.cores)} are frozen: a tensor "
                "train is trained whole, so call requires_grad_ for all its cores"
            )

    def _core_layout(self, device: torch.device) -> CoreLayout:
        spec = self.spec
        return CoreLayout(spec.row_factors, spec.dim_factors, spec.full_ranks, device)

    def reset_parameters(self) -> None:
        """Redraw the cores and reset optimizer state, step and learning rate."""
        layout = self._core_layout(self.features.device)
        values = INITIALIZERS[self.init](layout, 1.0 / math.sqrt(3.0 * self.spec.rows))
        with torch.no_grad():
            for core, value in zip(self.cores, values, strict=True):
                core.copy_(value)
            for states in self._core_states():
                for state in states:
                    state.zero_()
            self._reset_common()

    def forward(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Pool embeddings to `[B, D]`, or `[L, D]` for pooling NONE, in `output_dtype`.

        Args:
            indices: int32 or int64 `[L]`, row of each lookup; -1 skips.
            offsets: int32 or int64 `[B + 1]`: bag b is `indices[offsets[b] : offsets[b + 1]]`.
            per_sample_weights: float32 `[L]`, scales each row; gets a gradient if it requires one.

        Raises:
            RuntimeError: wrong dtype, device or number of offsets; out of bounds in mode FATAL.
        """
        self._check_frozen()
        if not self.include_last_offset:
            offsets = append_last_offset(indices, offsets)
        offsets = check_bounds(self, indices, offsets, self.features[1:])
        batch = self._batch(indices, offsets, self.pooling, self.output_dtype)
        weighted = per_sample_weights is not None and per_sample_weights.requires_grad
        if not torch.is_grad_enabled() or (self._frozen and not weighted):
            return tt.lookup(self._core_list(), batch, per_sample_weights)
        rule = autograd.UpdateRule.of(self.optimizer)
        if not autograd.updates_in_backward(self.optimizer):
            return tt.DenseTTLookup.apply(
                batch, per_sample_weights, rule, self.share_gradients, *self.cores
            )
        for core in self.cores:
            self._check_in_place(core)
        return tt.FusedTTLookup.apply(
            self.grad_anchor.detach() if self._frozen else self.grad_anchor,
            self._core_list(),
            self._core_states(),
            self.hyperparams,
            rule,
            batch,
            per_sample_weights,
            self.share_gradients,
        )

    def _apply_gradients(self) -> None:
        grads = [core.grad for core in self.cores]
        if all(grad is None for grad in grads):
            return
        filled = [
            torch.zeros_like(core) if grad is None else grad
            for core, grad in zip(self.cores, grads, strict=True)
        ]
        rule = autograd.UpdateRule.of(self.optimizer)
        tt.update_cores(self._core_list(), self._core_states(), self.hyperparams, rule, filled)

    def _batch(
        self, indices: Tensor, offsets: Tensor, pooling: Pooling, output_dtype: torch.dtype
    ) -> tt.TTLookup:
        spec = self.spec
        return tt.TTLookup(
            spec.rows,
            spec.row_factors,
            spec.dim_factors,
            self.features[:1],
            indices,
            offsets,
            pooling,
            output_dtype,
        )

    def _core_list(self) -> list[Tensor]:
        return [core.detach() for core in self.cores]

    def _core_states(self) -> list[list[Tensor]]:
        return [
            [getattr(self, f"state_{state.name}_{k}") for state in self.optimizer.states]
            for k in range(len(self.cores))
        ]

    def core_optimizer_states(self) -> list[dict[str, Tensor]]:
        """Return per core its optimizer state by name: core-shaped, or one entry per row."""
        names = [state.name for state in self.optimizer.states]
        return [dict(zip(names, states, strict=True)) for states in self._core_states()]

    def to_dense(self) -> Tensor:
        """Return the table as a dense `[rows, D]` matrix."""
        chunks = []
        for start in range(0, self.spec.rows, _DENSE_CHUNK):
            end = min(start + _DENSE_CHUNK, self.spec.rows)
            ids = torch.arange(start, end, device=self.features.device)
            offsets = torch.arange(end - start + 1, device=self.features.device)
            batch = self._batch(ids, offsets, Pooling.NONE, torch.float32)
            chunks.append(tt.lookup(self._core_list(), batch))
        return torch.cat(chunks)

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of `weights` (all cores) and `optimizer_state`."""
        return {
            "weights": sum(core.nbytes for core in self.cores),
            "optimizer_state": sum(
                state.nbytes for states in self._core_states() for state in states
            ),
        }

    @property
    def compression(self) -> float:
        """Return the number of values of the dense table over those of the cores."""
        return self.spec.rows * self.spec.dim / sum(core.numel() for core in self.cores)

    def extra_repr(self) -> str:
        """Describe sizes, optimizer and options."""
        spec = self.spec
        name = f"{spec.name}: " if spec.name else ""
        return (
            f"{name}{spec.rows} x {spec.dim}, ranks={spec.ranks}, row_factors={spec.row_factors}, "
            f"dim_factors={spec.dim_factors}, {self.compression:.1f}x smaller, "
            f"{brief(self.optimizer)}, pooling={self.pooling.value}"
        )
