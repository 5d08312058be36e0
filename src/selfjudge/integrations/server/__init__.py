"""OpenAI's API over our own loop.

`config` settings and address · `run` uvicorn, connections, signals · `api` endpoints, and what is checked before them ·
`schema` bodies of requests · `completions` from body to response · `rules` of requests · `jobs`, also of second
answers · `scheduler` start-up, queue and batches · `metrics` · `playground` the page at `/`."""
