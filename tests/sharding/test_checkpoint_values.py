"""Values of checkpoints that are not tensors: numpy's scalars, and what is refused when saved."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from emblib.sharding import checkpoints
from emblib.sharding.checkpoints import CheckpointError, values
from emblib.sharding.ranks import RankGroup

ALONE = RankGroup.single()
SCALARS: dict[str, tuple[Any, Any]] = {
    "double": (np.float64(0.1), 0.1),
    "float": (np.float32(0.1), float(np.float32(0.1))),
    "half": (np.float16(0.5), 0.5),
    "long": (np.int64(-3), -3),
    "byte": (np.uint8(200), 200),
    "flag": (np.bool_(True), True),
    "complex": (np.complex64(1j), 1j),
}


def test_a_schedule_of_numpy(tmp_path: Path) -> None:
    """Its rates are in the state of the optimizer and in lists of its own."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.cos(step))
    optimizer.step()
    schedule.step()
    rate = optimizer.param_groups[0]["lr"]
    assert isinstance(rate, np.float64)
    state = {"optimizer": optimizer, "schedule": schedule}
    checkpoints.save(state, tmp_path / "c", ALONE)
    checkpoints.async_save(state, tmp_path / "later", ALONE).result()
    checkpoints.export(state, tmp_path / "whole.pt", ALONE)
    assert optimizer.param_groups[0]["lr"] is rate
    for path in (tmp_path / "c", tmp_path / "later"):
        other = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5)
        again = torch.optim.lr_scheduler.LambdaLR(other, lambda step: np.cos(step))
        checkpoints.load({"optimizer": other, "schedule": again}, path, ALONE)
        assert other.param_groups[0]["lr"] == rate
        assert type(other.param_groups[0]["lr"]) is float
        assert again.get_last_lr() == schedule.get_last_lr()
    found = checkpoints.load_export(tmp_path / "whole.pt")
    assert found["optimizer"]["param_groups"][0]["lr"] == rate


def assert_plain(found: Any, wanted: Any) -> None:
    assert found == wanted
    assert type(found) is type(wanted)


@pytest.mark.parametrize("kind", SCALARS)
def test_scalars_of_numpy(kind: str, tmp_path: Path) -> None:
    scalar, wanted = SCALARS[kind]
    state: dict[str, Any] = {
        "v": scalar,
        "in": {"a": [scalar], "b": (1, ({"k": scalar}, [scalar], {2}))},
    }
    checkpoints.save(state, tmp_path, ALONE)
    found: dict[str, Any] = {"v": 0, "in": {"a": [], "b": 0}}
    checkpoints.load(found, tmp_path, ALONE)
    for value in (
        found["v"],
        found["in"]["a"][0],
        found["in"]["b"][1][0]["k"],
        found["in"]["b"][1][1][0],
    ):
        assert_plain(value, wanted)
    assert found["in"]["b"] == (1, ({"k": wanted}, [wanted], {2}))


def test_texts_of_numpy(tmp_path: Path) -> None:
    checkpoints.save({"t": np.str_("x"), "b": np.bytes_(b"y")}, tmp_path, ALONE)
    found: dict[str, Any] = {"t": "", "b": b""}
    checkpoints.load(found, tmp_path, ALONE)
    assert_plain(found["t"], "x")
    assert_plain(found["b"], b"y")


@pytest.mark.parametrize("kind", SCALARS)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.filterwarnings("ignore:.*has no checksums")
def test_scalars_of_numpy_in_older_checkpoints(kind: str, tmp_path: Path) -> None:
    """Before `save` looked at values, it wrote what torch writes."""
    scalar, wanted = SCALARS[kind]
    dcp.save({"v": scalar, "l": [scalar, 2]}, checkpoint_id=tmp_path, no_dist=True)
    admitted = set(torch.serialization.get_safe_globals())
    found: dict[str, Any] = {"v": 0, "l": []}
    checkpoints.load(found, tmp_path, ALONE)
    assert_plain(found["v"], wanted)
    assert found["l"] == [wanted, 2]
    assert set(torch.serialization.get_safe_globals()) == admitted


class Forged:
    """A scalar of numpy whose type says what its author likes."""

    def __init__(self, code: str, data: bytes) -> None:
        self.code, self.data = code, data

    def __reduce__(self) -> Any:
        function = np.float64(0).__reduce__()[0]
        return function, (np.dtype(self.code), self.data)


def test_byte_orders_of_numpy(tmp_path: Path) -> None:
    for code in (">i4", "<i4"):
        data = io.BytesIO()
        torch.save(Forged(code, np.array(7, code).tobytes()), data)
        assert values.read_value(data, "v", tmp_path) == 7


@pytest.mark.parametrize("code", ["O", "V8", "S8", "M8", "i4,O"])
def test_other_scalars_of_numpy_are_damage(code: str, tmp_path: Path) -> None:
    data = io.BytesIO()
    torch.save(Forged(code, b"\0" * np.dtype(code).itemsize), data)
    with pytest.raises(CheckpointError, match="v is damaged: it has a scalar of numpy's dtype"):
        values.read_value(data, "v", tmp_path)


def test_values_with_other_names_than_numpys_are_refused(tmp_path: Path) -> None:
    data = io.BytesIO()
    torch.save([np.float64(1), tmp_path], data)
    with pytest.raises(CheckpointError, match=r"v is not loaded: it names .*pathlib.*add_safe"):
        values.read_value(data, "v", tmp_path)


@pytest.mark.parametrize("value", [slice(1, 2), Path("x"), np.ones(2), [np.ones(2)]])
def test_other_values_are_refused_before_anything_is_written(value: Any, tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "deep": {"value": value}}
    for save in (checkpoints.save, checkpoints.async_save, checkpoints.export):
        with pytest.raises(TypeError, match=r"deep\.value is a .* and needs"):
            save(state, tmp_path / "c", ALONE)
    assert list(tmp_path.iterdir()) == []


class Counting(torch.optim.SGD):
    """An optimizer whose state dict has other entries than those of torch."""

    steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: Any) -> None:
        self.steps = state_dict["steps"]


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(2, device="meta"), "model.x is on the meta device"),
        (torch.eye(2).to_sparse(), "model.x must be a dense tensor"),
        (torch.eye(2).to_sparse_csr(), "model.x must be a dense tensor"),
        (
            torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
            "model.x must be a dense tensor",
        ),
    ],
)
def test_tensors_without_plain_memory_are_refused_by_name(
    tensor: torch.Tensor, message: str, tmp_path: Path
) -> None:
    state = {"model": {"x": tensor}}
    for save in (checkpoints.save, checkpoints.async_save):
        with pytest.raises(ValueError, match=message):
            save(state, tmp_path / "c", ALONE)
    if tensor.is_meta:
        with pytest.raises(ValueError, match=message):
            checkpoints.export(state, tmp_path / "whole.pt", ALONE)
    else:
        checkpoints.export(state, tmp_path / "whole.pt", ALONE)
        exported = checkpoints.load_export(tmp_path / "whole.pt")["model"]["x"]
        assert exported.layout is tensor.layout
    assert not (tmp_path / "c").exists()


def test_paths_may_begin_with_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    checkpoints.save({"x": 1}, "~/run/step_1", ALONE)
    checkpoints.async_save({"x": 2}, "~/run/step_2", ALONE).result()
    checkpoints.export({"x": 3}, "~/whole.pt", ALONE)
    state = {"x": 0}
    assert checkpoints.latest("~/run", ALONE) == tmp_path / "run/step_2"
    checkpoints.load(state, "~/run/step_1", ALONE)
    assert state == {"x": 1}
    assert checkpoints.load_export("~/whole.pt") == {"x": 3}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "whole.pt"]


def test_an_optimizer_with_a_state_dict_of_its_own(tmp_path: Path) -> None:
    one, other = (Counting([torch.nn.Parameter(torch.ones(1))], 0.1) for _ in range(2))
    one.steps = 3
    checkpoints.save({"optimizer": one}, tmp_path, ALONE)
    assert checkpoints.load({"optimizer": other}, tmp_path, ALONE) == []
    assert other.steps == 3
