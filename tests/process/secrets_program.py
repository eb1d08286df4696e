"""Says what of its environment a test asks about: a digest of each value, and the values to leak.

Its argument is JSON: `names` to digest into the file `seen`, `say` to print, `fail`
to end with an error that quotes them.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path


def main() -> None:
    asked = json.loads(sys.argv[1])
    seen = {
        name: hashlib.sha256(os.environb.get(name.encode(), b"")).hexdigest()
        for name in asked["names"]
    }
    with Path(asked["seen"]).open("a") as stream:
        stream.write(json.dumps(seen) + "\n")
    for name in asked.get("say", ()):
        print(f"the value is <{os.environ[name]}>", flush=True)
    if asked.get("fail") and os.environ["HOLDFAST_ATTEMPT"] == "1":
        raise RuntimeError(f"refused with {', '.join(os.environ[name] for name in asked['fail'])}")
    print("the end", flush=True)


if __name__ == "__main__":
    main()
