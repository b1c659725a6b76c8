"""OpenAI's API, and a page, on a scheduler. It needs the extra `server`."""
