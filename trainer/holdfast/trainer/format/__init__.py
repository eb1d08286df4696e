"""The formats of files: `.metadata` and other pickles, read without running their code.

A module belongs here if it reads or writes bytes of a format. Which rank writes which bytes is
decided in `planning`; which of them a rank wants is decided in `loading`.
"""
