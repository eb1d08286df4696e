"""Reports environment variables for a test: digests of their values, or the values themselves.

Its argument is JSON: variables in `names` are digested into the file `seen`, those in `say` are
printed, and those in `fail` are quoted in an error that ends the program.
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
