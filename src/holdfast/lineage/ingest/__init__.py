"""From a run's folder to the rows of the index. Nothing here answers a question."""
