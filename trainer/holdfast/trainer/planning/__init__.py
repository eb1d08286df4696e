"""Plans which rank writes which bytes of which file, once before the first save.

A module belongs here if its result is the same for every save of an unchanged state. The bytes of
`.metadata` and other formats are described in `format`.
"""
