"""From the rows of the index to the dictionaries that the command, the API and the page show.

A module belongs here if it only reads. It returns plain data, no rows of SQLAlchemy.
"""
