"""Makes `torch.cuda` that of two pretend GPUs, in a torch built with or without CUDA.

`install(settings)` comes before the first import of emblib: it builds and loads the devices,
replaces the functions of `torch.cuda`, and loads emblib with its CUDA entries. What it replaces
stays replaced until the process ends.
"""

import atexit
import ctypes
import faulthandler
import os
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
import torch.cuda.graphs
import torch.cuda.random
from torch.utils import dlpack

from tests.pretend import nccl
from tests.pretend.library import ROOT, build

NUM_DEVICES = 2
# Frames that cause nothing themselves: a wait belongs to the code that calls them.
_TRANSPARENT = (str(Path(torch.__file__).parent), __file__, "<frozen")
# Frames of whoever runs a test, which say nothing.
_RUNNERS = tuple(f"{Path(torch.__file__).parents[1]}/{name}" for name in ("_pytest", "pluggy"))
_STACK_DEPTH = 12  # frames of a race's stacks
_INTERNAL = "no Python code (a thread of autograd)"


class Schedule(StrEnum):
    """When the work of streams runs: at once, when waited for, or side streams last or first."""

    EAGER = "eager"
    LAZY = "lazy"
    SIDES_LATE = "sides_late"
    SIDES_EARLY = "sides_early"
    RANDOM = "random"


@dataclass(frozen=True)
class Settings:
    """What one session pretends.

    `seed` is of the random schedule. New memory is filled with the byte `poison`. `align` is the
    side of a page that allocations touch, "end" or "start": accesses beyond it fault at once. The
    major `capability` decides which kernels run: clusters need 9. With `detects_races`, accesses
    that nothing orders are errors.
    """

    schedule: Schedule = Schedule.EAGER
    seed: int = 1
    poison: int = 0xFF
    align: str = "end"
    multiprocessors: int = 4
    capability: int = 9
    detects_races: bool = False

    @classmethod
    def from_environment(cls) -> "Settings":
        """Read EMBLIB_PRETEND_SCHEDULE=random:7, _POISON=00, _ALIGN=start, _SMS=132 and so on."""
        schedule, _, seed = os.environ.get("EMBLIB_PRETEND_SCHEDULE", "eager").partition(":")
        align = os.environ.get("EMBLIB_PRETEND_ALIGN", "end")
        if align not in {"end", "start"}:
            raise ValueError(f"EMBLIB_PRETEND_ALIGN is 'end' or 'start', got {align!r}")
        return cls(
            schedule=Schedule(schedule),
            seed=int(seed or 1),
            poison=int(os.environ.get("EMBLIB_PRETEND_POISON", "ff"), 16),
            align=align,
            multiprocessors=int(os.environ.get("EMBLIB_PRETEND_SMS", "4")),
            capability=int(os.environ.get("EMBLIB_PRETEND_CAPABILITY", "9")),
            detects_races=os.environ.get("EMBLIB_PRETEND_RACES", "0") == "1",
        )


class PretendGpu:
    """The devices of this process."""

    def __init__(self, devices: Path, settings: Settings) -> None:
        self.settings = settings
        self.library = ctypes.CDLL(str(devices), mode=ctypes.RTLD_GLOBAL)
        self._lines: dict[tuple[tuple[str, int], ...], Any] = {}
        self._detects_races = False
        self._sync_mode = 0
        self._declare()
        # Kept alive as long as the library may call them.
        self._callbacks = (
            ctypes.CFUNCTYPE(ctypes.c_void_p)(self._line_address),
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)(self._on_wait),
        )
        self.library.pretend_set_memory(settings.poison, int(settings.align == "end"))
        self.library.pretend_set_multiprocessors(settings.multiprocessors)
        self.library.pretend_set_capability(settings.capability)
        self.set_schedule(settings.schedule, settings.seed)
        self.catch_faults()
        if settings.detects_races:
            self.detect_races()

    def _declare(self) -> None:
        library = self.library
        for name in ("counts", "entries", "settle", "end_capture"):
            getattr(library, f"pretend_{name}").restype = ctypes.c_char_p
        library.pretend_begin_capture.restype = ctypes.c_void_p
        library.pretend_begin_capture.argtypes = [ctypes.c_int, ctypes.c_int64]
        library.pretend_end_capture.argtypes = [ctypes.c_void_p]
        library.pretend_replay.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
        library.pretend_is_capturing.argtypes = [ctypes.c_int, ctypes.c_int64]
        library.pretend_live_bytes.restype = ctypes.c_int64
        library.pretend_set_schedule.argtypes = [ctypes.c_char_p, ctypes.c_int]
        library.pretend_share_pinned.argtypes = [ctypes.c_void_p]

    def catch_faults(self) -> None:
        """Turn faults into errors; again after someone else took the signal."""
        # A forbidden access of the host prints its stack of Python with this signal.
        faulthandler.register(signal.SIGUSR2, all_threads=False)
        self.library.pretend_set_callbacks(*self._callbacks)

    def detect_races(self) -> None:
        """Make accesses that nothing orders errors, from now on; errors show stacks of Python."""
        self._detects_races = True
        self.library.pretend_detect_races()
        # Memory that is freed after the interpreter has ended asks for no line.
        no_callbacks = (type(self._callbacks[0])(0), type(self._callbacks[1])(0))
        atexit.register(self.library.pretend_set_callbacks, *no_callbacks)

    def set_schedule(self, schedule: Schedule, seed: int = 1) -> None:
        """Change when streams run; the operations that are pending stay so."""
        assert self.library.pretend_set_schedule(schedule.value.encode(), seed)

    def catches_the_host(self) -> bool:
        """Return whether the processor has protection keys, without which the host may read all."""
        return bool(self.library.pretend_has_protection_keys())

    def counts(self) -> dict[str, int]:
        """Return how many there were of each "kernel ...", "operation ..." and "wait ..."."""
        return _counts(self.library.pretend_counts())

    def reset_counts(self) -> None:
        """Count from zero."""
        self.library.pretend_reset_counts()

    def entry_calls(self) -> dict[str, int]:
        """Return how often each CUDA entry of csrc was called."""
        return _counts(self.library.pretend_entries())

    def share_pinned(self, tensor: torch.Tensor) -> None:
        """Note that kernels use the pinned memory of a tensor in place, from now on."""
        self.library.pretend_share_pinned(tensor.data_ptr())

    def num_pending(self) -> int:
        """Return the number of operations that have not run."""
        return self.library.pretend_num_pending()

    def settle(self) -> str:
        """Run everything and return the error that no call has raised, "" for none."""
        return self.library.pretend_settle().decode()

    def live_bytes(self, device: Any = None) -> int:
        """Return the bytes of the tensors on a device."""
        return self.library.pretend_live_bytes(device_index(device))

    def set_sync_debug_mode(self, mode: int | str) -> None:
        """Let waits of the host warn or raise, as `torch.cuda.set_sync_debug_mode` does."""
        names = {"default": 0, "warn": 1, "error": 2}
        self._sync_mode = names[mode] if isinstance(mode, str) else mode

    def get_sync_debug_mode(self) -> int:
        """Return 0, 1 to warn or 2 to raise."""
        return self._sync_mode

    def begin_capture(self, stream: torch.Stream) -> int:
        """Let the stream record a graph, which is returned."""
        return self.library.pretend_begin_capture(stream.device_index, stream.stream_id)

    def end_capture(self, graph: int) -> None:
        """End the capture; raise RuntimeError if a stream of it was not joined."""
        error = self.library.pretend_end_capture(graph)
        if error is not None:
            raise RuntimeError(error.decode())

    def replay(self, graph: int, stream: torch.Stream) -> None:
        """Append the operations of a graph to a stream."""
        self.library.pretend_replay(graph, stream.device_index, stream.stream_id)

    def is_capturing(self, stream: torch.Stream) -> bool:
        """Return whether the stream records a graph."""
        return bool(self.library.pretend_is_capturing(stream.device_index, stream.stream_id))

    def _line(self) -> Any:
        frame: Any = sys._getframe()
        depth = _STACK_DEPTH if self._detects_races else 1
        frames: list[tuple[str, int]] = []
        while frame is not None and len(frames) < depth:
            name = frame.f_code.co_filename
            if name.startswith(_RUNNERS):
                break
            if not name.startswith(_TRANSPARENT):
                frames.append((name, frame.f_lineno))
            frame = frame.f_back
        key = tuple(frames)
        buffer = self._lines.get(key)
        if buffer is None:
            lines = [f"{name.removeprefix(f'{ROOT}/')}:{line}" for name, line in key]
            text = " < ".join(lines) or _INTERNAL
            buffer = self._lines[key] = ctypes.create_string_buffer(text.encode())
        return buffer

    def _line_address(self) -> int:
        return ctypes.addressof(self._line())

    def _on_wait(self, what: bytes) -> int:
        if self._sync_mode == 1:
            line = self._line().value.decode()
            warnings.warn(
                f"called a synchronizing CUDA operation: {what.decode()}, at {line}", stacklevel=2
            )
        return int(self._sync_mode == 2)


def _counts(lines: bytes) -> dict[str, int]:
    pairs = (line.rsplit("\t", 1) for line in lines.decode().splitlines())
    return {name: int(count) for name, count in pairs}


# The devices, once `install` has run.
gpu: PretendGpu | None = None


def device_index(device: Any = None) -> int:
    """Return the index of a device, of the current one for None, "cuda" and negative numbers."""
    index = device if device is None or isinstance(device, int) else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None or index < 0 else index


class Event(torch.Event):
    """torch.cuda.Event."""

    def __new__(cls, enable_timing: Any = False, *_: Any, **__: Any) -> "Event":
        return super().__new__(cls, "cuda", enable_timing=enable_timing)

    def record(self, stream: torch.Stream | None = None) -> None:
        super().record(stream or current_stream())

    def wait(self, stream: torch.Stream | None = None) -> None:
        super().wait(stream or current_stream())

    def elapsed_time(self, end_event: torch.Event) -> float:
        """Return 0 ms: the pretend GPU has no clock."""
        return 0.0


class Stream(torch.Stream):
    """torch.cuda.Stream."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> "Stream":
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        on = torch.device("cuda", device_index(device))
        return super().__new__(cls, on, priority=priority)

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        event = event or Event()
        torch.Event.record(event, self)
        return event

    def wait_event(self, event: torch.Event) -> None:
        torch.Event.wait(event, self)

    def wait_stream(self, stream: torch.Stream) -> None:
        self.wait_event(Stream.record_event(stream))

    @property
    def cuda_stream(self) -> int:
        return self.native_handle


def _as_cuda_stream(stream: torch.Stream) -> Stream:
    return Stream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


def current_stream(device: Any = None) -> Stream:
    """torch.cuda.current_stream."""
    on = torch.device("cuda", device_index(device))
    return _as_cuda_stream(torch.accelerator.current_stream(on))


def default_stream(device: Any = None) -> Stream:
    """torch.cuda.default_stream."""
    return Stream(stream_id=0, device_index=device_index(device), device_type=1)


def set_stream(stream: torch.Stream | None) -> None:
    """torch.cuda.set_stream."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


class CUDAGraph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: Any = False) -> None:
        self._graph: int | None = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        stream = current_stream()
        if stream.stream_id == 0:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self._graph = gpu.begin_capture(stream)

    def capture_end(self) -> None:
        gpu.end_capture(self._graph)

    def replay(self) -> None:
        if self._graph is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        gpu.replay(self._graph, current_stream())

    def pool(self) -> tuple[int, int]:
        return (0, 0)

    def reset(self) -> None:
        self._graph = None


class GraphContext:
    """torch.cuda.graph."""

    def __init__(
        self, cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, **_: Any
    ) -> None:
        self._graph, self._stream = cuda_graph, stream or Stream()

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        self._context = torch.cuda.stream(self._stream)
        self._context.__enter__()
        self._graph.capture_begin()

    def __exit__(self, *error: Any) -> None:
        try:
            self._graph.capture_end()
        finally:
            self._context.__exit__(*error)


class Properties:
    """What torch.cuda.get_device_properties returns."""

    name, minor = "Pretend GPU", 0
    total_memory = 1 << 36
    warp_size = 32
    L2_cache_size = 50 << 20

    def __init__(self) -> None:
        self.major = gpu.settings.capability
        self.multi_processor_count = gpu.settings.multiprocessors


def _exchange_device(device: int) -> int:
    before = torch.accelerator.current_device_index()
    if device >= 0:
        torch.accelerator.set_device_index(device)
    return before


def _maybe_exchange_device(device: int) -> int:
    # torch's compiler wants another function than `_exchange_device`.
    return _exchange_device(device)


def _no_op() -> Callable[..., None]:
    """Return a new function that does nothing: torch's compiler wants no two names for one."""
    return lambda *_, **__: None


def _replacements() -> dict[str, Any]:
    assert gpu is not None
    return {
        "is_available": lambda: True,
        "_is_compiled": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": _no_op(),
        "init": _no_op(),
        "_lazy_call": lambda function, **_: function(),
        "device_count": lambda: NUM_DEVICES,
        "current_device": lambda: torch.accelerator.current_device_index(),
        "set_device": lambda device: torch.accelerator.set_device_index(device_index(device)),
        "_exchange_device": _exchange_device,
        "_maybe_exchange_device": _maybe_exchange_device,
        "synchronize": lambda device=None: torch.accelerator.synchronize(device_index(device)),
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "graph": GraphContext,
        "is_current_stream_capturing": lambda: gpu.is_capturing(current_stream()),
        "set_sync_debug_mode": gpu.set_sync_debug_mode,
        "get_sync_debug_mode": gpu.get_sync_debug_mode,
        "mem_get_info": lambda device=None: (1 << 35, 1 << 36),
        "get_device_properties": lambda device=None: Properties(),
        "get_device_name": lambda device=None: Properties.name,
        "get_device_capability": lambda device=None: (gpu.settings.capability, Properties.minor),
        "empty_cache": _no_op(),
        "memory_allocated": lambda device=None: gpu.live_bytes(device),
        "max_memory_allocated": lambda device=None: gpu.live_bytes(device),
        "reset_peak_memory_stats": _no_op(),
        "default_generators": tuple(torch.Generator(f"cuda:{i}") for i in range(NUM_DEVICES)),
    }


def _let_storages_be_on_devices() -> None:
    """Let storages be made on a device and resized, which a torch without CUDA refuses."""
    make, resize = torch.UntypedStorage.__new__, torch.UntypedStorage.resize_

    def make_anywhere(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return make(cls, *args, **kwargs, **({} if device is None else {"device": device}))
        size = args[0] if args else 0
        return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()

    def resize_anywhere(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            return resize(self, size)
        on_it = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
        torch.ops.pretend.resize_storage(on_it.detach(), size)
        return self

    torch.UntypedStorage.__new__ = make_anywhere
    torch.UntypedStorage.resize_ = resize_anywhere


def _note_imported_tensors() -> None:
    """Note pinned memory that DLPack makes a tensor of a device over."""
    import_tensor = dlpack.from_dlpack

    def from_dlpack(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = import_tensor(*args, **kwargs)
        if tensor.is_cuda:
            gpu.share_pinned(tensor)
        return tensor

    dlpack.from_dlpack = from_dlpack


def install(settings: Settings) -> PretendGpu:
    """Build and load the pretend GPUs, and emblib with its CUDA entries for them."""
    global gpu
    assert gpu is None, "installed already"
    assert "emblib" not in sys.modules, "install the pretend GPU before emblib is imported"
    libraries = build()
    # Its own CUDA library, if it has one, is for real GPUs.
    torch.cuda.is_available = lambda: False
    import emblib.ops  # noqa: F401

    gpu = PretendGpu(libraries.devices, settings)
    replacements: dict[str, Callable[..., Any]] = _replacements()
    cuda = torch.cuda
    for name, value in replacements.items():
        for module in (cuda, cuda.streams, cuda.graphs, cuda.memory, cuda.random):
            if module is cuda or hasattr(module, name):
                setattr(module, name, value)
    torch.backends.cuda.is_built = lambda: True
    if torch.version.cuda is None:
        _let_storages_be_on_devices()
    # Imported by torch's compiler wherever torch.cuda says that it is compiled.
    torch._C._cuda_getCurrentRawStream = lambda device: current_stream(device).cuda_stream
    _note_imported_tensors()
    nccl.install()
    torch.ops.load_library(str(libraries.entries))
    return gpu
