"""Part of the package `holdfast`; see ARCHITECTURE.md."""

# Allow one import name only: a second one would create a second copy of every class.
if __name__ != "holdfast.flows":
    raise ImportError(f"import holdfast.flows, not {__name__}: the folder is part of the package")
