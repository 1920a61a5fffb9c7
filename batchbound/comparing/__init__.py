"""Comparisons of solvers on the same instances."""
