"""The database: connections, tables, changes of the schema, and who may see which rows.

Only this package, `ingest` and `queries` import SQLAlchemy.
"""
