"""Use an installed emblib for everything that a wheel could get wrong: files, library, kernels.

`scripts/wheel_test.sh` and cibuildwheel run it outside of the source tree. It needs only torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import io
import pkgutil
import platform
from pathlib import Path

import torch
from torch import nn

import emblib

OPTIONAL = {"torchmetrics"}  # packages of extras, without which a module may fail to import


def check_files() -> int:
    """Import every module of the installed package; return their number."""
    distribution = importlib.metadata.distribution("emblib")
    folder = Path(str(distribution.locate_file("emblib"))).resolve()
    assert Path(emblib.__file__).parent.resolve() == folder, f"{emblib.__file__} is not {folder}"
    assert distribution.version == emblib.__version__, distribution.version
    assert (folder / "py.typed").exists(), "type checkers ignore a package without py.typed"
    all_names = (module.name for module in pkgutil.walk_packages(emblib.__path__, "emblib."))
    names = [name for name in all_names if not name.startswith("emblib.libemblib_")]
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            if getattr(error.__cause__ or error, "name", None) not in OPTIONAL:
                raise
    return len(names)


def check_training() -> None:
    """Compare three steps with those of `nn.EmbeddingBag`, then save and load the state."""
    torch.manual_seed(0)
    bags = emblib.TableBatchedEmbeddingBags([emblib.TableSpec(1000, 20)], emblib.optim.SGD(0.1))
    torch_bags = nn.EmbeddingBag(1000, 20, mode="sum", include_last_offset=True)
    bags.table_weights()[0].copy_(torch_bags.weight.detach())
    ids, offsets = torch.randint(0, 1000, (600,)), torch.arange(0, 601, 3)
    for _ in range(3):
        output, expected = bags(ids, offsets), torch_bags(ids, offsets)
        torch.testing.assert_close(output, expected)
        output.square().sum().backward()
        torch_bags.weight.grad = None
        expected.square().sum().backward()
        with torch.no_grad():
            torch_bags.weight -= 0.1 * torch_bags.weight.grad
    torch.testing.assert_close(bags.table_weights()[0], torch_bags.weight.detach())
    file = io.BytesIO()
    torch.save(bags.state_dict(), file)
    file.seek(0)
    bags.load_state_dict(torch.load(file))


def check_kinds() -> None:
    """Take one step with a tensor train and a hash table, and look up quantised rows."""
    ids, offsets = torch.tensor([3, 99, 7, 3]), torch.tensor([0, 2, 4])
    train = emblib.TTEmbeddingBag(emblib.TTSpec(1000, 16, (4, 4)), emblib.optim.Adagrad(0.05))
    keyed = emblib.DynamicEmbeddingBags([emblib.DynamicSpec(1000, 16)], emblib.optim.Adam(0.01))
    for table in (train, keyed):
        table(ids, offsets).sum().backward()
    assert keyed.size(0) == 3
    config = emblib.EmbeddingBagConfig(1000, 16, "item")
    tables = emblib.EmbeddingBagCollection([config], optimizer=emblib.optim.SGD(0.1))
    batch = emblib.KeyedJaggedTensor(["item"], ids, lengths=torch.tensor([2, 2]))
    expected, output = tables(batch).values(), tables.quantized(8)(batch).values()
    torch.testing.assert_close(output.float(), expected.detach(), atol=1e-3, rtol=0.02)


def check_errors() -> None:
    """Check that an error of the library is an exception; a second C++ runtime ends the process."""
    try:
        torch.ops.emblib.cache_locate(*[torch.empty(0)] * 4)
    except RuntimeError:
        return
    raise AssertionError("wrong arguments were accepted")


if __name__ == "__main__":
    modules = check_files()
    check_training()
    check_kinds()
    check_errors()
    print(
        f"emblib {emblib.__version__} works: {modules} modules, "
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"{platform.machine()}, {' '.join(platform.libc_ver())}"
    )
