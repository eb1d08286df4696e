"""The database: connections, tables, schema changes, and the index that replaces a damaged file."""
