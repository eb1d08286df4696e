"""`holdfast serve`: the REST API, the web UI and the operator actions over HTTP.

`app.create_app` builds the application. `routes` defines the endpoints and `store` queries the
index. `watch` updates the index and the event stream from disk. `security` and `access` decide
who may do what. The actions themselves are in `workers`. The API does not import Prefect: the
`serve` command passes in the functions that start flows.
"""
