"""The HTTP server, compatible with OpenAI's clients."""
