"""The HTTP server: an endpoint that OpenAI clients can use."""
