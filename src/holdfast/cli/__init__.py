"""The `holdfast` command: one small module for each group of subcommands."""
