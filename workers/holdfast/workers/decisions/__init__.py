"""What to do next with a run, decided from records. Pure functions, which never ask a scheduler.

A module belongs here if its answer depends only on what it is given: causes, policy, sizes, places,
exclusions, forecasts. Code that acts on the answer belongs in `runs`.
"""
