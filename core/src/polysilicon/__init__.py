"""One set of LLM inference layers that runs at native speed on every chip."""
