"""The benchmark: this machine's limits, stock DCP and Holdfast in one run, compared as ratios.

    python -m holdfast_bench.limits [--directory DIR] [--megabytes N] [--pairs N] [--ranks N]

`runner` starts the programs of this folder under torchrun, one after the other. `figures` turns
their times into medians, spreads and ratios. `holdfast bench` shows the result.
"""
