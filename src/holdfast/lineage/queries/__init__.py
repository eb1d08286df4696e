"""From the rows of the index to the dictionaries that the command, the API and the page show."""
