"""What users ask a module about its keys, and tell it: their status, and scores for eviction."""

from collections.abc import Mapping

from torch import Tensor

from emblib.dynamic import key_status
from emblib.dynamic.admission import Admission
from emblib.dynamic.hash_index import HashIndex, Inserted
from emblib.dynamic.scores import Scores
from emblib.tables.locks import ModuleLock, atomic


def copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that no longer follow the module."""
    return {name: tensor.clone() for name, tensor in state.items()}


class KeyQuestions:
    """A part of `DynamicEmbeddingBags`."""

    index: HashIndex
    scores: Scores | None
    admission: Admission | None
    last: Inserted | None
    table_names: list[str]
    _lock: ModuleLock

    @property
    def tick(self) -> int:
        """How many training forwards there were (reads the device)."""
        return self.index.tick

    @atomic
    def key_status(self) -> Tensor:
        """What became of each id of the last training forward: uint8 `[L]` of `KeyStatus`.

        Nothing is computed for it before it is asked.
        """
        if self.last is None:
            raise RuntimeError(
                "key_status tells of the last training forward, and there was none; call the "
                "module in training mode, with gradients enabled, first"
            )
        return key_status.of_insertion(self.last)

    @atomic
    def set_score(self, score: int | Mapping[int, int] | Mapping[str, int]) -> None:
        """The score of `Eviction.CUSTOM` tables from the next training forward on.

        Every key that such a batch uses gets it; the keys with the lowest give way first.

        Args:
            score: an int64 for all those tables, or by number or name of the table.

        Raises:
            KeyError, IndexError: there is no such table.
            ValueError: its eviction is another.
            TypeError: not an int.
        """
        if self.scores is None:
            raise ValueError("scores are set for tables with Eviction.CUSTOM, and none has it")
        if isinstance(score, Mapping):
            self.scores.set({self.table_number(table): value for table, value in score.items()})
        else:
            self.scores.set(score)

    @atomic
    def set_step_score(self, table: int | str, step: int) -> None:
        """The score that a table with `Eviction.STEP` gives to its next batch; it counts on."""
        if self.scores is None:
            raise ValueError("steps are counted by tables with Eviction.STEP, and none has it")
        self.scores.restart({self.table_number(table): step})

    @atomic
    def score(self, table: int | str) -> int | None:
        """The score that a table gives to the next training batch (reads the device).

        None where eviction is not by scores that are given, or none was set yet.
        """
        number = self.table_number(table)
        return None if self.scores is None else self.scores.get()[number]

    def table_number(self, table: int | str) -> int:
        """Of a table by its number or name."""
        names = self.table_names
        if isinstance(table, str):
            if table not in names:
                raise KeyError(f"there is no table {table!r}; have {', '.join(names)}")
            return names.index(table)
        if isinstance(table, bool) or not hasattr(table, "__index__"):
            raise TypeError(f"a table is given by number or name, got {table!r}")
        if not 0 <= table < len(names):
            raise IndexError(
                f"table must be in [0, {len(names)}), the number of tables, got {table}"
            )
        return table
