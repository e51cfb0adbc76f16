"""`emblib.compat.fbgemm.install()`: modules, operators, and an unmodified TorchRec over them."""

import importlib.util
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.bench.suites_of_peers import REPOSITORY, switch_folder


def run(source: str, variables: Mapping[str, str] | None = None) -> None:
    """Run a program in a process of its own, as the operators stay registered."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(source)],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | (variables or {}),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_modules_and_operators() -> None:
    run(
        """
        import torch
        from emblib.compat import fbgemm

        fbgemm.install()
        register = torch._library.register_fake_class
        fbgemm.install()
        assert torch._library.register_fake_class is register
        import fbgemm_gpu
        import fbgemm_gpu.split_table_batched_embeddings_ops_training as training

        assert fbgemm_gpu.__file__.endswith(".py")
        assert fbgemm_gpu.__version__ == "1.8.0+emblib"
        from fbgemm_gpu.split_embedding_configs import SparseType
        from fbgemm_gpu.tbe.ssd import SSDTableBatchedEmbeddingBags

        assert training.SplitTableBatchedEmbeddingBagsCodegen is (
            fbgemm.SplitTableBatchedEmbeddingBagsCodegen
        )
        assert SparseType is fbgemm.SparseType
        try:
            SSDTableBatchedEmbeddingBags()
        except NotImplementedError as error:
            assert "docs/tiers.md" in str(error)
        else:
            raise AssertionError
        ops = torch.ops.fbgemm
        lengths, values = torch.tensor([[1, 2], [0, 1]]), torch.arange(4)
        found = ops.permute_2D_sparse_data(torch.tensor([1, 0]), lengths, values, None, 4)
        assert found[1].tolist() == [3, 0, 1, 2] and found[2] is None
        on_meta = ops.permute_2D_sparse_data(
            torch.empty(2, dtype=torch.int64, device="meta"), lengths.to("meta"),
            values.to("meta"), None, 4,
        )
        assert on_meta[1].shape == (4,)
        compiled = torch.compile(ops.asynchronous_complete_cumsum, fullgraph=True, backend="eager")
        assert compiled(values).tolist() == [0, 0, 1, 3, 6]
        bucketize = ops.block_bucketize_sparse_features
        arguments = (lengths.flatten(), values, False, True, torch.tensor([2, 3]), 2)
        eager = bucketize(*arguments)
        assert eager[1].tolist() == [0, 1, 0, 0] and eager[4].tolist() == [0, 1, 2, 3]
        graph = torch.compile(bucketize, fullgraph=True, backend="aot_eager")(*arguments)
        on_meta = bucketize(*(a.to("meta") if torch.is_tensor(a) else a for a in arguments))
        for mine, compiled, fake in zip(eager, graph, on_meta):
            assert (mine is None) == (compiled is None) == (fake is None)
            assert mine is None or torch.equal(mine, compiled) and fake.shape == mine.shape
        merged = ops.merge_pooled_embeddings([torch.empty(2, 3, device="meta")] * 2, 2, "cpu")
        assert merged.device.type == "cpu" and merged.shape == (2, 6)
        assert torch._library.register_fake_class("fbgemm::AtomicCounter", Exception) is Exception
        slots, metadata = ops.create_zch_buffer(5)
        assert slots.shape == (5, 1) and metadata is None
        from fbgemm_gpu.split_embedding_utils import get_table_batched_offsets_from_dense

        ids, offsets = get_table_batched_offsets_from_dense(torch.arange(12).view(2, 3, 2))
        assert ids.tolist() == list(range(12)) and offsets.tolist() == [0, 2, 4, 6, 8, 10, 12]
        try:
            import fbgemm_gpu.docs
        except ModuleNotFoundError:
            pass
        else:
            raise AssertionError
        """
    )


def test_the_switch_reaches_children(tmp_path: Path) -> None:
    """A process and its child, with the variable and without."""
    switch_folder(tmp_path)
    child = "import sys; import fbgemm_gpu; print(hasattr(fbgemm_gpu, 'is_of_emblib'))"
    source = f"""
        import os, subprocess, sys
        switched = "_emblib_as_fbgemm" in sys.modules
        assert switched == (os.environ["EMBLIB_AS_FBGEMM"] == "1")
        assert "torch" not in sys.modules and "emblib" not in sys.modules
        command = [sys.executable, "-W", "ignore", "-c", {child!r}]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.stdout == "True\\n" if switched else done.stdout != "True\\n", done.stderr
    """
    paths = [str(tmp_path), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    for value in ("0", "1"):
        run(source, {"PYTHONPATH": os.pathsep.join(paths), "EMBLIB_AS_FBGEMM": value})


def test_the_switch_refuses_unknown_values(tmp_path: Path) -> None:
    switch_folder(tmp_path)
    source = """
        for package in ("fbgemm_gpu", "torchrec", "fbgemm_gpu"):
            try:
                __import__(package)
            except ValueError as error:
                assert "EMBLIB_AS_FBGEMM must be 0, 1 or fallback, got 'off'" in str(error)
            else:
                raise AssertionError
    """
    paths = [str(tmp_path), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    run(source, {"PYTHONPATH": os.pathsep.join(paths), "EMBLIB_AS_FBGEMM": "off"})


def test_another_fbgemm_raises() -> None:
    run(
        """
        import sys, types, torch
        from emblib.compat import fbgemm

        sys.modules["fbgemm_gpu"] = types.ModuleType("fbgemm_gpu")
        try:
            fbgemm.install()
        except RuntimeError as error:
            assert "imported already" in str(error)
        else:
            raise AssertionError
        del sys.modules["fbgemm_gpu"]
        library = torch.library.Library("fbgemm", "FRAGMENT")
        library.define("invert_permute(Tensor permute) -> Tensor")
        try:
            fbgemm.install()
        except RuntimeError as error:
            assert "invert_permute" in str(error)
        else:
            raise AssertionError
        """
    )


TRAINING = """
    import sys, torch, torch.distributed as dist, torch.multiprocessing as mp

    def train(rank, path):
        from emblib.compat import fbgemm

        fbgemm.install()
        import torchrec
        from torchrec.distributed import sharding_plan as plans
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.distributed.types import ShardingEnv, ShardingPlan
        from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
        rows = {"t0": 20, "t1": 21, "t2": 22}
        collection = torchrec.EmbeddingBagCollection(
            tables=[
                torchrec.EmbeddingBagConfig(
                    name=name, embedding_dim=8, num_embeddings=n, feature_names=["f" + name]
                )
                for name, n in rows.items()
            ],
            device=torch.device("meta"),
        )
        apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.1})

        class Sharder(EmbeddingBagCollectionSharder):
            def sharding_types(self, device):
                return ["table_wise", "row_wise", "column_wise"]

        rules = {
            "t0": plans.table_wise(rank=1, compute_kernel="fused"),
            "t1": plans.row_wise(),
            "t2": plans.column_wise(ranks=[0, 1]),
        }
        plan = plans.construct_module_sharding_plan(
            collection, rules, sharder=Sharder(), local_size=2, world_size=2, device_type="cpu"
        )
        model = DistributedModelParallel(
            torch.nn.ModuleDict({"ebc": collection}),
            env=ShardingEnv.from_process_group(dist.GroupMember.WORLD),
            device=torch.device("cpu"),
            plan=ShardingPlan({"ebc": plan}),
            sharders=[Sharder()],
        )
        generator = torch.Generator().manual_seed(0)
        tables = {name: torch.randn(n, 8, generator=generator) for name, n in rows.items()}

        def shards():
            for key, value in model.state_dict().items():
                for shard in value.local_shards():
                    first, size = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                    whole = tables[key.split(".")[-2]]
                    part = whole[first[0] : first[0] + size[0], first[1] : first[1] + size[1]]
                    yield shard.tensor.detach(), part

        for tensor, part in shards():
            tensor.copy_(part)
        for _ in range(3):
            outputs, batches = [], []
            for of_rank in range(2):
                lengths = torch.randint(0, 4, (15,), generator=generator)
                ids = torch.randint(0, 20, (int(lengths.sum()),), generator=generator)
                batches.append((lengths, ids))
            keys = ["f" + name for name in rows]
            lengths, ids = batches[rank]
            out = model.module["ebc"](
                torchrec.KeyedJaggedTensor(keys=keys, lengths=lengths, values=ids)
            )
            found = torch.cat([out[key] for key in keys], 1)
            for whole in tables.values():
                whole.requires_grad_()
            expected = []
            for lengths, ids in batches:
                columns = []
                per_key = lengths.view(3, 5)
                parts = ids.split(per_key.sum(1).tolist())
                for whole, bag, part in zip(tables.values(), per_key, parts):
                    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), bag.cumsum(0)])
                    columns.append(
                        torch.nn.functional.embedding_bag(
                            part, whole, offsets, mode="sum", include_last_offset=True
                        )
                    )
                expected.append(torch.cat(columns, 1))
            torch.testing.assert_close(found, expected[rank])
            found.square().sum().backward()
            sum(part.square().sum() for part in expected).div(2).backward()
            with torch.no_grad():
                for name, whole in tables.items():
                    tables[name] = whole - 0.1 * whole.grad
        compared = 0
        for tensor, part in shards():
            torch.testing.assert_close(tensor, part)
            compared += 1
        assert compared
        dist.destroy_process_group()
        from torchrec.distributed import batched_embedding_kernel as kernels

        ours = fbgemm.SplitTableBatchedEmbeddingBagsCodegen
        assert kernels.SplitTableBatchedEmbeddingBagsCodegen is ours

    path = sys.argv[1]
    mp.start_processes(train, (path,), nprocs=2, start_method="fork")
"""


def test_torchrec_trains_on_it(tmp_path: object) -> None:
    """Table-, row- and column-wise tables of the real TorchRec, two ranks, against plain torch."""
    if importlib.util.find_spec("torchrec") is None:
        pytest.skip("torchrec is not installed")
    source = textwrap.dedent(TRAINING).replace("sys.argv[1]", repr(f"{tmp_path}/rendezvous"))
    run(source)


QUANTISED = """
    import torch
    from emblib.compat import fbgemm

    fbgemm.install()
    import torchrec
    from torchrec.inference.modules import quantize_embeddings

    from emblib.compat.fbgemm_inference import IntNBitTableBatchedEmbeddingBagsCodegen
    from emblib.compat.fbgemm_operators import rowwise

    lengths = torch.tensor([1, 0, 3, 2, 4, 1])
    ids = torch.randint(0, 20, (int(lengths.sum()),))
    batch = torchrec.KeyedJaggedTensor(keys=["a", "b"], values=ids, lengths=lengths)
    bags = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    for dtype, bits in ((torch.qint8, 8), (torch.quint4x2, 4), (torch.float16, 16)):
        collection = torchrec.EmbeddingBagCollection(
            tables=[
                torchrec.EmbeddingBagConfig(
                    name="t" + name, embedding_dim=8, num_embeddings=20, feature_names=[name]
                )
                for name in "ab"
            ]
        )
        rows = [table.weight.detach().clone() for table in collection.embedding_bags.values()]
        module = torch.nn.ModuleDict({"ebc": collection})
        quantised = quantize_embeddings(
            module, dtype=dtype, inplace=True, output_dtype=torch.float32
        )["ebc"]
        kernel = quantised._emb_modules[0]
        assert isinstance(kernel, IntNBitTableBatchedEmbeddingBagsCodegen)
        found = quantised(batch)
        for position, (key, table) in enumerate(zip("ab", rows)):
            if bits == 16:
                table = table.half().float()
            else:
                table = rowwise.fused_nbit_to_float(rowwise.to_fused_nbit(table, bits), bits)
            first, last = 3 * position, 3 * position + 3
            part = ids[bags[first] : bags[last]]
            expected = torch.nn.functional.embedding_bag(
                part, table, bags[first : last + 1] - bags[first], mode="sum",
                include_last_offset=True,
            )
            torch.testing.assert_close(found[key], expected)
"""


def test_torchrec_quantises_on_it() -> None:
    """Quantised collections of the real TorchRec, against the values of their rows."""
    if importlib.util.find_spec("torchrec") is None:
        pytest.skip("torchrec is not installed")
    run(QUANTISED)
