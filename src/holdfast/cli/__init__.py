"""The `holdfast` command, with one module for each group of subcommands.

A module parses options and prints. What it does is a call of `workers`, `flows` or `lineage`, so
that the API can make the same call. What several commands need is in `shared`.
"""
