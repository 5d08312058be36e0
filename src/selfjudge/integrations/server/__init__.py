"""OpenAI's API over our own loop. `config` settings and address · `run` uvicorn, connections, signals · `api`
endpoints, and checks before them · `schema` bodies of requests · `parameters` what they ask of decoding · `tools` calls
in the words of templates · `completions` from body to response · `rules` of requests · `jobs`, also of second answers ·
`scheduler` start-up, queue and batches · `operation` metrics and log · `playground` the page at `/`."""
