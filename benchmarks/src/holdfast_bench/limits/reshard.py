"""Loads a cold checkpoint of another rank count and, on request, saves it at this rank count.

`runner` starts this with one rank on a checkpoint of two, and the other way round.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from holdfast_bench.limits.files import read_files, ready_pages, share_out, sizes_of
from holdfast_bench.limits.pairs import cool, load_cold
from holdfast_bench.limits.ranks import Image, Program, Trained
from holdfast_bench.limits.saves import Saver

LOADS: Final = 3


def main() -> None:
    program = Program()
    trained = Trained(program.settings["state_bytes"])
    source = Path(program.settings["load"])
    share = share_out(sizes_of(source), program.ranks)[program.rank]
    image = Image([], sum(share.values()))
    program.facts |= {"unique_bytes": trained.unique_bytes(), "cold_resident": 0.0}
    for _ in range(min(LOADS, program.settings["pairs"])):
        cool(program, source)
        ready_pages(sum(share.values()))
        seconds = program.measure(lambda: read_files(source, share, image.bytes))
        program.note(raw_read=seconds)
        cool(program, source)
        ready_pages(sum(share.values()))
        loaded_s, count = load_cold(program, trained, source)
        program.note(load=loaded_s, load_bytes=count)
    if program.settings["save"]:
        saver = Saver(program, trained, program.directory / "resharded")
        program.facts["checkpoint"] = str(saver.save().directory)
        saver.session.close()
    program.finish()


if __name__ == "__main__":
    main()
