"""Part of the package `holdfast`; see ARCHITECTURE.md."""

# One import name only: under a second one every class would exist twice.
if __name__ != "holdfast.workers":
    raise ImportError(
        f"import holdfast.workers, not {__name__}: the folder is a part of the package"
    )
