"""`python -m holdfast.trainer.mirror`: see `command`."""

from __future__ import annotations

import sys

from holdfast.trainer.mirror.command import main

if __name__ == "__main__":
    sys.exit(main())
