"""What the adapters of frameworks cost: saves and steps beside those of the bare framework.

| module | contents |
|---|---|
| `programs.py` | one small program for each framework, with Holdfast and without |
| `steps.py` | the model, which notes when each step begins, and what the times mean |
| `__main__.py` | `python -m holdfast_bench.frameworks`: pairs of programs, as JSON |
"""
