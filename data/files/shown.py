"""Short text of objects, for a console or a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from html import escape


class Shown(ABC):
    """Base of objects that print a title and a few named values."""

    __slots__ = ()

    @abstractmethod
    def shown(self) -> Iterator[tuple[str, object]]:
        """Yield title and names with their values; None is left out."""

    def __str__(self) -> str:
        (title, value), *rows = self.shown()
        lines = [f"{title}: {_text(value)}"]
        lines += [f"  {name:<22}{_text(entry)}" for name, entry in rows if entry is not None]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        (title, value), *rows = self.shown()
        cells = "".join(
            f"<tr><td>{escape(name)}</td><td>{escape(_text(entry))}</td></tr>"
            for name, entry in rows
            if entry is not None
        )
        return f"<table><caption>{escape(title)}: {escape(_text(value))}</caption>{cells}</table>"


def _text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
