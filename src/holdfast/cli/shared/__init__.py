"""What several commands share: arguments, output, exit statuses and lookups in the index.

A command's own module is in the folder above.
"""
