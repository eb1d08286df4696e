"""What measures and rehearses Holdfast, and no run needs: the distribution `holdfast-bench`.

`holdfast bench` and `holdfast drill` use it. A cluster that only trains does without it.
"""
