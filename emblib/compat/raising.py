"""Names of a peer that emblib does not have: they import, and raise where they are used."""

from typing import Any


class RaisesOnUse(type):
    """Type of the names that emblib does not have: any use but `isinstance` and hints raises."""

    reason: str
    library: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Raise NotImplementedError with the reason and the way out."""
        raise NotImplementedError(f"{cls.__name__} of {cls.library}: {cls.reason}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(f"{cls.__name__}.{name} of {cls.library}: {cls.reason}")

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __repr__(cls) -> str:
        return f"<{cls.__name__} of {cls.library}, which raises when it is used>"


def raising(name: str, reason: str, library: str = "TorchRec") -> type:
    """Return a class that imports, annotates and tests types, and raises when it is used."""
    members = {"reason": reason, "library": library, "__doc__": f"Raises: {reason}"}
    return RaisesOnUse(name, (), members)
