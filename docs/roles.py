"""Shows references of docstrings, which Sphinx would link, as plain names on the API pages."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:[a-z]+:)?(?:class|meth|func|attr|mod|data|obj|math):`~?(?:[\w.]*\.)?([^`]+)`")


class PlainRoles(griffe.Extension):
    """Rewrites each docstring as it is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Replace the references of an object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)
