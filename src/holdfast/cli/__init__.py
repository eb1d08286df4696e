"""The `holdfast` command, with one module for each group of subcommands."""
