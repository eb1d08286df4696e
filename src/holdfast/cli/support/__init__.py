"""What operators hand to others about a run: an archive for a report, a trace, tools for agents.

These modules read the run's folder, the index or the API, remove secrets and translate what they
read for other programs. The commands themselves are one level up.
"""
