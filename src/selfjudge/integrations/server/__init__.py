"""OpenAI's API over the loop."""
