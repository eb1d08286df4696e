"""What commands show or hand out about a run: its errors, a report, a trace, tools for agents.

These modules read the run's folder, the index or the API, remove secrets and translate what they
read for people or other programs. The commands themselves are one level up.
"""
