"""`holdfast serve`: the index over HTTP for the page and for programs, and the operators' actions.

`app.create_app` puts it together: `routes` says what is answered, `store` asks the index,
`watch` keeps the index and the live stream up to date from disk, `security` and `access` say
who may do what. What an action does stands in `workers`; how a flow is started is handed in by
the command, for the API does not know Prefect.
"""
