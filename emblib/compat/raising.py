"""Names of a peer that emblib does not have: they import, and raise when they are called."""

from typing import Any


class RaisesOnUse(type):
    """Metaclass of names that emblib does not have: calling the class raises NotImplementedError.

    So does reading an attribute that the class lacks; if its name begins with `__`, AttributeError
    is raised. Type hints, `Name[...]`, `isinstance` and subclassing work.

    Attributes:
        reason: why emblib does not have the name, and what to use instead.
        library: name of the peer.
    """

    reason: str
    library: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Raise NotImplementedError with the reason."""
        raise NotImplementedError(f"{cls.__name__} of {cls.library}: {cls.reason}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(f"{cls.__name__}.{name} of {cls.library}: {cls.reason}")

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __repr__(cls) -> str:
        return f"<{cls.__name__} of {cls.library}, which raises when it is used>"


def raising_class(name: str, reason: str, library: str = "TorchRec") -> type:
    """Return a class for a name that emblib does not have; see `RaisesOnUse`.

    Args:
        name: name of the class.
        reason: why emblib does not have it, and what to use instead.
        library: name of the peer.
    """
    members = {"reason": reason, "library": library, "__doc__": f"Raises: {reason}"}
    return RaisesOnUse(name, (), members)
