"""OpenAI's API over our own loop.

`config` settings and address · `server` start-up · `run` uvicorn, connections, signals · `guard` headers, key, size ·
`api` endpoints · `schema` bodies of requests · `completions` from body to response · `rules` of requests · `jobs` ·
`scheduler` queue and batches · `shadow` second answers · `errors` · `metrics` · `playground` the page at `/`.
"""
