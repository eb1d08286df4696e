"""Write the generated reference pages into docs/generated, for readers of the checkout.

    .venv/bin/python infra/docs/write_reference.py

`make reference` and `make docs` call it. The site generates the same text when it is built.
"""

from __future__ import annotations

from holdfast_docs.pages import FOLDER, checkout_files


def main() -> None:
    """Write each file, and delete those that no page generates any more."""
    FOLDER.mkdir(exist_ok=True)
    files = dict(checkout_files())
    for path in set(FOLDER.glob("*.md")) - files.keys():
        path.unlink()
    for path, text in files.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
